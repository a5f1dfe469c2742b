"""Whose the icons are: what their licences ask every copy to say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import pages
from examples.pocket import icons
from workbench.pages.rendering import environment

TEMPLATES = Path(__file__).parent / "templates"
LINKS = {
    "Apache-2.0": "[Apache-2.0](https://www.apache.org/licenses/LICENSE-2.0)",
    "CC-BY-4.0": "[CC BY 4.0](https://creativecommons.org/licenses/by/4.0/)",
    "MIT": "MIT, below",
}


def render(template: str, **values: Any) -> str:
    """The text of a page. holders: of the MIT licence, where the page has it."""
    return environment(TEMPLATES).get_template(template).render(values)


def table(sets: Iterable[icons.IconSet], folders: Mapping[str, str] | None = None) -> str:
    """A row for each set. folders: style -> where its icons are, as a first column."""
    rows = []
    for each in sets:
        package = f"[{each.work}]({each.source}), as `@iconify-json/{each.package}` {each.version}"
        rows.append([each.style, each.author, package, LINKS[each.licence]])
    titles = ["style", "made by", "from", "licence"]
    if folders is not None:
        titles, rows = ["folder", *titles], [[folders[row[0]], *row] for row in rows]
    return pages.table(titles, rows)
