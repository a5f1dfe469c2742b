"""Copies a run's files to its mirror in a thread: a failing network delays the copies, and never stops or changes a run."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from trainer.base import files
from trainer.base.console import without_keys
from trainer.base.digests import Stamp, stamp_of
from trainer.base.errors import STORAGE_ERRORS, Interrupted, PeerStopped, UserError, one_line
from trainer.base.progress import duration
from trainer.base.run_layout import Layout, folder_name
from workbench.mirror.store import Claimed, Mirror, key_of

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a retry; each is twice the one before
WARN_SECONDS = 60.0  # between two warnings about one failure
POLL_SECONDS = 0.2  # between two checks of signals
SHORTEST_SILENCE = 5.0  # seconds that any answer may take, however short checkpoint.mirror_wait is
# Parts of the names of network errors that are no OSError: every backend has its own classes.
NETWORK = ("Connect", "Timeout", "Payload", "Disconnected", "HTTPClient", "ServiceRe")
# Messages of full stores: Ceph's and MinIO's codes, which s3fs gives as the text of an EIO.
FULL = ("QuotaExceeded", "StorageFull", "minimum free d")


def may_pass(error: Exception) -> bool:
    """Whether a retry may succeed: the cause is the network or the server, not the keys or the place."""
    lasting = (PermissionError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)
    if isinstance(error, OSError):
        return not isinstance(error, lasting) and error.errno not in (errno.EPERM, errno.EINVAL, errno.ENOSYS)
    return any(word in kind.__name__ for kind in type(error).__mro__ for word in NETWORK)


def reason(error: BaseException) -> str:
    """The error in one line, without keys; with a remedy if the store is full."""
    text = without_keys(one_line(error))
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(word in text for word in FULL):
        text += "; make room there, or give checkpoint.mirror another place"
    return text if isinstance(error, OSError) else f"{type(error).__name__}: {text}"


class Troubles:
    """Warnings about a mirror that does not answer: at once, then once a minute, and when it answers again."""

    def __init__(self, url: str, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.url, self.say, self.clock = url, say, clock
        self.last = ""  # the newest error
        self._pause, self._warned = FIRST_PAUSE, -WARN_SECONDS

    def pause_after(self, error: Exception, task: str) -> float:
        """Seconds until the next try. task: the work that is to be done then."""
        self.last, pause = reason(error), self._pause
        self._pause = min(2 * pause, LONGEST_PAUSE)
        if self.clock() - self._warned >= WARN_SECONDS:
            self._warned = self.clock()
            self.say(f"warning: {key_of(self.url)} fails ({self.last}); it is tried again: {task}")
        return pause

    def end(self) -> None:
        """Reset after a success."""
        if self.last:
            self.say(f"{key_of(self.url)} answers again")
        self.last, self._pause, self._warned = "", FIRST_PAUSE, -WARN_SECONDS

    def hurry(self) -> None:
        """Start again with the shortest pause: the run waits now."""
        self._pause = FIRST_PAUSE


def run_in_thread(work: Callable[[], T], check: Callable[[], object]) -> T:
    """Run `work` in a thread; returns or raises as it does. check: called meanwhile; if it raises, the thread goes on."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # raised below
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="mirror", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL_SECONDS)
        check()
    return outcome.result()


class Asker:
    """Calls a mirror before a run begins. wait: seconds that it may fail or be silent. check: polls signals; may raise."""

    def __init__(self, url: str, wait: float, say: Callable[[str], None], check: Callable[[], object]) -> None:
        self.url, self.wait, self.check = url, wait, check
        self.troubles = Troubles(url, say)

    def __call__(self, work: Callable[[], T], task: str, progress: Callable[[], int] = lambda: 0) -> T:
        """The result of `work`. progress: the amount that has arrived; `wait` restarts at each new maximum. Raises
        UserError for lasting errors, and after `wait`."""
        most, until, silence = 0, time.monotonic() + self.wait, max(self.wait, SHORTEST_SILENCE)

        def look() -> None:
            nonlocal most, until
            self.check()
            if (count := progress()) > most:
                most, until = count, time.monotonic() + self.wait
            if time.monotonic() - (until - self.wait) >= silence:
                raise TimeoutError(errno.ETIMEDOUT, f"no answer for {duration(silence)}")

        while True:
            try:
                result = run_in_thread(work, look)
                self.troubles.end()
                return result
            except (UserError, Interrupted, PeerStopped):
                raise
            except Exception as error:  # any class: backends raise their own
                if isinstance(error, OSError) and error.errno in STORAGE_ERRORS - {errno.EIO}:  # of the local disk
                    raise
                if not may_pass(error) or time.monotonic() >= until:
                    raise self._refusal(error, task) from None
                retry = min(until, time.monotonic() + self.troubles.pause_after(error, task))
                while time.monotonic() < retry:
                    self.check()
                    time.sleep(POLL_SECONDS)

    def _refusal(self, error: Exception, task: str) -> UserError:
        if may_pass(error):
            remedy = "start again when it answers, or wait longer with checkpoint.mirror_wait"
        elif isinstance(error, FileNotFoundError):
            remedy = "make the bucket or folder, or mend the URL"
        else:
            remedy = "give keys that may list, read, write and delete there (docs/mirror.md)"
        problem = f"{key_of(self.url)} cannot be used ({task}): {reason(error)}"
        return UserError(f"{problem}\n{remedy}, or leave checkpoint.mirror out")


