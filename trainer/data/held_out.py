"""Photos that are kept out of the training. The loss over them is not built yet."""

from collections.abc import Sequence

from trainer.data.sources import Photo
from trainer.errors import UserError


def split(photos: Sequence[Photo], held_out: int | float) -> tuple[tuple[Photo, ...], tuple[Photo, ...]]:
    """(those to train on, those held out), each in the order given.

    held_out: a count of images, or a share of them below 1; 0: none. The bytes of an image decide: its SHA-256 is read as a
    number between 0 and 1. With a share, the images below it are held out, whatever other photos there are. With a count,
    the images with the lowest numbers are: an added photo takes the place of at most one other. Identical images are on the
    same side. Regularisation images are all trained on, and so is a subject's image that is identical to one of them.
    Raises UserError if no image may be held out, if the share selects none, or if none is left to train on.
    """
    if not held_out:
        return tuple(photos), ()
    kept = {photo.sha256 for photo in photos if photo.source.regularisation}
    images = sorted({photo.sha256 for photo in photos} - kept)
    if isinstance(held_out, int):
        chosen = set(images[:held_out])
    else:
        chosen = {sha256 for sha256 in images if int(sha256[:16], 16) < held_out * 2**64}
    if not images:
        raise UserError(
            f"data.held_out = {held_out} has nothing to hold out: every image is also in a source with "
            "regularisation = true, whose photos are all trained on; remove the subject from it, or set data.held_out = 0"
        )
    if not chosen:
        raise UserError(
            f"data.held_out = {held_out} holds out none of the {len(images)} images (their bytes decide); give a count, as "
            "data.held_out = 1, or a larger share"
        )
    if len(chosen) == len(images):
        raise UserError(f"data.held_out = {held_out} leaves none of the {len(images)} images to train on; lower it")
    return (
        tuple(photo for photo in photos if photo.sha256 not in chosen),
        tuple(photo for photo in photos if photo.sha256 in chosen),
    )
