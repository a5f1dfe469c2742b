"""What a run says to people. Where nobody reads any more (a terminal closes, a pipe's other end stops) the run goes on. No
line has control characters, wherever its words come from. With logging.json each line is an object on stdout; errors stand
on stderr, too."""

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

GONE = {errno.EIO, errno.EPIPE, errno.EBADF}

WIDTH = 160  # the longest line, where there is no terminal or a wider one
REST = "\x1b[K"  # deletes from the cursor to the end of the line
NUMBER = re.compile(r"(?<![^\s(])([\d.,]{1,8}) ([KMGT]iB|[GT]FLOP|ms|s|min|h|%)(?!\w)")  # and its unit: one word of a line
LEVEL = re.compile(r"(?:(warning|error|critical): )?(.*)", re.DOTALL)  # and what is said
SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|CONNECTION_STRING")  # in names of the environment
NAMED = 6  # names that a refusal lists
PIPE_SECONDS = 0.1  # that a program at the other end of a pipe (tee) has to write to the same terminal


@contextmanager
def read_or_not(stream: TextIO) -> Iterator[None]:
    """A block in which a write to `stream` that nobody can read is no error; what follows goes to the null device."""
    try:
        yield
    except OSError as error:
        if error.errno not in GONE:
            raise
        null = os.open(os.devnull, os.O_WRONLY)
        # In the stream's own place: what it still holds is flushed when Python ends, and must not fail there.
        os.dup2(null, stream.fileno())
        os.close(null)


def width(stream: TextIO) -> int:
    """How many characters a line may have: as many as a terminal has columns, at most WIDTH."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else WIDTH
    except (OSError, ValueError):  # it is no file, or the terminal is gone
        columns = WIDTH
    return min(columns or 80, WIDTH)  # a terminal that nobody gave a size has none


def moves(stream: TextIO) -> bool:
    """Whether a line of it can be written over."""
    return not LIVE.json and stream.isatty() and os.environ.get("TERM") != "dumb"


class LiveLine:
    """The line at the bottom of the terminal (stderr) that is written over again and again: what a run is busy with. tqdm and
    rich cut a number in two where it does not fit. json: of logging.json, under which there is none."""

    text = ""
    json = False
    _hidden_until = 0.0

    def show(self, text: str) -> None:
        """What fits of it, in whole words: of a line that goes on to the next row, one would stay. "": nothing is shown."""
        columns = max(1, width(sys.stderr) - 1)
        text = broken(text, columns)[0][:columns]
        if text != self.text and not (text and time.monotonic() < self._hidden_until):
            self.text = text
            with read_or_not(sys.stderr):  # what is left of the old line is deleted after the new one: no flicker
                print(f"\r{text}{REST}", end="", file=sys.stderr, flush=True)

    def hide(self) -> None:
        """Nothing is shown until whoever reads stdout has had the time to write the same to the terminal (tee)."""
        self.show("")
        self._hidden_until = time.monotonic() + PIPE_SECONDS


LIVE = LiveLine()  # a process has one terminal


def write(text: str, stream: TextIO | None = None, *, whole: bool = False, fields: Mapping[str, Any] | None = None) -> None:
    """One line or several, above the live one; to stdout unless said otherwise. Long lines are broken between words. whole:
    no line is broken, because it is there to be copied, or searched for by its words. fields: more entries of the object."""
    stream = stream or sys.stdout
    if LIVE.json:
        import json  # which --help does without

        level, message = LEVEL.fullmatch(text).groups(default="info")
        entry = {"time": round(time.time(), 3), "level": level, "message": message} | dict(fields or {})
        with read_or_not(sys.stdout):
            print(json.dumps(entry), flush=True)
        if level != "error" or stream is sys.stdout:
            return
    lines = [printable(line) for line in text.split("\n")]
    if not whole:
        columns = width(stream)
        lines = [part for line in lines for part in broken(line, columns)]
    output = "\n".join(lines) + "\n"
    if LIVE.text and stream.isatty():
        output = f"\r{REST}{output}{LIVE.text}"  # in one piece: a terminal shows no state in between
    else:
        LIVE.hide()
    with read_or_not(stream):
        print(output, end="", file=stream, flush=True)


def broken(line: str, columns: int) -> list[str]:
    """The line in parts of so many characters, the later ones further to the right."""
    if len(line) <= columns:
        return [line]
    indent = line[: len(line) - len(line.lstrip())] + "    "
    line = NUMBER.sub("\\1\xa0\\2", line)
    parts = textwrap.wrap(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [part.replace("\xa0", " ") for part in parts]


def fitted(fields: Sequence[tuple[int, str]], columns: int) -> str:
    """One line of as many of (rank, text) as fit side by side, each whole and in this order; the highest rank is dropped
    first. Rank 0 stays in any case."""
    parts = list(fields)
    while len(line := ", ".join(text for _, text in parts)) > columns and any(rank for rank, _ in parts):
        parts.remove(max(parts, key=lambda field: field[0]))
    return line


def printable(what: object) -> str:
    """A name in one line that does to a terminal what it looks like: control characters, marks that turn the direction of
    writing, and bytes that are not UTF-8 are written as escapes."""
    text = str(what)
    if text.isprintable():
        return text
    return "".join(map(_escaped, text))


def without_keys(text: str) -> str:
    """The text without what opens a store: passwords and queries of URLs, and what this process's environment has under the
    name of a key."""
    text = re.sub(r"(\w:/{1,2})[^/@\s'\"]*:.*@", r"\1***@", text)  # a password may hold anything
    text = re.sub(r"(\w://[^\s'\"?]*\?)[^\s'\"]+", r"\1***", text)
    secrets = {value for name, value in os.environ.items() if SECRET.search(name) and len(value) >= 8}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def shortlist(names: Sequence[str], most: int) -> str:
    """The first `most` of the names in one line, printable, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(printable, names[:most])) + more


def some(names: Sequence[str]) -> str:
    """The first of them in quotes, for a refusal, and how many more there are."""
    return shortlist([repr(name[:200]) for name in names], NAMED)


def _escaped(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) == "Zs":  # spaces of any width
        return character
    if "\udc80" <= character <= "\udcff":  # a byte, as Python keeps it in names
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()


@contextmanager
def cause_first() -> Iterator[None]:
    """A block that tells at once, in a line, what ends it: a save that follows may hang, or fail and be all that is told."""
    try:
        yield
    except (Interrupted, PeerStopped):  # told when the signal came; told by the process that ended
        raise
    except Exception as error:
        status, message = ending(error)
        line = message.partition("\n")[0]
        if status == 1:  # nobody foresaw it, and its traceback is printed last
            place = traceback.extract_tb(error.__traceback__)[-1]
            line = f"{type(error).__name__}: {line} ({place.filename}, line {place.lineno})"
        write(f"stopping: {line}", sys.stderr)
        raise
