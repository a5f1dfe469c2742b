"""metrics.jsonl as it grows: its rows and columns; and the starts and events of a run, from phases.jsonl."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.base.files import open_regular
from trainer.base.progress import PACE_UNITS, START, STOP, duration, pace_of
from trainer.monitoring.course import CHANGED
from trainer.monitoring.metrics import is_line, is_number, measured

Series = Sequence[tuple[float, float | None]]


class History:
    """The rows of a metrics.jsonl. `read` continues where it stopped, or starts over if the file was replaced.
    unreadable: count of invalid lines, a torn last line included."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.unreadable, self._invalid, self._offset = 0, 0, 0
        self._inode: int | None = None
        self._columns: dict[str, list[tuple[float, float | None]]] = {}

    def read(self) -> History:
        """Read the new lines; a missing file gives no rows."""
        try:
            with open_regular(self.path) as file:
                stat = os.fstat(file.fileno())
                if self._inode != stat.st_ino or stat.st_size < self._offset:
                    self.rows, self._invalid, self._offset, self._inode, self._columns = [], 0, 0, stat.st_ino, {}
                file.seek(self._offset)
                *lines, torn = file.read().split(b"\n")
        except FileNotFoundError:
            self.rows, self._invalid, self._offset, self._inode, self._columns, self.unreadable = [], 0, 0, None, {}, 0
            return self
        for line in lines:
            self._add(line)
        self._offset += sum(len(line) + 1 for line in lines)
        self.unreadable = self._invalid + bool(torn.strip())
        return self

    def _add(self, line: bytes) -> None:
        row = _parsed(line)
        if not is_line(row):
            self._invalid += bool(line.strip())
            return
        self.rows.append(row)
        for step, fields in measured([row]):
            for name, value in fields.items():
                for key, number in enumerate(value, 1) if isinstance(value, list) else ((0, value),):
                    self._columns.setdefault(f"{name}/{key}" if key else name, []).append((step, _finite(number)))

    @property
    def stamp(self) -> tuple[object, ...]:
        """An identity of the lines read so far: it changes once `read` finds a new one."""
        return self._inode, self._offset, self.unreadable

    @property
    def fields(self) -> list[str]:
        """The names of the fields that hold single numbers."""
        return [name for name in self._columns if "/" not in name]

    @property
    def step(self) -> int:
        """The last step that was logged; 0 before there is one."""
        return self.rows[-1]["step"] if self.rows else 0

    def series(self, field: str) -> Series:
        """(step, value) of each row with the field, or with its list's item "FIELD/1"; None: null or not finite."""
        return self._columns.get(field, ())

    def values(self, field: str) -> list[float]:
        """The finite values of a field, in order."""
        return [value for _, value in self.series(field) if value is not None]

    def last(self, field: str) -> float | None:
        """The last finite value."""
        return next((value for _, value in reversed(self.series(field)) if value is not None), None)

    def newest(self, name: str) -> tuple[int, Any] | None:
        """(step, value) of the last row with this field, of any type."""
        return next(((row["step"], row[name]) for row in reversed(self.rows) if name in row), None)

    def pace(self, after: int = 0) -> float | None:
        """Seconds a step, over the last steps beyond `after` (progress.pace_of); None if too few are known."""
        last = self.rows[-PACE_UNITS:]
        return pace_of([row["time"] for row in last if row["step"] > after and _finite(row.get("time")) is not None])

    @property
    def levels(self) -> dict[int, str]:
        """The changes of what the loss measures, by the first step after each."""
        return {row["step"]: row[CHANGED] for row in self.rows if CHANGED in row}

    def skipped(self) -> list[int]:
        """Steps without an update."""
        return [row["step"] for row in self.rows if row.get("skipped") is True]


@dataclass(frozen=True)
class Mark:
    """An event after a step. kind: "resumed" by a further start, "changed" by --allow. text: for people."""

    step: int
    kind: str
    text: str


@dataclass(frozen=True)
class Events:
    """The events of a run. steps: by kind: samples drawn, adapters kept, updates skipped."""

    marks: tuple[Mark, ...] = ()
    steps: Mapping[str, Sequence[int]] = field(default_factory=dict)


NOTHING = Events()


def read_starts(path: Path) -> list[tuple[int, float]]:
    """(last step before it, Unix time) of each start in a phases.jsonl, without starts whose steps a later one undid."""
    starts: list[tuple[int, float]] = []
    for entry in _moments(path):
        step, time = entry["done"], _finite(entry.get("started"))
        if entry["phase"] == START and time is not None:
            starts = [earlier for earlier in starts if earlier[0] < step]
            starts.append((step, time))
    return starts


@dataclass(frozen=True)
class Standing:
    """The last start of a run by its phases.jsonl. total: the run's steps. ended: whether its end was logged. reason: of an
    early end, in a few words, or "". start_step: the last step before it. started: Unix time. None: unknown."""

    total: int | None = None
    ended: bool = False
    reason: str = ""
    start_step: int = 0
    started: float | None = None


def read_standing(path: Path) -> Standing:
    """The standing of a run by its phases.jsonl; all unknown if it is missing."""
    standing = Standing()
    for entry in _moments(path):
        if entry["phase"] == START:
            total, started = entry.get("total"), _finite(entry.get("started"))
            standing = Standing(total if isinstance(total, int) else None, start_step=entry["done"], started=started)
        else:
            reason = entry.get("why", "")
            standing = replace(standing, ended=True, reason=reason if isinstance(reason, str) else "")
    return standing


def marks_of(starts: Sequence[tuple[int, float]], rows: Sequence[Mapping[str, Any]], changes: Sequence[Mapping[str, Any]]):
    """The marks of resumed starts, and of changes by --allow. changes: those, in order."""
    ended = {row["step"]: row["time"] for row in rows if is_number(row.get("time"))} if len(starts) > 1 else {}
    marks = []
    for step, time in starts:
        if step > 0:
            pause = f", after a pause of {duration(time - ended[step])}" if time - ended.get(step, math.inf) > 0 else ""
            marks.append(Mark(step, "resumed", f"resumed after step {step:,}{pause}"))
    for change in changes:
        text = "; ".join(change["what"]).replace(" -> ", " \N{RIGHTWARDS ARROW} ")  # no line break cuts it in two
        marks.append(Mark(change["step"], "changed", f"changed after step {change['step']:,}: {text}"))
    return tuple(marks)


def _finite(value: object) -> float | None:
    return float(value) if is_number(value) and math.isfinite(value) else None


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _moments(path: Path) -> Iterator[dict[str, Any]]:
    """The valid entries of a phases.jsonl on a start or its end."""
    try:
        with open_regular(path) as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        lines = []
    for line in lines:
        if START.encode() not in line and STOP.encode() not in line:
            continue  # a long run has thousands of other entries
        entry = _parsed(line)
        if isinstance(entry, dict) and entry.get("phase") in (START, STOP) and isinstance(entry.get("done"), int):
            yield entry
