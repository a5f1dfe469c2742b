"""metrics.jsonl, what mirrors it, and the progress of the training."""

import hashlib
import json
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial, reduce
from pathlib import Path
from statistics import fmean, median
from typing import Any, Protocol

import psutil

from trainer.base.console import LIVE, WIDTH, fitted, write
from trainer.base.files import naming, write_atomic
from trainer.base.progress import QUIET, Fields, Phases
from trainer.monitoring.course import BY_PHOTO, CHANGED, COPIES, COUNT, LOST, PHOTOS, Line

VARY = ("time", "seconds", "images_per_second", "peak_bytes")  # between lines of two equal runs
SMOOTHED = 20  # steps over which the loss that is shown is averaged, and whose images a second are shown


def cut(path: Path, step: int) -> None:
    """Drop the lines after `step` (and a half-written one), so that a resumed run appends without a gap or a repeat."""
    if not path.exists():
        return
    lines = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            entry = json.loads(line)
        except ValueError:
            break  # a kill cut this line short; it is the last
        of_step = entry.get("step") if isinstance(entry, dict) else None
        if not line.endswith(b"\n") or type(of_step) is not int or of_step > step:
            break
        lines.append(line)
    write_atomic(path, lines)


def chained(digest: str, entry: dict[str, Any]) -> str:
    """The digest of a log with one more line: SHA-256, in hexadecimal, of the digest before and the line without VARY."""
    line = json.dumps({name: value for name, value in entry.items() if name not in VARY})
    return hashlib.sha256((digest + line).encode()).hexdigest()


def has_digest(path: Path, digest: str) -> bool:
    """Whether a log is that of a digest. What a later start has added to the last line stands behind the rest of it."""
    *before, last = read_lines(path) or [{}]
    first, fields = reduce(chained, before, ""), [*last.items()]
    return any(chained(first, dict(fields[:count])) == digest for count in range(len(fields), 0, -1))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """What `Metrics` has written there, up to a line that a kill cut short; nothing where there is no file."""
    entries = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            entries.append(json.loads(line))
        except ValueError:
            break
    return entries


# What a line must have, and what it may have: numbers; of those that it may have, null is one, too.
NEEDED = ("images", "lr")
OPTIONAL = ("loss", "grad_norm", "d", "weight_change", "held_out_loss", "trained_loss", COUNT, COPIES, LOST)


def is_line(entry: object) -> bool:
    """Whether something from a metrics.jsonl, which anybody may have changed, can be judged."""
    if not isinstance(entry, dict) or not isinstance(entry.get("step"), int) or isinstance(entry["step"], bool):
        return False
    start = entry.get("at_start", {})
    if not isinstance(start, dict) or not is_number(entry.get("highest_lr", 0)):
        return False
    numbers, both = [entry.get(name, "") for name in NEEDED], (entry, start)
    by_photo = [fields.get(name, {}) for fields in both for name in BY_PHOTO.values()]
    words = [fields.get(name, "") for fields in both for name in (PHOTOS, CHANGED)]
    if not all(isinstance(each, dict) for each in by_photo) or not all(isinstance(each, str) for each in words):
        return False
    optional = [fields.get(name) for fields in both for name in OPTIONAL] + [v for each in by_photo for v in each.values()]
    return all(map(is_number, numbers)) and all(value is None or is_number(value) for value in optional)


def is_number(value: object) -> bool:
    """Whether a value of JSON is a number that a float can hold."""
    return isinstance(value, float) or (
        isinstance(value, int) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    )


def mark_of(rows: Sequence[Line]) -> str | None:
    """The photos that were measured last (the field PHOTOS); None where nothing was."""
    newest_first = (fields for row in reversed(rows) for fields in (row, row.get("at_start", {})))
    return next((fields[PHOTOS] for fields in newest_first if PHOTOS in fields), None)


def measured(rows: Sequence[Line]) -> Iterator[tuple[int, Line]]:
    """(step, what was measured after it); what a line has "at_start" is of the step before it."""
    for row in rows:
        yield row["step"] - 1, row.get("at_start", {})
        yield row["step"], row


def _line(entry: dict[str, Any]) -> bytes:
    return (json.dumps(entry, allow_nan=False) + "\n").encode()


class Tracker(Protocol):
    """A program that shows the numbers of a run."""

    def add(self, line: Mapping[str, Any]) -> None:
        """A whole line of the log; a step's line may come again, with more in it."""

    def close(self) -> None:
        """Send what is left, and end."""


