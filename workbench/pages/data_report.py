"""A run's data as tables and pictures, for report.html and for `scripts/data.py report`."""

import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import accumulate
from typing import Any

from PIL import Image

from trainer.base.account import Entry, Heading, counted
from trainer.base.console import printable
from trainer.base.progress import QUIET, Phases
from trainer.data import buckets
from trainer.data.batches import sampler, short_batches
from trainer.data.captions import captions
from trainer.data.examples import Example
from trainer.data.images import views
from trainer.data.images.decode import decode
from trainer.data.images.views import View
from trainer.data.scan import strict_problem
from trainer.data.sources import Photo
from trainer.data.threads import in_threads
from trainer.plan.run_plan import DataPlan
from workbench.pages.rendering import document
from workbench.pages.tables import Sections, sorted_out
from workbench.sources import LAYOUTS
from workbench.summary.data import data_account

ROWS = 1000  # of a table of photos; the table of files left out has no limit
PICTURES = 240
PICTURE_PX, JPEG_QUALITY = 200, 80
VARIANTS = 8  # captions below a picture


def strict_problems(data: DataPlan, report: captions.CaptionReport) -> list[tuple[str, str]]:
    """(photo, reason) of every caption that data.strict_captions = true refuses."""
    problems = [
        (printable(photo.sample), reason)
        for photo in data.scanned.photos
        if (reason := strict_problem(photo.source, photo.caption if photo.caption_from else None, LAYOUTS))
    ]
    return problems + [
        (printable(sample), f"too long for {encoder}, which reads {report.tokens[encoder].limit} tokens")
        for encoder, samples in report.truncated.items()
        for sample in samples
    ]


def text(data: DataPlan, lines: Sequence[str], report: captions.CaptionReport, *, strict: bool) -> str:
    """The text: `lines`, the report on the captions, and with `strict` each caption that strict mode refuses."""
    parts = [*lines, str(report)]
    if strict and (problems := strict_problems(data, report)):
        parts.append(f"data.strict_captions = true would refuse these captions: {counted(len(problems), 'problem')}")
        parts += [f"  {sample}: {reason}" for sample, reason in problems[:ROWS]] + [f"  {line}" for line in _more(problems)]
    return "\n".join(parts)


def sections(data: DataPlan, lines: Sequence[str], report: captions.CaptionReport, phases: Phases = QUIET) -> Sections:
    """The sections of the page. lines: from `data_lines`. report: of the same data. Reads the pictured photos again."""
    photos = {photo.sample: photo for photo in data.scanned.photos}
    account = data_account(data)
    notes, warnings = ([e for e in account.entries(kind) if e.names] for kind in (Heading.NOTE, Heading.WARNING))
    held_out = dict.fromkeys(example.photo.sample for example in data.held_out)
    parts: Sections = {
        "Damaged": {
            "columns": ("file and reason",),
            "rows": [(problem,) for problem in data.scanned.damaged],
            "notes": [
                "A run is refused until these are repaired or removed. The rest of this page is about the other photos."
            ],
        },
        "In short": {"text": "\n".join([*lines, str(report)])},
        "Buckets": _buckets(data),
        "Tokens of captions": _table(
            ("text encoder", "reads at most", "longest caption", "photos whose caption is cut"),
            (
                (encoder, counts.limit, max(counts.counts.values(), default=0), len(report.truncated[encoder]))
                for encoder, counts in report.tokens.items()
            ),
        ),
        "What strict mode would refuse": _table(("photo", "why"), strict_problems(data, report)),
        "Near duplicates": _table(
            ("group", "photo", "pixels", "bytes", "used"),
            _alike_rows(data.alike, set(held_out)),
            notes=["Duplicates count several times in the training. Keep one photo of each group, unless you want that."],
        ),
        "Smaller than the bucket of their shape": _table(("photo", "pixels", "trained at", "enlarged"), _small_rows(data)),
        "Held out": _table(("never trained on", "pixels"), ((printable(name), _by(photos[name].size)) for name in held_out)),
        "Used, and perhaps not intended": _table(("what", "why"), _by_name(warnings)),
        "Notes": _table(("photo", "note"), _by_name(notes)),
        "Left out": {
            "columns": ("file", "why"),
            "rows": [(printable(file), reason) for file, reason in data.scanned.left_out],
            "folded": True,
        },
        **_pictures(data, report, phases),
    }
    return {title: section for title, section in parts.items() if any(section.get(k) for k in ("text", "pictures", "rows"))}


def html(*, name: str, data: Sections) -> str:
    """The page of a run's data alone: photos, then sections that need a look, then counts and the console's text."""
    pictured, care, plain = sorted_out(data)
    return document("data_report.html", name=name, data=pictured | care | plain, scripted=False)


def _by_name(entries: Sequence[Entry]) -> Iterator[tuple[str, str]]:
    return ((printable(name), entry.reason) for entry in entries for name in entry.names)


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]], notes: Sequence[str] = ()) -> dict[str, Any]:
    rows = list(rows)
    return {"columns": columns, "rows": rows[:ROWS], "notes": [*notes, *_more(rows)], "folded": len(rows) > 20}


def _more(rows: Sequence[Any]) -> list[str]:
    return [f"and {len(rows) - ROWS:,} more"] if len(rows) > ROWS else []


