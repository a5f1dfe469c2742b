"""Aspect-ratio buckets: the size at which a photo is trained, and its crop.

Sizes given to PIL are (width, height); a Placement holds (height, width), as SDXL's size conditioning does.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch
from PIL import Image, ImageOps

from trainer.base.errors import UserError
from trainer.base.types import ReferenceRule

Bucket = tuple[int, int]  # (width, height) in pixels
ReferenceLayout = tuple[Bucket, ...]  # a photo's bucket, and those of its references

# (zoom, right, down): the factor by which a photo is scaled beyond just covering the bucket, and how far the crop lies from
# its centre, in shares of the bucket's sides.
Crop = tuple[float, float, float]
CENTRE: Crop = (1.0, 0.0, 0.0)
WHOLE: Crop = (0.0, 0.0, 0.0)  # nothing is cut: the photo gets the bucket's aspect ratio

# Limits of reference images. FLUX.2's pipeline in diffusers (Flux2ImageProcessor): the largest area in pixels, the shortest
# side, the largest aspect ratio. FLUX.3's (Flux3ImageProcessor), which keeps them whole: the largest area of a bucket, the
# longest side, the factor by which a reference is shrunk until it fits.
REFERENCE_AREA, REFERENCE_SIDE, REFERENCE_ASPECT = 1024 * 1024, 64, 8
WHOLE_AREA, WHOLE_SIDE, WHOLE_SHRINK = 4 * 1024 * 1024, 4096, 0.995

RESIZE_FILTER = Image.Resampling.LANCZOS


@dataclass(frozen=True)
class Placement:
    """The place of a photo in its bucket, as SDXL's size conditioning has it.

    original_size: (height, width) of the photo in the file, oriented.
    crop_top_left: (top, left) of the bucket within the photo after resizing, so in pixels of the resized photo.
    target_size: (height, width) of the bucket.
    resized_size: (height, width) of the whole photo after resizing; no model gets this.
    """

    original_size: tuple[int, int]
    crop_top_left: tuple[int, int]
    target_size: tuple[int, int]
    resized_size: tuple[int, int]


def named(layout: ReferenceLayout) -> str:
    """ "512x768", and with references "512x768 beside 1024x1024"."""
    (width, height), *references = layout
    sizes = " and ".join(f"{w}x{h}" for w, h in references)
    return f"{width}x{height}" + (f" beside {sizes}" if sizes else "")


def bucket_step(resolution: int) -> int:
    """The default grid of bucket sides: a quarter of the resolution, a multiple of 16, between 16 and 64 pixels."""
    return min(64, max(16, resolution // 4 // 16 * 16))


@lru_cache(maxsize=4096)
def _landscape_buckets(resolution: int, step: int, max_aspect: float, long: int, short: int) -> tuple[Bucket, ...]:
    """Buckets with width >= height, within `long` x `short` and the aspect limit, that no other such bucket contains."""
    fitting = [
        (width, height)
        for height in range(step, min(resolution, short) + 1, step)
        if (width := min(resolution**2 // height, math.floor(height * max_aspect), long) // step * step) >= height
    ]
    # Each is the widest of its height, so it is contained in another exactly if a taller one is as wide.
    return tuple((w, h) for w, h in fitting if not any(h2 > h and w2 >= w for w2, h2 in fitting))


def bucket_of_shape(width: int, height: int, *, resolution: int, step: int, max_aspect: float = 2.0) -> Bucket:
    """The (width, height) for photos of this shape, however small this one is.

    Candidates: sides that are multiples of `step`, area at most resolution**2 and not enlargeable, long side at most
    `max_aspect` times the short one. The nearest in log aspect ratio is taken; a portrait photo gets the transposed bucket of
    the same photo in landscape. Raises UserError if no bucket fits into the resolution.
    """
    buckets = _landscape_buckets(resolution, step, float(max_aspect), resolution**2, resolution)
    if not buckets:
        raise UserError(
            f"data.resolution = {resolution} has no bucket: it must be at least the bucket step of {step} pixels "
            f"(and the largest aspect ratio, {max_aspect}, at least 1)"
        )
    return _nearest(width, height, buckets)


def bucket_within(width: int, height: int, *, resolution: int, step: int, max_aspect: float = 2.0) -> Bucket | None:
    """The (width, height) at which this photo is trained without being enlarged; None if it is too small.

    The bucket of its shape if the photo covers it. Else the candidates of `bucket_of_shape` whose sides are no longer than
    the photo's and whose short side is at least a quarter of the resolution; the nearest in log aspect ratio is taken.
    """
    usual = bucket_of_shape(width, height, resolution=resolution, step=step, max_aspect=max_aspect)
    if covers(width, height, usual):
        return usual
    # Rounded down, so that photos of a thousand sizes need few sets of buckets.
    long, short = (min(side, resolution**2) // step * step for side in (max(width, height), min(width, height)))
    buckets = _landscape_buckets(resolution, step, float(max_aspect), long, short)
    buckets = tuple(bucket for bucket in buckets if 4 * bucket[1] >= resolution)
    return _nearest(width, height, buckets) if buckets else None


def covers(width: int, height: int, bucket: Bucket) -> bool:
    """Whether a photo of this size fills the bucket without being enlarged."""
    return width >= bucket[0] and height >= bucket[1]


def _nearest(width: int, height: int, landscape: tuple[Bucket, ...]) -> Bucket:
    """The nearest of these landscape buckets, transposed for a portrait photo."""
    aspect = math.log(max(width, height) / min(width, height))
    long, short = min(landscape, key=lambda bucket: abs(math.log(bucket[0] / bucket[1]) - aspect))
    return _one_of_its_size((long, short) if width >= height else (short, long))


@cache
def _one_of_its_size(bucket: Bucket) -> Bucket:
    """One object for all photos of a bucket: a hundred thousand share a few."""
    return bucket


def place(width: int, height: int, bucket: Bucket, *, flip: bool = False, crop: Crop = CENTRE) -> Placement:
    """The place of a photo of width x height in the bucket: scaled just to cover it, cropped at the centre.

    crop: limited so that the photo is not enlarged for it, and that it stays within the photo. WHOLE: scaled to the bucket.
    `flip` mirrors the result, which moves an odd pixel of the crop to the other side.
    """
    (zoom, right, down), (target_width, target_height) = crop, bucket
    if crop == WHOLE:
        return Placement((height, width), (0, 0), bucket[::-1], bucket[::-1])
    resized_width, resized_height = _cover(width, height, target_width, target_height)
    zoom = min(zoom, width / resized_width, height / resized_height)
    if zoom > 1:
        larger = math.floor(target_width * zoom), math.floor(target_height * zoom)
        resized_width, resized_height = _cover(width, height, *larger)
    slack_y, slack_x = resized_height - target_height, resized_width - target_width
    top = min(max(slack_y // 2 + round(down * target_height), 0), slack_y)
    left = min(max(slack_x // 2 + round(right * target_width), 0), slack_x)
    if flip:
        left = resized_width - target_width - left
    return Placement((height, width), (top, left), (target_height, target_width), (resized_height, resized_width))


def _cover(width: int, height: int, target_width: int, target_height: int) -> tuple[int, int]:
    """(width, height) scaled just to cover the target. Integer arithmetic, rounding half up: one side is met exactly."""
    if width * target_height >= target_width * height:
        return (2 * width * target_height + height) // (2 * height), target_height
    return target_width, (2 * height * target_width + width) // (2 * width)


def kept_box(placement: Placement) -> tuple[float, float, float, float]:
    """(left, top, right, bottom) of the crop, in pixels of the photo in the file. placement: not of a mirrored photo."""
    (top, left), (height, width) = placement.crop_top_left, placement.target_size
    (full_height, full_width), (resized_height, resized_width) = placement.original_size, placement.resized_size
    scale_y, scale_x = full_height / resized_height, full_width / resized_width
    right, bottom = min((left + width) * scale_x, full_width), min((top + height) * scale_y, full_height)
    return left * scale_x, top * scale_y, right, bottom


def share_kept(width: int, height: int, bucket: Bucket, *, crop: Crop = CENTRE) -> float:
    """The share of a photo's area that the crop to a bucket keeps."""
    left, top, right, bottom = kept_box(place(width, height, bucket, crop=crop))
    return (right - left) * (bottom - top) / (width * height)