class Copier:
    """Copies a run's files to its mirror in a thread: the newest checkpoint, then older ones, newest first, up to
    `keep_last` in all. owner: of Mirror.claim. steps: of the checkpoints in the mirror at the start. say: prints a line."""

    def __init__(
        self,
        mirror: Mirror,
        layout: Layout,
        *,
        owner: dict[str, str],
        steps: Sequence[int] = (),
        keep_last: int,
        say: Callable[[str], None],
    ) -> None:
        self.mirror, self.layout, self.keep_last, self.say = mirror, layout, keep_last, say
        self.owner, self.name, self.steps = owner, owner["run"], steps
        self.troubles = Troubles(mirror.url, say)
        self._changed = threading.Condition()
        self._pending: list[int] = []  # steps, ascending
        self._ends: list[str] = []  # final files, by path in the output folder
        self._started = self._closed = False
        self.is_claimed = False  # by another start
        self.newest: int | None = None  # the newest step that is known to be complete there
        self._hurry = threading.Event()  # the run ends: cut long pauses short
        self._copied: dict[str, Stamp] = {}  # results, with their stamps when they were copied

    def start(self, step: int) -> None:
        """Begin to copy. step: the run's first. Until later checkpoints there are set aside, mirror.json has `back_to`: a
        start before that must not resume from them."""
        note = files.read_json(self.layout.mirror) if self.layout.mirror.exists() else {}
        back = min(step, note.get("back_to", step))  # also of an earlier start that did not reach the mirror
        self._note({"back_to": back} if any(later > back for later in self.steps) else {})
        if (self.layout.checkpoints / folder_name(step)).exists():
            self.offer(step)
        thread = threading.Thread(target=self._work, args=(back,), name="mirror", daemon=True)
        thread.start()

    def _note(self, entry: dict[str, int]) -> None:
        files.write_atomic(self.layout.mirror, [files.json_bytes({"id": self.owner["id"]} | entry)])

    def offer(self, step: int) -> None:
        """Queue a checkpoint that is on the disk."""
        with self._changed:
            self._pending = sorted({*self._pending, step})[-self.keep_last :]
            self._changed.notify_all()

    def finish(self, seconds: float, check: Callable[[], object]) -> list[str]:
        """Queue the final files, wait until all is copied, at most `seconds`, and stop copying. Returns the names of the
        files not copied. check: polls signals; may raise."""
        ends = [*self.layout.results(self.name), *self.layout.end_files(self.name)]
        until = time.monotonic() + seconds
        with self._changed:
            self._ends = [*ends]
            self.troubles.hurry()
            self._hurry.set()
            self._changed.notify_all()
        try:
            while self.missing() and time.monotonic() < until:
                check()
                with self._changed:
                    self._changed.wait(max(0.0, min(POLL_SECONDS, until - time.monotonic())))
        finally:
            with self._changed:
                self._closed = True
                self._hurry.set()
                self._changed.notify_all()
        return self.missing()

    def missing(self) -> list[str]:
        """The names of the files not yet copied; none if another start has claimed the mirror."""
        with self._changed:
            return [] if self.is_claimed else [*map(folder_name, reversed(self._pending)), *self._ends]

    def _work(self, back: int) -> None:
        while True:
            with self._changed:
                while self._started and not self._pending and not self._ends and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                newest = self._pending[-1] if self._pending else None
                end = self._ends[0] if self._ends else ""
            try:
                self.mirror.claim(self.owner)
                if not self._started:
                    self._begin(back)
                elif newest is not None:
                    self._copy(newest)
                else:
                    self._copy_file(end)
            except Claimed:
                self.is_claimed = True
                remedy = "stop it where the other is the same run on another machine, else give it another prefix"
                return self.say(
                    f"warning: {self.mirror.key} is claimed by another run now, or by another start of this one; this run "
                    f"goes on without a mirror and copies nothing more there: {remedy}"
                )
            except Exception as error:  # any class of a backend: the run goes on
                if self._closed:
                    return
                task = folder_name(newest) if newest is not None else end or "what comes"
                self._hurry.wait(self.troubles.pause_after(error, f"{task} is copied then"))
                self._hurry.clear()
            else:
                self.troubles.end()

    def _begin(self, back: int) -> None:
        for aside in self.mirror.set_aside(back):
            remedy = "delete it when you need no way back"
            self.say(f"warning: a later checkpoint in the mirror is set aside as {aside}; {remedy}")
        self._note({})
        sizes, stamps = self.mirror.listing(), {path: self._stamp(path) for path in self.layout.results(self.name)}
        self._copied |= {path: stamp for path, stamp in stamps.items() if sizes.get(path) == stamp[0]}
        self._started = True

    def _copy(self, step: int) -> None:
        folder = self.layout.checkpoints / folder_name(step)
        for path, of_step in self.layout.results(self.name).items():
            if of_step <= step:
                self._copy_file(path)
        log = self.layout.metrics
        try:
            if folder.exists():
                self.mirror.put(folder, step, log.read_bytes() if log.exists() else b"")
                self.newest = max(step, self.newest or 0)
                self.mirror.prune(self.keep_last)
        except FileNotFoundError:
            if folder.exists():
                raise
        # Copied, or pruned here meanwhile.
        with self._changed:
            self._pending = [other for other in self._pending if other != step]
            self._changed.notify_all()

    def _copy_file(self, path: str) -> None:
        if (self.layout.root / path).exists():  # else deleted meanwhile
            stamp = self._stamp(path)
            if self._copied.get(path) != stamp:
                self.mirror.send(self.layout.root / path, path)
                self._copied[path] = stamp
        with self._changed:
            self._ends = [other for other in self._ends if other != path]
            self._changed.notify_all()

    def _stamp(self, path: str) -> Stamp:
        return stamp_of((self.layout.root / path).stat())