class Metrics:
    """Writes one JSON object a step, flushed, and mirrors its numbers to the trackers and the phase "training".

    They are closed with it. digest: of all lines (`chained`), made as they are written.
    """

    def __init__(
        self,
        path: Path,
        *,
        trackers: Sequence[Tracker] = (),
        total_steps: int,
        initial_step: int,
        enabled: bool,
        phases: Phases = QUIET,
    ) -> None:
        self.path, self.trackers = path, trackers
        self.file = path.open("a", encoding="utf-8") if enabled else None
        self._open = ExitStack()
        # It is shown, no more: the loop looks at signals between two steps, and the log itself tells what they took.
        training = phases("training", total_steps, "step", before=initial_step, obey=False, keep=False)
        self.phase, self._phases = self._open.enter_context(training), phases
        self.digest = self._before = ""  # _before: without the last line
        self._last: deque[dict[str, Any]] = deque(maxlen=SMOOTHED)
        self._held_out: list[float] = []  # on the photos of _mark
        self._mark: object = None
        for entry in read_lines(path) if enabled else ():
            self._follow(entry)

    def log(self, entry: dict[str, Any]) -> None:
        """Write a step's line, and have the trackers told."""
        if self.file is None:
            return
        with naming(self.path):
            self.file.write(_line(entry).decode())
            self.file.flush()
        self._mirror(entry)
        self._follow(entry)
        self.phase.fields = partial(self._fields, entry)
        self.phase.advance()
        if LIVE.json:
            write(fitted(self._fields(entry), WIDTH), fields=entry)

    def _follow(self, entry: dict[str, Any]) -> None:
        """What the lines for people say of more than one step."""
        self._before, self.digest = self.digest, chained(self.digest, entry)
        if CHANGED in entry:
            self._last.clear()
        self._last.append(entry)
        self._measured(entry["step"] - 1, entry.get("at_start", {}))
        self._measured(entry["step"], entry)

    def _measured(self, step: int, fields: dict[str, Any]) -> None:
        if (held_out := fields.get("held_out_loss")) is not None:
            if fields.get(PHOTOS) != self._mark:
                self._mark, self._held_out = fields.get(PHOTOS), []
            best = "best, " if held_out < min(self._held_out, default=held_out) else ""
            self._held_out.append(held_out)
            self._phases.event = f"held-out loss {held_out:.4f} ({best}step {step})"

    def _fields(self, entry: dict[str, Any]) -> Fields:
        """How the training stands; what a narrow terminal leaves out first has the highest rank."""
        losses = [line["loss"] for line in self._last if line["loss"] is not None]
        rates = [line["images_per_second"] for line in self._last if "images_per_second" in line]
        memory = entry["peak_bytes"] if "peak_bytes" in entry else psutil.Process().memory_info().rss
        fields = [
            (0, f"step {entry['step']}/{self.phase.total}"),
            (5, f"epoch {entry['epoch']}" if "epoch" in entry else ""),
            (1, f"loss {fmean(losses):.4f}" if losses else "loss none"),
            (3, f"held-out {self._held_out[-1]:.4f}" if self._held_out else ""),
            (6, f"lr {entry['lr']:.2e}"),
            (7, f"{median(rates):.3g} images/s" if rates else ""),
            (8, f"memory {memory / 2**30:.2f} GiB"),
            (2, self.phase.time_left()),
            (4, f"last {self._phases.event}" if self._phases.event else ""),
        ]
        return [(rank, text) for rank, text in fields if text]

    def add(self, fields: dict[str, Any]) -> None:
        """Add fields to the last line: what a stop kept from it."""
        if self.file is None or not fields:
            return
        *lines, last = self.path.read_bytes().splitlines(keepends=True)
        entry = json.loads(last) | fields
        self.file.close()
        write_atomic(self.path, [*lines, _line(entry)])
        self.file, self.digest = self.path.open("a", encoding="utf-8"), chained(self._before, entry)
        # The whole line: a tracker may hide what an earlier start logged of this step.
        self._mirror({name: value for name, value in entry.items() if name != "at_start"})
        self._measured(entry["step"], fields)

    def _mirror(self, entry: dict[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.add(entry)

    def sync(self) -> None:
        """Put what was logged on the disk: no checkpoint may outlive the lines before it."""
        if self.file is not None:
            with naming(self.path):
                os.fsync(self.file.fileno())

    def close(self) -> None:
        """Close the file and the trackers."""
        self._open.close()
        for tracker in self.trackers:
            tracker.close()
        if self.file is not None:
            self.file.close()
