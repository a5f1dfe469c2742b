"""Held-out photos, and the photos whose loss is measured at fixed draws (trainer/engine/held_out_loss.py)."""

from collections.abc import Sequence
from dataclasses import replace

from trainer.base.account import counted
from trainer.base.errors import UserError
from trainer.data.examples import Example
from trainer.data.sources import Photo

# The photos whose loss is measured: at most MOST of each kind; the count of trained ones if none is held out.
MOST, ALONE = 32, 8


def split(photos: Sequence[Photo], held_out: int | float) -> tuple[tuple[Photo, ...], tuple[Photo, ...]]:
    """(photos to train on, held-out photos), each in the order of `photos`.

    held_out: a count of images, or a share of them below 1; 0: the photos of held-out sources. The bytes of an image decide:
    its SHA-256 is read as a number between 0 and 1. With a share, the images below it are held out, whatever other photos
    there are; with a count, those with the lowest numbers. Regularisation images are all trained on, and so is a subject's
    image that is identical to one of them. Raises UserError if no image may be held out, if the share selects none, if none
    is left to train on, or if a photo of a held-out source is also among the others.
    """
    if not held_out:
        return _split_by_source(photos)
    prior = {photo.sha256 for photo in photos if photo.source.regularisation}
    images = sorted({photo.sha256 for photo in photos} - prior)
    if isinstance(held_out, int):
        selected = set(images[:held_out])
    else:
        selected = {sha256 for sha256 in images if int(sha256[:16], 16) < held_out * 2**64}
    if not images:
        raise UserError(
            f"data.held_out = {held_out} has nothing to hold out: every image is also in a source with "
            "regularisation = true, whose photos are all trained on; remove the subject from it, or set data.held_out = 0"
        )
    if not selected:
        raise UserError(
            f"data.held_out = {held_out} holds out none of the {len(images)} images (their bytes decide); give a count, as "
            "data.held_out = 1, or a larger share"
        )
    if len(selected) == len(images):
        raise UserError(f"data.held_out = {held_out} leaves none of the {len(images)} images to train on; lower it")
    return (
        tuple(photo for photo in photos if photo.sha256 not in selected),
        tuple(photo for photo in photos if photo.sha256 in selected),
    )


def _split_by_source(photos: Sequence[Photo]) -> tuple[tuple[Photo, ...], tuple[Photo, ...]]:
    trained, held_out = (tuple(photo for photo in photos if photo.source.is_held_out is side) for side in (False, True))
    images = {photo.sha256: photo.image for photo in held_out}
    copies = [f"  {photo.image} = {images[photo.sha256]}" for photo in trained if photo.sha256 in images]
    if copies:
        count = counted(len(copies), "photo")
        raise UserError(
            f"data.sources: {count} both trained and held out, byte for byte; remove one of each:\n" + "\n".join(copies)
        )
    return trained, held_out


def measured_examples(trained: Sequence[Example], held_out: Sequence[Example]) -> dict[str, tuple[Example, ...]]:
    """{"held_out": at most MOST of them, "trained": as many of the others}, still; with none held out, ALONE trained ones.
    The bytes of the images decide which. Regularisation images are not among them: none is held out."""

    def lowest(examples: Sequence[Example], count: int) -> tuple[Example, ...]:
        """The examples whose images have the lowest SHA-256, still."""
        return tuple(map(still, sorted(examples, key=lambda example: (example.photo.sha256, example.sample))[:count]))

    subject = [example for example in trained if not example.photo.source.regularisation]
    measured = lowest(held_out, MOST)
    return ({"held_out": measured} if measured else {}) | {"trained": lowest(subject, len(measured) or ALONE)}


def still(example: Example) -> Example:
    """The example in one fixed form: the photo as it is (not mirrored, no jitter), with the first of its captions."""
    source = replace(example.photo.source, flip=False, crop_jitter=0.0, colour_jitter=0.0, caption_dropout=0.0)
    return replace(example, photo=replace(example.photo, source=source), captions=example.captions[:1])
