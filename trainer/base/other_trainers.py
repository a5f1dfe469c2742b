"""Names of keys and values in other trainers, and their names here. docs/other_trainers.md shows them."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources

TABLED = ("dtype",)  # too common to be recognised without its table


@dataclass(frozen=True)
class OtherTrainers:
    """The tables of other_trainers.json. Lists of names are strings with blanks between the names.

    trainers: the programs; the last row holds names that people write but no program has.
    commits: the commit of each program at which its names were looked up. not_looked_up: names only in its documentation.
    names: rows by subject: "here": our key, or a sentence (with blanks) if a key is not enough; then each trainer's names
    for it, with or without their table.
    absent: by key: sentence -> the values without a counterpart that it explains.
    values: our value -> other spellings, in lower case with underscores.
    """

    trainers: list[str]
    commits: Mapping[str, str]
    not_looked_up: Mapping[str, str]
    names: Mapping[str, list[Mapping[str, str]]]
    absent: Mapping[str, Mapping[str, str]]
    values: Mapping[str, str]

    @cached_property
    def keys(self) -> Mapping[str, str]:
        """Our key or sentence by another trainer's full name and by its last part. The first entry wins."""
        keys: dict[str, str] = {}
        for row in (row for rows in self.names.values() for row in rows):
            for name in " ".join(row.get(trainer, "") for trainer in self.trainers).split():
                last = name.rpartition(".")[2]
                for alias in (name, *(() if last in TABLED else (last,))):
                    keys.setdefault(alias, row["here"])
        return keys


@cache
def tables() -> OtherTrainers:
    """The content of other_trainers.json, read on first use."""
    file = resources.files("trainer.base") / "other_trainers.json"
    return OtherTrainers(**json.loads(file.read_text(encoding="utf-8")))


def plain(name: str) -> str:
    """A name normalised as in the tables: `--Train-Batch-Size` is train_batch_size."""
    return name.strip().lstrip("-").lower().replace("-", "_").replace(" ", "_")


def key_for(name: str) -> str | None:
    """Our key, or a sentence, for another trainer's name, given with or without its table."""
    keys, whole = tables().keys, plain(name)
    return keys.get(whole) or keys.get(whole.rpartition(".")[2])


def value_for(value: object, choices: Collection[str]) -> str | None:
    """The choice that another trainer calls `value`, or that differs in letter case alone."""
    if not isinstance(value, str):
        return None
    word = plain(value)
    candidates = (here for here, others in tables().values.items() if word in others.split())
    return next((match for match in (word, *candidates) if match in choices), None)


def why_absent(key: str, value: object) -> str | None:
    """The sentence why `key` has no counterpart of another trainer's value; None for other values."""
    if not isinstance(value, str):
        return None
    sentences = tables().absent.get(key, {})
    return next((sentence for sentence, others in sentences.items() if plain(value) in others.split()), None)
