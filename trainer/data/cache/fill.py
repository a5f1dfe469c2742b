"""Encodes photos and captions into entries of a cache. A key covers all inputs of its entry: a stale one is never read."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial

import torch

from trainer.base import tiles
from trainer.base.console import printable
from trainer.base.progress import QUIET, Phases
from trainer.base.types import Conditioning
from trainer.data import buckets
from trainer.data.cache.entries import Cache, MemoryCache, Tensors, finite
from trainer.data.examples import Example
from trainer.data.images import views
from trainer.data.images.decode import decode
from trainer.data.images.views import View
from trainer.data.memo import read_unchanged
from trainer.data.threads import in_threads

PREPROCESSING_VERSION = 1  # raise it when `decode.decode` or `buckets.fit` gives other pixels

Entries = Iterator[tuple[str, Tensors, dict[str, str]]]  # key, entry, metadata of its file


def _key(kind: str, **inputs: object) -> str:
    text = json.dumps({"kind": kind, **inputs}, sort_keys=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def latent_key(example: Example, view: View, *, fingerprint: str) -> str:
    """The key of the latents of one view. `fingerprint` stands for the image encoder, its weights and its dtypes. Choices, a
    moved crop, changed colours and tiles are part of it only if there are any: other photos keep their earlier keys."""
    photo, edge = example.photo, "frame" if view.reference and example.showing == "framed" else "crop"
    return _key(
        "latent",
        image=photo.sha256,
        bucket=list(example.bucket),
        resize=f"{'within' if view.reference else 'cover'} {buckets.RESIZE_FILTER.name}, {edge} centre",
        flip=view.flip,
        version=PREPROCESSING_VERSION,
        encoder=fingerprint,
        **({"choices": list(photo.choices)} if photo.choices else {}),
        **({} if view.reference else _crop(example, view)),
        **({"colours": list(view.colours)} if view.colours else {}),
        **({"tiles": side} if (side := tiles.side(*example.bucket)) else {}),
    )


def mask_key(example: Example, view: View, *, side: int) -> str:
    """The key of a mask over latents."""
    photo = example.photo
    return _key(
        "mask",
        mask=photo.mask.sha256,
        lies_in="alpha" if photo.source.masks == "alpha" else "files",
        bucket=list(example.bucket),
        flip=view.flip,
        side=side,
        version=PREPROCESSING_VERSION,
        **_crop(example, view),
    )


def _crop(example: Example, view: View) -> dict[str, list[int]]:
    photo = example.photo
    crop = buckets.place(*photo.size, example.bucket, crop=view.crop)
    if crop == buckets.place(*photo.size, example.bucket):
        return {}
    return {"crop": [*crop.resized_size, *crop.crop_top_left]}


def text_key(caption: str, *, fingerprint: str) -> str:
    """The key of one caption's conditioning. `fingerprint` stands for tokenizers and text encoders together."""
    return _key("text", caption=caption, encoder=fingerprint)


def latents_wanted(examples: Sequence[Example], *, seed: int, fingerprint: str) -> dict[str, tuple[Example, View]]:
    """Key -> every view that may be drawn, and the references beside it."""
    result: dict[str, tuple[Example, View]] = {}
    for example in examples:
        for view in views.every(seed, example):
            for image in ((example, view), *views.references(example, view)):
                result.setdefault(latent_key(*image, fingerprint=fingerprint), image)
    return result


def masks_wanted(examples: Sequence[Example], *, seed: int, side: int) -> dict[str, tuple[Example, View]]:
    """Key of a mask -> the first view that may be drawn with it."""
    result: dict[str, tuple[Example, View]] = {}
    for example in (example for example in examples if example.photo.mask is not None):
        for view in views.every(seed, example):
            result.setdefault(mask_key(example, view, side=side), (example, view))
    return result


def texts_wanted(captions: Iterable[str], *, fingerprint: str) -> dict[str, str]:
    """Each caption by its key, and "", which stands for dropped ones."""
    return {text_key(caption, fingerprint=fingerprint): caption for caption in (*captions, "")}


def fill_latents(
    cache: Cache | MemoryCache,
    views_by_key: Mapping[str, tuple[Example, View]],
    *,
    encode: Callable[[torch.Tensor], torch.Tensor],
    on_non_finite: Callable[[str], None],
    phases: Phases = QUIET,
) -> int:
    """Make the latents that are not cached yet; returns their count. views_by_key: of `latents_wanted`.

    `encode` maps pixels, fp32 [1, 3, H, W] in [-1, 1] on the CPU, to normalised latents [1, C, h, w]. It gets one photo at a
    time: with SDXL's VAE on a CPU two at once gave other bits. Entries hold "latents", fp32 [C, h, w].
    `on_non_finite` is called with a description of every photo whose latents hold NaN or infinity, new or cached; if it
    raises, the new ones are not kept. Raises UserError if a photo changed after the scan.
    """
    described = {key: f"the latents of {printable(e.sample)} ({e.photo.image})" for key, (e, _) in views_by_key.items()}
    make = partial(_from_views, views_by_key, pixels, lambda pixels_3HW: {"latents": latents_of(pixels_3HW, encode)})
    return _fill(cache, described, make, dict.fromkeys(views_by_key, on_non_finite), phases, "photo")


