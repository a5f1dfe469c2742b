"""What a run is busy with, how far it is, and where it can be stopped: one object for every long piece of work.

    with phases("loading unet", total=count, unit="B") as phase:
        for tensor in tensors:
            ...
            phase.advance(tensor.nbytes)

On a terminal a bar shows it; elsewhere a line every few seconds does. A phase that took long says so at its end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from trainer.files import naming
from trainer.terminal import read_or_not, write

LONG_SECONDS = 2.0  # a shorter phase leaves no line
LINE_SECONDS = 5.0  # between two lines of a phase, where there is no terminal


class Phase:
    """One piece of work under way. done: units so far, `before` of them in an earlier start. total: of how many, None where
    that is not known. note: what else its lines say. pace: seconds of a unit, where who does the work knows better than the
    average of all.

    advance, check: raise what the run's `check` raises (Interrupted) once it should stop.
    """

    def __init__(
        self, name: str, total: int | None, unit: str, *, before: int = 0, check: Callable[[], None], show: bool
    ) -> None:
        self.name, self.total, self.unit, self.before, self.done = name, total, unit, before, before
        self.note = ""
        self.pace: float | None = None
        self._check, self._bar = check, None
        self.began = time.monotonic()
        self._next_line = self.began + LONG_SECONDS if show else float("inf")
        if show and sys.stderr.isatty():
            from tqdm import tqdm

            self._next_line = float("inf")
            units = {"unit": "B", "unit_scale": True} if unit == "B" else {"unit": f" {unit}"}
            self._bar = tqdm(desc=name, total=total, initial=before, leave=False, dynamic_ncols=True, delay=0.5, **units)

    def advance(self, count: int = 1) -> None:
        """`count` more units are done."""
        self.done += count
        if self._bar is not None:
            with read_or_not(sys.stderr):
                self._bar.set_postfix_str(self.note, refresh=False)
                self._bar.update(count)
        self.check()

    def check(self) -> None:
        """A place where the work can be stopped: at least one a second."""
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + LINE_SECONDS
            write(f"{self.name}: {self._progress(now - self.began)}", sys.stderr)
        self._check()

    def between_modules(self) -> AbstractContextManager[Any]:
        """Inside the block every module of torch that is about to compute is such a place."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        return register_module_forward_pre_hook(lambda module, arguments: self.check())

    def close(self) -> None:
        if self._bar is not None:
            with read_or_not(sys.stderr):
                self._bar.close()

    def outcome(self, seconds: float) -> str:
        """What was done, in which time, at which rate."""
        done = _amount(self.done - self.before, self.unit) if self.unit else "done"
        return ", ".join(filter(None, [f"{done} in {duration(seconds)}", self._rate(seconds)]))

    def _progress(self, seconds: float) -> str:
        if not self.unit:
            return f"{duration(seconds)} so far"
        left, done = "", _amount(self.done, self.unit)
        if self.pace is not None:
            seconds = self.pace * (self.done - self.before)
        if self.total is not None:
            done = f"{done.partition(' ')[0]} of {_amount(self.total, self.unit)}"
            if self.before < self.done < self.total:
                left = f"{duration(seconds * (self.total - self.done) / (self.done - self.before))} left"
        return ", ".join(filter(None, [done, self._rate(seconds), left, self.note]))

    def _rate(self, seconds: float) -> str:
        if self.done == self.before or seconds <= 0:
            return ""
        rate = (self.done - self.before) / seconds
        if self.unit == "B":
            return f"{rate / 1e9:.2f} GB/s"
        return f"{rate:.1f} {self.unit}s/s" if rate >= 1 else f"{1 / rate:.1f} s a {self.unit}"


class Phases:
    """How the parts of a run announce what they do. Hand it down; `QUIET` is one that does nothing.

    check: raises (Interrupted) once the run should stop; called wherever a phase can be stopped.
    show: whether this process says what it does. record: keeps every phase that has ended and had anything to do.
    """

    def __init__(self, *, check: Callable[[], None] = lambda: None, show: bool = False, record: Record | None = None) -> None:
        self.check, self.show, self.record = check, show, record

    @contextmanager
    def __call__(
        self, name: str, total: int | None = None, unit: str = "", *, before: int = 0, obey: bool = True
    ) -> Iterator[Phase]:
        """A phase of `total` units ("B" for bytes, else a noun in the singular), `before` of them done in an earlier start.

        obey False: it is seen to its end.
        """
        started, finished = time.time(), False
        check = self.check if obey else lambda: None
        phase = Phase(name, total, unit, before=before, check=check, show=self.show)
        try:
            check()
            yield phase
            finished = True
        finally:
            seconds = time.monotonic() - phase.began
            phase.close()
            if finished and self.show and seconds > LONG_SECONDS:
                write(f"{name}: {phase.outcome(seconds)}", sys.stderr)
            if self.record is not None and total != 0:
                times = {"started": round(started, 3), "seconds": round(seconds, 3)}
                self.record.add({"phase": name, **times, "done": phase.done - before, "unit": unit})


QUIET = Phases()


class Record:
    """phases.jsonl: what each phase of each start took. In memory until `open` is called: a refused run leaves nothing."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._lines: list[str] = []

    def add(self, entry: dict[str, Any]) -> None:
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
    """As people read it."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
