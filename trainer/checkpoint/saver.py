"""Saving beside the training: one checkpoint at a time is written in the background, and its failure is not lost."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from trainer.base.files import Advance, unheard
from trainer.checkpoint import store
from trainer.checkpoint.store import Files


class Saver:
    """Writes the checkpoints of one run under `root` and prunes them.

    background: write in a thread, which costs the training a snapshot and little else; the bytes are the same either way.
    step: the newest that is saved or being written; -1 before there is one. before: called in front of each write, for other
    files that the checkpoint counts on. after: called with the step of each checkpoint that is on the disk, in the thread
    that wrote it. during: each write is in a block of it. watch: gets every number of bytes written while one waits.
    """

    def __init__(
        self,
        root: Path,
        *,
        keep_last: int,
        background: bool,
        before: Callable[[], None] = lambda: None,
        after: Callable[[int], object] = lambda step: None,
        during: AbstractContextManager[object] | None = None,
        step: int = -1,
    ) -> None:
        self.root, self.keep_last, self.background, self.before, self.after = root, keep_last, background, before, after
        self.during = during or nullcontext()
        self.step = self._before_this = step
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._written = self._told = 0  # bytes, in a thread; of these, what a watch was told

    def save(self, step: int, contents: Files, watch: Advance = unheard) -> None:
        """Write a checkpoint once the one before is done; `contents` must not change any more.

        What it meets with is kept for `join`, in the foreground too: all of a run's processes act on it together.
        """
        self._join_thread(watch)
        self._before_this, self.step = self.step, step  # the way back, where this one fails

        def write(advance: Advance) -> None:
            try:
                with self.during:
                    self._write(step, contents, advance)
            except Exception as error:  # whatever it is: returned by `join`
                self._failure = self._failure or error

        if self.background:
            # A daemon: a second Ctrl-C does not wait for a slow disk. What is cut off then was under a temporary name.
            self._thread = threading.Thread(target=write, args=(self._count,), name=f"checkpoint {step}", daemon=True)
            self._thread.start()
        else:
            write(watch)

    def _count(self, count: int) -> None:
        self._written += count

    def _join_thread(self, watch: Advance) -> None:
        while self._thread is not None:
            self._thread.join(0.2)
            written = self._written
            watch(written - self._told)
            self._told = written
            if not self._thread.is_alive():
                self._thread = None

    def _write(self, step: int, contents: Files, advance: Advance) -> None:
        try:
            self.before()
            store.save(self.root, step, contents, advance)
        except BaseException:
            self.step = self._before_this
            raise
        try:
            store.prune(self.root, self.keep_last)
        except store.NotReadBack:
            self.step = self._before_this
            raise
        self.after(step)

    def join(self, watch: Advance = unheard) -> Exception | None:
        """Wait until nothing is being written. Returns the first failure since the last call."""
        self._join_thread(watch)
        failure, self._failure = self._failure, None
        return failure

    @property
    def failed(self) -> bool:
        """Whether a save has ended in an exception that `join` has not returned yet."""
        return self._failure is not None
