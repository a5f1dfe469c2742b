"""Saving beside the training: one checkpoint at a time is written in the background, and its failure is not lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from trainer.checkpoint import store
from trainer.checkpoint.store import Files


class Saver:
    """Writes the checkpoints of one run under `root` and prunes them.

    background: write in a thread, which costs the training a snapshot and little else. The bytes are the same either way.
    step: the newest that is saved or being written; -1 before there is one.
    before: called in front of each write, where other files must be on the disk before the checkpoint that counts on them.
    """

    def __init__(
        self, root: Path, *, keep_last: int, background: bool, before: Callable[[], None] = lambda: None
    ) -> None:
        self.root, self.keep_last, self.background, self.before = root, keep_last, background, before
        self.step = self._before_this = -1
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def save(self, step: int, contents: Files) -> None:
        """Write a checkpoint once the one before is done; `contents` must not change any more.

        What it meets with is kept for `wait`, in the foreground too: only the process that saves would hear of it here, and
        all of a run's processes have to act on it together.
        """
        if self._thread is not None:
            self._thread.join()
        self._before_this, self.step = self.step, step  # the way back, where this one fails

        def write() -> None:
            try:
                self._write(step, contents)
            except Exception as error:  # whatever it is: raised by `wait`
                self._failure = self._failure or error

        if self.background:
            # A daemon: a second Ctrl-C does not wait for a slow disk. What is cut off then was under a temporary name.
            self._thread = threading.Thread(target=write, name=f"checkpoint {step}", daemon=True)
            self._thread.start()
        else:
            write()

    def _write(self, step: int, contents: Files) -> None:
        try:
            self.before()
            store.save(self.root, step, contents)
        except BaseException:
            self.step = self._before_this
            raise
        try:
            store.prune(self.root, self.keep_last)
        except store.NotReadBack:
            self.step = self._before_this
            raise

    def join(self) -> Exception | None:
        """Until nothing is being written; returns what `wait` would raise."""
        try:
            self.wait()
        except Exception as error:  # handed on
            return error
        return None

    @property
    def failed(self) -> bool:
        """Whether a save has ended in an exception that `wait` has not raised yet."""
        return self._failure is not None

    def wait(self) -> None:
        """Until nothing is being written. Raises the first failure since the last call."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
