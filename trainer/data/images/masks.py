"""Masks, averaged to the grid of the latents: white has weight 1, black has `unmasked_weight`."""

import numpy as np
import torch
from PIL import Image

from trainer.data import buckets
from trainer.data.examples import Example
from trainer.data.images.decode import decode, decode_mask
from trainer.data.images.views import View
from trainer.data.memo import read_unchanged


def on_latents(example: Example, view: View, *, side: int) -> torch.Tensor:
    """fp32 [h, w] in 0..1: the mean of the mask over each latent, cropped and mirrored as the photo is.

    side: pixels to a side of one latent. Raises OSError, and UserError if the mask changed after the scan.
    """
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
        places = np.arange(first, last)
        share = np.minimum(places + 1, b) - np.maximum(places, a)
        # Divided by their own sum, so that the mean of white lines is white to the bit.
        parts.append((share[:, None] * lines[first:last].astype(np.float64)).sum(0) / share.sum())
    return np.stack(parts)
