"""Texts that are made from templates (jinja2), which lie in `templates/` beside what fills them.

Light to import: jinja2 is imported when the first text is made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def environment(folder: Path, **filters: Callable[..., Any]) -> Environment:
    """The templates of a folder. HTML templates escape every text that is put into them; a name that is not given is an
    error, and no empty text. filters: what templates may ask of a value, by name."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

    made = Environment(
        loader=FileSystemLoader(folder), autoescape=select_autoescape(("html",)), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, auto_reload=False,
    )  # fmt: skip
    made.filters |= filters
    return made
