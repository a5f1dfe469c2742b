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
FILES = 6  # that are open while a process is started

In = TypeVar("In")
Out = TypeVar("Out")


def processors() -> int:
    """The number of processors that this process may keep busy, at least 1: limited by affinity and quota, divided among the
    processes of the run on this machine. No byte of a run depends on it."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min([allowed, *_quotas()])) // number_in("LOCAL_WORLD_SIZE", 1, least=1))


def _quotas() -> Iterator[float]:
    """The processors that the control groups of this process allow, of version 2 (no kinds) or 1."""
    with suppress(OSError):
        for line in Path(PROC, "self/cgroup").read_text().splitlines():
            _, kinds, name = line.split(":", 2)
            group = Path(CGROUP, kinds, name.lstrip("/"))
            for folder in (group, *group.parents):
                with suppress(OSError, ValueError):  # no such file, or "max"
                    files = [folder / f"cpu.cfs_{part}_us" for part in ("quota", "period")] if kinds else [folder / "cpu.max"]
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
    """A block that starts so many processes of a DataLoader. Raises OSError, and leaves none running, if not all can be
    started: the others ignore signals to end, and would be waited for."""
    with ExitStack() as stack:  # opens as many files as they will: an error is easier to undo before the first one starts
        for _ in range(FILES * (workers + 1)):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
    try:
        yield
    except OSError:
        for worker in multiprocessing.active_children():
            worker.kill()
        raise
