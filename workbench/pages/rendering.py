"""Pages from templates/: the one place where HTML is made, with the filters that the templates use."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.base.files import write_atomic
from trainer.base.pictures import data_uri, is_sound, thumbnail
from workbench.pages.samples import peek, step_name
from workbench.pages.settings import keyed_parts, toml
from workbench.pages.tables import number_columns, place, size, text

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"
RELOAD_SECONDS = 15  # page of a live run
SHEET_PX = 2048  # longer side of the grid of samples
INLINE = "'unsafe-inline'"  # the labels of a chart are placed by their style attributes


@cache
def environment(folder: Path, **filters: Callable[..., Any]) -> Environment:
    """The templates of a folder. HTML templates escape every inserted text; undefined names are errors. filters: by name."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

    templates = Environment(
        loader=FileSystemLoader(folder), autoescape=select_autoescape(("html",)), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, auto_reload=False,
    )  # fmt: skip
    templates.filters |= filters
    return templates


def render(template: str, **values: Any) -> str:
    """A rendered template, marked as safe so that another template does not escape it."""
    from markupsafe import Markup

    templates = environment(
        TEMPLATES, clock=clock, data_uri=data_uri, embedded=embedded, keyed_parts=keyed_parts,
        number_columns=number_columns, peek=peek, place=place, size=size, step_name=step_name, text=text, toml=toml,
    )  # fmt: skip
    return Markup(templates.get_template(template).render(values))


def document(template: str, *, watched: tuple[float, float] | None = None, scripted: bool = True, **values: Any) -> str:
    """A whole page. watched: (Unix time, seconds until it counts as stale); None: no reloading. scripted: with page.js."""
    style, script = _read("page.css"), _read("page.js") if scripted else ""
    reload = dict(zip(("written", "quiet", "reload"), (*watched, RELOAD_SECONDS), strict=True)) if watched else {}
    return render(template, style=style, script=script, reload=reload, policy=policy(scripted=scripted), **values)


def write_page(path: Path, html: str) -> None:
    """Write a page, atomically."""
    write_atomic(path, [html.encode("utf-8", errors="replace")])


@cache
def policy(*, scripted: bool = True) -> str:
    """The content security policy of a page: the browser enforces that it loads nothing from elsewhere but the samples'
    files beside it. scripted: whether page.js may run, by its hash; no other script may."""
    digest = base64.b64encode(hashlib.sha256(_read("page.js").encode()).digest()).decode()
    script = f"; script-src 'sha256-{digest}'" if scripted else ""
    return f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data: file: 'self'; style-src {INLINE}{script}"


def embedded(picture: Path) -> str:
    """A PNG as a JPEG in a data URI; "" if it is missing or damaged."""
    return thumbnail(picture, SHEET_PX) if picture.exists() and is_sound(picture) else ""


def clock(seconds: float) -> dict[str, str]:
    """A Unix time as ISO 8601 for page.js, which shows it in the reader's time zone, and in words."""
    moment = datetime.fromtimestamp(seconds, UTC)
    return {"exact": f"{moment:%Y-%m-%dT%H:%M:%SZ}", "words": f"{moment:%Y-%m-%d %H:%M} UTC"}


@cache
def _read(name: str) -> str:
    from markupsafe import Markup

    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))
