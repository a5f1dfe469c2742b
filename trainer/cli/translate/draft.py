"""A config of ours while it is made from another trainer's: each value beside its reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# What stands at the file's head, in this order.
FILL = "To be filled in"
ABSENT = "No equivalent here"
DIFFERS = "Differs here"
UNKNOWN = "Not looked up: names that are not known here; nothing was made of them"


@dataclass
class Options:
    """One table of another trainer's config by plain names. It remembers which of them were read.

    given: as the file has them. defaults: what the program takes for those that the file leaves out. prefix: put before a
    name when it is told.
    """

    given: dict[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    read: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        """Whether the file says something of it."""
        return self.given.get(name) is not None

    def get(self, name: str, otherwise: Any = None) -> Any:
        """What the file says, else the program's default, else `otherwise`."""
        self.read.add(name)
        if self.has(name):
            return self.given[name]
        return self.defaults.get(name, otherwise)

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
    """A value in one short line."""
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, float) else f"{value:g}"
    return text if len(text) <= 60 else f"{text[:57]}..."


class Draft:
    """Keys with their reasons, sources, samples, and what is said at the file's head.

    fixed: values by key as --set gave them. They stay, whatever the other config says, and what cannot be done for such a
    key is not said.
    """

    def __init__(self, trainer: str, fixed: Mapping[str, Any]) -> None:
        self.trainer = trainer
        self.fixed = dict(fixed)
        self.keys: dict[str, tuple[Any, str]] = {}
        self.sources: list[dict[str, tuple[Any, str]]] = []
        self.samples: list[dict[str, tuple[Any, str]]] = []
        self.rules: list[dict[str, tuple[Any, str]]] = []
        self.notes: dict[str, list[str]] = {FILL: [], ABSENT: [], DIFFERS: [], UNKNOWN: []}
        self.refusals: list[str] = []

    @property
    def lists(self) -> dict[str, list[dict[str, tuple[Any, str]]]]:
        """The lists of tables, by key."""
        return {"adapter.rules": self.rules, "data.sources": self.sources, "validation.samples": self.samples}

    def set(self, key: str, value: Any, why: str) -> None:
        """Write the key. `value` is one of TOML's."""
        self.keys[key] = (value, why)

    def carry(self, options: Options, name: str, key: str) -> None:
        """Write the key with the option's value as it is; nothing where neither the file nor the program has one."""
        value = options.get(name)
        if value is not None:
            self.set(key, value, options.told(name))

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
