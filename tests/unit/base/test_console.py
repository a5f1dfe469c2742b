"""Lines of the right length, whatever they say."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness import ROOT
from tests.terminal import Shown, in_terminal
from trainer.base import console

FIELDS = [(0, "step 11/20"), (2, "loss 0.5000"), (3, "lr 1.00e-04"), (1, "36 s left")]


@pytest.mark.parametrize(
    "columns, line",
    [
        (80, "step 11/20, loss 0.5000, lr 1.00e-04, 36 s left"),
        (47, "step 11/20, loss 0.5000, lr 1.00e-04, 36 s left"),
        (46, "step 11/20, loss 0.5000, 36 s left"),
        (33, "step 11/20, 36 s left"),
        (20, "step 11/20"),
        (3, "step 11/20"),
    ],
)
def test_what_does_not_fit_is_left_out_whole_and_the_least_important_first(columns: int, line: str) -> None:
    assert console.fitted(FIELDS, columns) == line


WORDS = st.lists(st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1, max_size=30), min_size=1)


@given(words=WORDS, indent=st.integers(0, 6), columns=st.integers(12, 160))
def test_a_long_line_is_broken_between_words_and_loses_none(words: list[str], indent: int, columns: int) -> None:
    parts = console.wrapped(" " * indent + " ".join(words), columns)
    assert " ".join(parts).split() == words
    assert all(len(part) <= columns or " " not in console.NUMBER.sub(r"\1\2", part.strip()) for part in parts)
    assert all(part.startswith(" " * (indent + 4)) for part in parts[1:])


@pytest.mark.parametrize("columns, wide", [(60, 60), (400, 160), (0, 80)])
def test_a_line_is_as_wide_as_the_terminal_and_never_wider_than_160(monkeypatch, columns: int, wide: int) -> None:
    """One that nobody gave a size has 0 columns."""
    monkeypatch.setattr(console, "WIDTH", 160)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    with os.fdopen(theirs, "w") as screen, os.fdopen(ours, "rb"):
        assert console.width(screen) == wide
        monkeypatch.setenv("TERM", "xterm")
        assert console.moves(screen)
        monkeypatch.setenv("TERM", "dumb")
        assert not console.moves(screen), "it has no way back to the start of a line"


def test_a_log_has_lines_of_160_characters() -> None:
    code = "from trainer.base import console as terminal; terminal.write('word ' * 100)"
    log = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert 150 < max(map(len, log.splitlines())) <= 160 and "\r" not in log


def test_a_number_stays_beside_its_unit() -> None:
    assert console.wrapped("saved 3.4 MiB, transient 0.6 MiB", 31) == ["saved 3.4 MiB, transient", "    0.6 MiB"]
    assert console.wrapped("4 h 12 min for 500 steps", 17) == ["4 h 12 min for", "    500 steps"]


def test_a_name_is_not_broken_at_its_hyphens() -> None:
    """It may be there to be copied."""
    assert console.wrapped("one a-long-option-name two", 16) == ["one", "    a-long-option-name", "    two"]


def test_no_control_character_gets_out_and_what_is_to_be_copied_stays_whole(monkeypatch) -> None:
    monkeypatch.setattr(console, "WIDTH", 20)
    stream = io.StringIO()
    console.write("a\rb\x1b[2Jc\td", stream)
    console.write("gnp.\u202egpj", stream)  # would be shown from right to left
    console.write("one two three four five six", stream)
    console.write("one two three four five six", stream, whole=True)
    said = stream.getvalue()
    assert said.split("\n") == [
        "a\\rb\\x1b[2Jc\\td",
        "gnp.\\u202egpj",
        "one two three four",
        "    five six",
        "one two three four five six",
        "",
    ]
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", said)


def test_a_line_above_the_live_one_is_drawn_in_one_piece(monkeypatch) -> None:
    """A terminal that draws between two writes would show none: it would flicker."""
    screen = Shown()
    written: list[str] = []
    monkeypatch.setattr(screen, "write", lambda text: written.append(text) if text else None)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(console, "LIVE", live := console.LiveLine())
    live.show("step 1/2")
    live.show("step 1/2")  # nothing new, nothing written
    console.write("a line", screen)
    live.show("")
    assert written == ["\rstep 1/2\x1b[K", "\r\x1b[Ka line\nstep 1/2", "\r\x1b[K"]


@pytest.mark.parametrize("columns", [1, 20, 30, 40])
def test_a_live_line_never_goes_on_to_the_next_row(monkeypatch, columns: int) -> None:
    """One that did would leave a row each time that it is drawn."""
    screen = Shown()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(console, "width", lambda stream: columns)
    monkeypatch.setattr(console, "LIVE", live := console.LiveLine())
    fields = [(0, "norms of the adapted layers: 120 of 135 layers"), (1, "36 s left")]
    live.show(console.fitted(fields, columns - 1))
    console.write("above", screen)
    drawn = [row for row in re.split(r"[\r\n]|\x1b\[K", screen.getvalue()) if row and row not in "above"]
    shown = {1: "n", 20: "norms of the", 30: "norms of the adapted layers:", 40: "norms of the adapted layers: 120 of 135"}
    assert drawn == [shown[columns]] * 2


def test_what_goes_to_a_pipe_and_back_to_the_terminal_has_a_row_of_its_own(tmp_path: Path) -> None:
    """`train.py ... | tee log`: tee writes to the terminal, too, a moment later and below nothing that is shown."""
    script, log = tmp_path / "piped.py", tmp_path / "log"
    script.write_text(
        "import time\nfrom pathlib import Path\nfrom types import SimpleNamespace\n"
        "from trainer.base import console, progress\n"
        "now, log = 1000.0, Path(__file__).with_name('log')\n"
        "progress.time = console.time = SimpleNamespace(time=time.time, monotonic=lambda: now)\n"
        "progress.LIVE_AFTER, progress.LONG_SECONDS, console.PIPE_SECONDS = 0, 60, 0.5\n"
        "with progress.Phases(show=True)('loading', total=12, unit='layer') as phase:\n"
        "    for layer in range(12):\n"
        "        now += 0.12\n        phase.advance()\n"
        "        if layer == 3:\n            console.write('a line')\n"
        # tee writes to the terminal first. However slow it is here, the clock stands still for it.
        "            while log.read_text() != 'a line\\n':\n                time.sleep(0.01)\n"
    )
    log.touch()
    screen = in_terminal(["sh", "-c", f"'{sys.executable}' '{script}' | tee '{log}'"], 60)
    assert screen.lines == ["a line"] and log.read_text() == "a line\n"
    shown = "\n".join(screen.seen)
    assert "4 of 12" in shown and "9 of 12" in shown, "nothing was shown before or afterwards"
    assert not re.search("[5-8] of 12", shown), "tee had no time"


@given(st.lists(st.text("abc", min_size=1), min_size=1, max_size=8), st.integers(1, 5))
def test_a_shortlist_accounts_for_every_name(names: list[str], most: int) -> None:
    shown, _, rest = console.shortlist(names, most).partition(" and ")
    assert shown.split(", ") == names[:most]
    assert len(names[:most]) + int(rest.removesuffix(" more") or 0) == len(names)


def test_a_shortlist_is_one_line_whatever_a_name_holds() -> None:
    assert console.shortlist(["a\nb", "\x1b[2J"], 2) == "a\\nb, \\x1b[2J"


@pytest.fixture
def as_json(monkeypatch) -> None:
    monkeypatch.setattr(console.LIVE, "json", True)


@pytest.mark.usefixtures("as_json")
@pytest.mark.parametrize(
    ("text", "level", "message"),
    [
        ("device cpu", "info", "device cpu"),
        ("Effect\n  what  value", "info", "Effect\n  what  value"),
        ("warning: the disk is small", "warning", "the disk is small"),
        ("warning: two\nlines: of it", "warning", "two\nlines: of it"),
        ("error: no such key", "error", "no such key"),
        ("a/b: warning: no", "info", "a/b: warning: no"),
        ("\x1b[31m \udc80 \u2028", "info", "\x1b[31m \udc80 \u2028"),
        ("", "info", ""),
    ],
)
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_line_is_an_object_on_stdout_and_an_error_stands_on_stderr_too(
    capsys, text: str, level: str, message: str, stream: str
) -> None:
    console.write(text, getattr(sys, stream), whole=True, fields={"step": 3})
    found = capsys.readouterr()
    (line,) = found.out.splitlines()
    entry = json.loads(line)
    assert isinstance(entry.pop("time"), float) and found.out.isascii()
    assert entry == {"level": level, "message": message, "step": 3}
    assert found.err == (f"{text}\n" if level == "error" and stream == "stderr" else "")


@pytest.mark.usefixtures("as_json")
def test_objects_move_no_line_of_a_terminal(monkeypatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(theirs, "w") as screen, os.fdopen(ours, "rb"):
        assert not console.moves(screen)
