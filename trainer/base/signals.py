"""Signal handlers that set flags for the run: SIGTERM, SIGINT and SIGHUP stop it, SIGUSR1 requests a checkpoint. Each is
acknowledged at once, even during a long computation. A second SIGINT stops at once."""

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

# None on Windows: the signal of a closed terminal, and the one that requests a checkpoint.
HANGUP, SAVE = getattr(signal, "SIGHUP", None), getattr(signal, "SIGUSR1", None)
STOP = (signal.SIGTERM, signal.SIGINT, *([HANGUP] if HANGUP else []))
HANDLED = {*STOP, *([SAVE] if SAVE else [])}


def hold_save() -> None:
    """Ignore the checkpoint signal, which by default kills the process, until there is something to save."""
    if SAVE:
        signal.signal(SAVE, signal.SIG_IGN)


@contextmanager
def blocked() -> Iterator[None]:
    """Block the signals in HANDLED. Processes started in the block inherit that, so that no signal reaches them before they
    have set their handlers. Only on the main thread of a POSIX system; elsewhere a no-op."""
    if not hasattr(signal, "pthread_sigmask") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Signals:
    """Signal handlers, installed during a `with` block. `check` raises Interrupted once a stop was requested. An ignored
    SIGHUP stays ignored (nohup). stop: the first signal that requested a stop, or None. save: whether a checkpoint was
    requested; its writer resets it. promise: the text that acknowledges a stop."""

    def __init__(self) -> None:
        self.stop: int | None = None
        self.save = False
        self.promise = "stopping"
        self._interrupted = False
        self._received = 0  # stop signals that this process itself received
        self._until: float | None = None
        self._before: dict[int, object] = {}
        # Python runs handlers between two bytecodes only, and a backward pass in C++ may take half a minute. Signal numbers
        # reach a thread through this socket at once.
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
        start = f"\r{REST}" if moves(sys.stderr) else ""  # overwrites the live line
        while True:
            for signum in self._reader.recv(64):
                if signum == 0:
                    return
                if signum in self._before:  # ending workers of the data loader send signals, too
                    text = "a checkpoint is written after this step" if signum == SAVE else self.promise
                    # Bypasses Python's stderr, whose lock the interrupted code may hold.
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
        """A block of optional work: after one stop signal, `check` raises only once the time is up or at a second signal."""
        self._until = time.monotonic() + seconds
        try:
            yield
        finally:
            self._until = None

    def check(self) -> None:
        """Raises Interrupted if a stop was requested."""
        in_time = self._until is not None and self._received < 2 and time.monotonic() < self._until
        if self.stop is not None and not in_time:
            raise Interrupted(self.stop)
