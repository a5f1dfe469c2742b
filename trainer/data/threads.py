"""Threads that read ahead, and the start of processes that do."""

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TypeVar

MAX_THREADS = 4
FILES = 6  # open ones, that a process takes while it is started

In = TypeVar("In")
Out = TypeVar("Out")


def in_threads(function: Callable[[In], Out], items: Iterable[In]) -> Iterator[Out]:
    """`map` with a few threads running ahead, in order, holding at most 2 x threads results; stops when closed.

    Decoding releases the interpreter's lock, so threads do help.
    """
    threads = max(2, min(MAX_THREADS, os.cpu_count() or 1))
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
