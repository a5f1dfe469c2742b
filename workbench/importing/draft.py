"""A config of ours while it is made from another trainer's: each value beside its reason."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError
from workbench.importing.reading import as_number, as_share

# What stands at the file's head, in this order.
FILL = "To be filled in"
ASSUMED = "Assumed"
ABSENT = "No equivalent here"
DIFFERS = "Differs here"
SAME = "Needs no key here"
UNKNOWN = "Not looked up: names that are not known here; nothing was made of them"
Line = tuple[Any, str]  # a value, and the reason why it is that
SWITCHES = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False, "none": False}


@dataclass
class Options:
    """One table of another trainer's config by plain names. It remembers which of them were read.

    given: as the file has them. defaults: the program's. prefix: put before a name when it is told. What takes a name and
    `otherwise` returns what the file says, else the program's default, else `otherwise`; it raises UserError, with the file
    and the option, for a value of another kind.
    """

    given: dict[str, Any]
    file: Path | str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    read: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        """Whether the file says something of it."""
        return self.given.get(name) is not None

    def first(self, *names: str) -> str:
        """The first name that the file says something of; the last where it says nothing."""
        return next((name for name in names if self.has(name)), names[-1])

    def null(self, name: str) -> bool:
        """Whether the file says null, which is not the same as leaving it out where that has a default there."""
        return name in self.given and self.given[name] is None

    def get(self, name: str, otherwise: Any = None) -> Any:
        """The value, of whatever kind it is."""
        self.read.add(name)
        if self.has(name):
            return self.given[name]
        return self.defaults.get(name, otherwise)

    def wrong(self, name: str, kind: str) -> UserError:
        """The error for a value that is not of the kind that it should be."""
        return UserError(f"{self.file}: {self.told(name)}: it should be {kind}")

    def word(self, name: str, otherwise: Any = None) -> Any:
        """The value as text; a number is its digits."""
        value = self.get(name, otherwise)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (str, int, float))):
            raise self.wrong(name, "text")
        return value if value is None else str(value)

    def number(self, name: str, otherwise: Any = None, *, least: float = -math.inf) -> Any:
        """A number, `least` or more, also where it is written as text."""
        value = self.get(name, otherwise)
        return None if value is None else self._number(name, value, least)

    def numbers(self, name: str, *, least: float = -math.inf) -> list[Any]:
        """A list of numbers; a number alone is a list of one."""
        return [self._number(name, each, least) for each in self.entries(name)]

    def whole(self, name: str, otherwise: Any = None, *, least: float = -math.inf) -> Any:
        """A whole number, `least` or more, also where it is written as text."""
        value = self.number(name, otherwise, least=least)
        if value is not None and value != int(value):
            raise self.wrong(name, "a whole number")
        return None if value is None else int(value)

    def steps(self, name: str, otherwise: Any = None) -> Any:
        """A number of steps, or the share of all steps that `N%` is."""
        share = as_share(self.get(name, otherwise))
        if share is not None and not 0 <= share < 1:
            raise self.wrong(name, "a number of steps, or a share below 100%")
        return self.number(name, otherwise) if share is None else share

    def line(self, name: str, kind: str, otherwise: Any = None) -> Line:
        """The value and its reason. kind: the method that reads it: word, number (as a float), whole, steps or flag."""
        value = getattr(self, kind)(name, otherwise)
        return float(value) if kind == "number" and value is not None else value, self.told(name, otherwise)

    def _number(self, name: str, value: Any, least: float) -> Any:
        number = as_number(value)
        if number is None or number < least:
            raise self.wrong(name, "a number" + (f", {least:g} or more" if least > -math.inf else ""))
        return number

    def flag(self, name: str, otherwise: bool = False) -> bool:
        """Whether it is on. None is off."""
        value = self.get(name, otherwise)
        switch = SWITCHES.get(str(value).lower()) if value is None or isinstance(value, (str, int, float)) else None
        if switch is None:
            raise self.wrong(name, "true or false")
        return switch

    def entries(self, name: str) -> list[Any]:
        """A list of texts and numbers; one alone is a list of one, none an empty list; null is no entry."""
        value = self.get(name)
        listed = [each for each in (value if isinstance(value, list) else [value]) if each is not None]
        if not all(isinstance(each, (str, int, float)) and not isinstance(each, bool) for each in listed):
            raise self.wrong(name, "a list of texts or numbers")
        return listed

    def table(self, name: str, prefix: str = "") -> Options:
        """A table within this one; an empty one where it is left out."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, "a table: names with their values")
        return Options(value or {}, self.file, prefix=prefix)

    def tables(self, name: str, prefix: str, defaults: Mapping[str, Any] | None = None) -> list[Options]:
        """The tables of a list within this table; none where it is left out."""
        value = self.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(each, dict) for each in value)):
            raise self.wrong(name, "a list of tables: of names with their values")
        return [Options(each, self.file, defaults or {}, prefix) for each in value or ()]

    def opened(self, *parts: str) -> Options:
        """The same options, with those of the tables `parts` beside them, by dotted name."""
        flat = {name: value for name, value in self.given.items() if name not in parts}
        for part in parts:
            flat |= {f"{part}.{name}": value for name, value in self.table(part).given.items()}
        return replace(self, given=flat)

    def pass_by(self, *names: str) -> None:
        """Count them as read: they say nothing beside what was read already."""
        self.read.update(names)

    def told(self, name: str, otherwise: Any = None) -> str:
        """The option and its value, as the reason of what is made of it."""
        if self.has(name):
            return f"{self.prefix}{name} = {shown(self.given[name])}"
        value = self.defaults.get(name, otherwise)
        return f"{self.prefix}{name} is left out" + ("" if value is None else f": {shown(value)} there")

    def rest(self) -> dict[str, Any]:
        """What the file says and nothing has read."""
        return {name: value for name, value in self.given.items() if name not in self.read}