def fit(image: Image.Image, bucket: Bucket, *, flip: bool = False, crop: Crop = CENTRE) -> Image.Image:
    """The photo resized to cover the bucket (Lanczos) and cropped to it as `place` says; mirrored if `flip`."""
    # Resizing only the crop equals cropping afterwards and bounds the memory for a very narrow photo.
    box = kept_box(place(image.width, image.height, bucket, crop=crop))
    fitted = image.resize(bucket, RESIZE_FILTER, box=box)
    return ImageOps.mirror(fitted) if flip else fitted


def reference_bucket(width: int, height: int, *, step: int) -> Bucket:
    """The (width, height) at which a reference is shown: its own, no larger than REFERENCE_AREA, in multiples of `step`.
    Raises ValueError, with the reason, for a reference that the released pipeline would not take."""
    if min(width, height) < REFERENCE_SIDE or max(width, height) > REFERENCE_ASPECT * min(width, height):
        raise ValueError(
            f"{width} x {height} pixels; a reference has sides of at least {REFERENCE_SIDE} pixels, the long one at most "
            f"{REFERENCE_ASPECT} times the short one"
        )
    width, height = _within_area(width, height)
    return _one_of_its_size((width // step * step, height // step * step))


def _within_area(width: int, height: int) -> tuple[int, int]:
    if width * height <= REFERENCE_AREA:
        return width, height
    scale = math.sqrt(REFERENCE_AREA / (width * height))
    return int(width * scale), int(height * scale)


def framed_bucket(width: int, height: int, *, step: int) -> Bucket:
    """The (width, height) at which a whole reference is shown: its own rounded up to multiples of `step`, no larger than
    WHOLE_AREA and WHOLE_SIDE."""

    def up(side: int) -> int:
        return min(WHOLE_SIDE, max(REFERENCE_SIDE, -(-side // step) * step))

    rounded = ((up(w), up(h)) for w, h in _shrunk(width, height))
    return _one_of_its_size(next(bucket for bucket in rounded if math.prod(bucket) <= WHOLE_AREA))


def _shrunk(width: int, height: int) -> Iterator[Bucket]:
    """The sizes to which a whole reference is shrunk, until one fits."""
    scale = min(1.0, math.sqrt(WHOLE_AREA / (width * height)), WHOLE_SIDE / max(width, height))
    while True:
        yield max(1, round(width * scale)), max(1, round(height * scale))
        scale *= WHOLE_SHRINK


def reference_size(width: int, height: int, rule: ReferenceRule, count: int, *, step: int) -> Bucket:
    """The (width, height) at which one of `count` references is shown. Raises ValueError like `reference_bucket`."""
    showing = rule.showing(count)
    if showing == "stretched":
        return nearest_size(width, height, rule.sizes, step=step)
    return (framed_bucket if showing == "framed" else reference_bucket)(width, height, step=step)


def nearest_size(width: int, height: int, sizes: Sequence[Bucket], *, step: int) -> Bucket:
    """The size whose aspect ratio is nearest to the image's, with the image's sides cut to multiples of `step`; on a tie the
    narrower one. As Flux's Kontext pipeline of diffusers takes it."""
    aspect = (width // step * step) / (height // step * step)
    return _one_of_its_size(min((abs(aspect - w / h), (w, h)) for w, h in sizes)[1])


def show_reference(image: Image.Image, bucket: Bucket, *, flip: bool = False) -> Image.Image:
    """The reference, shrunk where it is larger than REFERENCE_AREA (Lanczos), cropped at the centre; mirrored if `flip`."""
    width, height = _within_area(image.width, image.height)
    left, top = (width - bucket[0]) // 2, (height - bucket[1]) // 2
    image = image.resize((width, height), RESIZE_FILTER).crop((left, top, left + bucket[0], top + bucket[1]))
    return ImageOps.mirror(image) if flip else image


def framed(image: Image.Image, bucket: Bucket, *, flip: bool = False) -> Image.Image:
    """The reference, shrunk where it is larger than its `framed_bucket` (Lanczos), in the middle of a frame of its own
    mirrored edges; mirrored as a whole if `flip`."""
    width, height = next(size for size in _shrunk(*image.size) if size[0] <= bucket[0] and size[1] <= bucket[1])
    left, top = (bucket[0] - width) // 2, (bucket[1] - height) // 2
    around = ((top, bucket[1] - height - top), (left, bucket[0] - width - left), (0, 0))
    shrunk = np.asarray(image.resize((width, height), RESIZE_FILTER))
    image = Image.fromarray(np.pad(shrunk, around, mode="reflect"))
    return ImageOps.mirror(image) if flip else image


def to_pixels(image: Image.Image) -> torch.Tensor:
    """An RGB image as fp32 [3, H, W] in [-1, 1]."""
    bytes_HWC = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)
    return bytes_HWC.permute(2, 0, 1).to(torch.float32).div(127.5).sub(1.0).contiguous()
