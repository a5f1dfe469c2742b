"""What a run says to people.

Who reads it may leave: a terminal closes, the other end of a pipe stops. The run goes on then, and what it says later is
lost.
"""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

GONE = {errno.EIO, errno.EPIPE, errno.EBADF}


@contextmanager
def read_or_not(stream: TextIO) -> Iterator[None]:
    """Inside, a write to `stream` that nobody can read is no error; what follows goes to the null device."""
    try:
        yield
    except OSError as error:
        if error.errno not in GONE:
            raise
        null = os.open(os.devnull, os.O_WRONLY)
        # In the stream's own place: what it still holds is flushed when Python ends, and must not fail there.
        os.dup2(null, stream.fileno())
        os.close(null)


def write(line: str, stream: TextIO | None = None) -> None:
    """A line above whatever bars are shown; to stdout unless said otherwise."""
    stream = stream or sys.stdout
    with read_or_not(stream):
        if sys.stderr.isatty():
            from tqdm import tqdm

            with read_or_not(sys.stderr):
                tqdm.write(line, file=stream)
        else:
            print(line, file=stream)
        stream.flush()
