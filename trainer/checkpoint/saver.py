"""Saving in the background: one checkpoint at a time, and failures are reported."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from trainer.base.files import Advance, no_progress
from trainer.checkpoint import store
from trainer.checkpoint.store import Files


class Saver:
    """Writes the checkpoints of one run under `root` and prunes them.

    background: write in a thread, which costs the training a snapshot and little else; the bytes are the same either way.
    step: the newest step that is saved or being written; -1: none yet. before: called before each write, to sync other files
    that the checkpoint relies on. after: called with the step of each checkpoint on disk, in the thread that wrote it.
    during: a context manager around each write. watch: progress callback for bytes written while the caller waits.
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
        self._bytes_written = self._bytes_reported = 0  # by a thread; of these, reported to a watch

    def save(self, step: int, contents: Files, watch: Advance = no_progress) -> None:
        """Write a checkpoint after the previous one is done; `contents` must not change any more. Errors are kept for `join`,
        in the foreground, too: all processes of a run act on them together."""
        self._join_thread(watch)
        self._before_this, self.step = self.step, step  # restored if this save fails

        def write(advance: Advance) -> None:
            try:
                with self.during:
                    self._write(step, contents, advance)
            except Exception as error:  # any error: returned by `join`
                self._failure = self._failure or error

        if self.background:
            # A daemon: a second Ctrl-C does not wait for a slow disk. An interrupted write has a temporary name.
            self._thread = threading.Thread(target=write, args=(self._count,), name=f"checkpoint {step}", daemon=True)
            self._thread.start()
        else:
            write(watch)

    def _count(self, count: int) -> None:
        self._bytes_written += count

    def _join_thread(self, watch: Advance) -> None:
        while self._thread is not None:
            self._thread.join(0.2)
            total = self._bytes_written
            watch(total - self._bytes_reported)
            self._bytes_reported = total
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

    def join(self, watch: Advance = no_progress) -> Exception | None:
        """Wait until nothing is being written; returns the first failure since the last call."""
        self._join_thread(watch)
        failure, self._failure = self._failure, None
        return failure

    @property
    def failed(self) -> bool:
        """Whether a save has failed and `join` has not returned its exception yet."""
        return self._failure is not None
