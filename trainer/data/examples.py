"""Photos at the sizes of their source."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainer.base.account import counted
from trainer.base.errors import UserError
from trainer.base.types import ReferenceRule, Showing
from trainer.data import buckets
from trainer.data.buckets import Bucket, ReferenceLayout, bucket_of_shape, bucket_within, covers
from trainer.data.sources import Photo

DEFAULT_RULE = ReferenceRule()


@dataclass(frozen=True, slots=True)
class Example:
    """A photo at one size; or a reference of one, at the size at which it is shown.

    sample: the photo's, plus "@RESOLUTION" if its source has several; an occurrence refers to it. captions: the variants of
    its caption, at least one. small: whether the photo does not cover the bucket of its shape: it is enlarged, or trained in
    a smaller one. merged: whether it was moved to its bucket from one that could not fill a batch (short_batches.py).
    showing: how a reference is fitted to its bucket. references: of the photo, in order.
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
        """Its bucket, and the sizes of its references: equal for all photos of a batch."""
        return (self.bucket, *(reference.bucket for reference in self.references))


def examples(
    photos: Sequence[Photo],
    *,
    step: int,
    enlarge: bool,
    seed: int,
    multiple: int = 16,
    reference_rule: ReferenceRule = DEFAULT_RULE,
    max_aspect: float = 2.0,
) -> tuple[Example, ...]:
    """One example for each photo and resolution of its source.

    step: the sides of buckets are multiples of it, in pixels. multiple: the same for references. reference_rule: how
    references are shown. enlarge: scale a photo up if it is smaller than the bucket of its shape. max_aspect: the long side
    of a bucket over the short one, at most. seed: the run's, for the captions' variants. Raises UserError for a resolution
    without a bucket, for photos that are too small for every bucket, and for photos beyond `max_aspect` if nothing may be
    cut, naming all.
    """
    result, problems, shapes, of_buckets = [], [], {}, {"step": step, "max_aspect": max_aspect}
    for photo in photos:
        if photo.source.crop == "none" and photo.aspect > max_aspect:
            shapes[_size_line(photo)] = photo.aspect
        captions = photo.source.caption_rules.variants_of(photo.caption, seed=seed, sample=photo.sample)
        count = len(photo.extras.references)
        references = tuple(_reference(each, multiple, reference_rule, count) for each in photo.extras.references)
        for resolution in photo.source.resolutions:
            usual = bucket_of_shape(*photo.size, resolution=resolution, **of_buckets)
            bucket = usual if enlarge else bucket_within(*photo.size, resolution=resolution, **of_buckets)
            if bucket is None:
                least = f"no side of a bucket is shorter than {max(step, -(-resolution // 4))} pixels"
                problems.append(f"{_size_line(photo)}, too small for a bucket of resolution {resolution} ({least})")
                continue
            name = f"{photo.sample}@{resolution}" if len(photo.source.resolutions) > 1 else photo.sample
            small = not covers(*photo.size, usual)
            result.append(Example(name, photo, bucket, captions, small, references=references))
    if shapes:
        aspect = math.ceil(max(shapes.values()) * 10) / 10
        beyond = f"{counted(len(shapes), 'photo')} beyond data.max_aspect = {max_aspect:g}"
        remedy = f"set data.max_aspect = {aspect:g}, or crop or remove these"
        raise UserError(f"data.crop = 'none': {beyond}; {remedy}:\n" + "\n".join(shapes))
    if problems:
        subject, listed = "1 photo is" if len(problems) == 1 else f"{len(problems)} photos are", "\n".join(problems)
        raise UserError(
            f"data.sources: {subject} too small; remove them, lower the resolution, or set data.enlarge = true:\n{listed}"
        )
    return tuple(result)


def extremes(examples: Iterable[Example]) -> list[ReferenceLayout]:
    """The largest bucket with its references, and the smallest if it differs."""
    layouts = sorted({example.layout for example in examples}, key=lambda layout: (sum(map(math.prod, layout)), layout))
    return list(dict.fromkeys((layouts[-1], layouts[0]))) if layouts else []


def _size_line(photo: Photo) -> str:
    return "  {}: {} x {} pixels".format(photo.image, *photo.size)


def _reference(photo: Photo, multiple: int, rule: ReferenceRule, count: int) -> Example:
    bucket = buckets.reference_size(*photo.size, rule, count, step=multiple)
    return Example(photo.sample, photo, bucket, ("",), showing=rule.showing(count))
