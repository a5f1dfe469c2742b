"""Views of a photo: one of its variants (crop and colours), mirrored or not. There are finitely many, so that each can be
encoded once. The view of an appearance is drawn by (seed, epoch, sample, repeat), a variant by (seed, sample, its number)."""

from dataclasses import astuple, dataclass, replace

from PIL import Image, ImageEnhance

from trainer.base import draws
from trainer.base.types import Occurrence
from trainer.data import buckets
from trainer.data.buckets import CENTRE, WHOLE, Crop, Placement
from trainer.data.examples import Example

FLIP_PROBABILITY = 0.5
ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


@dataclass(frozen=True, slots=True)
class View:
    """What is drawn for one appearance of a photo. flip: mirrored, with its crop. crop: as `buckets.place` takes it.
    colours: a factor for each of ENHANCERS, or empty. reference: whether it is a reference, which is not scaled to cover its
    bucket."""

    flip: bool = False
    crop: Crop = CENTRE
    colours: tuple[float, ...] = ()
    reference: bool = False

    def place(self, example: Example) -> Placement:
        """The place of the photo in its bucket."""
        return buckets.place(*example.photo.size, example.bucket, flip=self.flip, crop=self.crop)

    def show(self, image: Image.Image, example: Example) -> Image.Image:
        """The photo as it is trained, the reference as it is shown."""
        if self.reference:
            show = buckets.framed if example.showing == "framed" else buckets.show_reference
            return show(image, example.bucket, flip=self.flip)
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


def drawn(seed: int, occurrence: Occurrence, example: Example) -> View:
    """The view of this appearance, one of `every`."""
    source, key = example.photo.source, astuple(occurrence)
    number = int(draws.uniform(seed, "image_variant", *key) * source.image_variants) if source.jitters else 0
    flip = source.flip and draws.uniform(seed, "flip", *key) < FLIP_PROBABILITY
    return replace(_variant(seed, example, number), flip=flip)


def beside(example: Example, view: View) -> list[tuple[Example, View]]:
    """The references as they are shown beside that view of the photo, mirrored where it is."""
    whole, unscaled = View(flip=view.flip, crop=WHOLE), View(flip=view.flip, reference=True)
    return [(each, whole if each.showing == "stretched" else unscaled) for each in example.references]


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
