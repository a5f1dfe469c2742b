"""The samples as HTML: of each prompt the first and the newest side by side, the truth, and the way between on a strip."""

from __future__ import annotations

import base64
from functools import lru_cache
from html import escape
from urllib.parse import quote

from trainer.base.pictures import data_uri, reduced
from trainer.report.samples import Embedded, Row, Samples

BESIDE, PEEK_PX = 3, 192  # pictures beside the verdict, and their longer side


def gallery(samples: Samples) -> str:
    note = f'<p class="soft">{left_out(samples)}</p>' if samples.unreadable else ""
    if not samples.rows:
        none = '<p class="soft">No sample is drawn yet. validation.prompts and validation.every_steps ask for some.</p>'
        return note or none
    present, gone = [], []
    last = samples.steps[-1]
    for place, row in enumerate(samples.rows):
        (present if last in row.files else gone).append(_card(row, place))
    slider = f'<div class="slider" data-steps="{" ".join(map(str, samples.steps))}"></div>' if len(samples.steps) > 2 else ""
    parts = [slider, f'<div class="cards">{"".join(present)}</div>']
    if gone:
        count = f"{len(gone)} prompt{'' if len(gone) == 1 else 's'} of earlier steps, not asked for any more"
        parts.append(f'<details class="gone"><summary>{count}</summary><div class="cards">{"".join(gone)}</div></details>')
    return "".join([*parts, note])


def newest(samples: Samples) -> str:
    """The newest picture of the first few prompts, small, to stand beside the verdict."""
    shown = []
    for row in [row for row in samples.rows if samples.steps[-1] in row.images][:BESIDE]:
        step, image = samples.steps[-1], row.images[samples.steps[-1]]
        small, name = ' class="small"' if image.small else "", escape(f"{row.prompt}, {_name(step, image)}")
        picture = f'<img src="{_peek(image.picture.uri)}" alt="{name}" title="{name}"{small}>'
        shown.append(f'<figure><a href="#samples">{picture}</a></figure>')
    said = _name(samples.steps[-1], None) if shown else ""
    return f'<div class="beside"><div>{"".join(shown)}</div><p class="soft">Samples, {said}</p></div>' if shown else ""


@lru_cache(maxsize=4 * BESIDE)
def _peek(uri: str) -> str:
    return data_uri(reduced(base64.b64decode(uri.partition(",")[2]), PEEK_PX), "jpeg")


def left_out(samples: Samples) -> str:
    return f"{samples.unreadable} image(s) of samples/ could not be read and are left out."


def _card(row: Row, place: int) -> str:
    """Every image stands in the page once: what lies between the first and the newest on the strip alone."""
    (first, *between), last = [*row.images.items()][:-1] or [None], [*row.images.items()][-1]
    sides = [shot(row, _name(*pair), pair[1], pair[0]) for pair in (first, last) if pair is not None]
    if row.truth:
        sides.append(shot(row, "the truth", row.truth, None))
    strip = "".join(shot(row, _name(*pair), pair[1], pair[0]) for pair in between)
    left = len(row.files) - len(row.images)
    beside = f'<p class="soft">{left:,} more are in samples/, and not in this page.</p>' if left else ""
    return (
        f'<article class="card" data-row="{place}"><h3>{escape(row.prompt)}</h3>'
        f'<p class="soft">{escape(row.detail)}</p><div class="sides n{len(sides)}">{"".join(sides)}</div>'
        + (f'<div class="strip" tabindex="0" aria-label="steps between">{strip}</div>' if strip else "")
        + f"{beside}</article>"
    )


def _name(step: int, _: object) -> str:
    return f"step {step:,}" if step else "before training"


def shot(row: Row, name: str, image: Embedded, step: int | None, base: str = "") -> str:
    """The link is to the full file beside the page, for as long as the two stay together. base: what leads there, encoded."""
    link, title = escape(base + quote(image.link)), escape(f"{row.prompt}, {name}")
    reduced = ' data-reduced=""' if image.picture.side is not None else ""
    small = ' class="small"' if image.small else ""
    at = "" if step is None else f' data-step="{step}"'
    return (
        f'<figure class="shot"{at}><a href="{link}"{reduced}>'
        f'<img src="{image.picture.uri}" alt="{title}"{small} decoding="async"></a>'
        f"<figcaption>{escape(name)}</figcaption></figure>"
    )
