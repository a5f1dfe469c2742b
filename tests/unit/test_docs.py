"""The documentation stays a book that is read: every page is short and begins with what a reader can do after it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness import ROOT

DOCS = ROOT / "docs"
# Written by scripts/reference_pages.py and scripts/memory_table.py.
BY_SCRIPT = {"keys.md", "other_trainers.md", "memory_tables.md"}
PAGE, BOOK, MEASUREMENTS = 1_800, 45_000, 12_500  # words
OPENING = "After this page you"
START = "index.md"


def pages(docs: Path) -> dict[str, str]:
    """Name, from `docs`, -> what a reader sees of it: markers of figures are comments."""
    found = {
        path.relative_to(docs).as_posix(): re.sub(r"<!--.*?-->", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for path in sorted(docs.rglob("*.md"))
    }
    return {name: text for name, text in found.items() if name not in BY_SCRIPT}


def faults(docs: Path) -> list[str]:
    found, words = [], {name: len(text.split()) for name, text in pages(docs).items()}
    for name, text in pages(docs).items():
        if words[name] > PAGE:
            found.append(f"{name} has {words[name]} words, at most {PAGE}")
        if name != START and OPENING not in " ".join(text.partition("\n## ")[0].split()):
            found.append(f"{name} does not begin with {OPENING!r}")
    measured = {name for name in words if name.startswith("benchmarks/")}
    for what, names, most in (("the book", words.keys() - measured, BOOK), ("the measurements", measured, MEASUREMENTS)):
        if (have := sum(words[name] for name in names)) > most:
            found.append(f"{what} has {have} words, at most {most}")
    return found


def test_the_book_is_short() -> None:
    assert faults(DOCS) == []


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [("a.md", "# A\n\nAfter this page\nyou can fly.\n", []),
     ("a.md", "# A\n\n## How\n\nAfter this page you can fly.\n", ["a.md does not begin with 'After this page you'"]),
     ("a.md", "After this page you can fly. " + "word " * 1_794, []),
     ("a.md", "After this page you can fly. " + "word " * 1_795, ["a.md has 1801 words, at most 1800"]),
     ("benchmarks/a.md", "After this page you can fly. " + "word " * 1_795, ["benchmarks/a.md has 1801 words, at most 1800"]),
     ("keys.md", "word " * 2_000, []),
     ("a.md", "After this page you can fly. <!-- " + "word " * 1_795 + "-->", []),
     ("memory_tables.md", "word " * 2_000, [])],
)  # fmt: skip
def test_a_page_that_is_not_is_found(tmp_path: Path, name: str, text: str, found: list[str]) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert faults(tmp_path) == found


@pytest.mark.parametrize(
    ("folder", "what", "most"), [(".", "the book", BOOK), ("benchmarks", "the measurements", MEASUREMENTS)]
)
def test_too_many_short_pages_are_found(tmp_path: Path, folder: str, what: str, most: int) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    for number in range(1 + most // PAGE):
        (tmp_path / folder / f"{number}.md").write_text(f"{OPENING} can fly. " + "word " * (PAGE - 6))
    assert faults(tmp_path) == [f"{what} has {PAGE * (1 + most // PAGE)} words, at most {most}"]
