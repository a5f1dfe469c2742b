"""Sections of tables, texts and pictures, and the formatting of their values."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

# Section title -> {"columns": [...], "rows": [[...], ...], optionally "notes": [...], "folded": True}; in place of a table
# "text", or "pictures": each {"jpeg": bytes or None, "title": ..., "lines": [...], "details": [...]}.
Sections = Mapping[str, Mapping[str, Any]]

# Sections on a run's data that need no action.
PLAIN = ("In short", "Buckets", "Tokens of captions", "Held out", "Notes", "Left out")


def place(title: str) -> str:
    """A title as the id of an element of the page."""
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def sorted_out(parts: Sections) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(photos, sections that need a look, the rest) of the sections on a run's data; the console's text comes last."""
    pictured = {title: part for title, part in parts.items() if part.get("pictures")}
    plain = {title: part for title, part in parts.items() if title in PLAIN}
    care = {title: part for title, part in parts.items() if title not in pictured and title not in plain}
    return pictured, care, dict(sorted(plain.items(), key=lambda pair: "text" in pair[1]))


def number_columns(rows: Sequence[Sequence[Any]]) -> list[int]:
    """The indices of the columns whose cells are all numbers, or missing."""
    columns = [[cell for cell in cells if cell is not None] for cells in zip(*rows, strict=True)]
    return [index for index, cells in enumerate(columns) if cells and all(map(_is_number, cells))]


def text(value: Any) -> str:
    """The text of a table's cell."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return re.fullmatch(r"[-+]?[\d.,]+(e[-+]?\d+)? ?%?", value) is not None
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def size(count: int) -> str:
    """Bytes in binary units, as file managers show them."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
