"""Seconds of a program without those in which it was ready and got no core: the other tests have them."""

from __future__ import annotations

import time
from pathlib import Path


def queued(task: int | str = "thread-self") -> float:
    """Seconds in which a task, the main one of a process, has waited for a core so far; 0 where no system tells it."""
    told = Path(f"/proc/{task}/schedstat")
    return int(told.read_text().split()[1]) * 1e-9 if told.exists() else 0.0


def own_time() -> float:
    """Of this thread: a clock that stands still while it waits for a core. It goes on while the thread waits for a file, for
    a lock, or sleeps."""
    return time.monotonic() - queued()
