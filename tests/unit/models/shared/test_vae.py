from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from trainer.base import tiles
from trainer.models.shared import vae


def module(levels: int) -> SimpleNamespace:
    mean = lambda pixels: SimpleNamespace(latent_dist=SimpleNamespace(mean=pixels.double(), sample=lambda: pixels * 2))  # noqa: E731
    return SimpleNamespace(config=SimpleNamespace(block_out_channels=[1] * levels), use_tiling=False, encode=mean)


@pytest.mark.parametrize(("levels", "factor"), [(4, 8), (2, 2)])
def test_tiles_are_those_of_the_size_and_of_the_vaes_factor(levels: int, factor: int) -> None:
    found = vae.for_size(module(levels), 4096, 2048)
    assert found.use_tiling and found.tile_overlap_factor == tiles.OVERLAP
    assert found.tile_latent_min_size * factor == found.tile_sample_min_size == tiles.side(4096, 2048)
    assert not vae.for_size(found, 512, 512).use_tiling, "a small photo after a large one is whole"


def test_latents_are_the_mean_in_fp32() -> None:
    pixels = torch.ones(1, 3, 8, 8)
    found = vae.posterior_mean(module(4), pixels)
    assert found.dtype == torch.float32 and torch.equal(found, pixels)
