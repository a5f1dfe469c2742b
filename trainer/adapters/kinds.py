"""The table of adapter kinds. A new one is an entry here, and the functions that it names.

Every kind changes a layer's weight W in one form: V = W + s B A, of factors A [R, K...] and B [N, R...] that its parameters
give; where it trains magnitudes m, the weight is m / ||V||_row V (dora.py). What reads or writes files, merges, measures or
replays knows this form, so a kind says how its parameters give it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from trainer.adapters import lokr
from trainer.adapters.dora import Part, is_drowned
from trainer.base import other_trainers, patterns
from trainer.base.errors import UserError

# How the names of PEFT's parameters end, in a checkpoint and in diffusers' keys. A layer's come in this order.
A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"

LayerState = Mapping[str, Tensor]  # of one layer's parameters, by the ends of their names
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a kind has that computes with other matrices than A and B, and whose files hold these.

    ends: of all names that they may have; a layer has some of them. part: (base layer, its matrices, these in the compute
    dtype, the first times s, and s) -> what computes, made once for an update: as a lokr.KronPart. rank: (the matrices'
    shapes) -> a layer's rank. unscaled: (the ends of a layer) -> whether its s is 1 whatever its alpha. product: (the
    matrices) -> B A in W's shape, fp64. norm: (the matrices) -> ||B A||; (the matrices, others) -> ||B A - B' A'||. nearest:
    (the matrices, rank) -> (A, B, what is lost) of the nearest of that rank. options: of `adapter`, the keys that `shapes`
    takes, too.
    """

    ends: tuple[str, ...]
    part: Callable[..., Any]
    rank: Callable[[Mapping[str, Sequence[int]]], int]
    unscaled: Callable[[Iterable[str]], bool]
    product: Callable[[LayerState], Tensor]
    norm: Callable[..., float]
    nearest: Callable[[LayerState, int], tuple[Tensor, Tensor, float]]
    options: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class AdapterKind:
    """One entry of the table.

    word: what people call it; its name is the word of `adapter.type`.
    shapes: (W's shape, rank) -> the shapes of what a layer trains, fp32, by the ends of the names, "NAME" or "NAME.weight".
    drawn: the ends of those that begin as draws, and not as zeros. first: (an AdaptedLayer, its adapter's name) -> the first
    values of what begins otherwise.
    factors: (the parameters) -> (A, B), with gradients; None: A and B are parameters. In a fresh adapter B is zero.
    form: what it has in place of A and B; then `factors` is for files and measures alone, and its R may be large.
    module: of kohya's programs, what a file of this kind belongs to; "": what the family says of a LoRA's.
    starts_from: of which kinds of files `adapter.init_from` takes one.
    refuses: the config keys that it does not go with, and why.
    """

    name: str
    word: str
    shapes: Callable[..., Shapes]
    drawn: tuple[str, ...] = (A,)
    first: Callable[[Any, str], LayerState] = lambda layer, adapter: {}
    factors: Callable[[LayerState], tuple[Tensor, Tensor]] | None = None
    form: Form | None = None
    module: str = ""
    starts_from: tuple[str, ...] = ()
    refuses: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """How the names of a layer's parameters end, in order."""
        return self.form.ends if self.form else tuple(self.shapes((1, 1), 1))

    @property
    def magnitudes(self) -> bool:
        """Whether it trains the lengths of rows: with a rate of their own and no decay. Its files need norms of W."""
        return MAGNITUDE in self.ends

    @property
    def in_files(self) -> str:
        """The name of the kind that its files are of."""
        return self.name if self.form else file_kind(magnitudes=self.magnitudes).name

    @property
    def composes(self) -> bool:
        """Whether A and B are made in every forward."""
        return self.factors is not None and self.form is None

    def unscaled(self, ends: Iterable[str]) -> bool:
        """Whether s is 1, whatever its alpha is, for a layer that has parameters of these ends."""
        return self.form is not None and self.form.unscaled(ends)

    def scaling(self, ends: Iterable[str], rank: int, alpha: float, rslora: bool) -> float:
        """s of a layer that has parameters of these ends."""
        return 1.0 if self.unscaled(ends) else alpha / (math.sqrt(rank) if rslora else rank)

    def rank(self, sizes: Mapping[str, Sequence[int]]) -> int:
        """The rank of a layer, by the shapes of its parameters."""
        return self.form.rank(sizes) if self.form else sizes[A][0]

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

    def values(self, state: LayerState, layer: str) -> dict[str, Tensor]:
        """The parameters of one layer, by its full name, in an `Adapter.state_dict`."""
        keys = {end: f"{layer}.{end}" for end in self.ends}
        return {end: state[key] for end, key in keys.items() if key in state or not self.form}


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
        AdapterKind(
            name="lokr",
            word="LoKr",
            shapes=lokr.shapes,
            drawn=lokr.DRAWN,
            factors=lokr.factors,
            form=Form(
                ends=lokr.ENDS,
                part=lokr.KronPart,
                rank=lokr.rank_of,
                unscaled=lokr.is_whole,
                product=lokr.product,
                norm=lokr.norm,
                nearest=lokr.nearest,
                options=("factor", "decompose"),
            ),  # fmt: skip
            module="lycoris.kohya",
            starts_from=("lokr",),
            refuses={
                "adapter.rank_dropout": "a LoKr has no rows of A; LyCORIS drops rows of its whole product",
                "adapter.module_dropout": "it is made of rows of A, which a LoKr has not",
                "adapter.max_norm": "it scales A and B as they are trained, and a LoKr has others",
                "optimizer.lora_plus": "it is the rate of B over that of A, which a LoKr has not",
            },
        ),
    )
}


def kind_named(name: str, keys: Mapping[str, Any] | None = None) -> AdapterKind:
    """The kind, with the options of `keys`, the config's `adapter`. Raises UserError, with the name probably meant."""
    if name not in KINDS:
        suggestion = other_trainers.why_absent("adapter.type", name) or patterns.suggestion(name, KINDS)
        raise UserError(f"adapter.type = {name!r} is not known; {suggestion}")
    kind = KINDS[name]
    if kind.form is None or keys is None:
        return kind
    return replace(kind, shapes=partial(kind.shapes, **{key: keys[key] for key in kind.form.options}))


def file_kind(*, magnitudes: bool, ends: Iterable[str] = ()) -> AdapterKind:
    """The kind of a file, or of PEFT's config. ends: of the matrices that it has in place of A and B."""
    of_form = (kind for end in ends for kind in KINDS.values() if kind.form and end in kind.form.ends)
    return next(of_form, KINDS["dora" if magnitudes else "lora"])
