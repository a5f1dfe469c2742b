"""Copying to a mirror beside the training: a network that fails delays it, and never stops or changes a run."""

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
from workbench.mirror.store import Mirror, Taken, key_of

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before something is tried again; each is twice the one before
SAID_EVERY = 60.0  # seconds between two lines about one trouble
LOOK_SECONDS = 0.2  # between two looks at signals
SHORTEST_SILENCE = 5.0  # seconds that any answer may take, however short checkpoint.mirror_wait is
# What the errors of a network are called that are no OSError: every backend has classes of its own.
NETWORK = ("Connect", "Timeout", "Payload", "Disconnected", "HTTPClient", "ServiceRe")
# What stores say that are full: Ceph's and MinIO's codes, which s3fs gives as the text of an EIO.
FULL = ("QuotaExceeded", "StorageFull", "minimum free d")


def may_pass(error: Exception) -> bool:
    """Whether the same may work a while later: a network or server is the cause, and neither keys nor the place."""
    lasting = (PermissionError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)
    if isinstance(error, OSError):
        return not isinstance(error, lasting) and error.errno not in (errno.EPERM, errno.EINVAL, errno.ENOSYS)
    return any(word in kind.__name__ for kind in type(error).__mro__ for word in NETWORK)


def reason(error: BaseException) -> str:
    """What went wrong, in one line, without keys; what helps where the place is full."""
    text = without_keys(one_line(error))
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(word in text for word in FULL):
        text += "; make room there, or give checkpoint.mirror another place"
    return text if isinstance(error, OSError) else f"{type(error).__name__}: {text}"


