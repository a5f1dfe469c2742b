"""A config under construction from another trainer's: every value with its reason."""

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

# Headings of the notes at the file's head, in this order.
FILL = "To be filled in"
ASSUMED = "Assumed"
ABSENT = "No equivalent here"
DIFFERS = "Differs here"
SAME = "Needs no key here"
UNKNOWN = "Not looked up: names that are not known here; nothing was made of them"
Line = tuple[Any, str]  # a value and its reason
SWITCHES = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False, "none": False}


@dataclass
class Options:
    """One table of another trainer's config by plain names. It records which of them were read.

    values: from the file. defaults: the program's. prefix: put before a name in messages. Methods that take a name and
    `otherwise` return the file's value, else the program's default, else `otherwise`; they raise UserError, with the file and
    the option, for a value of another kind.
    """

    values: dict[str, Any]
    file: Path | str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    names_read: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        """Whether the file has a value for it."""
        return self.values.get(name) is not None

    def first(self, *names: str) -> str:
        """The first name that the file has a value for; the last if there is none."""
        return next((name for name in names if self.has(name)), names[-1])

    def is_null(self, name: str) -> bool:
        """Whether the file says null: not the same as leaving out an option that has a default there."""
        return name in self.values and self.values[name] is None

    def get(self, name: str, otherwise: Any = None) -> Any:
        """The value, of any kind."""
        self.names_read.add(name)
        if self.has(name):
            return self.values[name]
        return self.defaults.get(name, otherwise)

    def error(self, name: str, kind: str) -> UserError:
        """The error for a value of another kind than `kind`."""
        return UserError(f"{self.file}: {self.cite(name)}: it should be {kind}")

    def word(self, name: str, otherwise: Any = None) -> Any:
        """The value as text; a number is its digits."""
        value = self.get(name, otherwise)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (str, int, float))):
            raise self.error(name, "text")
        return value if value is None else str(value)

    def number(self, name: str, otherwise: Any = None, *, least: float = -math.inf) -> Any:
        """A number, `least` or more, also written as text."""
        value = self.get(name, otherwise)
        return None if value is None else self._number(name, value, least)

    def numbers(self, name: str, *, least: float = -math.inf) -> list[Any]:
        """A list of numbers; a number alone is a list of one."""
        return [self._number(name, each, least) for each in self.entries(name)]

    def whole(self, name: str, otherwise: Any = None, *, least: float = -math.inf) -> Any:
        """A whole number, `least` or more, also written as text."""
        value = self.number(name, otherwise, least=least)
        if value is not None and value != int(value):
            raise self.error(name, "a whole number")
        return None if value is None else int(value)

    def steps(self, name: str, otherwise: Any = None) -> Any:
        """A number of steps, or N / 100 of all steps for `N%`."""
        share = as_share(self.get(name, otherwise))
        if share is not None and not 0 <= share < 1:
            raise self.error(name, "a number of steps, or a share below 100%")
        return self.number(name, otherwise) if share is None else share

    def line(self, name: str, kind: str, otherwise: Any = None) -> Line:
        """The value and its reason. kind: the method that reads it: word, number (as a float), whole, steps or flag."""
        value = getattr(self, kind)(name, otherwise)
        return float(value) if kind == "number" and value is not None else value, self.cite(name, otherwise)

    def _number(self, name: str, value: Any, least: float) -> Any:
        number = as_number(value)
        if number is None or number < least:
            raise self.error(name, "a number" + (f", {least:g} or more" if least > -math.inf else ""))
        return number

    def flag(self, name: str, otherwise: bool = False) -> bool:
        """Whether it is on; None is off."""
        value = self.get(name, otherwise)
        switch = SWITCHES.get(str(value).lower()) if value is None or isinstance(value, (str, int, float)) else None
        if switch is None:
            raise self.error(name, "true or false")
        return switch

    def entries(self, name: str) -> list[Any]:
        """A list of texts and numbers, without nulls; a single value is a list of one."""
        value = self.get(name)
        entries = [entry for entry in (value if isinstance(value, list) else [value]) if entry is not None]
        if not all(isinstance(entry, (str, int, float)) and not isinstance(entry, bool) for entry in entries):
            raise self.error(name, "a list of texts or numbers")
        return entries

    def table(self, name: str, prefix: str = "") -> Options:
        """A table within this one; empty if left out."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, "a table: names with their values")
        return Options(value or {}, self.file, prefix=prefix)

    def tables(self, name: str, prefix: str, defaults: Mapping[str, Any] | None = None) -> list[Options]:
        """The tables of a list within this table; none if left out."""
        value = self.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(entry, dict) for entry in value)):
            raise self.error(name, "a list of tables: of names with their values")
        return [Options(entry, self.file, defaults or {}, prefix) for entry in value or ()]

    def flattened(self, *tables: str) -> Options:
        """These options, and those of `tables` by dotted name."""
        flat = {name: value for name, value in self.values.items() if name not in tables}
        for table in tables:
            flat |= {f"{table}.{name}": value for name, value in self.table(table).values.items()}
        return replace(self, values=flat)

    def ignore(self, *names: str) -> None:
        """Mark options as read that say nothing beside what was read already."""
        self.names_read.update(names)

    def cite(self, name: str, otherwise: Any = None) -> str:
        """The option and its value, as the reason for what is made of it."""
        if self.has(name):
            return f"{self.prefix}{name} = {as_text(self.values[name])}"
        value = self.defaults.get(name, otherwise)
        return f"{self.prefix}{name} is left out" + ("" if value is None else f": {as_text(value)} there")

    def unread(self) -> dict[str, Any]:
        """The file's options that were not read."""
        return {name: value for name, value in self.values.items() if name not in self.names_read}


def as_text(value: Any) -> str:
    """A value in one short line; a number that is text there without quotes."""
    if isinstance(value, list):
        text = f"[{', '.join(map(as_text, value))}]"
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
    """Keys with their reasons, sources, samples, rules, and the notes at the file's head. program: that wrote the file.
    overrides: values by key from --set; they win, and no refusal is recorded for such a key."""

    def __init__(self, trainer: str, program: str, overrides: Mapping[str, Any]) -> None:
        self.trainer, self.program = trainer, program
        self.overrides = dict(overrides)
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

    def set(self, key: str, value: Any, reason: str) -> None:
        """Set the key to a value of TOML."""
        self.keys[key] = (value, reason)

    def carry(self, options: Options, name: str, key: str, kind: str = "whole") -> None:
        """Set the key to the option's value, if the file or the program has one."""
        value, reason = options.line(name, kind)
        if value is not None:
            self.set(key, value, reason)

    def in_epochs(self, table: str, epochs: int, reason: str) -> None:
        """Set a table's interval in epochs; it replaces one in steps unless --set gave that."""
        if f"{table}.every_steps" not in self.overrides:
            self.keys.pop(f"{table}.every_steps", None)
            self.set(f"{table}.every_epochs", epochs, reason)

    def value(self, key: str) -> Any:
        """The key's value from --set, else from the draft; None if left out."""
        return self.overrides[key] if key in self.overrides else self.keys.get(key, (None, ""))[0]

    def note(self, kind: str, text: str) -> None:
        """Add a note to the file's head, once."""
        if text not in self.notes[kind]:
            self.notes[kind].append(text)

    def refuse(self, key: str, text: str) -> None:
        """Refuse the import with `text`, unless --set gave the key."""
        if key not in self.overrides:
            self.refusals.append(f"{text}; --set {key}=VALUE says what to take in its place")
