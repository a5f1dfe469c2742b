"""The samples that a run is asked for, with the pictures that belong to them: checked before a weight is read."""

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
    wanted: ValidationTable, trained: Sequence[Example], side: int, images: ImagePart
) -> tuple[SampleRequest, ...]:
    """The samples that are asked for. side: pixels, where none are given. Raises UserError for one that cannot be drawn."""
    if not (wanted.every_steps or wanted.every_epochs):
        return ()
    size = wanted.resolution or side
    default = {"negative": "", "width": size, "height": size, "seed": wanted.seed, "steps": wanted.steps, "guidance": None}
    if isinstance(wanted.prompts, str):
        requests = [_of_example(example, default) for example in of_captions(trained)]
    else:
        requests = [SampleRequest(**default | {"prompt": prompt}) for prompt in wanted.prompts]
    for index, sample in enumerate(wanted.samples):
        key = f"validation.samples[{index}].references"
        given = sample.model_dump(exclude_none=True, exclude={"truth"})
        requests.append(SampleRequest(**default | given, images=references(sample.references, key)))
    check_sizes(requests, images.size_multiple)
    check_references(((f"validation sample {index}", len(one.images)) for index, one in enumerate(requests)), images)
    return tuple(replace(each, prompt=visible(each.prompt), negative=visible(each.negative)) for each in requests)


def of_captions(examples: Sequence[Example]) -> list[Example]:
    """Two examples whose captions are prompts: the first and one of the middle, or fewer; none of regularisation images."""
    subjects = [e for e in examples if not e.photo.source.regularisation and e.captions[0]]
    picks = [subjects[0], subjects[len(subjects) // 2]] if subjects else []
    return picks[: len({e.captions[0] for e in picks})]


def _of_example(example: Example, default: Mapping[str, Any]) -> SampleRequest:
    """A caption as a prompt. Of an edit: at the size at which it is trained, shown what the model is shown for it."""
    photos = [each.photo for each in example.references]
    width, height = example.bucket
    edit = {"width": width, "height": height, "references": tuple(str(photo.image) for photo in photos)} if photos else {}
    return SampleRequest(**default | edit | {"prompt": example.captions[0]}, images=tuple(map(_pixels, photos)))


def _pixels(photo: Photo) -> Image.Image:
    try:
        return decode(photo.image.read(), background=photo.source.background).image
    except (OSError, ValueError) as error:
        raise UserError(f"{photo.image}: {error}; it was read a moment ago: it has changed") from error


def references(paths: Sequence[str], key: str) -> tuple[Image.Image, ...]:
    """The images that a sample is shown. Raises UserError, by `key`, for one that is no image, or that no pipeline takes."""

    def read(path: str) -> Image.Image:
        image = load_rgb(path)
        buckets.reference_bucket(*image.size, step=1)
        return image

    return tuple(_picture(read, path, f"{key}[{number}]") for number, path in enumerate(paths))


def truths_of(
    wanted: ValidationTable, requests: Sequence[SampleRequest], trained: Sequence[Example]
) -> tuple[Image.Image | None, ...]:
    """What the samples ought to look like, scaled and cropped to their sizes; None: not known. An edit's is its photo."""
    if not requests:
        return ()
    truths: list[Image.Image | None] = [None] * (len(requests) - len(wanted.samples))
    if isinstance(wanted.prompts, str):
        truths = [_pixels(e.photo) if e.references else None for e in of_captions(trained)]
    for index, sample in enumerate(wanted.samples):
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
    """A sample's reference, no larger than the model is shown it. count: of the references of that sample."""
    how = images.references.showing(count)
    step = images.size_multiple if how == "stretched" else 1
    size = buckets.reference_size(*image.size, images.references, count, step=step)
    if how == "stretched":
        return buckets.fit(image, size, crop=buckets.WHOLE)
    return (buckets.framed if how == "framed" else buckets.show_reference)(image, size)


def check_references(counts: Iterable[tuple[str, int]], images: ImagePart) -> None:
    """Raises UserError where more references are shown than the model takes. counts: by photo or sample."""
    most = images.references.most
    for name, count in counts:
        if most is not None and count > most:
            raise UserError(f"{name} has {count} references, and this model is shown {most} at a time; leave out the others")


def check_sizes(requests: Sequence[Any], multiple: int) -> None:
    """Raises UserError where a sample's size is not a multiple of what the model needs."""
    for index, request in enumerate(requests):
        sides = (request.width, request.height)
        if any(side % multiple for side in sides):
            given, near = "x".join(map(str, sides)), "x".join(str(round(s / multiple) * multiple or multiple) for s in sides)
            raise UserError(f"validation sample {index}: {given} is not a multiple of {multiple}; use {near}")
