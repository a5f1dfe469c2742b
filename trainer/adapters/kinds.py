"""The table of adapter kinds. A new one is an entry here, and the functions that it names.

Every kind changes a layer's weight W in one form: V = W + s B A, of factors A [R, K...] and B [N, R...] that its parameters
give; if it trains magnitudes m, the weight is m / ||V||_row V (dora.py). Code that reads or writes files, merges, measures or
replays uses this form alone, so a kind says how its parameters give it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from trainer.adapters import lokr
from trainer.adapters.dora import is_drowned
from trainer.base import other_trainers, patterns
from trainer.base.errors import UserError

# Ends of PEFT's parameter names, in a checkpoint and in diffusers' keys; also the order of a layer's parameters.
A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"

LayerState = Mapping[str, Tensor]  # one layer's parameters by the ends of their names
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Form:
    """The functions of a kind that computes with other matrices than A and B, and whose files hold these.

    ends: the name ends that the matrices may have; a layer has some of them.
    part: (base layer, matrices, matrices in the compute dtype with the first times s, s) -> an object that computes the
      forward, made once for an update: a lokr.KronPart.
    rank: (shapes of the matrices) -> a layer's rank. unscaled: (ends of a layer) -> whether s is 1 whatever alpha is.
    product: (matrices) -> B A in W's shape, fp64. norm: (matrices) -> ||B A||; (matrices, others) -> ||B A - B' A'||.
    nearest: (matrices, rank) -> (A, B, relative loss) of the nearest product of that rank.
    options: keys of `adapter` that `shapes` takes too.
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

    name: the word of `adapter.type`. word: the kind's common name.
    shapes: (W's shape, rank) -> shapes of a layer's parameters, fp32, by the ends of their names, "NAME" or "NAME.weight".
    drawn: ends of the parameters that begin as random draws, not as zeros.
    first: (AdaptedLayer, adapter name) -> first values of parameters that begin otherwise.
    factors: (parameters) -> (A, B), with gradients; None: A and B are parameters. In a fresh adapter B is zero.
    form: the functions of its own matrices in place of A and B; then `factors` is for files and measures alone, and its R
      may be large.
    module: value of the header's ss_network_module; "": the one that the family gives a LoRA.
    starts_from: the kinds of file that `adapter.init_from` takes. refuses: config key -> why it excludes this kind.
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
        """The ends of a layer's parameter names, in order."""
        return self.form.ends if self.form else tuple(self.shapes((1, 1), 1))

    @property
    def magnitudes(self) -> bool:
        """Whether it trains row lengths: with a rate of their own and no decay. Its files need norms of W."""
        return MAGNITUDE in self.ends

    @property
    def in_files(self) -> str:
        """The kind's name in its files."""
        return self.name if self.form else file_kind(magnitudes=self.magnitudes).name

    @property
    def composes(self) -> bool:
        """Whether every forward makes A and B."""
        return self.factors is not None and self.form is None

    def unscaled(self, ends: Iterable[str]) -> bool:
        """Whether a layer with parameters of these ends has s = 1, whatever its alpha."""
        return self.form is not None and self.form.unscaled(ends)

    def scaling(self, ends: Iterable[str], rank: int, alpha: float, rslora: bool) -> float:
        """The scale s of a layer with parameters of these ends."""
        return 1.0 if self.unscaled(ends) else alpha / (math.sqrt(rank) if rslora else rank)

    def rank(self, sizes: Mapping[str, Sequence[int]]) -> int:
        """A layer's rank from the shapes of its parameters."""
        return self.form.rank(sizes) if self.form else sizes[A][0]

    def effective(self, values: LayerState) -> tuple[Tensor, Tensor, Tensor | None]:
        """(A, B, m or None) from a layer's parameters."""
        a, b = (values[A], values[B]) if self.factors is None else self.factors(values)
        return a, b, values.get(MAGNITUDE)

    def values(self, state: LayerState, layer: str) -> dict[str, Tensor]:
        """One layer's parameters from an `Adapter.state_dict`. layer: full name."""
        keys = {end: f"{layer}.{end}" for end in self.ends}
        return {end: state[key] for end, key in keys.items() if key in state or not self.form}


def low_rank(shape: Sequence[int], rank: int) -> Shapes:
    """Shapes of a layer's A and B; a convolution's B is 1x1."""
    rows, *columns = shape
    return {A: (rank, *columns), B: (rows, rank, *(1 for _ in columns[1:]))}


def first_lengths(layer: Any, adapter: str) -> LayerState:
    """The magnitudes of a new adapter, ||W + s B A||. Also gives the layer the buffers that its norms need."""
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
    """The kind, with the options in `keys`, the config's `adapter`. Raises UserError with the likely name if unknown."""
    if name not in KINDS:
        suggestion = other_trainers.why_absent("adapter.type", name) or patterns.suggestion(name, KINDS)
        raise UserError(f"adapter.type = {name!r} is not known; {suggestion}")
    kind = KINDS[name]
    if kind.form is None or keys is None:
        return kind
    return replace(kind, shapes=partial(kind.shapes, **{key: keys[key] for key in kind.form.options}))


def file_kind(*, magnitudes: bool, ends: Iterable[str] = ()) -> AdapterKind:
    """The kind of a file, or of PEFT's config. ends: name ends of matrices in place of A and B."""
    matches = (kind for end in ends for kind in KINDS.values() if kind.form and end in kind.form.ends)
    return next(matches, KINDS["dora" if magnitudes else "lora"])
