"""What people type who come from other trainers, and what it is here. docs/other_trainers.md shows it."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources

TABLED = ("dtype",)  # so common a name that it means the same only in its table


@dataclass(frozen=True)
class OtherTrainers:
    """The tables of other_trainers.json, with lists of names written in one string, parted by blanks.

    trainers: the programs; the last has the names that none of them has, but that people write.
    commits: of each program, where its names were looked up. not_looked_up: names that its documentation alone has.
    names: options and config keys by subject: "here", a key or, where that is not all, a sentence (it has blanks); then the
    names that each trainer has for it, with their table or without.
    absent: by key, a sentence on values that it has nothing for, and those values.
    values: how others spell what a key may be, in lower case with underscores.
    """

    trainers: list[str]
    commits: Mapping[str, str]
    not_looked_up: Mapping[str, str]
    names: Mapping[str, list[Mapping[str, str]]]
    absent: Mapping[str, Mapping[str, str]]
    values: Mapping[str, str]

    @cached_property
    def keys(self) -> Mapping[str, str]:
        """What it is here, by another trainer's name and by that name's last part. The first wins where one stands twice."""
        keys: dict[str, str] = {}
        for row in (row for rows in self.names.values() for row in rows):
            for name in " ".join(row.get(trainer, "") for trainer in self.trainers).split():
                last = name.rpartition(".")[2]
                for known in (name, *(() if last in TABLED else (last,))):
                    keys.setdefault(known, row["here"])
        return keys


@cache
def tables() -> OtherTrainers:
    """The file's content. It is read when the first mistake is to be explained."""
    file = resources.files("trainer.base") / "other_trainers.json"
    return OtherTrainers(**json.loads(file.read_text(encoding="utf-8")))


def plain(name: str) -> str:
    """A name as the tables have it: `--Train-Batch-Size` is train_batch_size."""
    return name.strip().lstrip("-").lower().replace("-", "_").replace(" ", "_")


def key_for(name: str) -> str | None:
    """The key, or the sentence, for a name of another trainer, with or without the table it stands in."""
    keys, whole = tables().keys, plain(name)
    return keys.get(whole) or keys.get(whole.rpartition(".")[2])


def value_for(value: object, known: Collection[str]) -> str | None:
    """One of `known` that another trainer, or another case, calls `value`."""
    if not isinstance(value, str):
        return None
    word = plain(value)
    ours = (here for here, others in tables().values.items() if word in others.split())
    return next((found for found in (word, *ours) if found in known), None)


def why_absent(key: str, value: object) -> str | None:
    """Why `key` has nothing for a value that it has elsewhere; None of any other value."""
    if not isinstance(value, str):
        return None
    sentences = tables().absent.get(key, {})
    return next((why for why, others in sentences.items() if plain(value) in others.split()), None)
