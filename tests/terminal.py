"""A terminal of a given width, and what stood on it while a command ran."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import termios
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.harness import ROOT


class Shown(io.StringIO):
    """A terminal as far as a stream can tell; what was written is its value."""

    def isatty(self) -> bool:
        return True


@dataclass
class Screen:
    """lines: what scrolled by, and stays. seen: each state of the line at the bottom, as often as it was drawn."""

    columns: int
    lines: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)

    def show(self, text: str) -> None:
        """Text, line ends, carriage returns and the deletion of a line's rest: nothing else may come."""
        row, column = "", 0
        for piece in re.findall(r"\r\n|\r|\n|\x1b\[K|[^\x00-\x1f\x7f]+", text):
            if piece in ("\r\n", "\n"):
                self.lines.append(row)
                row, column = "", 0
            elif piece == "\r":
                column = 0
            elif piece == "\x1b[K":
                row = row[:column]
                if row:
                    self.seen.append(row)
            else:
                row = row[:column] + piece + row[column + len(piece) :]
                column += len(piece)
        assert not re.sub(r"\r|\n|\x1b\[K|[^\x00-\x1f\x7f]+", "", text), "another control character"
        if row:
            self.lines.append(row)


def in_terminal(arguments: Sequence[str], columns: int) -> Screen:
    """What `arguments` do to a terminal of so many columns. Their status has to be 0."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TERM": "xterm"}
    with subprocess.Popen(arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=ROOT) as process:
        os.close(theirs)
        said = b""
        try:
            while piece := os.read(ours, 65536):
                said += piece
        except OSError:  # the other end is closed
            pass
    os.close(ours)
    assert process.returncode == 0, said.decode()
    screen = Screen(columns)
    screen.show(said.decode())
    return screen
