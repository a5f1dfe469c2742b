"""What a run is busy with, how far it is, and where it can be stopped: one object for every long piece of work.

    with phases("loading unet", total=count, unit="B") as phase:
        for tensor in tensors:
            ...
            phase.advance(tensor.nbytes)

On a terminal one live line shows it; elsewhere a line every few seconds does. A phase that took long says so at its end. Each
unit is a sign of life, for what looks from outside whether a run hangs. No thread gives them: it would outlive a hang.
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
LINE_SECONDS = 10.0  # between two lines of a phase, where there is no terminal (logging.every_seconds)
PACE_UNITS = 200  # the last ones, whose pace tells how long the rest will take
LIVE_AFTER, LIVE_SECONDS = 0.5, 0.1  # a shorter phase is not seen on a terminal; between two looks of its line

EVERY_SECONDS = 5.0  # between two signs, at least
QUIET_SECONDS, QUIET_TIMES = 600.0, 4  # a run is silent for no longer: seconds, and in its longest silence so far

Fields = Sequence[tuple[int, str]]  # as of console.fitted


def pace_of(ends: Sequence[float]) -> float | None:
    """Seconds from one unit to the next, with all that is done between them, of the last PACE_UNITS. ends: when each was
    done. None for a single unit: its beginning would count what came before it."""
    last = ends[-PACE_UNITS:]
    return (last[-1] - last[0]) / (len(last) - 1) if len(last) > 1 and last[-1] > last[0] else None


class Phase:
    """One piece of work under way. done: units so far, `before` of them in an earlier start. total: of how many, None where
    that is not known. fields: replaces the default text of its lines. pace: seconds per unit; replaces the average of
    all units. every: seconds between two of its lines where no terminal is, None where it is not shown. around: the phase in
    which this one is. check: is told whether the work gets on, and raises (Interrupted) once it should stop."""

    def __init__(
        self,
        name: str,
        total: int | None,
        unit: str,
        *,
        before: int = 0,
        check: Callable[[bool], None],
        every: float | None,
        around: Phase | None = None,
    ) -> None:
        self.name, self.total, self.unit, self.before, self.done = name, total, unit, before, before
        self.fields: Callable[[], Fields] | None = None
        self.pace: float | None = None
        self._check, self._around = check, around
        self.began = time.monotonic()
        self._live = every is not None and moves(sys.stderr)
        self._every = LIVE_SECONDS if self._live else every or 0.0
        self._next_line = self.began + (LIVE_AFTER if self._live else LONG_SECONDS) if every is not None else float("inf")

    def advance(self, count: int = 1) -> None:
        """`count` more units are done; 0: whoever does them was waited for."""
        self.done += count
        self.check(gets_on=count > 0)

    def check(self, *, gets_on: bool = True) -> None:
        """A place where the work can be stopped: at least one a second. gets_on: it is a sign of life, too."""
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + self._every
            if self._live:
                self._draw()
            elif self.fields is None or not LIVE.json:  # whose units are lines of their own there
                write(fitted(self._said(), width(sys.stderr)), sys.stderr)
        self._check(gets_on)

    def between_modules(self) -> AbstractContextManager[Any]:
        """A block in which every module of torch that is about to compute is a place to stop at, too."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        return register_module_forward_pre_hook(lambda module, arguments: self.check())

    def close(self) -> None:
        """Take the line off the terminal; the line of the phase around this one comes back."""
        if self._live and LIVE.text:
            if self._around is None:
                LIVE.show("")
            else:
                self._around._draw()

    def _draw(self) -> None:
        # The last column stays free: a terminal would go on to the next line.
        LIVE.show(fitted(self._said(), width(sys.stderr) - 1))

    def _said(self) -> Fields:
        if self.fields is not None:
            return self.fields()
        seconds = time.monotonic() - self.began
        done = f"{duration(seconds)} so far" if not self.unit else _amount(self.done, self.unit)
        if self.unit and self.total is not None:
            done = f"{done.partition(' ')[0]} of {_amount(self.total, self.unit)}"
        fields = [(0, f"{self.name}: {done}"), (2, self._rate(seconds)), (1, self.left())]
        if self._around is not None and self._around.fields is not None:
            fields.append((3, self._around.fields()[0][1]))
        return [(rank, text) for rank, text in fields if text]

    def outcome(self, seconds: float) -> str:
        """What was done, in which time, at which rate."""
        done = _amount(self.done - self.before, self.unit) if self.unit else "done"
        apart = " in the steps alone" if self.pace is not None else ""
        rate = self._rate(seconds)
        return f"{done} in {duration(seconds)}{rate and f', {rate}{apart}'}"

    def left(self) -> str:
        """How long it will take, in words; "" where that is not known."""
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
    """How the parts of a run announce what they do. Hand it down; `QUIET` is one that does nothing.

    check: raises (Interrupted) once the run should stop. sign: takes a sign of life, the name of what is done, wherever that
    gets on. show: whether this process says what it does. every: seconds between two lines of a phase, where there is no
    terminal. record: keeps every phase that has ended and had anything to do. event: what was made last, for people.
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
        self._under_way: list[Phase] = []

    def sign(self) -> None:
        """A sign of life, of work that has no phase of its own or is long within one."""
        self._sign(self._under_way[-1].name if self._under_way else "")

    def check(self, gets_on: bool = True) -> None:
        """What a phase does wherever it can be stopped. gets_on: it is a sign of life, too."""
        if gets_on:
            self.sign()
        self._check()

    def made(self, event: str) -> None:
        """Note the newest thing that was made, which the line of the steps names."""
        self.event = event

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
        """A phase of `total` units ("B" for bytes, else a noun in the singular), `before` of them done in an earlier start.
        obey False: it is seen to its end. keep False: it is shown, and not recorded. event: what has been made at its end."""
        started, finished = time.time(), False
        check = self.check if obey else lambda gets_on: self.sign() if gets_on else None
        around = self._under_way[-1] if self._under_way else None
        phase = Phase(name, total, unit, before=before, check=check, every=self.every if self.show else None, around=around)
        self._under_way.append(phase)
        try:
            check(True)
            yield phase
            finished = True
            self.event = event or self.event
        finally:
            seconds = time.monotonic() - phase.began
            self._under_way.remove(phase)
            phase.close()
            if finished and self.show and seconds > LONG_SECONDS:
                write(f"{name}: {phase.outcome(seconds)}", sys.stderr)
            if self.record is not None and keep and total != 0:
                times = {"started": round(started, 3), "seconds": round(seconds, 3)}
                self.record.add({"phase": name, **times, "done": phase.done - before, "unit": unit})


QUIET = Phases()


def quiet_for(silence: float) -> float:
    """Seconds that a run which is alive may be silent. silence: its longest one so far."""
    return max(QUIET_SECONDS, QUIET_TIMES * silence)


@dataclass(frozen=True)
class Sign:
    """The last sign of life of a run that has not told its end. time: Unix time. silence: seconds, its longest one so far.
    doing: what it was busy with."""

    time: float
    silence: float
    doing: str

    @property
    def over(self) -> float:
        """Unix time by which a run that is alive would have given another one."""
        return self.time + quiet_for(self.silence)


def last_sign(path: Path) -> Sign | None:
    """The sign in an alive.json; None where there is none that can be read."""
    try:
        entry = json.loads(path.read_bytes())
        return Sign(path.stat().st_mtime, float(entry["silence"]), str(entry["doing"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


class Alive:
    """Keeps an alive.json inside a `with` block, at whose end it is gone. The file's time is that of the last sign; it is
    written anew where it would say something else. enabled: in the main process."""

    def __init__(self, path: Path, *, enabled: bool = True) -> None:
        self.path, self.enabled = path, enabled
        self._last, self._silence = -EVERY_SECONDS, EVERY_SECONDS
        self._written: dict[str, object] = {}

    def __enter__(self) -> Alive:
        return self

    def __exit__(self, *error: object) -> None:
        if self._written:
            with suppress(OSError):  # what ended the run is told, and not that this could not be deleted
                self.path.unlink()

    def sign(self, doing: str) -> None:
        """Give a sign, where the last one is a while ago and the folder is there. doing: what the run is busy with."""
        now = time.monotonic()
        # A start that is refused leaves no folder.
        if not self.enabled or now - self._last < EVERY_SECONDS or not self.path.parent.is_dir():
            return
        self._silence = max(self._silence, now - self._last if self._written else 0.0)
        about = {"doing": doing, "host": socket.gethostname(), "pid": os.getpid(), "silence": round(self._silence)}
        self._last = now
        with suppress(OSError):  # nobody's work ends by it; a full disk still has room for a time
            if about != self._written or not self.path.exists():
                self._written = about
                write_atomic(self.path, [json_bytes(about)])
        with suppress(OSError):
            os.utime(self.path)


# Entries of a record beside phases: where a start went on from (its "done": steps), and what ended it, but for a kill.
START, STOP = "start of the training", "end of this start"


class Record:
    """phases.jsonl: what each phase of each start took. In memory until `open` is called: a refused run leaves nothing."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._lines: list[str] = []

    def add(self, entry: dict[str, Any]) -> None:
        """Add one phase's line. entry: the line as a JSON object."""
        self._lines.append(json.dumps(entry) + "\n")
        if self._path is not None:
            self.open(self._path)

    def open(self, path: Path) -> None:
        """Append to `path`, what came so far and all that comes."""
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
    """Seconds as people read them: "4.2 s", "1 min 5 s", "2 h 10 min"."""
    if round(seconds) < 60:
        return f"{seconds:.1f} s" if round(seconds, 1) < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 48 * 60 else f"{minutes / 60 / 24:.1f} days"
