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


def read_lines(path: Path) -> list[dict[str, Any]]:
    """What `Metrics` has written there, up to a line that a kill cut short; nothing where there is no file."""
    entries = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            entries.append(json.loads(line))
        except ValueError:
            break
    return entries


def _line(entry: dict[str, Any]) -> bytes:
    return (json.dumps(entry, allow_nan=False) + "\n").encode()


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
            self.file.write(_line(entry).decode())
            self.file.flush()
        self._mirror(entry)
        loss = "none" if entry["loss"] is None else f"{entry['loss']:.4f}"
        self.phase.note = f"loss {loss}, lr {entry['lr']:.2e}"
        self.phase.advance()

    def add(self, fields: dict[str, Any]) -> None:
        """To the last line: what a stop kept from it."""
        if self.file is None or not fields:
            return
        *lines, last = self._lines()
        entry = json.loads(last) | fields
        self.file.close()
        write_atomic(self.path, [*lines, _line(entry)])
        self.file = self.path.open("a", encoding="utf-8")
        # The whole line: TensorBoard hides what an earlier start logged of this step.
        self._mirror({name: value for name, value in entry.items() if name != "at_start"})

    def _lines(self) -> list[bytes]:
        return self.path.read_bytes().splitlines(keepends=True)

    def _mirror(self, entry: dict[str, Any]) -> None:
        """To TensorBoard: numbers by name, lists of them by name and place; "at_start" as of the step before."""
        if self.tracker is None and self.tensorboard is not None:
            # With the first entry: importing it need not delay the first step. Not accelerate's tracker: that one flushes
            # after every step, which costs a small model two milliseconds of it.
            from torch.utils.tensorboard import SummaryWriter

            self.tracker = SummaryWriter(str(self.tensorboard), purge_step=entry["step"])
        if self.tracker is not None:
            for step, fields in ((entry["step"] - 1, entry.get("at_start", {})), (entry["step"], entry)):
                for key, value in fields.items():
                    numbers = {f"{key}/{n}": v for n, v in enumerate(value, 1)} if isinstance(value, list) else {key: value}
                    for name, number in numbers.items():
                        if name not in ("step", "time") and isinstance(number, (int, float)):
                            self.tracker.add_scalar(f"train/{name}", number, step)

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
