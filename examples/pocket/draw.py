"""Draw with a pocket model, and hold what it drew beside the truth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

from examples.pocket import icons

STEPS, GUIDANCE = 25, 4.0


@torch.no_grad()
def draw(pipeline, captions: Sequence[str], *, seed: int, batch: int = 20, **more):
    """fp32 [N, 3, H, W] in [-1, 1]. The k-th caption's noise depends on `seed` and k alone. more: for the pipeline."""
    pipeline.set_progress_bar_config(disable=True)
    drawn = []
    for start in range(0, len(captions), batch):
        part = list(captions[start : start + batch])
        generators = [torch.Generator().manual_seed(seed * 100_003 + start + k) for k in range(len(part))]
        settings = {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE, "width": icons.SIZE, "height": icons.SIZE}
        values = pipeline(prompt=part, generator=generators, output_type="pt", **settings | more).images
        drawn.append(values.float() * 2 - 1)
    return torch.cat(drawn)


def sheet(rows: Sequence[Sequence[torch.Tensor]], path: Path, scale: int = 1) -> None:
    """A picture of pictures: fp32 [3, H, W] in [-1, 1] each; every row has as many."""
    values = torch.cat([torch.cat(list(row), dim=2) for row in rows], dim=1)
    pixels = ((values.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).numpy()
    picture = Image.fromarray(pixels)
    picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST).save(path)


def pixels(picture: Image.Image) -> torch.Tensor:
    """fp32 [3, H, W] in [-1, 1]."""
    rgb = picture.convert("RGB")
    values = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8).float() / 127.5 - 1
    return values.view(rgb.height, rgb.width, 3).permute(2, 0, 1)


def distances(drawn: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Of each picture to its truth: the mean difference of their pixels, of [0, 1]. Both fp32 [N, 3, H, W] in [-1, 1]."""
    return (drawn.clamp(-1, 1) - truth).abs().mean(dim=(1, 2, 3)) / 2


@torch.no_grad()
def feature_distances(drawn: torch.Tensor, truth: torch.Tensor, encode) -> torch.Tensor:
    """The same in the autoencoder's latents (normalised): the root of the mean square. encode(pixels) -> latents [N, ...]."""
    difference = encode(drawn.clamp(-1, 1)) - encode(truth)
    return difference.flatten(1).square().mean(1).sqrt()