class Troubles:
    """What is said of a mirror that does not answer: at once, then once a minute, and when it does again."""

    def __init__(self, url: str, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.url, self.say, self.clock = url, say, clock
        self.last = ""  # the newest
        self._pause, self._said = FIRST_PAUSE, -SAID_EVERY

    def met(self, error: Exception, waiting: str) -> float:
        """Seconds until the next try. waiting: what is done when it works."""
        self.last, pause = reason(error), self._pause
        self._pause = min(2 * pause, LONGEST_PAUSE)
        if self.clock() - self._said >= SAID_EVERY:
            self._said = self.clock()
            self.say(f"warning: {key_of(self.url)} fails ({self.last}); it is tried again: {waiting}")
        return pause

    def over(self) -> None:
        """It worked."""
        if self.last:
            self.say(f"{key_of(self.url)} answers again")
        self.last, self._pause, self._said = "", FIRST_PAUSE, -SAID_EVERY

    def hurry(self) -> None:
        """Begin with the shortest pause again: something waits now."""
        self._pause = FIRST_PAUSE


def beside(work: Callable[[], T], check: Callable[[], object]) -> T:
    """What `work` gives or raises, done in a thread. check: called meanwhile; may raise, which leaves the thread alone."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # raised below
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="mirror", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(LOOK_SECONDS)
        check()
    return outcome.result()


class Asker:
    """Asks a mirror before a run begins. wait: seconds that it may fail, or be silent. check: looks at signals, may raise."""

    def __init__(self, url: str, wait: float, say: Callable[[str], None], check: Callable[[], object]) -> None:
        self.url, self.wait, self.check = url, wait, check
        self.troubles = Troubles(url, say)

    def __call__(self, work: Callable[[], T], waiting: str, came: Callable[[], int] = lambda: 0) -> T:
        """What `work` gives. came: how much of it is here; `wait` begins again with what is more than ever. Raises UserError
        for what will last, and once `wait` is over."""
        most, until, silence = 0, time.monotonic() + self.wait, max(self.wait, SHORTEST_SILENCE)

        def look() -> None:
            nonlocal most, until
            self.check()
            if (count := came()) > most:
                most, until = count, time.monotonic() + self.wait
            if time.monotonic() - (until - self.wait) >= silence:
                raise TimeoutError(errno.ETIMEDOUT, f"no answer for {duration(silence)}")

        while True:
            try:
                given = beside(work, look)
                self.troubles.over()
                return given
            except (UserError, Interrupted, PeerStopped):
                raise
            except Exception as error:  # whatever a backend raises
                if isinstance(error, OSError) and error.errno in STORAGE_ERRORS - {errno.EIO}:  # the disk here
                    raise
                if not may_pass(error) or time.monotonic() >= until:
                    raise self._refusal(error, waiting) from None
                again = min(until, time.monotonic() + self.troubles.met(error, waiting))
                while time.monotonic() < again:
                    self.check()
                    time.sleep(LOOK_SECONDS)

    def _refusal(self, error: Exception, waiting: str) -> UserError:
        if may_pass(error):
            remedy = "start again when it answers, or wait longer with checkpoint.mirror_wait"
        elif isinstance(error, FileNotFoundError):
            remedy = "make the bucket or folder, or mend the URL"
        else:
            remedy = "give keys that may list, read, write and delete there (docs/mirror.md)"
        why = f"{key_of(self.url)} cannot be used ({waiting}): {reason(error)}"
        return UserError(f"{why}\n{remedy}, or leave checkpoint.mirror out")


class Copier:
    """Copies a run's files to its mirror in a thread: the newest checkpoint, then older ones, newest first, up to
    `keep_last` in all. owner: as Mirror.claim. there: the steps that a start found there. say: prints a line of the run.
    clock: gives seconds."""

    def __init__(
        self,
        mirror: Mirror,
        layout: Layout,
        *,
        owner: dict[str, str],
        there: Sequence[int] = (),
        keep_last: int,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.mirror, self.layout, self.keep_last, self.say = mirror, layout, keep_last, say
        self.owner, self.name, self.there = owner, owner["run"], there
        self.troubles = Troubles(mirror.url, say, clock)
        self._changed = threading.Condition()
        self._pending: list[int] = []  # steps, ascending
        self._ends: list[str] = []  # files, by their paths in the output folder
        self._begun = self._closed = False
        self.taken = False  # another start has claimed the place
        self.newest: int | None = None  # the newest step that this start knows to be whole there
        self._hurry = threading.Event()  # the end is near: no long pause is slept through
        self._copied: dict[str, Stamp] = {}  # results, as they were when they were copied

    def start(self, step: int) -> None:
        """Begin to copy. step: where the run begins. Until later checkpoints there are set aside, mirror.json says so: a
        start that comes before must not go on from them."""
        note = files.read_json(self.layout.mirror) if self.layout.mirror.exists() else {}
        back = min(step, note.get("back_to", step))  # of an earlier start, too, which did not reach the mirror
        self._note({"back_to": back} if any(later > back for later in self.there) else {})
        if (self.layout.checkpoints / folder_name(step)).exists():
            self.offer(step)
        thread = threading.Thread(target=self._work, args=(back,), name="mirror", daemon=True)
        thread.start()

    def _note(self, more: dict[str, int]) -> None:
        files.write_atomic(self.layout.mirror, [files.json_bytes({"id": self.owner["id"]} | more)])

    def offer(self, step: int) -> None:
        """A checkpoint is on the disk."""
        with self._changed:
            self._pending = sorted({*self._pending, step})[-self.keep_last :]
            self._changed.notify_all()

    def finish(self, seconds: float, check: Callable[[], object]) -> list[str]:
        """Copy what the end left, too, and wait until all is copied, at most so many seconds. Returns the names of what is
        not; no more is copied then. check: looks at signals; may raise."""
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
                    self._changed.wait(max(0.0, min(LOOK_SECONDS, until - time.monotonic())))
        finally:
            with self._changed:
                self._closed = True
                self._hurry.set()
                self._changed.notify_all()
        return self.missing()

    def missing(self) -> list[str]:
        """The names of what is to be copied and is not yet; none where the mirror is another's now."""
        with self._changed:
            return [] if self.taken else [*map(folder_name, reversed(self._pending)), *self._ends]

    def _work(self, back: int) -> None:
        while True:
            with self._changed:
                while self._begun and not self._pending and not self._ends and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                newest = self._pending[-1] if self._pending else None
                end = self._ends[0] if self._ends else ""
            try:
                self.mirror.claim(self.owner)
                if not self._begun:
                    self._begin(back)
                elif newest is not None:
                    self._copy(newest)
                else:
                    self._copy_file(end)
            except Taken:
                self.taken = True
                remedy = "stop it where the other is the same run on another machine, else give it another prefix"
                return self.say(
                    f"warning: {self.mirror.key} is claimed by another run now, or by another start of this one; this run "
                    f"goes on without a mirror and copies nothing more there: {remedy}"
                )
            except Exception as error:  # whatever a backend raises: the run goes on
                if self._closed:
                    return
                waiting = folder_name(newest) if newest is not None else end or "what comes"
                self._hurry.wait(self.troubles.met(error, f"{waiting} is copied then"))
                self._hurry.clear()
            else:
                self.troubles.over()

    def _begin(self, back: int) -> None:
        for aside in self.mirror.set_aside(back):
            remedy = "delete it when you need no way back"
            self.say(f"warning: a later checkpoint in the mirror is set aside as {aside}; {remedy}")
        self._note({})
        there, stamps = self.mirror.listing(), {path: self._stamp(path) for path in self.layout.results(self.name)}
        self._copied |= {path: stamp for path, stamp in stamps.items() if there.get(path) == stamp[0]}
        self._begun = True

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
        if (self.layout.root / path).exists():  # else somebody deleted it meanwhile
            stamp = self._stamp(path)
            if self._copied.get(path) != stamp:
                self.mirror.send(self.layout.root / path, path)
                self._copied[path] = stamp
        with self._changed:
            self._ends = [other for other in self._ends if other != path]
            self._changed.notify_all()

    def _stamp(self, path: str) -> Stamp:
        return stamp_of((self.layout.root / path).stat())