def shown(value: Any) -> str:
    """A value in one short line; a number in a text as it is written there, without quotes."""
    if isinstance(value, list):
        text = f"[{', '.join(map(shown, value))}]"
    elif isinstance(value, str) and as_number(value) is not None:
        text = value
    else:
        text = json.dumps(value, ensure_ascii=False) if not isinstance(value, float) else f"{value:g}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of values by dotted key."""
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        *tables, last = key.split(".")
        reduce(lambda node, table: node.setdefault(table, {}), tables, tree)[last] = value
    return tree


class Draft:
    """Keys with their reasons, sources, samples, and what is said at the file's head. program: whose file it was. fixed:
    values by key as --set gave them, which stay; what cannot be done for such a key is not said."""

    def __init__(self, trainer: str, program: str, fixed: Mapping[str, Any]) -> None:
        self.trainer, self.program = trainer, program
        self.fixed = dict(fixed)
        self.keys: dict[str, Line] = {}
        self.sources: list[dict[str, Line]] = []
        self.samples: list[dict[str, Line]] = []
        self.rules: list[dict[str, Line]] = []
        self.notes: dict[str, list[str]] = {heading: [] for heading in (FILL, ASSUMED, ABSENT, DIFFERS, UNKNOWN, SAME)}
        self.refusals: list[str] = []

    @property
    def lists(self) -> dict[str, list[dict[str, Line]]]:
        """The lists of tables, by key."""
        return {"adapter.rules": self.rules, "data.sources": self.sources, "validation.samples": self.samples}

    def set(self, key: str, value: Any, why: str) -> None:
        """Write the key. `value` is one of TOML's."""
        self.keys[key] = (value, why)

    def carry(self, options: Options, name: str, key: str, kind: str = "whole") -> None:
        """Write the key with the option's value; nothing where neither the file nor the program has one."""
        value, why = options.line(name, kind)
        if value is not None:
            self.set(key, value, why)

    def in_epochs(self, table: str, epochs: int, why: str) -> None:
        """Write a table's interval in epochs, in the place of one in steps that --set did not give."""
        if f"{table}.every_steps" not in self.fixed:
            self.keys.pop(f"{table}.every_steps", None)
            self.set(f"{table}.every_epochs", epochs, why)

    def value(self, key: str) -> Any:
        """What the key will be: as --set gave it, else as it was written; None where it is left out."""
        return self.fixed[key] if key in self.fixed else self.keys.get(key, (None, ""))[0]

    def note(self, kind: str, text: str) -> None:
        """Say it at the file's head, once."""
        if text not in self.notes[kind]:
            self.notes[kind].append(text)

    def cannot(self, key: str, text: str) -> None:
        """Refuse the import, with what is wrong, unless --set gave the key."""
        if key not in self.fixed:
            self.refusals.append(f"{text}; --set {key}=VALUE says what to take in its place")
