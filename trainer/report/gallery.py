"""The samples as HTML: of each prompt the first and the newest side by side, the truth, and the way between on a strip."""

from __future__ import annotations

from html import escape
from urllib.parse import quote

from trainer.report.samples import Embedded, Row, Samples


def gallery(samples: Samples) -> str:
    note = f'<p class="soft">{left_out(samples)}</p>' if samples.unreadable else ""
    if not samples.rows:
        none = '<p class="soft">No sample is drawn yet. validation.prompts and validation.every_steps ask for some.</p>'
        return note or none
    present, gone = [], []
    newest = samples.steps[-1]
    for place, row in enumerate(samples.rows):
        (present if newest in row.files else gone).append(_card(row, place))
    slider = f'<div class="slider" data-steps="{" ".join(map(str, samples.steps))}"></div>' if len(samples.steps) > 2 else ""
    parts = [slider, f'<div class="cards">{"".join(present)}</div>']
    if gone:
        count = f"{len(gone)} prompt{'' if len(gone) == 1 else 's'} of earlier steps, not asked for any more"
        parts.append(f'<details class="gone"><summary>{count}</summary><div class="cards">{"".join(gone)}</div></details>')
    return "".join([*parts, note])


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


def _name(step: int, _: Embedded) -> str:
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
