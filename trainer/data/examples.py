"""Photos at the sizes that their source asks for."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainer.base.account import counted
from trainer.base.errors import UserError
from trainer.base.types import ReferenceRule, Showing
from trainer.data import buckets
from trainer.data.buckets import Bucket, ReferenceLayout, bucket_of_shape, bucket_within, covers
from trainer.data.sources import Photo

KEPT = ReferenceRule()


@dataclass(frozen=True, slots=True)
class Example:
    """A photo at one size; or a reference of one, at the size at which it is shown.

    sample: the photo's, plus "@RESOLUTION" if its source has several; an occurrence refers to it. captions: the variants of
    its caption, at least one. small: whether the photo does not cover the bucket of its shape: it is enlarged, or trained in
    a smaller one. merged: whether it was moved to the bucket from one that could not fill a batch (short_batches.py).
    showing: of a reference. references: that the model is shown beside it, in order.
    """

    sample: str
    photo: Photo
    bucket: Bucket
    captions: tuple[str, ...]
    small: bool = False
    merged: bool = False
    showing: Showing = "cut"
    references: tuple["Example", ...] = ()

    @property
    def layout(self) -> ReferenceLayout:
        """What the photos of a batch have in common: their bucket, and the sizes of their references."""
        return (self.bucket, *(each.bucket for each in self.references))


def examples(
    photos: Sequence[Photo],
    *,
    step: int,
    enlarge: bool,
    seed: int,
    multiple: int = 16,
    beside: ReferenceRule = KEPT,
    max_aspect: float = 2.0,
) -> tuple[Example, ...]:
    """One example for each photo and resolution of its source.

    step: the sides of buckets are multiples of it, in pixels. multiple: the same for references. beside: how these are
    shown. enlarge: scale a photo up if it is smaller than the bucket of its shape. max_aspect: of buckets, the long side over
    the short one. seed: the run's, of the captions' variants. Raises UserError for a resolution without a bucket, for photos
    that are too small for every bucket, and for those of another shape than buckets where nothing may be cut, naming all.
    """
    made, problems, shapes, of_buckets = [], [], {}, {"step": step, "max_aspect": max_aspect}
    for photo in photos:
        if photo.source.crop == "none" and photo.aspect > max_aspect:
            shapes[_sized(photo)] = photo.aspect
        captions = photo.source.caption_rules.variants_of(photo.caption, seed=seed, sample=photo.sample)
        others = photo.beside.references
        references = tuple(_reference(each, multiple, beside, len(others)) for each in others)
        for resolution in photo.source.resolutions:
            usual = bucket_of_shape(*photo.size, resolution=resolution, **of_buckets)
            bucket = usual if enlarge else bucket_within(*photo.size, resolution=resolution, **of_buckets)
            if bucket is None:
                least = f"no side of a bucket is shorter than {max(step, -(-resolution // 4))} pixels"
                problems.append(f"{_sized(photo)}, too small for a bucket of resolution {resolution} ({least})")
                continue
            name = f"{photo.sample}@{resolution}" if len(photo.source.resolutions) > 1 else photo.sample
            small = not covers(*photo.size, usual)
            made.append(Example(name, photo, bucket, captions, small, references=references))
    if shapes:
        least = math.ceil(max(shapes.values()) * 10) / 10
        beyond = f"{counted(len(shapes), 'photo')} beyond data.max_aspect = {max_aspect:g}"
        remedy = f"set data.max_aspect = {least:g}, or crop or remove these"
        raise UserError(f"data.crop = 'none': {beyond}; {remedy}:\n" + "\n".join(shapes))
    if problems:
        count, listed = "1 photo is" if len(problems) == 1 else f"{len(problems)} photos are", "\n".join(problems)
        raise UserError(
            f"data.sources: {count} too small; remove them, lower the resolution, or set data.enlarge = true:\n{listed}"
        )
    return tuple(made)


def extremes(examples: Iterable[Example]) -> list[ReferenceLayout]:
    """The largest bucket with its references, and the smallest where that is another."""
    layouts = sorted({example.layout for example in examples}, key=lambda layout: (sum(map(math.prod, layout)), layout))
    return list(dict.fromkeys((layouts[-1], layouts[0]))) if layouts else []


def _sized(photo: Photo) -> str:
    return "  {}: {} x {} pixels".format(photo.image, *photo.size)


def _reference(photo: Photo, multiple: int, rule: ReferenceRule, count: int) -> Example:
    bucket = buckets.reference_size(*photo.size, rule, count, step=multiple)
    return Example(photo.sample, photo, bucket, ("",), showing=rule.showing(count))
