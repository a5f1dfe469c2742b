"""Samples from fixed prompts and seeds. The trained weights are read where they are: nothing is converted or moved."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.errors import UserError


def sample_folder(output_dir: Path, step: int) -> Path:
    return output_dir / "samples" / f"step-{step:08d}"


def draw_samples(requests: Sequence[Any], *, sample: Callable[[Any], Any], folder: Path) -> None:
    """One PNG for every request, named by the request's index; the folder appears when all are drawn.

    sample: request -> PIL image; it may raise Interrupted, which leaves no folder.
    """
    from PIL.PngImagePlugin import PngInfo

    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for index, request in enumerate(requests):
            with torch.no_grad():
                image = sample(request)
            described = PngInfo()
            described.add_text("prompt", request.prompt)
            image.save(temporary / f"{index:02d}.png", format="PNG", pnginfo=described)
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def pairs(output_dir: Path, step: int) -> list[tuple[Path, Path]]:
    """(before training, at `step`) of every sample of equal prompt and size in both."""
    from PIL import Image

    def described(path: Path) -> tuple[Any, ...]:
        with Image.open(path) as image:
            return image.info.get("prompt"), image.size

    found = []
    for after in sorted(sample_folder(output_dir, step).glob("*.png")):
        before = sample_folder(output_dir, 0) / after.name
        if before.exists() and described(before) == described(after):
            found.append((before, after))
    return found


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
