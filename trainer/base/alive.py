"""A run's signs of life, for what looks from outside whether it hangs (scripts/health.py, the comparison of runs).

No thread gives them: it would outlive a hang. Whoever does long work gives one between two pieces of it (progress.Phases).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.base.files import json_bytes, write_atomic

EVERY_SECONDS = 5.0  # between two signs, at least
QUIET_SECONDS, QUIET_TIMES = 600.0, 4  # a run is silent for no longer: seconds, and in its longest silence so far


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

    def is_over(self, now: float) -> bool:
        """Whether a run that is alive would have given another one by `now`."""
        return now - self.time >= quiet_for(self.silence)


def last_sign(path: Path) -> Sign | None:
    """The sign in an alive.json; None where there is none that can be read."""
    try:
        said = json.loads(path.read_bytes())
        return Sign(path.stat().st_mtime, float(said["silence"]), str(said["doing"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


class Alive:
    """Keeps an alive.json inside a `with` block, at whose end it is gone. Its time is that of the last sign; it is written
    anew where it would say something else. say: tells, once, that it could not be written; the run goes on."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path, self.say = path, say
        self._last, self._silence = None, 0.0
        self._written: dict[str, object] | None = None
        self._failed = False

    def __enter__(self) -> Alive:
        return self

    def __exit__(self, *error: object) -> None:
        if self._written is not None:
            with suppress(OSError):  # what ended the run is told, and not that this could not be deleted
                self.path.unlink()

    def sign(self, doing: str) -> None:
        """Give a sign, where the last one is a while ago and the folder is there. doing: what the run is busy with."""
        now = time.monotonic()
        quiet = EVERY_SECONDS if self._last is None else now - self._last
        if quiet < EVERY_SECONDS:
            return
        self._silence = max(self._silence, quiet)
        about = {"doing": doing, "host": socket.gethostname(), "pid": os.getpid(), "silence": round(self._silence)}
        try:
            if about == self._written:
                os.utime(self.path)
            elif self.path.parent.is_dir():  # a start that is refused leaves none
                write_atomic(self.path, [json_bytes(about)])
                self._written = about
            else:
                return
        except OSError as error:
            with suppress(OSError):  # a full disk still has room for a time
                os.utime(self.path)
            self._written = self._written and {}
            if not self._failed and not isinstance(error, FileNotFoundError):  # deleted by hand: it comes again
                self.say(f"warning: {self.path} could not be written ({error}); a check of health may take this run for hung")
            self._failed = True
        self._last = now
