"""Photos and captions become entries of a cache, each addressed by everything that went into it.

A changed photo, caption, preprocessing or encoder has another key, so a stale entry is never read.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing

import torch

from trainer.data import buckets, masks, views
from trainer.data.entries import Cache, MemoryCache, Tensors, finite
from trainer.data.examples import Example
from trainer.data.images import decode
from trainer.data.threads import in_threads
from trainer.data.views import View
from trainer.errors import UserError
from trainer.phases import QUIET, Phases
from trainer.tensorfile import serialize
from trainer.terminal import printable
from trainer.types import Conditioning

PREPROCESSING_VERSION = 1  # raise it when `images.decode` or `buckets.fit` gives other pixels

# Captions that are encoded at once, if that gives the same bytes as one by one.
TOGETHER = 8

Entries = Iterator[tuple[str, Tensors, dict[str, str]]]  # key, entry, metadata of its file


def _key(kind: str, **inputs: object) -> str:
    text = json.dumps({"kind": kind, **inputs}, sort_keys=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def latent_key(example: Example, view: View, *, fingerprint: str) -> str:
    """The key of the latents of one view. `fingerprint` stands for the image encoder, its weights and its dtypes.

    Some inputs count only where they are not the default: choices (images.Decoded), a crop that is not at the centre, changed
    colours. So a photo keeps its key when such a key of the config is introduced.
    """
    photo = example.photo
    return _key(
        "latent",
        image=photo.sha256,
        bucket=list(example.bucket),
        resize=f"cover {buckets.RESIZE_FILTER.name}, crop centre",
        flip=view.flip,
        version=PREPROCESSING_VERSION,
        encoder=fingerprint,
        **({"choices": list(photo.choices)} if photo.choices else {}),
        **_crop(example, view),
        **({"colours": list(view.colours)} if view.colours else {}),
    )


def mask_key(example: Example, view: View, *, side: int) -> str:
    """The key of a mask as `masks.on_latents` gives it."""
    photo = example.photo
    return _key(
        "mask",
        mask=photo.mask_sha256,
        lies_in=photo.source.masks,
        bucket=list(example.bucket),
        flip=view.flip,
        side=side,
        version=PREPROCESSING_VERSION,
        **_crop(example, view),
    )


def _crop(example: Example, view: View) -> dict[str, list[int]]:
    photo = example.photo
    kept = buckets.place(photo.width, photo.height, example.bucket, crop=view.crop)
    if kept == buckets.place(photo.width, photo.height, example.bucket):
        return {}
    return {"crop": [*kept.resized_size, *kept.crop_top_left]}


def text_key(caption: str, *, fingerprint: str) -> str:
    """The key of one caption's conditioning. `fingerprint` stands for tokenizers and text encoders together."""
    return _key("text", caption=caption, encoder=fingerprint)


def latents_wanted(examples: Sequence[Example], *, seed: int, fingerprint: str) -> dict[str, tuple[Example, View]]:
    """By key, every view that may be drawn."""
    wanted: dict[str, tuple[Example, View]] = {}
    for example in examples:
        for view in views.every(seed, example):
            wanted.setdefault(latent_key(example, view, fingerprint=fingerprint), (example, view))
    return wanted


def masks_wanted(examples: Sequence[Example], *, seed: int, side: int) -> dict[str, tuple[Example, View]]:
    """By key, every view whose mask may be drawn."""
    wanted: dict[str, tuple[Example, View]] = {}
    for example in examples:
        if example.photo.mask is not None:
            for view in views.every(seed, example):
                wanted.setdefault(mask_key(example, view, side=side), (example, view))
    return wanted


def texts_wanted(captions: Iterable[str], *, fingerprint: str) -> dict[str, str]:
    """By key, each caption and "", which stands for dropped ones."""
    return {text_key(caption, fingerprint=fingerprint): caption for caption in (*captions, "")}


def fill_latents(
    cache: Cache | MemoryCache,
    examples: Sequence[Example],
    *,
    seed: int,
    fingerprint: str,
    encode: Callable[[torch.Tensor], torch.Tensor],
    on_non_finite: Callable[[str], None],
    phases: Phases = QUIET,
    mine: Callable[[str], bool] = lambda key: True,
) -> int:
    """Make the latents that are not cached yet, of every view; returns how many were made.

    seed: the run's, which the views follow from.
    `encode` maps pixels, fp32 [1, 3, H, W] in [-1, 1] on the CPU, to normalised latents [1, C, h, w]. It gets one photo
    at a time, so that an entry does not depend on its neighbours: two at once give other bits, of every photo that was
    measured (docs/data.md). Entries hold "latents", fp32 [C, h, w].
    mine: which keys are looked at, and made.
    `on_non_finite` is called with a description of every photo whose latents hold NaN or infinity, new or cached; if it
    raises, the new ones are not kept.
    Raises UserError if a photo changed after the scan.
    """
    wanted = latents_wanted(examples, seed=seed, fingerprint=fingerprint)

    def made(todo: list[str]) -> Entries:
        with closing(in_threads(lambda key: pixels(*wanted[key]), todo)) as decoded:
            for key, pixels_3HW in zip(todo, decoded, strict=True):
                yield key, {"latents": latents_of(pixels_3HW, encode)}, {"sample": wanted[key][0].sample}

    described = {
        key: f"the latents of {printable(example.sample)} ({example.photo.image})" for key, (example, _) in wanted.items()
    }
    return _fill(cache, described, made, on_non_finite, phases, "photo", mine)


