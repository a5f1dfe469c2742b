"""Heartbeats of a run's processes, independent of their common computations, to find a lost one.

The others may wait for a lost process in a call that nothing interrupts: in a reduction of NCCL, or for an answer of the
store in the main process. So a thread watches, and ends this process if it must.
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

STATUS = 143  # exit status of a process that ends because another one is lost
WATCHING = "watching the others"  # name of a thread that outlives the run only if a process is lost
MOST_SECONDS = 2.0  # between two heartbeats
OVER = "over"  # the last heartbeat of a process that has finished
REPLACED = "replaced"  # store key that tells a start's processes of a later start


class Heartbeat:
    """Sends this process's heartbeats, and watches those of the others.

    store: a connection of its own, as a call that waits blocks all others on it. broken: the store's error once the process
    that has it, rank 0, is gone. lost_after: seconds from a process's last heartbeat until the others have ended: after
    seven tenths it is lost, and the rest is for the main thread, whose `answer` raises. If it does not call it, it hangs in
    something that will not return. end: ends this process at once, with a message.
    """

    def __init__(
        self, store: Store, *, rank: int, count: int, lost_after: float, broken: type[Exception], end: Callable[[str], object]
    ) -> None:
        self._store, self._rank, self._others = store, rank, [other for other in range(count) if other != rank]
        self._lost_after, self._broken, self._end = lost_after, broken, end
        self._pause = min(MOST_SECONDS, lost_after / 20)
        self._beats: dict[int, dict[str, Any]] = {}  # each process's last heartbeat
        self._previous_beats: dict[int, dict[str, Any] | None] = {}  # as of the last `look`
        self._silent = dict.fromkeys(self._others, 0.0)  # seconds since a heartbeat changed
        self._store_gone = False
        self.work = 0  # pieces of work of the main thread: these threads send heartbeats even while it hangs
        self._last_sign, self._late = time.monotonic(), False  # this process's last heartbeat; whether any was late
        self._seconds_left = lost_after  # from the detection of a lost process until this one must have ended
        self._message = ""
        # Set: once a process is lost, once the main thread has reacted, once this process has finished.
        self._loss, self._reaction, self._over = threading.Event(), threading.Event(), threading.Event()
        self.undisturbed = threading.Lock()  # its holder is not ended here while there is time
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("signs of life", self._exchange), (WATCHING, self._watch))
        ]

    def __enter__(self) -> Heartbeat:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Tell the others that this process has finished. If one is lost, the thread still ends this process."""
        self._over.set()
        for thread in self._threads if not self._loss.is_set() else ():
            thread.join(self._lost_after)  # the store may never answer

    @property
    def missed(self) -> bool:
        """Whether the others may count this process as lost: it was stopped, or its store gave no answer, for so long."""
        return self._late or time.monotonic() - self._last_sign > 0.7 * self._lost_after

    @property
    def work_elsewhere(self) -> int:
        """The other processes' pieces of work, by their last heartbeats."""
        return sum(beat["work"] for beat in list(self._beats.values()))

    def answer(self) -> None:
        """Raises PeerStopped, with its rank, host and process number, once a process is lost."""
        if self._loss.is_set():
            self._reaction.set()
            raise PeerStopped(self._message, STATUS)

    def wait(self) -> None:
        """Wait, after a connection broke, until the lost process is known, if one is. Raises what `answer` raises."""
        self._loss.wait(self._lost_after)
        self.answer()

    def exchange(self, sign: int | str) -> None:
        """Send a heartbeat, and read those of the others. Ends this process if a later start goes on without it."""
        if self._store.check([REPLACED]):
            self._end("this process was stopped or cut off, and a later start goes on without it; nothing was written since")
        self._late, self._last_sign = self.missed, time.monotonic()
        beat = {"sign": sign, "work": self.work, "host": socket.gethostname(), "pid": os.getpid()}
        self._store.set(f"beat/{self._rank}", json.dumps(beat))
        for other in self._others:
            if self._store.check([f"beat/{other}"]):
                self._beats[other] = json.loads(self._store.get(f"beat/{other}"))

    def look(self, seconds: float) -> None:
        """Add so many seconds of silence to the processes without a new heartbeat. The clock does not count: while this
        process was stopped, it did not listen."""
        for other in self._others:
            beat = self._beats.get(other)
            silent = beat == self._previous_beats.get(other) and not (beat and beat["sign"] == OVER)
            self._silent[other] = self._silent[other] + seconds if silent else 0.0
            self._previous_beats[other] = beat
        limit = 0.7 * self._lost_after
        # If the store does not answer, all are silent, and the main process is the lost one: the lowest rank.
        ranks = [other for other, silence in self._silent.items() if silence >= limit - 2 * seconds]
        if any(silence >= limit for silence in self._silent.values()):
            self._report_loss(min(ranks), f"has given no sign of life for {self._lost_after:g} s (run.lost_after)")
        elif self._store_gone and (self._previous_beats.get(0) or {}).get("sign") != OVER:
            # The main process may have ended because of a lost one, which the others have missed for as long.
            ranks = [other for other, silence in self._silent.items() if silence >= limit / 2]
            self._report_loss(min(ranks, default=0), "is gone")

    def _report_loss(self, rank: int, problem: str) -> None:
        # Nobody looks between two heartbeats, so a process may have been lost a pause before its silence began.
        self._seconds_left = self._lost_after - max(self._silent.values()) - self._pause
        beat = self._beats.get(rank)
        place = f" (host {beat['host']}, pid {beat['pid']})" if beat else ""
        main = ", the main one," if rank == 0 else ""
        self._message = f"process {rank}{place}{main} {problem}; start all processes again with --resume_from auto"
        self._loss.set()

    def _exchange(self) -> None:
        count = 0
        try:
            pause = 0.0
            while not self._over.wait(pause):
                count += 1
                self.exchange(count)
                # Sooner until all are known: a process that is lost right at the start should be named, too.
                pause = self._pause / (1 if len(self._beats) == len(self._others) else 10)
            self.exchange(OVER)
        except self._broken:  # `look` reports it
            self._store_gone = True

    def _watch(self) -> None:
        while not self._loss.is_set():
            if self._over.wait(self._pause):
                return
            self.look(self._pause)
        # The main thread calls `answer` in every wait and between two pieces of work, but no exception reaches a reduction of
        # NCCL or a wait for a stopped store. A checkpoint that is being written is finished first, if there is time.
        end = time.monotonic() + self._seconds_left
        if self._reaction.wait(2 * self._pause):
            # It ends, and saves what it can, unless saving waits for the lost process, too.
            time.sleep(max(end - time.monotonic(), 0))
        else:
            self.undisturbed.acquire(timeout=max(end - time.monotonic(), 0))
        self._end(self._message)
