"""The samples of a config, with their reference images and truths: checked before any weight is read."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from trainer.base.errors import UserError
from trainer.base.text import visible
from trainer.config import ValidationTable
from trainer.data import buckets
from trainer.data.examples import Example
from trainer.data.images.decode import decode, load_rgb
from trainer.data.sources import Photo
from trainer.models.base import ImagePart, SampleRequest


def requests_of(
    table: ValidationTable, examples: Sequence[Example], side: int, images: ImagePart
) -> tuple[SampleRequest, ...]:
    """The samples of [validation]. side: the default width and height in pixels. Raises UserError if one cannot be drawn."""
    if not (table.every_steps or table.every_epochs):
        return ()
    size = table.resolution or side
    default = {"negative": "", "width": size, "height": size, "seed": table.seed, "steps": table.steps, "guidance": None}
    if isinstance(table.prompts, str):
        requests = [_example_request(example, default) for example in prompt_examples(examples)]
    else:
        requests = [SampleRequest(**default | {"prompt": prompt}) for prompt in table.prompts]
    for index, sample in enumerate(table.samples):
        key = f"validation.samples[{index}].references"
        options = sample.model_dump(exclude_none=True, exclude={"truth"})
        requests.append(SampleRequest(**default | options, images=references(sample.references, key)))
    check_sizes(requests, images.size_multiple)
    check_references(((f"validation sample {index}", len(one.images)) for index, one in enumerate(requests)), images)
    return tuple(replace(one, prompt=visible(one.prompt), negative=visible(one.negative)) for one in requests)


def prompt_examples(examples: Sequence[Example]) -> list[Example]:
    """Examples whose captions become prompts: the first and the middle one, fewer if equal; no regularisation images."""
    subjects = [e for e in examples if not e.photo.source.regularisation and e.captions[0]]
    picks = [subjects[0], subjects[len(subjects) // 2]] if subjects else []
    return picks[: len({e.captions[0] for e in picks})]


def _example_request(example: Example, default: Mapping[str, Any]) -> SampleRequest:
    """A caption as a prompt; for an edit with the example's training size and reference images."""
    photos = [reference.photo for reference in example.references]
    width, height = example.bucket
    edit = {"width": width, "height": height, "references": tuple(str(photo.image) for photo in photos)} if photos else {}
    return SampleRequest(**default | edit | {"prompt": example.captions[0]}, images=tuple(map(_pixels, photos)))


def _pixels(photo: Photo) -> Image.Image:
    try:
        return decode(photo.image.read(), background=photo.source.background).image
    except (OSError, ValueError) as error:
        raise UserError(f"{photo.image}: {error}; it was read a moment ago: it has changed") from error


def references(paths: Sequence[str], key: str) -> tuple[Image.Image, ...]:
    """A sample's reference images. Raises UserError, naming `key`, for a file that is no image or that no pipeline takes."""

    def read(path: str) -> Image.Image:
        image = load_rgb(path)
        buckets.reference_bucket(*image.size, step=1)
        return image

    return tuple(_picture(read, path, f"{key}[{number}]") for number, path in enumerate(paths))


def truths_of(
    table: ValidationTable, requests: Sequence[SampleRequest], examples: Sequence[Example]
) -> tuple[Image.Image | None, ...]:
    """The pictures that the samples should look like, at the samples' sizes; None: unknown. An edit's truth is its photo."""
    if not requests:
        return ()
    truths: list[Image.Image | None] = [None] * (len(requests) - len(table.samples))
    if isinstance(table.prompts, str):
        truths = [_pixels(e.photo) if e.references else None for e in prompt_examples(examples)]
    for index, sample in enumerate(table.samples):
        key = f"validation.samples[{index}].truth"
        truths.append(None if sample.truth is None else _picture(load_rgb, sample.truth, key))
    return tuple(
        truth and ImageOps.fit(truth, (request.width, request.height), Image.Resampling.LANCZOS)
        for truth, request in zip(truths, requests, strict=True)
    )


def _picture(read: Callable[[str | Path], Image.Image], path: str, key: str) -> Image.Image:
    try:
        return read(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{key} = {path!r}: {reason}; give an image file, or leave it out") from error


def as_shown(image: Image.Image, images: ImagePart, count: int) -> Image.Image:
    """A reference image as the model sees it, at most at its own size. count: the sample's number of references."""
    mode = images.references.showing(count)
    step = images.size_multiple if mode == "stretched" else 1
    size = buckets.reference_size(*image.size, images.references, count, step=step)
    if mode == "stretched":
        return buckets.fit(image, size, crop=buckets.WHOLE)
    return (buckets.framed if mode == "framed" else buckets.show_reference)(image, size)


def check_references(counts: Iterable[tuple[str, int]], images: ImagePart) -> None:
    """Raises UserError if a photo or sample has more references than the model takes. counts: (name, count) pairs."""
    most = images.references.most
    for name, count in counts:
        if most is not None and count > most:
            raise UserError(f"{name} has {count} references, and this model is shown {most} at a time; leave out the others")


def check_sizes(requests: Sequence[Any], multiple: int) -> None:
    """Raises UserError if a sample's width or height is not a multiple of `multiple`."""
    for index, request in enumerate(requests):
        sides = (request.width, request.height)
        if any(side % multiple for side in sides):
            size, near = "x".join(map(str, sides)), "x".join(str(round(s / multiple) * multiple or multiple) for s in sides)
            raise UserError(f"validation sample {index}: {size} is not a multiple of {multiple}; use {near}")
