"""The config of a run for its page: what differs from the defaults first."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

from trainer import config as configs
from trainer.base.errors import UserError
from trainer.report.tables import folded, grid


def values(path: Path) -> dict[str, Any]:
    """By full key, of a resolved config.toml; of a damaged or missing file none."""
    try:
        return configs.flatten(configs.read_resolved(path)) if path.is_file() else {}
    except UserError:
        return {}


def changed_keys(path: Path) -> list[tuple[str, Any, Any]]:
    """(key, value, default) of each key of a resolved config.toml whose value is not the default; None: there is none.

    A damaged or missing file has none.
    """
    given = values(path)
    plain = {key: value for key, value in configs.known_keys().items() if isinstance(value, (str, int, float, bool, list))}
    found: list[tuple[str, Any, Any]] = []
    for key, value in given.items():
        whole = configs.whole(key)
        default = plain.get(configs.generic(whole))
        if whole != key:
            at = int(key.rpartition(".")[2])
            same = isinstance(default, list) and at < len(default) and default[at] == value
        else:
            same = default == value and type(default) is type(value)
        if not same:
            found.append((key, value, default))
    return found


def configuration(path: Path) -> str:
    if not path.is_file():
        return '<p class="soft">There is no config.toml in this folder.</p>'
    changed = changed_keys(path)
    differ = [
        [_key(key), f"<td><code>{_toml(value)}</code></td>", f'<td class="soft"><code>{_toml(default)}</code></td>']
        for key, value, default in changed
        if default is not None
    ]
    without = [[_key(key), f"<td><code>{_toml(value)}</code></td>"] for key, value, default in changed if default is None]
    head = [f'<th scope="col">{title}</th>' for title in ("Key", "This run", "Default")]
    text = path.read_text(encoding="utf-8", errors="replace")
    parts = [
        folded(_count(differ, "differs from the default", "differ from the defaults"), grid(head, differ), opened=True)
        if differ
        else "",
        folded(_count(without, "has no default", "have no default"), grid(head[:2], without)) if without else "",
        folded("config.toml, every default written out", f"<pre>{escape(text)}</pre>"),
    ]
    return "".join(parts)


def _count(rows: list[list[str]], one: str, many: str) -> str:
    return f"{len(rows)} key {one}" if len(rows) == 1 else f"{len(rows)} keys {many}"


def _key(key: str) -> str:
    """On a narrow page it is broken between its words."""
    parts = re.sub(r"([._])(?=\w)", r"\1<wbr>", escape(key))
    return f'<th scope="row"><code>{parts}</code></th>'


def _toml(value: Any) -> str:
    return escape(str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, str) else str(value))
