"""Samples from fixed prompts and seeds, drawn with the training weights in place: nothing is converted or moved."""

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


def draw_samples(
    requests: Sequence[Any],
    *,
    sample: Callable[[Any], Any],
    folder: Path,
    weights: Mapping[str, Callable[[], AbstractContextManager[None]]] = MappingProxyType({"": nullcontext}),
) -> None:
    """Draws one PNG for every request, named by its index, with text entries "prompt" and "request". The folder appears when
    all are drawn.

    requests: dataclasses of JSON values, and of `images`. sample: request -> PIL image; if it raises, there is no folder.
    weights: file name ending -> context with the weights to draw with: "", and "_ema", which "request" contains, too.
    """
    with appearing(folder) as temporary:
        for ending, in_use in weights.items():
            with in_use():
                for index, request in enumerate(requests):
                    with torch.no_grad():
                        image = sample(request)
                    (temporary / f"{index:02d}{ending}.png").write_bytes(_png(image, request, ending))


def _png(image: Image, request: Any, ending: str = "") -> bytes:
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text("prompt", request.prompt)
    values = _request_values(request) | ({"weights": ending.removeprefix("_")} if ending else {})
    info.add_text("request", json.dumps(values, sort_keys=True))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", pnginfo=info)
    return buffer.getvalue()


def _request_values(request: Any) -> dict[str, Any]:
    """A request as JSON values; references and cfg only if set, so that the text equals that of earlier runs."""
    values = {field.name: getattr(request, field.name) for field in fields(request) if field.name != "images"}
    return {name: value for name, value in values.items() if name not in ("references", "cfg") or value}


def keep_truths(requests: Sequence[Any], truths: Sequence[Image | None], folder: Path) -> None:
    """Write the pictures that the samples should look like, as PNGs with the same text entries. A file is named by a digest
    of its request, so that files of earlier prompts stay."""
    for request, truth in zip(requests, truths, strict=True):
        if truth is not None:
            _keep(request, truth, folder)


def keep_references(requests: Sequence[Any], folder: Path) -> None:
    """Write the samples' reference images, as `keep_truths` writes truths; their numbers end the files' names."""
    for request in requests:
        for number, image in enumerate(request.images, 1):
            _keep(request, image, folder, f"-{number:02d}")


def _keep(request: Any, picture: Image, folder: Path, ending: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(json.dumps(_request_values(request), sort_keys=True).encode()).hexdigest()[:16]
    write_atomic(folder / f"{name}{ending}.png", [_png(picture, request)])
