"""The VAE in tiles, against the VAE as a whole."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image
from torch import nn

from tests.harness import PHOTOS, ROOT
from trainer.base import tiles
from trainer.models.shared import vae

TILE = 64  # pixels: a small one, for a small VAE


@pytest.fixture
def module() -> AutoencoderKL:
    """The pocket SDXL's, which was trained."""
    return AutoencoderKL.from_pretrained(ROOT / "examples" / "pocket_sdxl" / "vae").double().eval()


def photo(size: int) -> torch.Tensor:
    """fp64 [1, 3, size, size]"""
    with Image.open(PHOTOS / "00.jpg") as image:
        pixels = np.array(image.convert("RGB").resize((size, size)))
    return torch.tensor(pixels).permute(2, 0, 1)[None].double() / 127.5 - 1


def whole():
    return patch.object(tiles, "side", lambda width, height: None)


def tiled(side: int = TILE):
    return patch.object(tiles, "side", lambda width, height: side)


@torch.no_grad()
def encode(module: AutoencoderKL, pixels: torch.Tensor) -> torch.Tensor:
    return vae.for_size(module, pixels.shape[-1], pixels.shape[-2]).encode(pixels).latent_dist.mean


@torch.no_grad()
def decode(module: AutoencoderKL, latents: torch.Tensor) -> torch.Tensor:
    return vae.for_size(module, 8 * latents.shape[-1], 8 * latents.shape[-2]).decode(latents).sample


@pytest.mark.slow
def test_without_norms_tiles_differ_from_the_whole_only_where_a_tiles_border_is_seen(module: AutoencoderKL) -> None:
    """A convolution sees as far as its kernel. So beyond the reach of all borders tiles give the whole's numbers."""
    for name, layer in list(module.named_modules()):
        if isinstance(layer, nn.GroupNorm):
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, nn.Identity())
    pixels = photo(576)[..., :64, :]
    with whole():
        latents = encode(module, pixels)
        drawn = decode(module, latents)
    with tiled(512):
        in_tiles, drawn_in_tiles = encode(module, pixels), decode(module, latents)
        assert module.use_tiling
    # The second tile begins at 384, and is blended with the first up to its border at 512. No output sees 128 pixels far.
    for given, expected, unit in ((in_tiles, latents, 1), (drawn_in_tiles, drawn, 8)):
        assert given.shape == expected.shape
        inside = (..., slice(0, 48 * unit))
        torch.testing.assert_close(given[inside], expected[inside], rtol=1e-9, atol=1e-9)
        assert not torch.allclose(given, expected, rtol=1e-3), "borders are seen somewhere"


def test_where_tiles_overlap_the_value_lies_between_theirs(module: AutoencoderKL) -> None:
    pixels = photo(2 * TILE)[..., :48, :96]  # two tiles, at 0 and 48, with 16 pixels in common
    with tiled():
        given = encode(module, pixels)
    with whole():
        left, right = encode(module, pixels[..., :TILE]), encode(module, pixels[..., 48:])
    assert torch.equal(given[..., :6], left[..., :6]) and torch.equal(given[..., 8:], right[..., 2:])
    low, high = torch.stack([left[..., 6:], right[..., :2]]).aminmax(dim=0)
    assert ((given[..., 6:8] >= low) & (given[..., 6:8] <= high)).all()


@pytest.mark.parametrize("size", [128, pytest.param(240, marks=pytest.mark.slow)])
def test_tiles_change_less_than_the_vae_itself_loses(module: AutoencoderKL, size: int) -> None:
    """Their norms have another mean and variance. What that changes is smaller than what encoding and decoding lose."""
    pixels = photo(size)
    with whole():
        latents = encode(module, pixels)
        drawn = decode(module, latents)
    with tiled():
        in_tiles, drawn_in_tiles = encode(module, pixels), decode(module, latents)
    with whole():
        from_tiles = decode(module, in_tiles)
    lost = (drawn - pixels).norm()
    for changed in (from_tiles, drawn_in_tiles):
        assert 0 < (changed - drawn).norm() < lost
