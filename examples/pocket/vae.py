"""The pocket models' autoencoder: diffusers' AutoencoderKL, 8 x 8 latents of 8 channels for an icon of 64 x 64."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from torch.nn.functional import l1_loss

from examples.pocket import CONFIGS, icons, training

BATCH = 16
KL_WEIGHT = 1e-3
CONFIG = CONFIGS["vae"]
LATENTS = CONFIG["latent_channels"]


def build(seed: int) -> AutoencoderKL:
    torch.manual_seed(seed)
    return AutoencoderKL(**CONFIG)


def augmented(pictures: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """uint8 [N, 4, H, W] -> fp32 [N, 3, H, W]: shifted, mirrored, on white or a colour, in other colours, or grey.

    The autoencoder meets more than icons on white: styles and backgrounds that the denoisers will learn only later.
    """
    shift = torch.randint(-4, 5, (2,), generator=draw).tolist()
    pictures = torch.roll(pictures, shift, (2, 3))
    mirrored = torch.rand(len(pictures), 1, 1, 1, generator=draw) < 0.5
    pictures = torch.where(mirrored, pictures.flip(3), pictures)
    values = icons.on_colour(pictures, backgrounds(len(pictures), draw))
    kind = torch.rand(len(pictures), 1, 1, 1, generator=draw)
    grey = (values.mean(1, keepdim=True) * 1.5).clamp(-1, 1).expand_as(values)
    swapped = values[:, torch.randperm(3, generator=draw)]
    return torch.where(kind < 0.2, grey, torch.where(kind < 0.4, swapped, values))


def backgrounds(count: int, draw: torch.Generator) -> torch.Tensor:
    """fp32 [count, 3, SIZE, SIZE] in [-1, 1]: half of them white, half a colour above a line and another one below it."""
    above, below = (torch.rand(count, 3, 1, 1, generator=draw) * 2 - 1 for _ in range(2))
    line = torch.randint(icons.SIZE // 2, 2 * icons.SIZE, (count, 1, 1, 1), generator=draw)
    rows = torch.arange(icons.SIZE).view(1, 1, -1, 1)
    white = torch.rand(count, 1, 1, 1, generator=draw) < 0.5
    coloured = torch.where(rows < line, above, below)
    return torch.where(white, torch.ones(()), coloured).expand(count, 3, icons.SIZE, icons.SIZE)


def edges(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return values.diff(dim=2), values.diff(dim=3)


def train(pictures: Mapping[str, torch.Tensor], state: Path, *, seed: int, steps: int, seconds: float) -> AutoencoderKL:
    """pictures: style -> uint8 [N, 4, H, W], trained styles only."""
    module = build(seed)
    every = torch.cat(list(pictures.values()))

    def loss(step: int) -> torch.Tensor:
        draw = training.generator(seed, step)
        chosen = training.epoch_order(seed, len(every), step * BATCH, BATCH)
        truth = augmented(every[chosen], draw)
        with torch.autocast("cpu", torch.bfloat16):
            posterior = module.encode(truth).latent_dist
            noise = torch.randn(posterior.mean.shape, generator=draw)
            drawn = module.decode(posterior.mean + posterior.std * noise).sample
        drawn = drawn.float()
        outlines = sum(l1_loss(a, b) for a, b in zip(edges(drawn), edges(truth), strict=True))
        kl = 0.5 * (posterior.mean.float() ** 2 + posterior.var.float() - 1 - posterior.logvar.float()).mean()
        return l1_loss(drawn, truth) + outlines + KL_WEIGHT * kl

    settings = {"peak": 1.5e-3, "average": 0.998, "weight_decay": 0.0}
    training.train(module, loss, state, seed=seed, steps=steps, seconds=seconds, **settings)
    return module
