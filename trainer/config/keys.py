"""The names of the keys that there are, and of those that earlier versions had."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import reduce
from typing import Any, get_args

from pydantic.fields import FieldInfo

from trainer.base.console import without_keys
from trainer.base.errors import UserError
from trainer.config.kinds import ReadWith, Table
from trainer.config.tables import Config

_LENGTHS = "averages of any length are gone; take ema.kind = 'constant' alone, or finish such a run with commit 028b4cb"
_LAST = "leave it out, or finish a run that has it with commit 51dd1b4"
# By key, (what earlier versions had, what to take instead). A key that is gone has its default here: every config.toml and
# checkpoint of an earlier version may have it, and it asks for nothing. A key that stays has the value that is gone.
REMOVED = {
    "ema.kind": ("power", _LENGTHS),
    "ema.snapshot_every_steps": (0, _LENGTHS),
    "export.license_link": (
        "",
        "leave it out; for a licence that the hub has no name for set export.license = 'other', and write license_name and "
        "license_link into the header of adapters/README.md, which then stays as it is",
    ),
    "optimizer.min_8bit_size": (4096, f"a group of fewer than 4096 elements has 32-bit state in every run; {_LAST}"),
    "precision.loss_scale_growth_interval": (2000, f"it is 2000 updates without an overflow in every run; {_LAST}"),
}


def generic(key: str) -> str:
    """`key` with list items and component names written as '*'."""
    parts = ["*" if part.isdigit() else part for part in key.split(".")]
    if parts[:2] == ["model", "components"] and len(parts) > 2:
        parts[2] = "*"
    return ".".join(parts)


def whole(key: str) -> str:
    """`a.0` becomes `a`: an index into a list is dropped; every other key stays."""
    table, _, last = key.rpartition(".")
    return table if last.isdigit() else key


def known_keys() -> dict[str, Any]:
    """Every key of the contract, as `generic` writes it, and its default as TOML has it."""
    return {key: list(field.default) if isinstance(field.default, tuple) else field.default for key, field in fields()}


def drop_removed(tree: Mapping[str, Any], what: str = "", may_change: Collection[str] = ()) -> dict[str, Any]:
    """The tree without the keys that only earlier versions had. Raises UserError, a line for each thing that is gone, where
    one asks for it and is not of the patterns `may_change`: such a key stays. what: names the tree."""
    known, left = known_keys(), dict(tree)
    asked: dict[str, list[str]] = {}
    for key, (value, instead) in REMOVED.items():
        table, _, name = key.partition(".")
        values = left.get(table)
        if not isinstance(values, Mapping) or name not in values:
            continue
        if (values[name] == value) is (key in known):
            if not any(fnmatchcase(key, pattern) for pattern in may_change):
                asked.setdefault(instead, []).append(f"{key} = {without_keys(repr(values[name]))}")
        elif key not in known:
            left[table] = {other: values[other] for other in values if other != name}
    if asked:
        lines = (f"{', '.join(keys)}: {instead}" for instead, keys in asked.items())
        raise UserError("\n".join(f"{what}: {line}" if what else line for line in lines))
    return left


def fields(table: type[Table] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of the contract (or of one table in it), as `generic` writes it, and what the tables say of it."""
    for attribute, field in table.model_fields.items():
        name = field.alias or attribute
        yield prefix + name, field
        for nested in _tables_in(field.annotation):
            repeated = nested is not field.annotation
            yield from fields(nested, f"{prefix}{name}." + ("*." if repeated else ""))


def choices(field: FieldInfo) -> list[ReadWith]:
    """The choices that a key needs beside it to be read."""
    return [each for each in field.metadata if isinstance(each, ReadWith)]


def unread(config: Config) -> dict[str, str]:
    """Every key that lacks a choice beside it, set or not: by its full name, beside what it has no effect, and the remedy."""
    return dict(_unread(config, "", config))


def _unread(table: Table, prefix: str, config: Config) -> Iterator[tuple[str, str]]:
    def value(key: str) -> Any:
        return reduce(getattr, key.split("."), config if "." in key else table)

    for attribute, field in type(table).model_fields.items():
        name, inner = field.alias or attribute, getattr(table, attribute)
        yield from ((prefix + name, lack) for choice in choices(field)[::-1] if (lack := choice.without(value)) is not None)
        items = inner.items() if isinstance(inner, dict) else enumerate(inner) if isinstance(inner, tuple) else ()
        for key, item in [("", inner), *((f"{key}.", item) for key, item in items)]:
            if isinstance(item, Table):
                yield from _unread(item, f"{prefix}{name}.{key}", config)


def _tables_in(annotation: Any) -> list[type[Table]]:
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return [annotation]
    return [table for argument in get_args(annotation) for table in _tables_in(argument)]


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{'a': {'b': [1]}} -> {'a.b.0': 1}; empty tables and lists are kept as values."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    flat = {k: v for key, value in items for k, v in flatten(value, f"{prefix}{key}.").items()}
    return flat if flat or not prefix else {prefix[:-1]: tree}