def latents_of(pixels_3HW: torch.Tensor, encode: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """fp32 [C, h, w] on the CPU: those of one photo, encoded as `fill_latents` does."""
    return encode(pixels_3HW.unsqueeze(0)).detach().to("cpu", torch.float32).squeeze(0)


def fill_masks(
    cache: Cache | MemoryCache,
    examples: Sequence[Example],
    *,
    seed: int,
    side: int,
    phases: Phases = QUIET,
    mine: Callable[[str], bool] = lambda key: True,
) -> int:
    """Make the masks that are not cached yet, of every view; returns how many were made.

    seed: the run's. side: as of `masks.on_latents`. mine: as in `fill_latents`. Entries hold "mask", fp32 [h, w].
    Raises UserError if a mask changed after the scan.
    """
    wanted = masks_wanted(examples, seed=seed, side=side)

    def made(todo: list[str]) -> Entries:
        with closing(in_threads(lambda key: masks.on_latents(*wanted[key], side=side), todo)) as found:
            for key, mask in zip(todo, found, strict=True):
                yield key, {"mask": mask}, {"sample": wanted[key][0].sample}

    described = {
        key: f"the mask of {printable(example.sample)} ({example.photo.mask})" for key, (example, _) in wanted.items()
    }
    return _fill(cache, described, made, _never, phases, "mask", mine) if wanted else 0


def _never(what: str) -> None:
    raise AssertionError(f"{what} is not finite")


def fill_text(
    cache: Cache | MemoryCache,
    captions: Iterable[str],
    *,
    fingerprint: str,
    encode: Callable[[list[str]], Conditioning],
    on_non_finite: Callable[[str], None],
    phases: Phases = QUIET,
    mine: Callable[[str], bool] = lambda key: True,
    together: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> int:
    """Make the conditioning that is not cached yet, of each caption and of "" (dropped captions); returns how many.

    Entries hold Conditioning.tensors() with a batch dimension of 1, in the dtypes that `encode` gives.
    `on_non_finite` and `mine` as in `fill_latents`.
    together: how many captions `encode` may get at once, if that gives the bytes of one at a time. `say` is called with a
    line if it does not.
    """
    wanted = texts_wanted(captions, fingerprint=fingerprint)

    def made(todo: list[str]) -> Entries:
        keys = {wanted[key]: key for key in todo}
        for caption, tensors in _encoded(list(keys), encode, together, say):
            yield keys[caption], tensors, {}

    described = {key: f"the text encodings of {caption!r}" for key, caption in wanted.items()}
    return _fill(cache, described, made, on_non_finite, phases, "caption", mine)


def _encoded(
    captions: list[str], encode: Callable[[list[str]], Conditioning], together: int, say: Callable[[str], None]
) -> Iterator[tuple[str, Tensors]]:
    """Each caption with its conditioning, in any order.

    Whether batching changes bits depends on the shapes, not on the values. So the shortest and the longest captions are
    encoded one by one and at once. If all their bits agree, the rest is encoded in batches of that shape.
    """

    def alone(caption: str) -> tuple[str, Tensors]:
        tensors = encode([caption]).tensors()
        for name, tensor in tensors.items():
            assert tensor.shape[0] == 1, f"{name} of one caption has shape {list(tensor.shape)}"
        return caption, tensors

    def at_once(some: list[str]) -> list[tuple[str, Tensors]]:
        tensors = encode(some).tensors()
        return [(caption, {n: t[i : i + 1].clone() for n, t in tensors.items()}) for i, caption in enumerate(some)]

    if together > 1 and len(captions) >= 2 * together:
        captions = sorted(captions, key=len)
        ends = [*captions[: together // 2], *captions[-(together - together // 2) :]]
        captions = captions[together // 2 : -(together - together // 2)]
        singly = [alone(caption) for caption in ends]
        yield from singly
        if all(_equal(one, other) for (_, one), (_, other) in zip(singly, at_once(ends), strict=True)):
            while len(captions) >= together:
                yield from at_once(captions[:together])
                captions = captions[together:]
        else:
            say(f"captions are encoded one by one: {together} at once give other bits on this machine")
    yield from map(alone, captions)


def _equal(one: Tensors, other: Tensors) -> bool:
    """Bit by bit, as they would lie in a file."""
    return list(map(bytes, serialize(one))) == list(map(bytes, serialize(other)))


def _fill(
    cache: Cache | MemoryCache,
    described: Mapping[str, str],
    made: Callable[[list[str]], Entries],
    on_non_finite: Callable[[str], None],
    phases: Phases,
    unit: str,
    mine: Callable[[str], bool],
) -> int:
    """described: what each key stands for. made: keys -> their entries, in any order."""
    keys = [key for key in described if mine(key)]
    todo = cache.missing(keys, phases)
    with phases(f"encoding {unit}s", len(todo), unit) as phase, phase.between_modules(), closing(made(todo)) as entries:
        for key, tensors, metadata in entries:
            if not finite(tensors):
                on_non_finite(described[key])
            cache.put(key, tensors, metadata)
            phase.advance()
    new = frozenset(todo)
    for key in keys:
        if key not in new and not cache.is_finite(key):
            on_non_finite(f"{described[key]}, {cache.origin(key)},")
    return len(todo)


def pixels(example: Example, view: View) -> torch.Tensor:
    """fp32 [3, H, W] in [-1, 1]: what the image encoder gets. Raises UserError where the photo changed after the scan."""
    photo = example.photo
    data = photo.image.read()
    # The key was made from the hash of the scan: other bytes must not be stored under it.
    if hashlib.sha256(data).hexdigest() != photo.sha256:
        raise UserError(f"{photo.image} changed while the run was starting; start again")
    image = decode(data, background=photo.source.background).image
    return buckets.to_pixels(view.show(image, example))
