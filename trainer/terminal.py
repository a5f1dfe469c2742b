"""What a run says to people.

Who reads it may leave: a terminal closes, the other end of a pipe stops. The run goes on then, and what it says later is
lost.
"""

import errno
import os
import sys
import unicodedata
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


def printable(what: object) -> str:
    """A name in one line that does to a terminal what it looks like: whatever else it holds is written as escapes.

    That is control characters, marks that turn the direction of writing, and bytes that are not UTF-8.
    """
    text = str(what)
    if text.isprintable():
        return text
    return "".join(each if _plain(each) else _escaped(each) for each in text)


def _plain(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"  # spaces of any width


def _escaped(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # a byte, as Python keeps it in names
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()
