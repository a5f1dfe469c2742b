"""Signals become flags that the run reads between steps: SIGTERM and SIGINT stop it, SIGUSR1 asks for a checkpoint now.

A second SIGINT stops at once.
"""

from __future__ import annotations

import signal

from trainer.errors import Interrupted

STOP = (signal.SIGTERM, signal.SIGINT)
SAVE = getattr(signal, "SIGUSR1", None)  # not on Windows
HANDLED = {*STOP, *([SAVE] if SAVE else [])}


def hold_save() -> None:
    """Ignore the signal for a checkpoint, which by default ends a process: before there is anything to save."""
    if SAVE:
        signal.signal(SAVE, signal.SIG_IGN)


class Signals:
    """Installed for the length of a `with` block. `check` raises Interrupted once a stop was asked for.

    stop: the number of the first signal that asked to stop, or None. save: whether a checkpoint was asked for; whoever writes
    it sets it back.
    """

    def __init__(self) -> None:
        self.stop: int | None = None
        self.save = False
        self._interrupted = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Signals:
        for signum in HANDLED:
            self._before[signum] = signal.signal(signum, self._arrived)
        return self

    def __exit__(self, *error) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _arrived(self, signum: int, frame) -> None:
        if signum == SAVE:
            self.save = True
            return
        if signum == signal.SIGINT and self._interrupted:
            raise KeyboardInterrupt
        self._interrupted |= signum == signal.SIGINT
        self.stop = self.stop or signum

    def check(self) -> None:
        if self.stop is not None:
            raise Interrupted(self.stop)
