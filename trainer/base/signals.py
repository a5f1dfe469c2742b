"""Signals become flags that the run reads: SIGTERM, SIGINT and SIGHUP stop it, SIGUSR1 asks for a checkpoint now.

Each is acknowledged at once, in the middle of whatever is computed. A second SIGINT stops at once.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.base.console import REST, moves, read_or_not
from trainer.base.errors import Interrupted

# Not on Windows: the signal for a closed terminal, and the one for a checkpoint.
HANGUP, SAVE = getattr(signal, "SIGHUP", None), getattr(signal, "SIGUSR1", None)
STOP = (signal.SIGTERM, signal.SIGINT, *([HANGUP] if HANGUP else []))
HANDLED = {*STOP, *([SAVE] if SAVE else [])}

STOPPING = "stopping"


def hold_save() -> None:
    """Ignore the signal for a checkpoint, which by default ends a process: before there is anything to save."""
    if SAVE:
        signal.signal(SAVE, signal.SIG_IGN)


@contextmanager
def blocked() -> Iterator[None]:
    """A block that starts processes, who inherit it: a run's signals meet none before it has said what it does with them.
    On the main thread of a POSIX system; elsewhere nothing is held back."""
    if not hasattr(signal, "pthread_sigmask") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Signals:
    """Installed for the length of a `with` block. `check` raises Interrupted once a stop was asked for.

    stop: the number of the first signal that asked to stop, or None. save: whether a checkpoint was asked for; whoever writes
    it sets it back. promise: what the acknowledgement says of a stop. A SIGHUP that was ignored stays so (nohup).
    """

    def __init__(self) -> None:
        self.stop: int | None = None
        self.save = False
        self.promise = STOPPING
        self._interrupted = False
        self._received = 0  # signals to stop that came to this process, and not from another one
        self._until: float | None = None
        self._before: dict[int, object] = {}
        # Python runs a handler between two of its own instructions: a backward pass in C++ may be half a minute long. The
        # number of a signal comes through here at once, to a thread.
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup = -1
        self._thread = threading.Thread(target=self._acknowledge, name="signals", daemon=True)

    def __enter__(self) -> Signals:
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        for signum in HANDLED:
            if signum != HANGUP or signal.getsignal(signum) != signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._arrived)
        return self

    def __exit__(self, *error) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._writer.send(b"\0")
        self._thread.join()
        self._reader.close()
        self._writer.close()

    def _acknowledge(self) -> None:
        start = f"\r{REST}" if moves(sys.stderr) else ""  # in the place of the live line
        while True:
            for signum in self._reader.recv(64):
                if signum == 0:
                    return
                if signum in self._before:  # the data loader's workers send signals too when they end
                    text = "a checkpoint is written after this step" if signum == SAVE else self.promise
                    # Not through Python's stderr, whose lock the interrupted code may hold.
                    with read_or_not(sys.stderr):
                        os.write(2, f"{start}{signal.Signals(signum).name}: {text}\n".encode())

    def _arrived(self, signum: int, frame) -> None:
        if signum == SAVE:
            self.save = True
            return
        if signum == signal.SIGINT and self._interrupted:
            raise KeyboardInterrupt
        self._interrupted |= signum == signal.SIGINT
        self._received += 1
        self.stop = self.stop or signum

    @contextmanager
    def last_work(self, seconds: float) -> Iterator[None]:
        """A block in which a stop that was asked for once leaves time for work that may be left undone: `check` raises when
        that time is over, or at a second signal."""
        self._until = time.monotonic() + seconds
        try:
            yield
        finally:
            self._until = None

    def check(self) -> None:
        """Raises Interrupted where a stop was asked for."""
        in_time = self._until is not None and self._received < 2 and time.monotonic() < self._until
        if self.stop is not None and not in_time:
            raise Interrupted(self.stop)
