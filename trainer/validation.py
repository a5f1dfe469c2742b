"""Samples from fixed prompts and seeds. The trained weights are read where they are: nothing is converted or moved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trainer.errors import UserError


def draw_samples(requests: Sequence[Any], *, sample: Callable[[Any], Any], folder: Path) -> None:
    """One PNG for every request, named by the request's index, with what was asked as text entries "prompt" and "request".

    The folder appears when all are drawn. requests: dataclasses of JSON values.
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
            described.add_text("request", json.dumps(asdict(request), sort_keys=True))
            image.save(temporary / f"{index:02d}.png", format="PNG", pnginfo=described)
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def pairs(before: Path, after: Path) -> list[tuple[Path, Path]]:
    """(in the folder `before`, in `after`) of every sample that was asked for in the same words, size, seed and all else."""
    from PIL import Image

    def asked(path: Path) -> str | None:
        with Image.open(path) as image:
            return image.info.get("request")

    first = {asked(path): path for path in sorted(before.glob("*.png"))}
    second = [(asked(path), path) for path in sorted(after.glob("*.png"))]
    return [(first[request], path) for request, path in second if request is not None and request in first]


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

    def pixels(path: Path) -> torch.Tensor:
        image = Image.open(path).convert("RGB")
        return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).float() / 255

    a, b = pixels(before), pixels(after)
    return float((b - a).norm() / a.norm().clamp_min(1e-12))
