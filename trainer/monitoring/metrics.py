"""metrics.jsonl, the trackers that mirror it, and the progress line of the training."""

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

VARY = ("time", "seconds", "images_per_second", "peak_bytes")  # fields that differ between two equal runs
SMOOTHED = 20  # steps over which the progress line averages the loss and the images per second


def truncate(path: Path, step: int) -> None:
    """Drop the lines after `step` (and a half-written one), so that a resumed run appends without a gap or a repeat."""
    if not path.exists():
        return
    lines = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            entry = json.loads(line)
        except ValueError:
            break  # a kill cut this line short; it is the last
        number = entry.get("step") if isinstance(entry, dict) else None
        if not line.endswith(b"\n") or type(number) is not int or number > step:
            break
        lines.append(line)
    write_atomic(path, lines)


def chained(digest: str, entry: dict[str, Any]) -> str:
    """The digest of a log after one more line: SHA-256, in hexadecimal, of the previous digest and the line without VARY."""
    line = json.dumps({name: value for name, value in entry.items() if name not in VARY})
    return hashlib.sha256((digest + line).encode()).hexdigest()


def has_digest(path: Path, digest: str) -> bool:
    """Whether a log has a digest, also without the last fields of its last line: a later start may have added them."""
    *others, last = read_lines(path) or [{}]
    previous, fields = reduce(chained, others, ""), [*last.items()]
    return any(chained(previous, dict(fields[:count])) == digest for count in range(len(fields), 0, -1))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, up to one that a kill cut short; none if there is no file."""
    entries = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            entries.append(json.loads(line))
        except ValueError:
            break
    return entries


# A line's required and optional fields: numbers, the optional ones also null.
REQUIRED = ("images", "lr")
OPTIONAL = ("loss", "grad_norm", "d", "weight_change", "held_out_loss", "trained_loss", COUNT, COPIES, LOST)


def is_line(entry: object) -> bool:
    """Whether an entry of a metrics.jsonl, which anybody may have edited, has the fields and types of a line."""
    if not isinstance(entry, dict) or not isinstance(entry.get("step"), int) or isinstance(entry["step"], bool):
        return False
    start = entry.get("at_start", {})
    if not isinstance(start, dict) or not is_number(entry.get("highest_lr", 0)):
        return False
    parts = (entry, start)
    by_photo = [part.get(name, {}) for part in parts for name in BY_PHOTO.values()]
    texts = [part.get(name, "") for part in parts for name in (PHOTOS, CHANGED)]
    if not all(isinstance(each, dict) for each in by_photo) or not all(isinstance(each, str) for each in texts):
        return False
    optional = [part.get(name) for part in parts for name in OPTIONAL] + [v for each in by_photo for v in each.values()]
    required = [entry.get(name, "") for name in REQUIRED]
    return all(map(is_number, required)) and all(value is None or is_number(value) for value in optional)


def is_number(value: object) -> bool:
    """Whether a value of JSON is a number that a float can hold."""
    return isinstance(value, float) or (
        isinstance(value, int) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    )


def mark_of(rows: Sequence[Line]) -> str | None:
    """The field PHOTOS of the last measurement; None if there is none."""
    newest_first = (fields for row in reversed(rows) for fields in (row, row.get("at_start", {})))
    return next((fields[PHOTOS] for fields in newest_first if PHOTOS in fields), None)


def measured(rows: Sequence[Line]) -> Iterator[tuple[int, Line]]:
    """(step, the fields measured after it); a line's "at_start" belongs to the step before it."""
    for row in rows:
        yield row["step"] - 1, row.get("at_start", {})
        yield row["step"], row


def _line(entry: dict[str, Any]) -> bytes:
    return (json.dumps(entry, allow_nan=False) + "\n").encode()


class Tracker(Protocol):
    """A program that shows the numbers of a run."""

    def add(self, line: Mapping[str, Any]) -> None:
        """Take a whole line of the log; a step's line may come again, with more fields."""

    def close(self) -> None:
        """Send the rest, and end."""


class Metrics:
    """Writes one JSON object a step, flushed, and mirrors its numbers to the trackers and the phase "training", which are
    closed with it. digest: of all lines so far (`chained`)."""

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
        # For display only: the loop checks signals between two steps, and the log itself has their times.
        training = phases("training", total_steps, "step", before=initial_step, obey=False, keep=False)
        self.phase, self._phases = self._open.enter_context(training), phases
        self.digest = self._previous_digest = ""  # _previous_digest: without the last line
        self._last: deque[dict[str, Any]] = deque(maxlen=SMOOTHED)
        self._held_out: list[float] = []  # losses on the photos of _mark
        self._mark: object = None  # the field PHOTOS
        for entry in read_lines(path) if enabled else ():
            self._follow(entry)

    def log(self, entry: dict[str, Any]) -> None:
        """Write a step's line, also to the trackers."""
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
        """Update the digest, and the values of the progress line that cover several steps."""
        self._previous_digest, self.digest = self.digest, chained(self.digest, entry)
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
        """(rank, text) of the progress line's fields; a narrow terminal leaves out the highest ranks first."""
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
        """Add fields to the last line: measurements that a stop prevented."""
        if self.file is None or not fields:
            return
        *lines, last = self.path.read_bytes().splitlines(keepends=True)
        entry = json.loads(last) | fields
        self.file.close()
        write_atomic(self.path, [*lines, _line(entry)])
        self.file, self.digest = self.path.open("a", encoding="utf-8"), chained(self._previous_digest, entry)
        # The whole line: a tracker may hide what an earlier start logged for this step.
        self._mirror({name: value for name, value in entry.items() if name != "at_start"})
        self._measured(entry["step"], fields)

    def _mirror(self, entry: dict[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.add(entry)

    def sync(self) -> None:
        """Sync the file to the disk: no checkpoint may outlive the lines before it."""
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
