"""What was found and what became of it: counted, with a few names and the reason for each kind, in one place.

The data has an account and the model has one. The start of a run, --plan and the data page print them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from trainer.base.console import shortlist

SHOWN = 3  # names of an entry in one line


class Heading(StrEnum):
    """What an entry says of its items, in the order of printing."""

    NOTE = "note"  # what is used, and how
    ASSUMED = "assumed"  # what no file and no key says
    WARNING = "warning"  # what is used and looks unintended
    LEFT_OUT = "left out"


@dataclass
class Entry:
    """Items that share a reason. reason: a phrase for people. names: of the items; empty for a statement about the whole.
    remedy: what changes it, mostly a config key; "" where nothing does. noun: the kind of the items, in the singular."""

    heading: Heading
    reason: str
    names: list[str] = field(default_factory=list)
    remedy: str = ""
    noun: str = "file"

    def __str__(self) -> str:
        items = f"{counted(len(self.names), self.noun)}: " if self.names else ""
        names = f" ({shortlist(self.names, SHOWN)})" if self.names else ""
        return f"{items}{self.reason}{names}{f'; {self.remedy}' if self.remedy else ''}"


class Account:
    """Entries by heading, each in the order in which its reason came first."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._entries: dict[tuple[Heading, str, str], Entry] = {}
        for entry in entries:
            self.add(entry.heading, entry.reason, entry.names, remedy=entry.remedy, noun=entry.noun)

    def add(self, heading: Heading, reason: str, names: Iterable[str] = (), *, remedy: str = "", noun: str = "file") -> None:
        """Add items to the entry of this reason and noun."""
        entry = self._entries.setdefault((heading, reason, noun), Entry(heading, reason, remedy=remedy, noun=noun))
        entry.names += names

    def __add__(self, other: "Account") -> "Account":
        return Account([*self._entries.values(), *other._entries.values()])

    def entries(self, heading: Heading) -> list[Entry]:
        """The entries of a heading, those of most items first."""
        return sorted((e for e in self._entries.values() if e.heading is heading), key=lambda e: -len(e.names))

    def lines(self) -> list[str]:
        """What is printed: a line for each entry, below the heading's own count where things were left out."""
        lines = [str(entry) for entry in self.entries(Heading.NOTE)]
        for heading in (Heading.ASSUMED, Heading.WARNING):
            lines += [f"{heading}: {entry}" for entry in self.entries(heading)]
        if left_out := self.entries(Heading.LEFT_OUT):
            lines.append(f"{Heading.LEFT_OUT}: {_sum(left_out)}")
            lines += [f"  {entry}" for entry in left_out]
        return lines


def counted(count: int, noun: str) -> str:
    """The number with its noun, which gets an s but for 1."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _sum(entries: Sequence[Entry]) -> str:
    nouns = {entry.noun for entry in entries}
    return counted(sum(len(entry.names) for entry in entries), nouns.pop() if len(nouns) == 1 else "file")
