"""The names of the keys that there are."""

from __future__ import annotations

from typing import Any, get_args

from trainer.config.kinds import Table
from trainer.config.tables import Config


def generic(key: str) -> str:
    """`key` with list items and component names written as '*'."""
    parts = ["*" if part.isdigit() else part for part in key.split(".")]
    if parts[:2] == ["model", "components"] and len(parts) > 2:
        parts[2] = "*"
    return ".".join(parts)


def known_keys(table: type[Table] | None = None, prefix: str = "") -> dict[str, Any]:
    """Every key of the contract (or of one table in it), as `generic` writes it, and its default."""
    keys = {}
    for name, field in (table or Config).model_fields.items():
        keys[prefix + name] = field.default
        for nested in _tables_in(field.annotation):
            repeated = nested is not field.annotation
            keys |= known_keys(nested, f"{prefix}{name}." + ("*." if repeated else ""))
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
