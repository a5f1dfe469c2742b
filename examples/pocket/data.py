"""What the denoisers learn from: latents and captions of every icon that they may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file

from examples.pocket import CONFIGS, icons
from trainer.models.shared import clip
from trainer.models.tokenizers import build_clip_tokenizer

CLIP = CONFIGS["clip"]


@dataclass(frozen=True)
class Examples:
    """latents: fp32 [N, C, 8, 8] of mean 0 and deviation 1; captions and those without a style: N of each."""

    latents: torch.Tensor
    captions: list[str]
    styleless: list[str]


def shown(style: str) -> list[int]:
    """Of which subjects the models see that trained style."""
    hidden = icons.left_out(style)
    return [number for number, name in enumerate(icons.SUBJECTS) if name not in hidden]


def pictures(rendered: Path) -> dict[str, torch.Tensor]:
    """Trained style -> uint8 [N, 4, H, W], without what is left out of it."""
    every = load_file(rendered)
    return {style: every[style][shown(style)] for style in icons.TRAINED_STYLES}


@torch.no_grad()
def encode(autoencoder, values: torch.Tensor) -> torch.Tensor:
    """fp32 [N, 3, H, W] in [-1, 1] -> the posterior's means, fp32 [N, C, 8, 8], as the autoencoder gives them."""
    return torch.cat([autoencoder.encode(part).latent_dist.mean.float() for part in values.split(64)])


def scale_and_shift(latents: torch.Tensor) -> tuple[float, float]:
    """(scale, shift) with (latents - shift) * scale of mean 0 and deviation 1. SDXL's convention has no shift."""
    return round(1 / latents.std().item(), 5), round(latents.mean().item(), 5)


def examples(autoencoder, rendered: Path, *, scale: float, shift: float) -> Examples:
    latents, captions, styleless = [], [], []
    for style, drawn in pictures(rendered).items():
        latents.append((encode(autoencoder, icons.on_white(drawn)) - shift) * scale)
        captions += [icons.caption(icons.SUBJECTS[number], style) for number in shown(style)]
        styleless += [icons.caption(icons.SUBJECTS[number], None) for number in shown(style)]
    return Examples(torch.cat(latents), captions, styleless)


@cache
def clip_tokenizer():
    """The one that is embedded in the trainer, padding with the end token."""
    return build_clip_tokenizer(None)


def clip_ids(captions: Sequence[str]) -> torch.Tensor:
    """int64 [N, 77]."""
    return clip.clip_ids(clip_tokenizer(), captions)
