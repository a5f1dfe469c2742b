"""Captions of several numbers of rows, for denoisers that take those of one number at once: a mask would change last bits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from trainer.base.types import Conditioning
from trainer.models import base

Pick = Callable[[torch.Tensor], torch.Tensor]


def collate(parts: Sequence[Conditioning]) -> Conditioning:
    """Several captions' conditioning side by side, with the rows of each."""
    return replace(base.collate(parts), lengths=tuple(part.sequence.shape[1] for part in parts))


def each_length(conditioning: Conditioning) -> Iterator[tuple[int, list[int], Pick]]:
    """(rows, which captions have so many, what takes these rows of a batch's tensor), length by length."""
    count = len(conditioning.sequence)
    lengths = conditioning.lengths or (conditioning.sequence.shape[1],) * count
    for length in dict.fromkeys(lengths):
        indices = [index for index, each in enumerate(lengths) if each == length]
        yield length, indices, partial(_picked, indices=indices)


def in_order(made: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The results of all captions as one batch. made: by their places in it."""
    return torch.stack([made[index] for index in range(len(made))])


def _picked(tensor: torch.Tensor, indices: list[int]) -> torch.Tensor:
    """These rows of it, without an index on its device."""
    return tensor if len(indices) == len(tensor) else torch.cat([tensor[index : index + 1] for index in indices])
