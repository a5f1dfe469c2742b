"""Samples from fixed prompts and seeds. The trained weights are read where they are: nothing is converted or moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.errors import UserError
from trainer.types import Conditioning


def sample_folder(output_dir: Path, step: int) -> Path:
    return output_dir / "samples" / f"step-{step:08d}"


def draw_samples(
    requests: Sequence[Any],
    *,
    sample: Callable[[Any, Conditioning, Conditioning], Any],
    conditioning: Callable[[str], Conditioning],
    folder: Path,
    check: Callable[[], None],
) -> list[Path]:
    """One PNG for every request, written when all are drawn, named by the request's index.

    check is called between images and may raise Interrupted.
    """
    from PIL.PngImagePlugin import PngInfo

    images = []
    for request in requests:
        check()
        with torch.no_grad():
            images.append(sample(request, conditioning(request.prompt), conditioning(request.negative)))
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{index:02d}.png" for index in range(len(images))]
    for request, image, path in zip(requests, images, paths, strict=True):
        described = PngInfo()
        described.add_text("prompt", request.prompt)
        temporary = path.with_suffix(".tmp")
        image.save(temporary, format="PNG", pnginfo=described)
        temporary.replace(path)
    return paths


def check_sizes(requests: Sequence[Any], multiple: int) -> None:
    """Raises UserError where a sample's size is not a multiple of what the model needs."""
    for index, request in enumerate(requests):
        if request.width % multiple or request.height % multiple:
            raise UserError(
                f"validation sample {index}: {request.width}x{request.height} is not a multiple of {multiple}; "
                f"use {round(request.width / multiple) * multiple or multiple}x"
                f"{round(request.height / multiple) * multiple or multiple}"
            )


def image_distance(before: Path, after: Path) -> float:
    """How far the adapter moved an image: the relative L2 distance of the pixels in [0, 1]."""
    from PIL import Image
    from torch import frombuffer

    def pixels(path: Path) -> torch.Tensor:
        image = Image.open(path).convert("RGB")
        return frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).float() / 255

    a, b = pixels(before), pixels(after)
    return float((b - a).norm() / a.norm().clamp_min(1e-12))
