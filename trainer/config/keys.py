"""The names of all config keys, and of those that earlier versions had."""

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
# Key -> (value, remedy). A removed key stands here with its old default: config.toml and checkpoints of earlier versions
# contain it, and it may be dropped. A key that still exists stands here with the one value that was removed.
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
    """Every config key, as `generic` writes it, and its default as TOML has it."""
    return {key: list(field.default) if isinstance(field.default, tuple) else field.default for key, field in fields()}


def drop_removed(tree: Mapping[str, Any], name: str = "", may_change: Collection[str] = ()) -> dict[str, Any]:
    """The tree without removed keys. name: the tree's name, for messages. Raises UserError, a line for each remedy, if a key
    asks for a removed feature; one that matches a pattern of `may_change` is kept instead."""
    current, remaining = known_keys(), dict(tree)
    refused: dict[str, list[str]] = {}  # by remedy
    for key, (value, remedy) in REMOVED.items():
        table, _, leaf = key.partition(".")
        values = remaining.get(table)
        if not isinstance(values, Mapping) or leaf not in values:
            continue
        if (values[leaf] == value) is (key in current):
            if not any(fnmatchcase(key, pattern) for pattern in may_change):
                refused.setdefault(remedy, []).append(f"{key} = {without_keys(repr(values[leaf]))}")
        elif key not in current:
            remaining[table] = {other: values[other] for other in values if other != leaf}
    if refused:
        lines = (f"{', '.join(keys)}: {remedy}" for remedy, keys in refused.items())
        raise UserError("\n".join(f"{name}: {line}" if name else line for line in lines))
    return remaining


def fields(table: type[Table] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of the config or of one table, as `generic` writes it, with its pydantic field."""
    for attribute, field in table.model_fields.items():
        name = field.alias or attribute
        yield prefix + name, field
        for nested in _tables_in(field.annotation):
            repeated = nested is not field.annotation
            yield from fields(nested, f"{prefix}{name}." + ("*." if repeated else ""))


def choices(field: FieldInfo) -> list[ReadWith]:
    """The conditions under which a key has an effect."""
    return [condition for condition in field.metadata if isinstance(condition, ReadWith)]


def unread(config: Config, table: Table | None = None, prefix: str = "") -> dict[str, str]:
    """Key -> reason and remedy, for every key of the config, or of a table in it, that the value of another key disables."""
    table, keys = table or config, dict[str, str]()

    def value(key: str) -> Any:
        return reduce(getattr, key.split("."), config if "." in key else table)

    for attribute, field in type(table).model_fields.items():
        name, nested = field.alias or attribute, getattr(table, attribute)
        if reason := next(filter(None, (condition.without(value) for condition in choices(field))), None):
            keys[prefix + name] = reason
        items = nested.items() if isinstance(nested, dict) else enumerate(nested) if isinstance(nested, tuple) else ()
        for key, item in [("", nested), *((f"{key}.", item) for key, item in items)]:
            if isinstance(item, Table):
                keys |= unread(config, item, f"{prefix}{name}.{key}")
    return keys


def _tables_in(annotation: Any) -> list[type[Table]]:
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return [annotation]
    return [table for argument in get_args(annotation) for table in _tables_in(argument)]


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{'a': {'b': [1]}} -> {'a.b.0': 1}; empty tables and lists are kept as values."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    flat = {k: v for key, value in items for k, v in flatten(value, f"{prefix}{key}.").items()}
    return flat if flat or not prefix else {prefix[:-1]: tree}
