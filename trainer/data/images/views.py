"""Views of a photo: one of its variants (crop and colours), mirrored or not, and the view's mask. There are finitely many, so
that each can be encoded once. The view of an appearance is drawn by (seed, epoch, sample, repeat), a variant by (seed,
sample, its number)."""

from dataclasses import astuple, dataclass, replace

import numpy as np
import torch
from PIL import Image, ImageEnhance

from trainer.base import draws
from trainer.base.types import Occurrence
from trainer.data import buckets
from trainer.data.buckets import CENTRE, WHOLE, Crop, Placement
from trainer.data.examples import Example
from trainer.data.images.decode import decode, decode_mask
from trainer.data.memo import read_unchanged

FLIP_PROBABILITY = 0.5
ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


@dataclass(frozen=True, slots=True)
class View:
    """The draws of one appearance of a photo. flip: mirrored, with its crop. crop: for `buckets.place`. colours: a factor for
    each of ENHANCERS, or empty. reference: whether it is a reference, which is not scaled to cover its bucket."""

    flip: bool = False
    crop: Crop = CENTRE
    colours: tuple[float, ...] = ()
    reference: bool = False

    def place(self, example: Example) -> Placement:
        """The place of the photo in its bucket."""
        return buckets.place(*example.photo.size, example.bucket, flip=self.flip, crop=self.crop)

    def show(self, image: Image.Image, example: Example) -> Image.Image:
        """The photo as it is trained, or the reference as it is shown."""
        if self.reference:
            fit = buckets.framed if example.showing == "framed" else buckets.show_reference
            return fit(image, example.bucket, flip=self.flip)
        fitted = buckets.fit(image, example.bucket, flip=self.flip, crop=self.crop)
        for enhancer, factor in zip(ENHANCERS, self.colours, strict=False):
            fitted = enhancer(fitted).enhance(factor)
        return fitted


def plain(example: Example) -> View:
    """The photo as it is, with its source's crop."""
    return View(crop=WHOLE if example.photo.source.crop == "none" else CENTRE)


def every(seed: int, example: Example) -> list[View]:
    """All views that may be drawn."""
    source = example.photo.source
    upright = [_variant(seed, example, number) for number in range(source.image_variants if source.jitters else 1)]
    return [replace(view, flip=flip) for view in upright for flip in ((False, True) if source.flip else (False,))]


def draw(seed: int, occurrence: Occurrence, example: Example) -> View:
    """The view of this appearance, one of `every`."""
    source, key = example.photo.source, astuple(occurrence)
    number = int(draws.uniform(seed, "image_variant", *key) * source.image_variants) if source.jitters else 0
    flip = source.flip and draws.uniform(seed, "flip", *key) < FLIP_PROBABILITY
    return replace(_variant(seed, example, number), flip=flip)


def references(example: Example, view: View) -> list[tuple[Example, View]]:
    """The references that are shown beside a view of the photo, with their views, mirrored if the photo is."""
    whole, unscaled = View(flip=view.flip, crop=WHOLE), View(flip=view.flip, reference=True)
    return [(reference, whole if reference.showing == "stretched" else unscaled) for reference in example.references]


def _variant(seed: int, example: Example, number: int) -> View:
    """Number 0 is the photo as it is. The others are drawn uniformly from the source's range."""
    source = example.photo.source
    if number == 0:
        return plain(example)

    def within(jitter: float, purpose: str, axis: int) -> float:
        return jitter * (2 * draws.uniform(seed, purpose, example.sample, number, axis) - 1)

    crop, colours = plain(example).crop, ()
    if source.crop_jitter:
        zoom, right, down = (within(source.crop_jitter, "crop_jitter", axis) for axis in range(3))
        crop = (1 + abs(zoom), right, down)
    if source.colour_jitter:
        colours = tuple(1 + within(source.colour_jitter, "colour_jitter", axis) for axis in range(len(ENHANCERS)))
    return View(crop=crop, colours=colours)


def mask_on_latents(example: Example, view: View, *, side: int) -> torch.Tensor:
    """fp32 [h, w] in 0..1: the mean of the mask over each latent, cropped and mirrored as the photo is. White has weight 1,
    black has `unmasked_weight`. side: pixels to a side of one latent. Raises OSError, and UserError if the mask changed after
    the scan."""
    photo, (width, height) = example.photo, example.bucket
    assert photo.mask is not None
    data = read_unchanged(photo.mask.place, photo.mask.sha256)
    mask = decode(data).alpha if photo.source.masks == "alpha" else decode_mask(data)
    assert mask is not None and mask.size == photo.size
    crop = buckets.place(*photo.size, example.bucket, crop=view.crop)
    averaged = area_average(mask, buckets.kept_box(crop), (height // side, width // side))
    return (averaged.flip(1) if view.flip else averaged).contiguous()


def area_average(mask: Image.Image, box: tuple[float, float, float, float], grid: tuple[int, int]) -> torch.Tensor:
    """fp32 (rows, columns) = grid: the mean of each cell of the box (left, top, right, bottom), a pixel weighted by the part
    of it that lies in the cell."""
    left, top, right, bottom = box
    rows = _averages(np.asarray(mask), top, bottom, grid[0])
    cells = _averages(rows.T, left, right, grid[1]).T
    return torch.from_numpy(np.ascontiguousarray(cells / 255.0)).to(torch.float32)


def _averages(lines: np.ndarray, start: float, end: float, count: int) -> np.ndarray:
    """fp64 [count, ...]: the means of `count` equal parts of the lines between start and end."""
    parts = []
    edges = start + (end - start) * np.arange(count + 1) / count
    for a, b in zip(edges[:-1], edges[1:], strict=True):
        first, last = int(np.floor(a)), min(int(np.ceil(b)), len(lines))
        pixels = np.arange(first, last)
        share = np.minimum(pixels + 1, b) - np.maximum(pixels, a)
        # Divided by their own sum, so that the mean of white lines is white to the bit.
        parts.append((share[:, None] * lines[first:last].astype(np.float64)).sum(0) / share.sum())
    return np.stack(parts)
