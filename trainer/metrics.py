"""metrics.jsonl, TensorBoard and the progress of the training."""

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from trainer.files import naming, write_atomic
from trainer.phases import QUIET, Phases


def cut(path: Path, step: int) -> None:
    """Drop the lines after `step` (and a half-written one), so that a resumed run appends without a gap or a repeat."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            entry = json.loads(line)
        except ValueError:
            break  # a kill cut this line short; it is the last
        if not line.endswith(b"\n") or not isinstance(entry, dict) or entry.get("step", step + 1) > step:
            break
        kept.append(line)
    write_atomic(path, kept)


class Metrics:
    """Writes one JSON object a step, flushed, and mirrors its numbers to TensorBoard and the phase "training".

    tensorboard: its folder, where what a killed run logged beyond `initial_step` is hidden; None: without it.
    """

    def __init__(
        self,
        path: Path,
        *,
        tensorboard: Path | None,
        total_steps: int,
        initial_step: int,
        enabled: bool,
        phases: Phases = QUIET,
    ) -> None:
        self.path, self.tensorboard = path, tensorboard
        self.tracker: Any = None
        self.file = path.open("a", encoding="utf-8") if enabled else None
        self._open = ExitStack()
        self.phase = self._open.enter_context(phases("training", total_steps, "step", before=initial_step))

    def log(self, entry: dict[str, Any]) -> None:
        if self.file is None:
            return
        with naming(self.path):
            self.file.write(json.dumps(entry, allow_nan=False) + "\n")
            self.file.flush()
        if self.tracker is None and self.tensorboard is not None:
            # With the first entry: importing it need not delay the first step. Not accelerate's tracker: that one flushes
            # after every step, which costs a small model two milliseconds of it.
            from torch.utils.tensorboard import SummaryWriter

            self.tracker = SummaryWriter(str(self.tensorboard), purge_step=entry["step"])
        if self.tracker is not None:
            for key, value in entry.items():
                if key not in ("step", "time") and isinstance(value, (int, float)):
                    self.tracker.add_scalar(f"train/{key}", value, entry["step"])
        loss = "none" if entry["loss"] is None else f"{entry['loss']:.4f}"
        self.phase.note = f"loss {loss}, lr {entry['lr']:.2e}"
        self.phase.advance()

    def sync(self) -> None:
        """Put what was logged on the disk: no checkpoint may outlive the lines before it."""
        if self.file is not None:
            with naming(self.path):
                os.fsync(self.file.fileno())

    def close(self) -> None:
        self._open.close()
        if self.tracker is not None:
            self.tracker.close()
        if self.file is not None:
            self.file.close()
