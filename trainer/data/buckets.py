"""Aspect-ratio buckets: which size a photo is trained at, and what of it is kept.

Sizes given to PIL are (width, height); what the model is told (Placement) is (height, width), as SDXL defines it.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from PIL import Image

from trainer.errors import UserError

Bucket = tuple[int, int]  # (width, height) in pixels

RESIZE_FILTER = Image.Resampling.LANCZOS


@dataclass(frozen=True)
class Placement:
    """How a photo lies in its bucket, as SDXL's size conditioning wants it.

    original_size: (height, width) of the photo in the file, oriented.
    crop_top_left: (top, left) of the bucket within the photo after resizing, so in pixels of the resized photo.
    target_size: (height, width) of the bucket.
    resized_size: (height, width) of the whole photo after resizing; no model is told this.
    """

    original_size: tuple[int, int]
    crop_top_left: tuple[int, int]
    target_size: tuple[int, int]
    resized_size: tuple[int, int]

    @property
    def upscaled(self) -> bool:
        """Whether the photo is smaller than its bucket, so that training sees invented detail."""
        return self.resized_size[0] > self.original_size[0] or self.resized_size[1] > self.original_size[1]


def bucket_step(resolution: int) -> int:
    """The default grid of bucket sides: a quarter of the resolution, a multiple of 16, between 16 and 64 pixels."""
    return min(64, max(16, resolution // 4 // 16 * 16))


@lru_cache
def _landscape_buckets(resolution: int, step: int, max_aspect: float) -> tuple[Bucket, ...]:
    """Buckets with width >= height, within the aspect limit, that no other such bucket contains."""
    fitting = [
        (width, height)
        for height in range(step, resolution + 1, step)
        if (width := min(resolution**2 // height, math.floor(height * max_aspect)) // step * step) >= height
    ]
    # Each is the widest of its height, so it is contained in another exactly if a taller one is as wide.
    return tuple((w, h) for w, h in fitting if not any(h2 > h and w2 >= w for w2, h2 in fitting))


def choose_bucket(width: int, height: int, *, resolution: int, step: int, max_aspect: float = 2.0) -> Bucket:
    """The (width, height) that a photo of this size is trained at.

    Candidates: sides that are multiples of `step`, area at most resolution**2 and not enlargeable, long side at most
    `max_aspect` times the short one. Of these the one nearest in log aspect ratio; a portrait photo gets the transposed
    bucket of the same photo lying down. Raises UserError if no bucket fits into the resolution.
    """
    buckets = _landscape_buckets(resolution, step, float(max_aspect))
    if not buckets:
        raise UserError(
            f"data.resolution = {resolution} has no bucket: it must be at least the bucket step of {step} pixels "
            f"(and the largest aspect ratio, {max_aspect}, at least 1)"
        )
    aspect = math.log(max(width, height) / min(width, height))
    long, short = min(buckets, key=lambda bucket: abs(math.log(bucket[0] / bucket[1]) - aspect))
    return (long, short) if width >= height else (short, long)


def place(width: int, height: int, bucket: Bucket, *, flip: bool = False) -> Placement:
    """Where a photo of width x height lies in the bucket: scaled just to cover it, cropped at the centre.

    `flip` mirrors the photo before all else, which moves an odd pixel of the crop to the other side.
    """
    target_width, target_height = bucket
    # Integer arithmetic, rounding half up: the covering side is met exactly.
    if width * target_height >= target_width * height:
        resized_width = (2 * width * target_height + height) // (2 * height)
        resized_height = target_height
    else:
        resized_width = target_width
        resized_height = (2 * height * target_width + width) // (2 * width)
    top, left = (resized_height - target_height) // 2, (resized_width - target_width) // 2
    if flip:
        left = resized_width - target_width - left
    return Placement((height, width), (top, left), (target_height, target_width), (resized_height, resized_width))


def fit(image: Image.Image, bucket: Bucket, *, flip: bool = False) -> tuple[Image.Image, Placement]:
    """The photo resized to cover the bucket (Lanczos) and cropped to it at the centre; mirrored if `flip`."""
    kept = place(image.width, image.height, bucket)
    (top, left), (height, width) = kept.crop_top_left, kept.target_size
    scale_y, scale_x = image.height / kept.resized_size[0], image.width / kept.resized_size[1]
    # Resizing only what is kept equals cropping afterwards and bounds the memory for a very narrow photo.
    right, bottom = min((left + width) * scale_x, image.width), min((top + height) * scale_y, image.height)
    fitted = image.resize((width, height), RESIZE_FILTER, box=(left * scale_x, top * scale_y, right, bottom))
    if flip:
        fitted = fitted.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return fitted, place(image.width, image.height, bucket, flip=flip)


def to_pixels(image: Image.Image) -> torch.Tensor:
    """An RGB image as fp32 [3, H, W] in [-1, 1]."""
    bytes_HWC = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)
    return bytes_HWC.permute(2, 0, 1).to(torch.float32).div(127.5).sub(1.0).contiguous()
