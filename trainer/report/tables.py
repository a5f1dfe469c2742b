"""Sections of tables, texts and pictures as HTML. Every text from elsewhere passes through `escape`."""

import base64
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

# Section title -> {"columns": [...], "rows": [[...], ...], optionally "notes": [...], "folded": True}; in place of a table
# "text", or "pictures": each {"jpeg": bytes or None, "title": ..., "lines": [...], "details": [...]}.
Sections = Mapping[str, Mapping[str, Any]]

# Of a run's data, what says nothing that somebody has to mend.
PLAIN = ("In short", "Buckets", "Tokens of captions", "Held out", "Notes", "Left out")


def section(title: str, inner: str, about: str = "") -> str:
    """A part of the page, with a place that can be linked to."""
    said = f'<p class="soft">{escape(about)}</p>' if about else ""
    return f'<section id="{place(title)}"><h2>{escape(title)}</h2>{said}{inner}</section>'


def place(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def folded(title: str, inner: str, *, opened: bool = False) -> str:
    return f"<details{' open' if opened else ''}><summary>{escape(title)}</summary>{inner}</details>"


def sections(parts: Sections) -> str:
    return "".join((f"<h3>{escape(str(title))}</h3>" if title else "") + content(part) for title, part in parts.items())


def data(parts: Sections) -> str:
    """A run's data as HTML: the photos, then what needs a look, then the rest, folded."""
    pictured, care, plain = sorted_out(parts)
    rest = folded(f"More: {', '.join(title.lower() for title in plain)}", sections(plain)) if plain else ""
    return sections(pictured) + sections(care) + rest


def sorted_out(parts: Sections) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(photos, what needs a look, the rest) of the sections about a run's data; what the console said comes last."""
    pictured = {title: part for title, part in parts.items() if part.get("pictures")}
    plain = {title: part for title, part in parts.items() if title in PLAIN}
    care = {title: part for title, part in parts.items() if title not in pictured and title not in plain}
    return pictured, care, dict(sorted(plain.items(), key=lambda pair: "text" in pair[1]))


def facts(pairs: Mapping[str, str], kind: str = "facts") -> str:
    """Names and values, as tiles ("facts") or as lines ("list")."""
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs.items())
    return f'<dl class="{kind}">{cells}</dl>' if cells else ""


def content(section: Mapping[str, Any]) -> str:
    parts = []
    if section.get("text"):
        parts.append(f"<pre>{escape(section['text'])}</pre>")
    if rows := section.get("rows"):
        drawn = table(section["columns"], rows)
        count = f"{len(rows):,} row{'' if len(rows) == 1 else 's'}"
        parts.append(f"<details><summary>{count}</summary>{drawn}</details>" if section.get("folded") else drawn)
    parts += [f'<p class="soft">{escape(str(note))}</p>' for note in section.get("notes", ())]
    if section.get("pictures"):
        parts.append(f'<div class="photos">{"".join(map(_picture, section["pictures"]))}</div>')
    return "".join(parts)


def _picture(picture: Mapping[str, Any]) -> str:
    title, image = escape(picture["title"]), '<p class="soft">cannot be read any more</p>'
    if picture["jpeg"] is not None:
        image = f'<img src="data:image/jpeg;base64,{base64.b64encode(picture["jpeg"]).decode()}" alt="{title}">'
    lines = "".join(f"<p>{escape(line)}</p>" for line in picture["lines"])
    details = "".join(f'<p class="soft">{escape(line)}</p>' for line in picture["details"])
    return f'<figure class="photo">{image}<h4>{title}</h4>{lines}{details}</figure>'


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns whose cells are all numbers (or missing) are aligned to the right."""
    kinds = []
    for cells in zip(*rows, strict=True):
        given = [cell for cell in cells if cell is not None]
        kinds.append(' class="number"' if given and all(map(_is_number, given)) else "")
    head = [f'<th scope="col"{kind}>{escape(title)}</th>' for kind, title in zip(kinds, columns, strict=True)]
    return grid(head, [[f"<td{k}>{escape(shown(v))}</td>" for k, v in zip(kinds, row, strict=True)] for row in rows])


def grid(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """A table of cells that are HTML already."""
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="wide"><table{kind}><thead><tr>{"".join(head)}</tr></thead><tbody>{body}</tbody></table></div>'


def shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _is_number(value: Any) -> bool:
    """Numbers, and texts that are one number with or without a percent sign."""
    if isinstance(value, str):
        return re.fullmatch(r"[-+]?[\d.,]+(e[-+]?\d+)? ?%?", value) is not None
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def size(count: int) -> str:
    """Bytes in binary units, as file managers show them."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
