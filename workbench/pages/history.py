"""metrics.jsonl as it grows, and the starts of phases.jsonl: rows, columns of them, and what happened when."""

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
    """The rows of a metrics.jsonl. `read` goes on where it stopped, and anew where another file has taken its place.
    unreadable: lines that the judge cannot take, and a last line that is torn."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.unreadable = 0
        self._bad = 0
        self._place, self._file = 0, None
        self._columns: dict[str, list[tuple[float, float | None]]] = {}

    def read(self) -> History:
        """All that is written by now; a missing file gives no rows."""
        try:
            with open_regular(self.path) as file:
                stat = os.fstat(file.fileno())
                if self._file != stat.st_ino or stat.st_size < self._place:
                    self.rows, self._bad, self._place, self._file, self._columns = [], 0, 0, stat.st_ino, {}
                file.seek(self._place)
                *lines, torn = file.read().split(b"\n")
        except FileNotFoundError:
            self.rows, self._bad, self._place, self._file, self._columns, self.unreadable = [], 0, 0, None, {}, 0
            return self
        for line in lines:
            self._add(line)
        self._place += sum(len(line) + 1 for line in lines)
        self.unreadable = self._bad + bool(torn.strip())
        return self

    def _add(self, line: bytes) -> None:
        row = _parsed(line)
        if not is_line(row):
            self._bad += bool(line.strip())
            return
        self.rows.append(row)
        for step, fields in measured([row]):
            for name, value in fields.items():
                for key, number in enumerate(value, 1) if isinstance(value, list) else ((0, value),):
                    self._columns.setdefault(f"{name}/{key}" if key else name, []).append((step, _finite(number)))

    @property
    def stamp(self) -> tuple[object, ...]:
        """What is another one once `read` has found anything new."""
        return self._file, self._place, self.unreadable

    @property
    def fields(self) -> list[str]:
        """Those that hold numbers, lists of them apart."""
        return [name for name in self._columns if "/" not in name]

    @property
    def step(self) -> int:
        """The last step that was logged; 0 before there is one."""
        return self.rows[-1]["step"] if self.rows else 0

    def series(self, field: str) -> Series:
        """(step, value) for each row that has the field, or its place "FIELD/1"; None where it is null or not finite."""
        return self._columns.get(field, ())

    def values(self, field: str) -> list[float]:
        """The field's values where it has any, in order."""
        return [value for _, value in self.series(field) if value is not None]

    def last(self, field: str) -> float | None:
        """The last finite value."""
        return next((value for _, value in reversed(self.series(field)) if value is not None), None)

    def newest(self, name: str) -> tuple[int, Any] | None:
        """(step, value) of the last row that has this field, whatever it holds."""
        return next(((row["step"], row[name]) for row in reversed(self.rows) if name in row), None)

    def pace(self, after: int = 0) -> float | None:
        """The seconds of a step, of the last ones beyond `after` (progress.pace_of); None where too few are known."""
        last = self.rows[-PACE_UNITS:]
        return pace_of([row["time"] for row in last if row["step"] > after and _finite(row.get("time")) is not None])

    @property
    def levels(self) -> dict[int, str]:
        """What was changed, by the first step whose loss measures something else than before."""
        return {row["step"]: row[CHANGED] for row in self.rows if CHANGED in row}

    def skipped(self) -> list[int]:
        """Steps without an update."""
        return [row["step"] for row in self.rows if row.get("skipped") is True]


@dataclass(frozen=True)
class Mark:
    """Something that happened after a step. kind: of the start of a process, "resumed"; of --allow, "changed"."""

    step: int
    kind: str
    said: str


@dataclass(frozen=True)
class Events:
    """What happened when. steps: by what they are steps of: samples drawn, adapters kept, updates skipped."""

    marks: tuple[Mark, ...] = ()
    steps: Mapping[str, Sequence[int]] = field(default_factory=dict)


NOTHING = Events()


def read_starts(path: Path) -> list[tuple[int, float]]:
    """(the step it went on from, Unix time) of each start in a phases.jsonl, but for those that a later one went back
    behind."""
    starts: list[tuple[int, float]] = []
    for entry in _moments(path):
        step, time = entry["done"], _finite(entry.get("started"))
        if entry["phase"] == START and time is not None:
            starts = [earlier for earlier in starts if earlier[0] < step]
            starts.append((step, time))
    return starts


@dataclass(frozen=True)
class Standing:
    """What the last start told of itself. total: the run's steps. ended: whether it has told its end. why: what ended it
    before all was done, in a few words. begun: the step it went on from. started: Unix time. None: not told."""

    total: int | None = None
    ended: bool = False
    why: str = ""
    begun: int = 0
    started: float | None = None


def read_standing(path: Path) -> Standing:
    """The standing of a run by its phases.jsonl; a missing file tells nothing."""
    standing = Standing()
    for entry in _moments(path):
        if entry["phase"] == START:
            total = entry.get("total")
            known = total if isinstance(total, int) else None
            standing = Standing(known, begun=entry["done"], started=_finite(entry.get("started")))
        else:
            why = entry.get("why", "")
            standing = replace(standing, ended=True, why=why if isinstance(why, str) else "")
    return standing


def marks_of(starts: Sequence[tuple[int, float]], rows: Sequence[Mapping[str, Any]], changes: Sequence[Mapping[str, Any]]):
    """Resumed starts, and what --allow changed. changes: what --allow changed, in order."""
    ended = {row["step"]: row["time"] for row in rows if is_number(row.get("time"))} if len(starts) > 1 else {}
    marks = []
    for step, time in starts:
        if step > 0:
            pause = f", after a pause of {duration(time - ended[step])}" if time - ended.get(step, math.inf) > 0 else ""
            marks.append(Mark(step, "resumed", f"resumed after step {step:,}{pause}"))
    for change in changes:
        what = "; ".join(change["what"]).replace(" -> ", " \N{RIGHTWARDS ARROW} ")  # which no line's end cuts in two
        marks.append(Mark(change["step"], "changed", f"changed after step {change['step']:,}: {what}"))
    return tuple(marks)


def _finite(value: object) -> float | None:
    return float(value) if is_number(value) and math.isfinite(value) else None


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _moments(path: Path) -> Iterator[dict[str, Any]]:
    """The sound entries of a phases.jsonl that tell of a start or its end."""
    try:
        with open_regular(path) as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        lines = []
    for line in lines:
        if START.encode() not in line and STOP.encode() not in line:
            continue  # of a long run there are thousands
        entry = _parsed(line)
        if isinstance(entry, dict) and entry.get("phase") in (START, STOP) and isinstance(entry.get("done"), int):
            yield entry
