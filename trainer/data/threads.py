"""Threads that read ahead, and the start of processes that do."""

import math
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from trainer.base.errors import number_in

MAX_THREADS = 8  # each may hold two photos, decoded
PROC, CGROUP = "/proc", "/sys/fs/cgroup"
FILES = 6  # open ones, that a process takes while it is started

In = TypeVar("In")
Out = TypeVar("Out")


def processors() -> int:
    """How many processors this process may keep busy: those that it may run on, as far as its quota goes, shared with the
    other processes of the run on this machine. At least 1. No byte of a run depends on it."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min([allowed, *_quotas()])) // number_in("LOCAL_WORLD_SIZE", 1, least=1))


def _quotas() -> Iterator[float]:
    """The processors that the control groups of this process allow, of version 2 (no kinds) or 1."""
    with suppress(OSError):
        for line in Path(PROC, "self/cgroup").read_text().splitlines():
            _, kinds, inside = line.split(":", 2)
            folder = Path(CGROUP, kinds, inside.lstrip("/"))
            for each in (folder, *folder.parents):
                with suppress(OSError, ValueError):  # none of it, or "max"
                    files = [each / f"cpu.cfs_{name}_us" for name in ("quota", "period")] if kinds else [each / "cpu.max"]
                    quota, period = map(int, " ".join(file.read_text() for file in files).split())
                    if quota > 0:
                        yield quota / period


def in_threads(function: Callable[[In], Out], items: Iterable[In]) -> Iterator[Out]:
    """`map` with a few threads running ahead, in order, holding at most 2 x threads results; stops when closed. Decoding
    releases the interpreter's lock."""
    threads = max(2, min(MAX_THREADS, processors()))  # two: one reads while the other decodes
    pool = ThreadPoolExecutor(threads)
    pending: deque = deque()
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) >= 2 * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def starting(workers: int) -> Iterator[None]:
    """A block that starts so many processes of a DataLoader. Raises OSError, and leaves none, where not all can be started:
    the others heed no signal to end, and would be waited for."""
    with ExitStack() as held:  # the files they take: an error is easier to undo before the first one is there
        for _ in range(FILES * (workers + 1)):
            held.callback(os.close, os.open(os.devnull, os.O_RDONLY))
    try:
        yield
    except OSError:
        for worker in multiprocessing.active_children():
            worker.kill()
        raise
