"""Console output. A run goes on if nobody reads it any more (closed terminal or pipe). Control characters are escaped. With
logging.json each line is a JSON object on stdout; errors go to stderr, too."""

import errno
import os
import re
import sys
import textwrap
import time
import traceback
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from trainer.base.errors import Interrupted, PeerStopped, ending

GONE = {errno.EIO, errno.EPIPE, errno.EBADF}  # a write fails so once the reader has gone
WIDTH = 160  # maximum line length, also without a terminal
REST = "\x1b[K"  # escape sequence: clear to the end of the line
NUMBER = re.compile(r"(?<![^\s(])([\d.,]{1,8}) ([KMGT]iB|[GT]FLOP|ms|s|min|h|%)(?!\w)")  # unit included: never wrapped
LEVEL = re.compile(r"(?:(warning|error|critical): )?(.*)", re.DOTALL)  # and message
SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|CONNECTION_STRING")  # names of environment variables
NAMED = 6  # names listed in an error message
PIPE_SECONDS = 0.1  # time given to a program behind a pipe (tee) to write to the same terminal


@contextmanager
def read_or_not(stream: TextIO) -> Iterator[None]:
    """Suppress write errors of `stream` after its reader has gone; later output goes to the null device."""
    try:
        yield
    except OSError as error:
        if error.errno not in GONE:
            raise
        null = os.open(os.devnull, os.O_WRONLY)
        # dup2: the stream's buffer is flushed when Python exits, and must not fail then.
        os.dup2(null, stream.fileno())
        os.close(null)


def width(stream: TextIO) -> int:
    """Maximum characters of a line: the terminal's columns, at most WIDTH."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else WIDTH
    except (OSError, ValueError):  # no file, or the terminal has gone
        columns = WIDTH
    return min(columns or 80, WIDTH)  # a terminal without a configured size reports 0


def moves(stream: TextIO) -> bool:
    """Whether a line of the stream can be overwritten in place."""
    return not LIVE.json and stream.isatty() and os.environ.get("TERM") != "dumb"


class LiveLine:
    """The status line at the bottom of the terminal (stderr), redrawn in place; tqdm and rich would cut a number in two to
    make it fit. json: logging.json is on, so there is no such line."""

    text = ""
    json = False
    _hidden_until = 0.0

    def show(self, text: str) -> None:
        """Show as many whole words as fit (a wrapped row could not be erased). "": clear the line."""
        columns = max(1, width(sys.stderr) - 1)
        text = wrapped(text, columns)[0][:columns]
        if text != self.text and not (text and time.monotonic() < self._hidden_until):
            self.text = text
            with read_or_not(sys.stderr):  # the rest of the old line is cleared after the new one is written: no flicker
                print(f"\r{text}{REST}", end="", file=sys.stderr, flush=True)

    def hide(self) -> None:
        """Clear the line for PIPE_SECONDS, so that a reader of stdout (tee) can write to the same terminal."""
        self.show("")
        self._hidden_until = time.monotonic() + PIPE_SECONDS


LIVE = LiveLine()  # a process has one terminal


def write(text: str, stream: TextIO | None = None, *, whole: bool = False, fields: Mapping[str, Any] | None = None) -> None:
    """Print lines above the live one, to stdout by default. Long lines are wrapped between words. whole: do not wrap, so that
    the text can be copied or searched. fields: more entries of the JSON object."""
    stream = stream or sys.stdout
    if LIVE.json:
        import json  # here: --help starts faster without it

        level, message = LEVEL.fullmatch(text).groups(default="info")
        entry = {"time": round(time.time(), 3), "level": level, "message": message} | dict(fields or {})
        with read_or_not(sys.stdout):
            print(json.dumps(entry), flush=True)
        if level != "error" or stream is sys.stdout:
            return
    lines = [printable(line) for line in text.split("\n")]
    if not whole:
        columns = width(stream)
        lines = [part for line in lines for part in wrapped(line, columns)]
    output = "\n".join(lines) + "\n"
    if LIVE.text and stream.isatty():
        output = f"\r{REST}{output}{LIVE.text}"  # one write: the terminal shows no intermediate state
    else:
        LIVE.hide()
    with read_or_not(stream):
        print(output, end="", file=stream, flush=True)


def wrapped(line: str, columns: int) -> list[str]:
    """The line wrapped to `columns` characters, continuation lines indented."""
    if len(line) <= columns:
        return [line]
    indent = line[: len(line) - len(line.lstrip())] + "    "
    line = NUMBER.sub("\\1\xa0\\2", line)
    parts = textwrap.wrap(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [part.replace("\xa0", " ") for part in parts]


def fitted(fields: Sequence[tuple[int, str]], columns: int) -> str:
    """One line of those (rank, text) that fit, each whole, in this order. The highest rank is dropped first; 0 never is."""
    parts = list(fields)
    while len(line := ", ".join(text for _, text in parts)) > columns and any(rank for rank, _ in parts):
        parts.remove(max(parts, key=lambda field: field[0]))
    return line


def printable(value: object) -> str:
    """A value as one safe line: control characters, marks of text direction and bytes that are not UTF-8 become escapes."""
    text = str(value)
    return text if text.isprintable() else "".join(map(_escaped, text))


def without_keys(text: str) -> str:
    """The text without secrets: passwords and queries of URLs, and values of environment variables named like SECRET."""
    text = re.sub(r"(\w:/{1,2})[^/@\s'\"]*:.*@", r"\1***@", text)  # a password may contain any character
    text = re.sub(r"(\w://[^\s'\"?]*\?)[^\s'\"]+", r"\1***", text)
    secrets = {value for name, value in os.environ.items() if SECRET.search(name) and len(value) >= 8}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def shortlist(names: Sequence[str], most: int) -> str:
    """The first `most` names in one line, printable, and the number of further ones."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(printable, names[:most])) + more


def some(names: Sequence[str]) -> str:
    """The first NAMED names in quotes, for an error message, and the number of further ones."""
    return shortlist([repr(name[:200]) for name in names], NAMED)


def _escaped(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) == "Zs":  # spaces of any width
        return character
    if "\udc80" <= character <= "\udcff":  # a byte that is not UTF-8, as Python keeps it in file names
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()


@contextmanager
def cause_first() -> Iterator[None]:
    """Print the exception that ends the block at once: the save that follows may hang, or fail and hide it."""
    try:
        yield
    except (Interrupted, PeerStopped):  # already reported, by the signal handler or the other process
        raise
    except Exception as error:
        status, message = ending(error)
        line = message.partition("\n")[0]
        if status == 1:  # unforeseen: its traceback is printed last
            place = traceback.extract_tb(error.__traceback__)[-1]
            line = f"{type(error).__name__}: {line} ({place.filename}, line {place.lineno})"
        write(f"stopping: {line}", sys.stderr)
        raise
