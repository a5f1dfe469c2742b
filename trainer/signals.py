"""SIGTERM and SIGINT become a flag that the run reads between steps; a second SIGINT stops at once."""

from __future__ import annotations

import signal

from trainer.errors import Interrupted


class StopSignal:
    """Installed for the length of a `with` block. `check` raises Interrupted once a signal has arrived."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopSignal:
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._before[signum] = signal.signal(signum, self._arrived)
        return self

    def __exit__(self, *error) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _arrived(self, signum: int, frame) -> None:
        if self.signum == signal.SIGINT and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.signum = signum

    def check(self) -> None:
        if self.signum is not None:
            raise Interrupted(self.signum)
