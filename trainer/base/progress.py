"""Progress reports of long work, which are also the points where it can be stopped:

    with phases("loading unet", total=count, unit="B") as phase:
        for tensor in tensors:
            ...
            phase.advance(tensor.nbytes)

A terminal shows one live line, other outputs a line every few seconds. A long phase prints a line at its end. Each unit is
a heartbeat for outside checks whether a run hangs; no thread sends it, as that would go on in a hang.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.base.console import LIVE, fitted, moves, width, write
from trainer.base.files import json_bytes, naming, write_atomic

LONG_SECONDS = 2.0  # a shorter phase leaves no line
LINE_SECONDS = 10.0  # between two lines of a phase without a terminal (logging.every_seconds)
PACE_UNITS = 200  # the time left is estimated from the pace of so many last units
LIVE_AFTER, LIVE_SECONDS = 0.5, 0.1  # before a terminal shows a phase; between two updates

EVERY_SECONDS = 5.0  # minimum between two heartbeats
QUIET_SECONDS, QUIET_TIMES = 600.0, 4  # a live run is silent for at most: seconds, multiples of its longest silence

Fields = Sequence[tuple[int, str]]  # (rank, text), for console.fitted


def pace_of(ends: Sequence[float]) -> float | None:
    """Mean seconds per unit over the last PACE_UNITS, including the work between them. ends: end times. None for one unit: a
    start time would include earlier work."""
    last = ends[-PACE_UNITS:]
    return (last[-1] - last[0]) / (len(last) - 1) if len(last) > 1 and last[-1] > last[0] else None


class Phase:
    """A running piece of work. done: units so far, `before` of them in an earlier start. total: of how many; None: unknown.
    obey: whether it can be stopped. fields: replaces the default text of its lines. pace: seconds per unit; replaces the
    average over all units."""

    def __init__(self, phases: Phases, name: str, total: int | None, unit: str, before: int = 0, obey: bool = True) -> None:
        self.name, self.total, self.unit, self.before, self.done, self.obey = name, total, unit, before, before, obey
        self.fields: Callable[[], Fields] | None = None
        self.pace: float | None = None
        self._phases, self._around = phases, phases.running[-1] if phases.running else None
        self.began = time.monotonic()
        self._live = phases.show and moves(sys.stderr)
        self._every = LIVE_SECONDS if self._live else phases.every
        self._next_line = self.began + (LIVE_AFTER if self._live else LONG_SECONDS) if phases.show else float("inf")

    def advance(self, count: int = 1) -> None:
        """Count `count` more units as done; 0: still waiting for them."""
        self.done += count
        self.check(gets_on=count > 0)

    def check(self, *, gets_on: bool = True) -> None:
        """A point where the work can be stopped; call it at least once a second. gets_on: send a heartbeat, too."""
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + self._every
            if self._live:
                self._draw()
            elif self.fields is None or not LIVE.json:  # `fields` belong to the steps, which are JSON lines themselves
                write(fitted(self._fields(), width(sys.stderr)), sys.stderr)
        if self.obey:
            self._phases.check(gets_on)
        elif gets_on:
            self._phases.sign()

    def between_modules(self) -> AbstractContextManager[Any]:
        """A block in which `check` is called before the forward of each torch module, too."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        return register_module_forward_pre_hook(lambda module, arguments: self.check())

    def close(self) -> None:
        """Remove the live line, and show the enclosing phase's again."""
        if self._live and LIVE.text:
            if self._around is None:
                LIVE.show("")
            else:
                self._around._draw()

    def _draw(self) -> None:
        # The last column stays free, or the terminal would wrap.
        LIVE.show(fitted(self._fields(), width(sys.stderr) - 1))

    def _fields(self) -> Fields:
        if self.fields is not None:
            return self.fields()
        seconds = time.monotonic() - self.began
        amount = f"{duration(seconds)} so far" if not self.unit else _amount(self.done, self.unit)
        if self.unit and self.total is not None:
            amount = f"{amount.partition(' ')[0]} of {_amount(self.total, self.unit)}"
        fields = [(0, f"{self.name}: {amount}"), (2, self._rate(seconds)), (1, self.time_left())]
        if self._around is not None and self._around.fields is not None:
            fields.append((3, self._around.fields()[0][1]))
        return [(rank, text) for rank, text in fields if text]

    def outcome(self, seconds: float) -> str:
        """The amount done, its time and rate, in words."""
        amount = _amount(self.done - self.before, self.unit) if self.unit else "done"
        scope = " in the steps alone" if self.pace is not None else ""
        rate = self._rate(seconds)
        return f"{amount} in {duration(seconds)}{rate and f', {rate}{scope}'}"

    def time_left(self) -> str:
        """The time left, in words; "" if unknown."""
        if self.total is None or not self.before < self.done < self.total:
            return ""
        pace = (time.monotonic() - self.began) / (self.done - self.before) if self.pace is None else self.pace
        return f"{duration(pace * (self.total - self.done))} left"

    def _rate(self, seconds: float) -> str:
        if not self.unit or self.done == self.before or seconds <= 0:
            return ""
        rate = (self.done - self.before) / seconds if self.pace is None else 1 / self.pace
        if self.unit == "B":
            return f"{rate / 1e9:.2f} GB/s"
        a = "an" if self.unit[0] in "aeiou" else "a"
        return f"{rate:.1f} {self.unit}s/s" if rate >= 1 else f"{1 / rate:.1f} s {a} {self.unit}"


