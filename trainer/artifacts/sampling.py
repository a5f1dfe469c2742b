"""Samples from fixed prompts and seeds. The trained weights are read where they are: nothing is converted or moved."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from trainer.base.files import appearing, write_atomic

if TYPE_CHECKING:
    from PIL.Image import Image


WithWeights = Mapping[str, Callable[[], AbstractContextManager[None]]]


def draw_samples(
    requests: Sequence[Any],
    *,
    sample: Callable[[Any], Any],
    folder: Path,
    weights: WithWeights = MappingProxyType({"": nullcontext}),
) -> None:
    """One PNG for every request, named by the request's index, with what was asked as text entries "prompt" and "request".
    The folder appears when all are drawn.

    requests: dataclasses of JSON values, and of `images`. sample: request -> PIL image; it may raise Interrupted, which
    leaves no folder. weights: by an ending of the files' names, a context with the weights to draw with: "" and, of an
    average, "_ema", which "request" tells too.
    """
    with appearing(folder) as temporary:
        for ending, used in weights.items():
            with used():
                for index, request in enumerate(requests):
                    with torch.no_grad():
                        image = sample(request)
                    (temporary / f"{index:02d}{ending}.png").write_bytes(_png(image, request, ending))


def _png(image: Image, request: Any, ending: str = "") -> bytes:
    from PIL.PngImagePlugin import PngInfo

    described = PngInfo()
    described.add_text("prompt", request.prompt)
    asked = _asked(request) | ({"weights": ending.removeprefix("_")} if ending else {})
    described.add_text("request", json.dumps(asked, sort_keys=True))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", pnginfo=described)
    return buffer.getvalue()


def _asked(request: Any) -> dict[str, Any]:
    """What was asked for, as JSON values; references and cfg where there are any, so that the text is that of earlier
    runs."""
    asked = {each.name: getattr(request, each.name) for each in fields(request) if each.name != "images"}
    return {name: value for name, value in asked.items() if name not in ("references", "cfg") or value}


def keep_truths(requests: Sequence[Any], truths: Sequence[Image | None], folder: Path) -> None:
    """Write what the samples ought to look like, beside them: a PNG for every request whose truth is known, described as they
    are. A file is named by its request: files of earlier prompts stay."""
    for request, truth in zip(requests, truths, strict=True):
        if truth is not None:
            _keep(request, truth, folder)


def keep_references(requests: Sequence[Any], folder: Path) -> None:
    """Write what the model is shown for the samples, as `keep_truths` writes truths; their numbers end the files' names."""
    for request in requests:
        for number, image in enumerate(request.images, 1):
            _keep(request, image, folder, f"-{number:02d}")


def _keep(request: Any, picture: Image, folder: Path, ending: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(json.dumps(_asked(request), sort_keys=True).encode()).hexdigest()[:16]
    write_atomic(folder / f"{name}{ending}.png", [_png(picture, request)])
