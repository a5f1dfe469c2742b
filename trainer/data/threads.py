"""Threads that read ahead."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

MAX_THREADS = 4

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
