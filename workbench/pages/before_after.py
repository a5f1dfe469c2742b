"""before_after.png: a row for each sample: before training, after it, and the truth if it is known."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from trainer.base.files import write_atomic
from trainer.base.pictures import png
from trainer.base.run_layout import AVERAGE, Layout

SMALLEST, LARGEST = 160, 384  # px: limits of a picture's longer side
MARGIN, LINE = 12, 20  # px


def write_before_after(layout: Layout, samples: Sequence[tuple[Path, Path, Path | None]], step: int) -> Path | None:
    """Write the picture; returns its path, or None if there is nothing to show. samples: (before, after `step`, truth)."""
    if step == 0 or not samples:
        return None
    rows = []
    for sample in samples:
        pictures = [Image.open(file) if file else None for file in sample]
        averaged = " (average of the weights)" if sample[1].stem.endswith(AVERAGE) else ""
        rows.append((pictures[1].info["prompt"] + averaged, [picture and scaled(picture) for picture in pictures]))
    titles = ["before training", f"after step {step:,}", *(["the truth"] if any(truth for *_, truth in samples) else [])]
    write_atomic(layout.before_after, [png(table(titles, rows))])
    return layout.before_after


def scaled(picture):
    """The picture as RGB within SMALLEST and LARGEST: enlarged pixel by pixel by a whole number, or reduced."""
    side = max(picture.size)
    if side > LARGEST:
        size = tuple(max(1, round(length * LARGEST / side)) for length in picture.size)
        return picture.convert("RGB").resize(size, Image.Resampling.LANCZOS)
    factor = max(1, -(-SMALLEST // side))
    return picture.convert("RGB").resize(tuple(length * factor for length in picture.size), Image.Resampling.NEAREST)


def table(titles: Sequence[str], rows):
    """A picture of pictures in rows below titles. rows: (prompt, a picture or None for each title)."""
    from PIL import ImageDraw, ImageFont  # they load FreeType, which a plan has no use for

    font = ImageFont.load_default(14)
    width = max(picture.width for _, pictures in rows for picture in pictures if picture)
    heights = [max(picture.height for picture in pictures if picture) for _, pictures in rows]
    whole = (MARGIN + (width + MARGIN) * len(titles), MARGIN + LINE + sum(heights) + (LINE + MARGIN) * len(rows))
    page = Image.new("RGB", whole, "white")
    pen = ImageDraw.Draw(page)
    for column, title in enumerate(titles):
        pen.text((MARGIN + (width + MARGIN) * column, MARGIN), title, "black", font)
    top = MARGIN + LINE
    for (prompt, pictures), height in zip(rows, heights, strict=True):
        pen.text((MARGIN, top), shortened(prompt, font, whole[0] - 2 * MARGIN), "dimgray", font)
        for column, picture in enumerate(pictures[: len(titles)]):
            if picture:
                page.paste(picture, (MARGIN + (width + MARGIN) * column, top + LINE))
        top += LINE + height + MARGIN
    return page


def shortened(text: str, font, width: int) -> str:
    """The text cut to `width` pixels, with three dots at the end if it was cut."""
    text = " ".join(text.split())[:width]  # as measuring a very long text takes long
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}...") > width:
        text = text[:-1]
    return f"{text}..."
