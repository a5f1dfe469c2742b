"""Encodes captions with a model's text encoders, one encoder after another: each is unloaded before the next is loaded.

The outputs of earlier encoders stay in the host's memory until the last one has encoded the caption, too. They are bounded,
so captions go through all encoders in rounds: 512 MiB are 2000 captions of SDXL and 170,000 of Flux.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from trainer.base.progress import QUIET, Phases
from trainer.base.tensorfile import serialize
from trainer.base.types import Conditioning
from trainer.data.cache.entries import Tensors

# Captions that are encoded at once, if that gives the same bytes as one by one.
TOGETHER = 8
HELD_BYTES = 2**29  # of each earlier encoder's outputs, in a round

Encode = Callable[[list[str]], Mapping[str, torch.Tensor]]


def one_after_another(
    captions: Sequence[str],
    encoders: Mapping[str, Callable[[], AbstractContextManager[Encode]]],
    *,
    join: Callable[[Sequence[Mapping[str, torch.Tensor]]], Conditioning],
    together: int = 1,
    held_bytes: int = HELD_BYTES,
    say: Callable[[str], None] = lambda line: None,
    phases: Phases = QUIET,
) -> Iterator[tuple[str, Conditioning]]:
    """Each of the captions with its conditioning, on the CPU, with a batch dimension of 1, in any order.

    encoders: by name, in their order. Inside its context an encoder is in memory; its function maps captions to its part of
    their conditioning, tensors [B, ...] by name. join: the parts of all encoders, in their order -> the conditioning.
    together: the most captions that an encoder gets at once, if that gives the bytes of one at a time; else `say` gets a
    line.
    """
    allowed = dict.fromkeys(encoders, together)

    def through(name: str, encode: Encode, some: list[str]) -> Iterator[tuple[str, Tensors]]:
        def differ() -> None:
            say(f"{name}: captions are encoded one by one: {together} at once give other bits on this machine")
            allowed[name] = 1

        return _encoded(some, encode, allowed[name], differ)

    *earlier, last = encoders
    remaining = list(captions)
    while remaining:
        parts: dict[str, tuple[Tensors, ...]] = dict.fromkeys(remaining, ())
        for name in earlier:
            encoded, size = {}, 0
            with encoders[name]() as encode, phases(f"captions through {name}", len(parts), "caption") as phase:
                for caption, part in through(name, encode, list(parts)):
                    encoded[caption] = (*parts[caption], part)
                    phase.advance()
                    size += sum(tensor.nbytes for tensor in part.values())
                    if size >= held_bytes:
                        break
            parts = encoded
        remaining = [caption for caption in remaining if caption not in parts]
        with encoders[last]() as encode:
            for caption, part in through(last, encode, list(parts)):
                yield caption, join((*parts.pop(caption), part))


def at_once(count: int, together: int) -> int:
    """The most captions of `count` that an encoder gets at once. For few, comparing the bytes is not worth it."""
    return together if count >= 2 * together else 1


def _encoded(captions: list[str], encode: Encode, together: int, differ: Callable[[], None]) -> Iterator[tuple[str, Tensors]]:
    """Each caption with one encoder's part of its conditioning, on the CPU, in any order. Whether batching changes bits
    depends on the shapes, not on the values: the shortest and the longest captions are encoded one by one and at once. If all
    their bits are equal, the rest is encoded in batches of that shape; else `differ` is called."""

    def alone(caption: str) -> tuple[str, Tensors]:
        tensors = encode([caption])
        for name, tensor in tensors.items():
            assert tensor.shape[0] == 1, f"{name} of one caption has shape {list(tensor.shape)}"
        return caption, {name: tensor.cpu() for name, tensor in tensors.items()}

    def side_by_side(some: list[str]) -> list[tuple[str, Tensors]]:
        tensors = {name: tensor.cpu() for name, tensor in encode(some).items()}
        return [(caption, {n: t[i : i + 1].clone() for n, t in tensors.items()}) for i, caption in enumerate(some)]

    if at_once(len(captions), together) > 1:
        captions = sorted(captions, key=len)
        ends = [*captions[: together // 2], *captions[-(together - together // 2) :]]
        captions = captions[together // 2 : -(together - together // 2)]
        singly = [alone(caption) for caption in ends]
        yield from singly
        if all(_equal(one, other) for (_, one), (_, other) in zip(singly, side_by_side(ends), strict=True)):
            while len(captions) >= together:
                yield from side_by_side(captions[:together])
                captions = captions[together:]
        else:
            differ()
    yield from map(alone, captions)


def _equal(one: Tensors, other: Tensors) -> bool:
    """Whether all names, dtypes, shapes and bits are equal."""
    return list(map(bytes, serialize(one))) == list(map(bytes, serialize(other)))
