"""Whether the other processes of a run are alive. Each gives signs of life, apart from all that they compute together.

One may be lost while the others wait for it in a way that nothing ends: in a reduction of NCCL, or for an answer of the store
that the main process holds. So a thread of its own watches, and ends this process if need be.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainer.base.errors import PeerStopped

if TYPE_CHECKING:
    from torch.distributed import Store

STATUS = 143  # of a process that ends because another one is lost
WATCHING = "watching the others"  # the thread's name. Where it outlives the run, a process is lost.
MOST_SECONDS = 2.0  # between two signs of life
OVER = "over"
REPLACED = "replaced"  # the key that tells the processes of a start of a later one


class Heartbeat:
    """This process's signs of life, and those of the others.

    store: a connection of its own, as a call that waits holds up all others. broken: what the store raises once the process
    that holds it, rank 0, is gone. lost_after: seconds from the last sign of life of a process until the others have ended:
    after seven tenths it is lost, and the rest is for the main thread, which hears of it in `answer`. Where it does not, it
    is held by something that will not come back. end: ends this process at once, with a message.
    """

    def __init__(
        self, store: Store, *, rank: int, count: int, lost_after: float, broken: type[Exception], end: Callable[[str], object]
    ) -> None:
        self._store, self._rank, self._others = store, rank, [other for other in range(count) if other != rank]
        self._lost_after, self._broken, self._end = lost_after, broken, end
        self._pause = min(MOST_SECONDS, lost_after / 20)
        self._beats: dict[int, dict[str, Any]] = {}  # the last sign of each
        self._known: dict[int, dict[str, Any] | None] = {}  # as of the last look
        self._silent = dict.fromkeys(self._others, 0.0)
        self._gone = False  # the store
        self.work = 0  # pieces that the main thread has done: these threads give signs while it hangs
        self._given, self._late = time.monotonic(), False  # this one's last sign of life, and whether any was late
        self._left = lost_after  # seconds from when a process was found lost until this one has ended
        self._lost, self._found, self._heard, self._over = "", threading.Event(), threading.Event(), threading.Event()
        self.undisturbed = threading.Lock()  # whoever holds it is not ended here as long as there is time
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("signs of life", self._exchange), (WATCHING, self._watch))
        ]

    def __enter__(self) -> Heartbeat:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """The others do not miss this process from now on. Where one is lost, the thread still ends this process."""
        self._over.set()
        for thread in self._threads if not self._found.is_set() else ():
            thread.join(self._lost_after)  # the store may never answer

    @property
    def missed(self) -> bool:
        """Whether the others may have missed this process: it was stopped, or its store gave no answer, for so long."""
        return self._late or time.monotonic() - self._given > 0.7 * self._lost_after

    @property
    def work_elsewhere(self) -> int:
        """The pieces of work that the others have told of."""
        return sum(beat["work"] for beat in list(self._beats.values()))

    def answer(self) -> None:
        """Raises PeerStopped, with its rank, host and process number, once a process is lost."""
        if self._found.is_set():
            self._heard.set()
            raise PeerStopped(self._lost, STATUS)

    def wait(self) -> None:
        """Wait, after a connection broke, until it is known which process is lost, if one is. Raises what `answer` raises."""
        self._found.wait(self._lost_after)
        self.answer()

    def exchange(self, sign: int | str) -> None:
        """Give a sign of life, and take those of the others. Ends this process where they have begun anew without it."""
        if self._store.check([REPLACED]):
            self._end("this process was stopped or cut off, and a later start goes on without it; nothing was written since")
        self._late, self._given = self.missed, time.monotonic()
        beat = {"sign": sign, "work": self.work, "host": socket.gethostname(), "pid": os.getpid()}
        self._store.set(f"beat/{self._rank}", json.dumps(beat))
        for other in self._others:
            if self._store.check([f"beat/{other}"]):
                self._beats[other] = json.loads(self._store.get(f"beat/{other}"))

    def look(self, seconds: float) -> None:
        """Note who was silent for so many seconds more. Not by the clock: who was stopped itself has not listened."""
        for other in self._others:
            beat = self._beats.get(other)
            same = beat == self._known.get(other) and not (beat and beat["sign"] == OVER)
            self._silent[other] = self._silent[other] + seconds if same else 0.0
            self._known[other] = beat
        limit = 0.7 * self._lost_after
        # Where the store does not answer, all are silent, and it is the main process that is lost: the lowest rank.
        lost = [other for other, silent in self._silent.items() if silent >= limit - 2 * seconds]
        if any(silent >= limit for silent in self._silent.values()):
            self._find(min(lost), f"has given no sign of life for {self._lost_after:g} s (run.lost_after)")
        elif self._gone and (self._known.get(0) or {}).get("sign") != OVER:
            # The main process may have ended for the sake of one that was lost: the others have missed it as long.
            missed = [other for other, silent in self._silent.items() if silent >= limit / 2]
            self._find(min(missed, default=0), "is gone")

    def _find(self, rank: int, what: str) -> None:
        # Nobody looks between two signs of life, so a process may have been lost a pause before its silence began.
        self._left = self._lost_after - max(self._silent.values()) - self._pause
        beat = self._beats.get(rank)
        where = f" (host {beat['host']}, pid {beat['pid']})" if beat else ""
        main = ", the main one," if rank == 0 else ""
        self._lost = f"process {rank}{where}{main} {what}; start all processes again with --resume_from auto"
        self._found.set()

    def _exchange(self) -> None:
        count = 0
        try:
            pause = 0.0
            while not self._over.wait(pause):
                count += 1
                self.exchange(count)
                # Soon again until all are known: one that is lost right at the start should be named, too.
                pause = self._pause / (1 if len(self._beats) == len(self._others) else 10)
            self.exchange(OVER)
        except self._broken:  # told by whoever watches
            self._gone = True

    def _watch(self) -> None:
        while not self._found.is_set():
            if self._over.wait(self._pause):
                return
            self.look(self._pause)
        # The main thread looks at `answer` in every wait and between two pieces of work, but no exception gets into a
        # reduction of NCCL or a wait for a store that was stopped. A checkpoint that is being written is finished first, if
        # there is time.
        end = time.monotonic() + self._left
        if self._heard.wait(2 * self._pause):
            # It goes, and saves what it can: unless that waits for the lost process, too.
            time.sleep(max(end - time.monotonic(), 0))
        else:
            self.undisturbed.acquire(timeout=max(end - time.monotonic(), 0))
        self._end(self._lost)