class Phases:
    """A factory of phases, handed to all parts of a run; `QUIET` does nothing.

    check: raises (Interrupted) once the run should stop. sign: takes heartbeats: the name of the work that advanced. show:
    whether this process prints. every: seconds between two lines of a phase without a terminal. record: the log of phases
    that ended and had work to do. event: the newest result, shown in the line of the steps.
    """

    def __init__(
        self,
        *,
        check: Callable[[], None] = lambda: None,
        sign: Callable[[str], None] = lambda doing: None,
        show: bool = False,
        every: float = LINE_SECONDS,
        record: Record | None = None,
    ) -> None:
        self._check, self._sign, self.show, self.every, self.record = check, sign, show, every, record
        self.event = ""
        self.running: list[Phase] = []  # the innermost last

    def sign(self) -> None:
        """Send a heartbeat, for work without a phase of its own or long work within one."""
        self._sign(self.running[-1].name if self.running else "")

    def check(self, gets_on: bool = True) -> None:
        """Raise what stops the run, if anything does. gets_on: send a heartbeat first."""
        if gets_on:
            self.sign()
        self._check()

    @contextmanager
    def __call__(
        self,
        name: str,
        total: int | None = None,
        unit: str = "",
        *,
        before: int = 0,
        obey: bool = True,
        keep: bool = True,
        event: str = "",
    ) -> Iterator[Phase]:
        """A phase of `total` units ("B" for bytes, else a singular noun), `before` of them done in an earlier start. obey:
        False: it cannot be stopped. keep: False: it is shown but not recorded. event: the result that exists at its end."""
        started, finished = time.time(), False
        phase = Phase(self, name, total, unit, before, obey)
        self.running.append(phase)
        try:
            (self.check if obey else self.sign)()
            yield phase
            finished = True
            self.event = event or self.event
        finally:
            seconds = time.monotonic() - phase.began
            self.running.remove(phase)
            phase.close()
            if finished and self.show and seconds > LONG_SECONDS:
                write(f"{name}: {phase.outcome(seconds)}", sys.stderr)
            if self.record is not None and keep and total != 0:
                times = {"started": round(started, 3), "seconds": round(seconds, 3)}
                self.record.add({"phase": name, **times, "done": phase.done - before, "unit": unit})


QUIET = Phases()


def quiet_for(silence: float) -> float:
    """Seconds that a live run may be silent. silence: its longest silence so far, in seconds."""
    return max(QUIET_SECONDS, QUIET_TIMES * silence)


@dataclass(frozen=True)
class Sign:
    """The last heartbeat of a run. time: Unix time. silence: its longest silence in seconds. doing: its work, in words."""

    time: float
    silence: float
    doing: str

    @property
    def over(self) -> float:
        """Unix time by which a live run would have sent another one."""
        return self.time + quiet_for(self.silence)


def last_sign(path: Path) -> Sign | None:
    """The heartbeat in an alive.json, or None if it is missing or unreadable."""
    try:
        entry = json.loads(path.read_bytes())
        return Sign(path.stat().st_mtime, float(entry["silence"]), str(entry["doing"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


class Alive:
    """An alive.json, which exists during a `with` block. Its mtime is the last heartbeat; it is rewritten only if its content
    changes. enabled: whether this is the main process."""

    def __init__(self, path: Path, *, enabled: bool = True) -> None:
        self.path, self.enabled = path, enabled
        self._last, self._silence = -EVERY_SECONDS, EVERY_SECONDS
        self._content: dict[str, object] = {}

    def __enter__(self) -> Alive:
        return self

    def __exit__(self, *error: object) -> None:
        if self._content:
            with suppress(OSError):  # the error that ended the run is reported, not this one
                self.path.unlink()

    def sign(self, doing: str) -> None:
        """Send a heartbeat if the last one is EVERY_SECONDS old and the folder exists. doing: the run's work, in words."""
        now = time.monotonic()
        # A refused start must not make the folder.
        if not self.enabled or now - self._last < EVERY_SECONDS or not self.path.parent.is_dir():
            return
        self._silence = max(self._silence, now - self._last if self._content else 0.0)
        content = {"doing": doing, "host": socket.gethostname(), "pid": os.getpid(), "silence": round(self._silence)}
        self._last = now
        with suppress(OSError):  # it must not end the run; the time below fits on a full disk, too
            if content != self._content or not self.path.exists():
                self._content = content
                write_atomic(self.path, [json_bytes(content)])
        with suppress(OSError):
            os.utime(self.path)


# Entries of a record besides phases: the beginning of a start (its "done": steps), and its end, unless it was killed.
START, STOP = "start of the training", "end of this start"


class Record:
    """phases.jsonl: the times of all phases of all starts. In memory until `open` is called: a refused run leaves no file."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._lines: list[str] = []

    def add(self, entry: dict[str, Any]) -> None:
        """Add a line. entry: its JSON object."""
        self._lines.append(json.dumps(entry) + "\n")
        if self._path is not None:
            self.open(self._path)

    def open(self, path: Path) -> None:
        """Append all lines to `path`, those so far and later ones."""
        self._path = path
        lines, self._lines = self._lines, []
        with naming(path), path.open("a+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            if file.read() not in (b"", b"\n"):
                lines.insert(0, "\n")  # a killed run's last line is cut short
            file.write("".join(lines).encode())


def _amount(count: int, unit: str) -> str:
    return f"{count / 1e9:.2f} GB" if unit == "B" else f"{count} {unit}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Seconds in words: "4.2 s", "1 min 5 s", "2 h 10 min"."""
    if round(seconds) < 60:
        return f"{seconds:.1f} s" if round(seconds, 1) < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 48 * 60 else f"{minutes / 60 / 24:.1f} days"
