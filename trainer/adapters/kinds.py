"""The table of adapter kinds. A new one is an entry here, and the functions that it names.

Every kind changes a layer's weight W in one form: V = W + s B A, of factors A [R, K...] and B [N, R...] that its parameters
give; where it trains magnitudes m, the weight is m / ||V||_row V (dora.py). What reads or writes files, merges, measures or
replays knows this form, so a kind says how its parameters give it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from trainer.adapters.dora import Part, is_drowned
from trainer.base import other_trainers, patterns
from trainer.base.errors import UserError

# How the names of PEFT's parameters end, in a checkpoint and in diffusers' keys. A layer's come in this order.
A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"

LayerState = Mapping[str, Tensor]  # of one layer's parameters, by the ends of their names
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class AdapterKind:
    """One entry of the table.

    word: what people call it; its name is the word of `adapter.type`.
    shapes: (W's shape, rank) -> the shapes of what a layer trains, fp32, by the ends of the names, "NAME" or "NAME.weight".
    first: (an AdaptedLayer, its adapter's name) -> the first values of what begins neither as zeros nor, as A, drawn.
    factors: (the parameters) -> (A, B), with gradients, R being the layer's rank; None: A and B are parameters. In a fresh
    adapter B is zero.
    module: of kohya's programs, what a file of this kind belongs to; "": what the family says of a LoRA's.
    starts_from: of which kinds of files `adapter.init_from` takes one.
    refuses: the config keys that it does not go with, and why.
    """

    name: str
    word: str
    shapes: Callable[[Sequence[int], int], Shapes]
    first: Callable[[Any, str], LayerState] = lambda layer, adapter: {}
    factors: Callable[[LayerState], tuple[Tensor, Tensor]] | None = None
    module: str = ""
    starts_from: tuple[str, ...] = ()
    refuses: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """How the names of a layer's parameters end, in order."""
        return tuple(self.shapes((1, 1), 1))

    @property
    def magnitudes(self) -> bool:
        """Whether it trains the lengths of rows: with a rate of their own and no decay. Its files need norms of W."""
        return MAGNITUDE in self.ends

    def effective(self, values: LayerState) -> tuple[Tensor, Tensor, Tensor | None]:
        """(A, B, m or None) of a layer, of its parameters."""
        a, b = (values[A], values[B]) if self.factors is None else self.factors(values)
        return a, b, values.get(MAGNITUDE)

    def composed(self, layer: Any, adapter: str) -> Part:
        """What a layer computes with in one forward, of a kind that makes A and B of other parameters."""
        (a, b, m), scaling, c = layer.effective(adapter), layer.scaling[adapter], None
        if m is not None:
            c = layer.norm = layer.norm_with(a.flatten(1), b.flatten(1), scaling)
        return Part(layer.get_base_layer(), a, b, scaling, m, c, layer.z_rows)

    def of_layer(self, state: LayerState, layer: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """The same of one layer, by its full name, in an `Adapter.state_dict`."""
        return self.effective({end: state[f"{layer}.{end}"] for end in self.ends})


def low_rank(shape: Sequence[int], rank: int) -> Shapes:
    """The shapes of A and B of a layer; of a convolution B is 1x1."""
    rows, *columns = shape
    return {A: (rank, *columns), B: (rows, rank, *(1 for _ in columns[1:]))}


def first_lengths(layer: Any, adapter: str) -> LayerState:
    """The magnitudes of a new adapter, ||W + s B A||; the layer holds from now on what its norms are made of."""
    base = layer.get_base_layer()
    if layer.base_norm_sq is None:
        layer.base_norm_sq = base.kernels.row_squares(base.stored())
        layer.norm = torch.empty_like(layer.base_norm_sq)
        drowned = is_drowned(layer.base_norm_sq, base.bias_N)
        layer.z_rows = drowned.nonzero().flatten() if drowned.any() else None
    return {MAGNITUDE: layer.current_norm(adapter)}


WHOLE = (
    "DoRA divides by the norm of the whole W + s B A, and with a part of it left out the rows would not have the magnitudes' "
    "lengths"
)
KINDS = {
    kind.name: kind
    for kind in (
        AdapterKind(name="lora", word="LoRA", shapes=low_rank, starts_from=("lora",)),
        AdapterKind(
            name="dora",
            word="DoRA",
            shapes=lambda shape, rank: low_rank(shape, rank) | {MAGNITUDE: (shape[0],)},
            first=first_lengths,
            module="lycoris.kohya",
            starts_from=("lora", "dora"),
            refuses={
                "adapter.dropout": "DoRA's row scale couples the dropped path with the base",
                "adapter.rank_dropout": WHOLE,
                "adapter.module_dropout": WHOLE,
            },
        ),
    )
}


def kind_named(name: str) -> AdapterKind:
    """Raises UserError, with the name that was probably meant."""
    if name not in KINDS:
        suggestion = other_trainers.why_absent("adapter.type", name) or patterns.suggestion(name, KINDS)
        raise UserError(f"adapter.type = {name!r} is not known; {suggestion}")
    return KINDS[name]


def file_kind(*, magnitudes: bool) -> AdapterKind:
    """The kind of a file, or of PEFT's config, with or without magnitudes: files know no others."""
    return KINDS["dora" if magnitudes else "lora"]
