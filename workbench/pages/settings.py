"""The config of a run for its page: keys that differ from the defaults first."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from trainer import config as configs
from trainer.base.errors import UserError


def values(path: Path) -> dict[str, Any]:
    """The values of a resolved config.toml by full key; none of a damaged or missing file."""
    try:
        return configs.flatten(configs.drop_removed(configs.read_resolved(path), may_change=("*",))) if path.is_file() else {}
    except UserError:
        return {}


def changed_keys(path: Path) -> list[tuple[str, Any, Any]]:
    """(key, value, default) of each key of a resolved config.toml whose value is not the default; None: no default."""
    plain = {key: value for key, value in configs.known_keys().items() if isinstance(value, (str, int, float, bool, list))}
    changes: list[tuple[str, Any, Any]] = []
    for key, value in values(path).items():
        whole = configs.whole(key)
        default = plain.get(configs.generic(whole))
        if whole == key:
            is_default = default == value and type(default) is type(value)
        else:
            index = int(key.rpartition(".")[2])
            is_default = isinstance(default, list) and default[index : index + 1] == [value]
        if not is_default:
            changes.append((key, value, default))
    return changes


def configuration(path: Path) -> dict[str, Any] | None:
    """The keys of a config.toml that differ from their default, keys without a default, and the text; None without a file."""
    if not path.is_file():
        return None
    changed = changed_keys(path)
    return {
        "differ": [row for row in changed if row[2] is not None],
        "without": [row for row in changed if row[2] is None],
        "text": path.read_text(encoding="utf-8", errors="replace"),
    }


def keyed_parts(key: str) -> list[str]:
    """The unbreakable pieces of a key on a narrow page."""
    return re.split(r"(?<=[._])(?=\w)", key)


def toml(value: Any) -> str:
    """A value as TOML writes it."""
    return str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, str) else str(value)
