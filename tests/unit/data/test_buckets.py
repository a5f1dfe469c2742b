"""Buckets: the set, the choice, and the geometry against hand-computed examples."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from trainer.base.errors import UserError
from trainer.data.buckets import RESIZE_FILTER, bucket_of_shape, bucket_step, bucket_within, covers, fit, place, to_pixels
from trainer.data.images.decode import load_rgb

sides = st.integers(1, 4000)
resolutions = st.integers(4, 80).map(lambda n: n * 16)


@pytest.mark.parametrize(("resolution", "step"), [(16, 16), (64, 16), (128, 32), (256, 64), (512, 64), (1024, 64)])
def test_bucket_step(resolution, step):
    assert bucket_step(resolution) == step


@pytest.mark.parametrize(
    ("size", "bucket"),
    [
        ((1024, 1024), (1024, 1024)),
        ((3000, 2000), (1216, 832)),  # SDXL's own bucket for 3:2
        ((2000, 3000), (832, 1216)),
        ((1920, 1080), (1344, 768)),  # SDXL's own bucket for 16:9
        ((640, 480), (1152, 896)),  # SDXL's own bucket for 4:3
        ((5000, 1000), (1408, 704)),  # wider than the limit of 2
        ((1, 9000), (704, 1408)),
    ],
)
def test_sdxl_buckets_at_1024(size, bucket):
    assert bucket_of_shape(*size, resolution=1024, step=64, max_aspect=2.0) == bucket


def test_tiny_buckets_at_64():
    photos = [(768, 512), (768, 768), (640, 768), (512, 768), (768, 640)]
    # log(1.2) lies nearer to log(1) than to log(5/3); log(1.5) does not.
    expected = [(80, 48), (64, 64), (64, 64), (48, 80), (64, 64)]
    assert [bucket_of_shape(*size, resolution=64, step=16) for size in photos] == expected


# Height x width, as the paper's appendix I lists what SDXL was trained at (https://arxiv.org/abs/2307.01952).
SDXL_SIZES = """
512x2048 512x1984 512x1920 512x1856 576x1792 576x1728 576x1664 640x1600 640x1536 704x1472 704x1408 704x1344 768x1344
768x1280 832x1216 832x1152 896x1152 896x1088 960x1088 960x1024 1024x1024 1024x960 1088x960 1088x896 1152x896 1152x832
1216x832 1280x768 1344x768 1408x704 1472x704 1536x640 1600x640 1664x576 1728x576 1792x576 1856x512 1920x512 1984x512 2048x512
"""


@given(st.integers(1408, 4000), st.integers(1408, 4000))
def test_at_1024_every_bucket_is_a_size_that_sdxl_was_trained_at(width, height):
    trained = {(int(w), int(h)) for h, w in (size.split("x") for size in SDXL_SIZES.split())}
    bucket = bucket_of_shape(width, height, resolution=1024, step=64)
    assert bucket in trained
    # Of those no larger than the budget and no longer than twice their width, none is nearer by more than their spacing.
    near = [abs(math.log(w / h * height / width)) for w, h in trained if w * h <= 1024**2 and max(w, h) <= 2 * min(w, h)]
    ours = abs(math.log(bucket[0] / bucket[1] * height / width))
    assert ours <= max(min(near) + 0.07, math.log(width / height) - math.log(2))


@pytest.mark.parametrize(("resolution", "step"), [(512, 64), (768, 64), (1024, 64), (1024, 16), (1408, 64)])
def test_every_bucket_suits_flux(resolution, step):
    """Multiples of 16, from its 256^2 to 2 megapixels, and nearly all of the budget: the timesteps shift with the area."""
    for aspect in (n / 100 for n in range(50, 201)):
        width, height = bucket_of_shape(4000 * aspect, 4000, resolution=resolution, step=step)
        assert width % 16 == height % 16 == 0
        assert 0.85 * resolution**2 <= width * height <= resolution**2


@given(sides, sides, resolutions, st.floats(1.0, 4.0))
def test_without_enlarging_a_photo_covers_its_bucket(width, height, resolution, max_aspect):
    step = bucket_step(resolution)
    known = {"resolution": resolution, "step": step, "max_aspect": max_aspect}
    usual, bucket = bucket_of_shape(width, height, **known), bucket_within(width, height, **known)
    if covers(width, height, usual):
        assert bucket == usual
        return
    long, short = max(width, height), min(width, height)
    # Every size of the grid, by brute force.
    grid = range(step, min(resolution**2 // step, long) + 1, step)
    fitting = [(w, h) for h in grid for w in grid if h <= short and h <= w <= max_aspect * h and w * h <= resolution**2]
    largest = {h: max(w for w, h2 in fitting if h2 == h) for _, h in fitting}
    maximal = [(w, h) for h, w in largest.items() if not any(h2 > h and w2 >= w for h2, w2 in largest.items())]
    maximal = [(w, h) for w, h in maximal if h >= resolution / 4]
    if not maximal:
        assert bucket is None
        return
    assert bucket is not None and covers(width, height, bucket) and (max(bucket), min(bucket)) in maximal
    nearest = min(abs(math.log(w / h) - math.log(long / short)) for w, h in maximal)
    assert abs(math.log(max(bucket) / min(bucket)) - math.log(long / short)) <= nearest + 1e-12


@pytest.mark.parametrize(
    ("size", "bucket"),
    [
        ((3000, 2000), (1216, 832)),  # large enough: as ever
        ((1216, 832), (1216, 832)),
        ((1215, 832), (1152, 832)),
        ((640, 480), (640, 448)),
        ((480, 640), (448, 640)),
        ((1000, 1000), (960, 960)),
        ((3000, 300), (512, 256)),
        ((256, 256), (256, 256)),
        ((255, 4000), None),
    ],
)
def test_small_photos_at_1024(size, bucket):
    assert bucket_within(*size, resolution=1024, step=64) == bucket


@given(sides, sides, resolutions, st.floats(1.0, 4.0))
def test_a_bucket_is_the_nearest_of_those_allowed(width, height, resolution, max_aspect):
    step = bucket_step(resolution)
    bucket = bucket_of_shape(width, height, resolution=resolution, step=step, max_aspect=max_aspect)
    assert bucket_of_shape(height, width, resolution=resolution, step=step, max_aspect=max_aspect) == bucket[::-1] or (
        width == height
    )

    def allowed(w, h):
        return w * h <= resolution**2 and max(w, h) <= max_aspect * min(w, h)

    grid = range(step, resolution**2 // step + 1, step)
    short_sides = [n for n in grid if n <= resolution]
    candidates = [(w, h) for h in short_sides for w in grid if w >= h and allowed(w, h)]
    maximal = [(w, h) for w, h in candidates if not any((w2, h2) != (w, h) and w2 >= w and h2 >= h for w2, h2 in candidates)]
    long, short = max(bucket), min(bucket)
    assert (long, short) in maximal
    aspect = math.log(max(width, height) / min(width, height))
    distance = abs(math.log(long / short) - aspect)
    assert distance <= min(abs(math.log(w / h) - aspect) for w, h in maximal) + 1e-12


def test_a_resolution_below_the_step_is_refused():
    with pytest.raises(UserError, match="data.resolution = 8 .*16"):
        bucket_of_shape(10, 10, resolution=8, step=16)


def test_placement_of_a_wide_photo():
    # 768 x 512 into 80 x 48: scale 48/512 gives 72 < 80, so scale 80/768: 80 x 53.33 -> 53, and (53 - 48) // 2 = 2.
    placement = place(768, 512, (80, 48))
    assert placement.original_size == (512, 768)
    assert placement.resized_size == (53, 80)
    assert placement.crop_top_left == (2, 0)
    assert placement.target_size == (48, 80)


def test_placement_when_flipped_moves_the_odd_pixel():
    # 101 x 64 into 64 x 64: nothing to scale, 37 columns too many: 18 left and 19 right, mirrored the other way round.
    assert place(101, 64, (64, 64)).crop_top_left == (0, 18)
    assert place(101, 64, (64, 64), flip=True).crop_top_left == (0, 19)


@given(sides, sides, st.integers(1, 80), st.integers(1, 80))
def test_the_bucket_lies_within_the_resized_photo(width, height, a, b):
    bucket = (a * 16, b * 16)
    for flip in (False, True):
        placement = place(width, height, bucket, flip=flip)
        (top, left), (h, w), (rh, rw) = placement.crop_top_left, placement.target_size, placement.resized_size
        assert (w, h) == bucket and 0 <= top <= rh - h and 0 <= left <= rw - w
        assert rh == h or rw == w
        assert abs(top - (rh - h - top)) <= 1 and abs(left - (rw - w - left)) <= 1
        # The proportions are kept to half a pixel of the longer side.
        assert abs(rw * height - rh * width) * 2 <= max(width, height)


@given(st.integers(8, 120), st.integers(8, 120), st.sampled_from([(64, 64), (80, 48), (48, 80)]))
def test_fit_equals_resizing_the_whole_photo_and_cropping(width, height, bucket):
    # Middle values: where the filter overshoots 0..255 Pillow clips between its passes, whose order varies with size.
    noise = np.random.default_rng(width * 1000 + height).integers(80, 176, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    fitted, placement = fit(image, bucket), place(width, height, bucket)
    (top, left), (rh, rw) = placement.crop_top_left, placement.resized_size
    whole = image.resize((rw, rh), RESIZE_FILTER).crop((left, top, left + bucket[0], top + bucket[1]))
    assert np.abs(np.asarray(fitted).astype(int) - np.asarray(whole)).max() <= 2  # two roundings


def test_fit_bounds_its_memory_for_a_very_narrow_photo():
    fitted = fit(Image.new("RGB", (1, 50_000), "red"), (704, 1408))  # in full: 704 x 35 million pixels
    assert fitted.size == (704, 1408) and place(1, 50_000, fitted.size).resized_size == (35_200_000, 704)


def test_flip_mirrors_the_fitted_photo():
    image = load_rgb("examples/bear_plushie/00.jpg")
    plain, mirrored = fit(image, (80, 48)), fit(image, (80, 48), flip=True)
    assert np.array_equal(np.asarray(plain)[:, ::-1], np.asarray(mirrored))


def test_fit_keeps_directions_and_colours():
    image = Image.new("RGB", (200, 100), "red")
    image.paste("blue", (0, 0, 100, 100))
    pixels = to_pixels(fit(image, (64, 48)))
    assert pixels[:, 24, 5].tolist() == [-1, -1, 1] and pixels[:, 24, 60].tolist() == [1, -1, -1]


def test_to_pixels():
    image = Image.new("RGB", (4, 2), (0, 255, 51))
    image.putpixel((3, 1), (255, 0, 0))
    pixels = to_pixels(image)
    assert pixels.shape == (3, 2, 4) and pixels.dtype == torch.float32 and pixels.is_contiguous()
    assert pixels[:, 0, 0].tolist() == pytest.approx([-1.0, 1.0, -0.6])
    assert pixels[:, 1, 3].tolist() == [1.0, -1.0, -1.0]
