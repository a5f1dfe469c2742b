"""The samples that a run is asked for, with the pictures that belong to them: checked before a weight is read."""

from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from trainer.base.errors import UserError
from trainer.config import Config, SampleTable
from trainer.data import buckets
from trainer.data.captions import prompts
from trainer.data.examples import Example
from trainer.data.images.decode import load_rgb
from trainer.models.base import SampleRequest
from trainer.plan.data_sources import resolutions


def requests_of(config: Config, trained: Sequence[Example], multiple: int) -> tuple[SampleRequest, ...]:
    """The config's samples. multiple: of which their sides have to be. Raises UserError for one that cannot be drawn."""
    wanted = config.validation
    if wanted.every_steps == 0:
        return ()
    size = wanted.resolution or max(resolutions(config.data.resolution))
    texts = prompts.of_captions(trained) if isinstance(wanted.prompts, str) else wanted.prompts
    asked = (*(SampleTable(prompt=prompt) for prompt in texts), *wanted.samples)
    default = {"width": size, "height": size, "seed": wanted.seed, "steps": wanted.steps, "guidance": None}
    requests = []
    for index, sample in enumerate(asked):
        key = f"validation.samples[{index}].references"
        given = sample.model_dump(exclude_none=True, exclude={"truth"})
        requests.append(SampleRequest(**default | given, images=references(sample.references, key)))
    check_sizes(requests, multiple)
    return tuple(requests)


def references(paths: Sequence[str], key: str) -> tuple[Image.Image, ...]:
    """The images that a sample is shown. Raises UserError, by `key`, for one that is no image, or that no pipeline takes."""

    def read(path: str) -> Image.Image:
        image = load_rgb(path)
        buckets.reference_bucket(*image.size, step=1)
        return image

    return tuple(_picture(read, path, f"{key}[{number}]") for number, path in enumerate(paths))


def truths_of(config: Config, requests: Sequence[SampleRequest]) -> tuple[Image.Image | None, ...]:
    """What the samples ought to look like, scaled to cover their sizes and cropped; None where it is not known."""
    truths: list[Image.Image | None] = [None] * len(requests)
    for index, (sample, request) in enumerate(zip(config.validation.samples, requests, strict=False)):
        if sample.truth is not None:
            picture = _picture(load_rgb, sample.truth, f"validation.samples[{index}].truth")
            truths[index] = ImageOps.fit(picture, (request.width, request.height), Image.Resampling.LANCZOS)
    return tuple(truths)


def _picture(read: Callable[[str | Path], Image.Image], path: str, key: str) -> Image.Image:
    try:
        return read(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{key} = {path!r}: {reason}; give an image file, or leave it out") from error


def pixels_of(request: SampleRequest) -> int:
    """The pixels of a sample, and of the references that are shown for it."""
    return request.width * request.height + sum(prod(buckets.reference_bucket(*e.size, step=1)) for e in request.images)


def check_sizes(requests: Sequence[Any], multiple: int) -> None:
    """Raises UserError where a sample's size is not a multiple of what the model needs."""
    for index, request in enumerate(requests):
        if request.width % multiple or request.height % multiple:
            raise UserError(
                f"validation sample {index}: {request.width}x{request.height} is not a multiple of {multiple}; "
                f"use {round(request.width / multiple) * multiple or multiple}x"
                f"{round(request.height / multiple) * multiple or multiple}"
            )
