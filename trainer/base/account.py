"""Counts of what was used, assumed or left out of the data or the model, each with its reason and a few names."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from trainer.base.console import shortlist

SHOWN = 3  # names printed per entry


class Heading(StrEnum):
    """The kinds of entries, in printing order."""

    USED = "used"  # printed as a count with its noun
    NOTE = "note"  # how something is used
    ASSUMED = "assumed"  # stated by no file and no key
    WARNING = "warning"  # used, but looks unintended
    LEFT_OUT = "left out"


@dataclass
class Entry:
    """Items that share a reason (a phrase). names: empty for a statement about the whole. count: number of items; a folder
    is one name and counts all its files. remedy: how to change it, mostly a config key. noun: singular, names the items."""

    heading: Heading
    reason: str
    names: list[str] = field(default_factory=list)
    count: int = 0
    remedy: str = ""
    noun: str = "file"

    def __str__(self) -> str:
        items = f"{counted(self.count, self.noun)}: " if self.count else ""
        names = f" ({shortlist(self.names, SHOWN)})" if self.names else ""
        return f"{items}{self.reason}{names}{f'; {self.remedy}' if self.remedy else ''}"


class Account:
    """Entries grouped by heading, in the order in which their reasons were first added."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._entries: dict[tuple[Heading, str, str], Entry] = {}
        for entry in entries:
            self.add(entry.heading, entry.reason, entry.names, count=entry.count, remedy=entry.remedy, noun=entry.noun)

    def add(
        self,
        heading: Heading,
        reason: str,
        names: Iterable[str] = (),
        *,
        count: int | None = None,
        remedy: str = "",
        noun: str = "file",
    ) -> None:
        """Add items to the entry of this reason and noun. count: number of items; None: one per name."""
        entry = self._entries.setdefault((heading, reason, noun), Entry(heading, reason, remedy=remedy, noun=noun))
        before = len(entry.names)
        entry.names += names
        entry.count += len(entry.names) - before if count is None else count

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __add__(self, other: "Account") -> "Account":
        return Account([*self, *other])

    def entries(self, heading: Heading) -> list[Entry]:
        """The entries of a heading: statements about the whole first, then by falling count."""
        mine = [entry for entry in self if entry.heading is heading]
        return sorted(mine, key=lambda entry: (bool(entry.names), -entry.count))

    def lines(self) -> list[str]:
        """The printed lines: the counts, then a line for each entry."""
        used, left_out = [e for e in self if e.heading is Heading.USED], self.entries(Heading.LEFT_OUT)
        parts, sums = [counted(entry.count, entry.noun) for entry in used if entry.count], Counter[str]()
        for entry in left_out:
            sums[entry.noun] += entry.count
        parts += [f"{sums.total():,} left out"] if left_out else []
        lines = [f"found: {', '.join(parts)}"] if used else []
        lines += map(str, self.entries(Heading.NOTE))
        for heading in (Heading.ASSUMED, Heading.WARNING):
            lines += [f"{heading}: {entry}" for entry in self.entries(heading)]
        lines += [f"{Heading.LEFT_OUT}: {', '.join(counted(n, noun) for noun, n in sums.items())}"] if left_out else []
        return lines + [f"  {entry}" for entry in left_out]


def counted(count: int, noun: str) -> str:
    """The number with its noun, in the plural unless the count is 1."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