def latents_of(pixels_3HW: torch.Tensor, encode: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The latents of one photo, fp32 [C, h, w] on the CPU, encoded as `fill_latents` does."""
    return encode(pixels_3HW.unsqueeze(0)).detach().to("cpu", torch.float32).squeeze(0)


def fill_masks(
    cache: Cache | MemoryCache, views_by_key: Mapping[str, tuple[Example, View]], *, side: int, phases: Phases = QUIET
) -> int:
    """Make the masks that are not cached yet; returns their count. views_by_key: of `masks_wanted` for the same side. Entries
    hold "mask", fp32 [h, w]. Raises UserError if a mask changed after the scan."""
    described = {key: f"the mask of {printable(e.sample)} ({e.photo.mask.place})" for key, (e, _) in views_by_key.items()}
    make = partial(_from_views, views_by_key, partial(views.mask_on_latents, side=side), lambda mask: {"mask": mask})
    # No entry of `on_non_finite`: a mean of bytes is finite.
    return _fill(cache, described, make, {}, phases, "mask") if views_by_key else 0


def _from_views(
    views_by_key: Mapping[str, tuple[Example, View]],
    read: Callable[[Example, View], torch.Tensor],
    entry: Callable[[torch.Tensor], Tensors],
    keys: list[str],
) -> Entries:
    """The entries of these keys. Threads read ahead; `entry` is called in this one."""
    with closing(in_threads(lambda key: read(*views_by_key[key]), keys)) as results:
        for key, result in zip(keys, results, strict=True):
            yield key, entry(result), {"sample": views_by_key[key][0].sample}


def fill_text(
    cache: Cache | MemoryCache,
    trained: Mapping[str, str],
    prompts: Mapping[str, str] = {},
    *,
    encode: Callable[[list[str]], Iterator[tuple[str, Conditioning]]],
    on_non_finite: Callable[[str], None],
    on_black: Callable[[str], None] = lambda name: None,
    phases: Phases = QUIET,
) -> int:
    """Make the conditioning that is not cached yet; returns its count.

    trained, prompts: of `texts_wanted`; no step sees the prompts of samples. `encode` yields each text with its conditioning,
    in any order (data/cache/texts.py). Entries hold Conditioning.tensors() with a batch dimension of 1, in the dtypes of
    `encode`. `on_non_finite` is called if an encoding is not finite, `on_black` instead if only a prompt is not finite.
    """
    texts = {**trained, **prompts}
    described = {key: f"the text encodings of {text!r}" for key, text in texts.items()}

    def make(keys: list[str]) -> Entries:
        by_text = {texts[key]: key for key in keys}
        with closing(encode(list(by_text))) as encoded:
            for text, conditioning in encoded:
                yield by_text[text], conditioning.tensors(), {}

    actions = {key: on_non_finite if key in trained else on_black for key in texts}
    return _fill(cache, described, make, actions, phases, "caption")


def _fill(
    cache: Cache | MemoryCache,
    described: Mapping[str, str],
    make: Callable[[list[str]], Entries],
    on_non_finite: Mapping[str, Callable[[str], None]],
    phases: Phases,
    unit: str,
) -> int:
    """described: key -> its entry in words. make: keys -> their entries, in any order. on_non_finite: by key."""
    missing = cache.missing(list(described), phases)
    with phases(f"encoding {unit}s", len(missing), unit) as phase, phase.between_modules(), closing(make(missing)) as entries:
        try:
            for key, tensors, metadata in entries:
                if not finite(tensors):
                    on_non_finite[key](described[key])
                cache.put(key, tensors, metadata)
                phase.advance()
        finally:  # a stop keeps the entries so far
            cache.flush()
    new = frozenset(missing)
    for key in described:
        if key not in new and not cache.is_finite(key):
            on_non_finite[key](f"{described[key]}, {cache.origin(key)},")
    return len(missing)


def pixels(example: Example, view: View) -> torch.Tensor:
    """fp32 [3, H, W] in [-1, 1]: the input of the image encoder. Raises UserError if the photo changed after the scan."""
    photo = example.photo
    image = decode(read_unchanged(photo.image, photo.sha256), background=photo.source.background).image
    return buckets.to_pixels(view.show(image, example))