def _buckets(data: DataPlan) -> dict[str, Any]:
    size, merges = data.table.batch_size, data.table.short_batches == "merge"
    counts, short = short_batches.appearances(data.examples), short_batches.short(data.examples, batch_size=size)
    photos = Counter(example.layout for example in data.examples)
    rows = [
        (buckets.named(layout), photos[layout], count, -(-count // size), size if merges else short.get(layout, size))
        for layout, count in sorted(counts.items())
    ]
    notes = [f"{sampler.batches_per_epoch(data.examples, batch_size=size):,} batches an epoch, of {size} photos."]
    if short and not merges:
        smaller, factor = short_batches.would_fill(data.examples, batch_size=size)
        remedy = f"data.batch_size = {smaller}, by {factor} x the repeats, or by data.short_batches = 'merge'"
        notes.append(f"Batches that are not full: {len(short)}. They are filled by {remedy}.")
    return {
        "columns": ("width x height", "photos", "images an epoch", "batches", "photos in the last batch"),
        "rows": rows,
        "notes": notes,
    }


def _alike_rows(groups: Sequence[Sequence[Photo]], held_out: set[str]) -> Iterator[tuple[Any, ...]]:
    for number, group in enumerate(groups, 1):
        copies = Counter(photo.sha256 for photo in group)
        for photo in group:
            content = "the same" if copies[photo.sha256] > 1 else "other"
            use = "held out" if photo.sample in held_out else "trained on"
            yield number, printable(photo.sample), _by(photo.size), content, use


def _small_rows(data: DataPlan) -> Iterator[tuple[str, str, str, str]]:
    for example in data.examples:
        if example.small:
            (width, height), (across, down) = example.bucket, example.photo.size
            scale = max(width / across, height / down)
            enlarged = f"{scale:.2f} x" if scale > 1 else "no"
            yield printable(example.sample), _by((across, down)), _by(example.bucket), enlarged


def _pictures(data: DataPlan, report: captions.CaptionReport, phases: Phases) -> Sections:
    """The sections of trained and of held-out photos: all of them, or the first of each bucket if more than PICTURES."""
    members: dict[tuple[bool, tuple[int, int]], list[Example]] = {}
    for examples, held_out in ((data.examples, False), (data.held_out, True)):
        for example in examples:
            members.setdefault((held_out, example.bucket), []).append(example)
    share = _share([len(group) for group in members.values()])
    pairs = [(example, held_out) for (held_out, _), group in sorted(members.items()) for example in group[:share]][:PICTURES]
    pictures: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    with (
        phases("drawing photos as they are cropped", len(pairs), "photo") as phase,
        closing(in_threads(partial(_picture, limits=report.tokens), [example for example, _ in pairs])) as results,
    ):
        for (_, held_out), picture in zip(pairs, results, strict=True):
            pictures[held_out].append(picture)
            phase.advance()
    names = "; ".join(f'{number}/ is "{printable(source.path)}"' for number, source in enumerate(data.table.sources))
    notes = [f"A name begins with the number of its source: {names}."]
    if rest := len(data.examples) + len(data.held_out) - len(pairs):
        notes.append(f"The first photos of each bucket are pictured, {len(pairs):,} in all; {rest:,} more are not pictured.")
    return {
        "As they are cropped": {"pictures": pictures[False], "notes": notes},
        "Held out, as they would be cropped": {
            "pictures": pictures[True],
            "notes": ["data.held_out keeps these out of the training. No step ever sees them."],
        },
    }


def _share(sizes: Sequence[int]) -> int:
    """How many photos of each group fit into PICTURES, at least one. Groups with fewer leave room for others."""
    return max(1, max(share for share in range(PICTURES + 1) if sum(min(share, size) for size in sizes) <= PICTURES))


def _picture(example: Example, *, limits: Mapping[str, captions.Tokens]) -> dict[str, Any]:
    """A picture of a section: a small JPEG of the references and the photo, in a row; None if one can no longer be read."""
    photo, jpeg = example.photo, None
    try:
        images = [_small(*pair) for pair in (*views.references(example, View()), (example, views.plain(example)))]
        buffer = io.BytesIO()
        _in_a_row(images).save(buffer, "JPEG", quality=JPEG_QUALITY)
        jpeg = buffer.getvalue()
    except (OSError, ValueError):
        pass  # it was readable when the run began; the page says that it no longer is
    variants = list(dict.fromkeys(example.captions))
    lines = []
    for text in variants[:VARIANTS]:
        counts = ", ".join(f"{encoder} {tokens.counts[text]} of {tokens.limit}" for encoder, tokens in limits.items())
        lines += [text or "(no caption)", *([f"tokens: {counts}"] if counts else [])]
    if len(variants) > VARIANTS:
        lines.append(f"and {len(variants) - VARIANTS} more variants")
    moved = ", the bucket of others (data.short_batches)" if example.merged else ""
    sizes = f"{_by(photo.size)}, scaled and cropped to {buckets.named(example.layout)}{moved}"
    origin = f"caption from {photo.caption_from}" if photo.caption_from else "no caption was found"
    details = [sizes, origin, *photo.notes]
    return {"jpeg": jpeg, "title": printable(example.sample), "lines": lines, "details": details}


def _small(example: Example, view: View) -> Image.Image:
    image = view.show(decode(example.photo.image.read(), background=example.photo.source.background).image, example)
    image.thumbnail((PICTURE_PX, PICTURE_PX))
    return image


def _in_a_row(images: Sequence[Image.Image]) -> Image.Image:
    lefts = [*accumulate((image.width for image in images), initial=0)]
    row = Image.new("RGB", (lefts[-1], max(image.height for image in images)), "white")
    for left, image in zip(lefts, images, strict=False):
        row.paste(image, (left, 0))
    return row


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"
