"""An adapter apart from any model: the result of every reader of adapter files, the input of every writer.

    layers[NAME]: B A with its scale, by our full name of the layer ("unet.down_blocks...to_q"); for a DoRA its magnitude

Reading is lazy: tensors are recipes (tensorfile.Recipe), made one at a time when a file is written.

A DoRA's magnitude m, of the output axis (one a row of W) or of the input axis (one a column), stands for

    "magnitude"          m (W + s B A) / ||W + s B A||    the definition: PEFT, LyCORIS, OneTrainer
    "comfyui_released"   m (W + s B A) / ||W||            ComfyUI's released versions

Training changes the first. To convert one into the other takes ||W|| and ||W + s B A|| of the base (norms.py).
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Literal, Self

import torch

from trainer.adapters import lokr
from trainer.adapters.adapter import Adapter
from trainer.adapters.kinds import AdapterKind, B, Form, file_kind
from trainer.adapters.norms import RowNorms, magnitude, released_scale
from trainer.adapters.targets import Target
from trainer.base.errors import NonFiniteError, UserError
from trainer.base.files import Advance, no_progress
from trainer.base.tensorfile import Recipe, count_not_finite

Axis = Literal["output", "input"]
# ComfyUI's released versions divide dora_scale by ||W|| instead of ||W + sBA||; the label says what a file was made for.
DoraScale = Literal["comfyui_released", "magnitude"]
AllNorms = Mapping[str, RowNorms]  # by full name of the layer


def recipe(tensor: torch.Tensor) -> Recipe:
    """A recipe that gives `tensor` on the CPU."""
    return Recipe(tensor.dtype, tuple(tensor.shape), tensor.cpu)


def derived(base: Recipe, shape: tuple[int, ...], change: Callable[[torch.Tensor], torch.Tensor]) -> Recipe:
    """A recipe with `base`'s dtype and another shape, which applies `change` to the tensor of `base`."""
    return Recipe(base.dtype, shape, lambda: change(base.make()))


def _swapped(rows: Recipe) -> Recipe:
    return derived(rows, rows.shape, lambda t: torch.cat(t.chunk(2)[::-1]))


@dataclass(frozen=True)
class Factors:
    """One layer's adapter: W becomes W + s B A, s = alpha / rank (rsLoRA: alpha / sqrt(rank)).

    a: [R, K] or, for a convolution, [R, K, kh, kw]. b: [N, R] or [N, R, 1, 1]. Both of any floating dtype.
    magnitude: [N] for the output axis, [K] for the input axis; None for a LoRA.
    matrices: by the ends of their names, those of a kind that has others than A and B (kinds.Form); `a` and `b` then compute
      A and B from them. Factors with another A or B have no matrices.
    """

    a: Recipe
    b: Recipe
    alpha: float
    rslora: bool = False
    magnitude: Recipe | None = None
    axis: Axis = "output"
    matrices: Mapping[str, Recipe] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """R, the rows of A."""
        return self.a.shape[0]

    @property
    def rows(self) -> int:
        """N, the rows of B and of W."""
        return self.b.shape[0]

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of W: [N, K], or [N, C / groups, kh, kw]."""
        return self.rows, *self.a.shape[1:]

    @property
    def scaling(self) -> float:
        """s, what B A is multiplied by: alpha / R, or alpha / sqrt(R) for rsLoRA."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def named_matrices(self, stem: str, scaled: bool = False) -> dict[str, Recipe]:
        """`matrices` in the shapes of files, flat but for a whole w2. scaled: with s in the first, as PEFT expects them."""
        tensors: dict[str, Recipe] = {}
        for end, tensor in self.matrices.items():
            shape = tensor.shape if end == lokr.W2 else (tensor.shape[0], math.prod(tensor.shape[1:]))
            by = self.scaling if scaled and not tensors else 1.0
            tensors[stem + end] = derived(tensor, shape, lambda t, shape=shape, by=by: (t if by == 1 else t * by).view(shape))
        return tensors

    def swapped(self) -> "Factors":
        """The same for a W whose two halves of rows are in the other order; in a LoKr those of w1. If w1 has an odd number of
        rows, the result is no LoKr, and has no `matrices`."""
        m = self.magnitude if self.magnitude is None or self.axis == "input" else _swapped(self.magnitude)
        w1 = next((end for end in (lokr.W1, lokr.W1_A) if end in self.matrices), None)
        even = w1 is not None and self.matrices[w1].shape[0] % 2 == 0
        matrices = {**self.matrices, w1: _swapped(self.matrices[w1])} if even else {}
        return replace(self, b=_swapped(self.b), magnitude=m, matrices=matrices)

    def changes(self) -> bool:
        """Whether B A is not zero, or may not be."""
        return all(bool(tensor.make().any()) for tensor in (self.matrices or {B: self.b}).values())

    @property
    def form(self) -> Form | None:
        """The functions for `matrices`; None without any."""
        return file_kind(magnitudes=False, ends=self.matrices).form

    @property
    def ranked(self) -> tuple[int, float]:
        """(rank, alpha) by the definition of the layer's kind; R may be larger."""
        if self.form is None:
            return self.rank, self.alpha
        rank = self.form.rank({end: tensor.shape for end, tensor in self.matrices.items()})
        return rank, self.scaling * rank

    def matrix_tensors(self) -> dict[str, torch.Tensor]:
        """`matrices` as tensors."""
        return {end: tensor.make() for end, tensor in self.matrices.items()}

    def tensors(self) -> dict[str, Recipe]:
        """All tensors, by their names in messages."""
        recipes = dict(self.matrices) or {"A": self.a, "B": self.b, "magnitude": self.magnitude}
        return {name: tensor for name, tensor in recipes.items() if tensor is not None}


@dataclass(frozen=True)
class Portable:
    """An adapter apart from any model, as files hold it. layers: by full name, in the model's order if that is known.
    meaning: of the magnitudes. metadata: the file's."""

    layers: Mapping[str, Factors]
    meaning: DoraScale = "magnitude"
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> AdapterKind:
        """The kind of a layer's matrices in place of A and B; else DoRA if a layer has a magnitude, or LoRA."""
        ends = {end: None for factors in self.layers.values() for end in factors.matrices}
        return file_kind(magnitudes=any(factors.magnitude is not None for factors in self.layers.values()), ends=ends)

    @property
    def rslora(self) -> bool:
        """Whether a layer is scaled by alpha / sqrt(R)."""
        return any(factors.rslora for factors in self.layers.values())

    @property
    def targets(self) -> list[Target]:
        """Every layer with its rank and alpha."""
        split = [(name.partition("."), *factors.ranked) for name, factors in self.layers.items()]
        return [Target(component, rest, rank, alpha) for (component, _, rest), rank, alpha in split]

    def with_layers(self, layers: Mapping[str, Factors]) -> Self:
        """The same with other layers."""
        return replace(self, layers=dict(layers))

    def rounded(self, dtype: torch.dtype) -> Self:
        """The same with its matrices in `dtype`; magnitudes keep theirs. Raises UserError if a number is too large."""

        def cast(name: str, tensor: Recipe) -> Recipe:
            def make() -> torch.Tensor:
                before = tensor.make()
                after = before.to(dtype)
                if is_finite(before) and not is_finite(after):
                    largest, most = float(before.abs().max()), torch.finfo(dtype).max
                    raise UserError(f"{name} has numbers up to {largest:g}, and {dtype} goes to {most:g}; take bf16 or fp32")
                return after

            return tensor if tensor.dtype == dtype else Recipe(dtype, tensor.shape, make)

        layers = {}
        for name, factors in self.layers.items():
            if factors.matrices:
                layers[name] = made_of({end: cast(name, each) for end, each in factors.matrices.items()}, factors.scaling)
            else:
                layers[name] = replace(factors, a=cast(name, factors.a), b=cast(name, factors.b))
        return self.with_layers(layers)

    def distance(self, other: Self) -> tuple[float, str]:
        """The largest ||s B A - s B' A'|| / ||s B A|| of a layer, and its name. other: has the same layers and scales."""
        largest = 0.0, ""
        for name, factors in self.layers.items():
            rival = other.layers[name]
            if factors.form is not None:
                matrices = factors.matrix_tensors()
                size, difference = factors.form.norm(matrices), factors.form.norm(matrices, rival.matrix_tensors())
            else:
                (a, b), (c, d) = ([each.make().flatten(1).double() for each in (of.a, of.b)] for of in (factors, rival))
                size = math.sqrt(squared_norm(a, b))
                difference = math.sqrt(max(0.0, squared_norm(torch.cat([a, c]), torch.cat([b, -d], 1))))
            if size:
                largest = max(largest, (difference / size, name))
        return largest

    def parted(self, separate: Collection[str]) -> tuple[Self, dict[str, Self]]:
        """(the adapter without the components `separate`, {component: its adapter} of those of them that it adapts)."""
        groups: dict[str, dict[str, Factors]] = {"": {}}
        for name, factors in self.layers.items():
            component = name.partition(".")[0]
            groups.setdefault(component if component in separate else "", {})[name] = factors
        parts = {component: self.with_layers(layers) for component, layers in groups.items()}
        return parts.pop(""), parts

    def check_finite(self, advance: Advance = no_progress) -> None:
        """Raise NonFiniteError naming a tensor that is not finite. Reads everything, one tensor after another."""
        for name, factors in self.layers.items():
            for kind, tensor in factors.tensors().items():
                if not is_finite(tensor.make()):
                    raise NonFiniteError(
                        f"the adapter's {kind} of {name} is not finite; it was not exported. Take another file or checkpoint"
                    )
            advance(0)


def squared_norm(a_RK: torch.Tensor, b_NR: torch.Tensor) -> float:
    """||B A||^2 = <B^T B, A A^T> of fp64 matrices."""
    return float(((b_NR.T @ b_NR) * (a_RK @ a_RK.T)).sum())


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value of the tensor is NaN or infinite."""
    return not count_not_finite(tensor)


def of_adapter(adapter: Adapter, norms: AllNorms, meaning: DoraScale, advance: Advance = no_progress) -> Portable:
    """A run's adapter in its present state. norms: every DoRA layer's, by full name. advance: counts layers."""
    state, targets = adapter.state_dict(), list(adapter.targets.values())
    return of_state(state, targets, norms, meaning, kind=adapter.kind, rslora=adapter.rslora, advance=advance)


def of_state(
    state: Mapping[str, torch.Tensor],
    targets: list[Target],
    norms: AllNorms,
    meaning: DoraScale,
    *,
    kind: AdapterKind,
    rslora: bool,
    advance: Advance = no_progress,
) -> Portable:
    """The adapter of an `Adapter.state_dict`: a checkpoint has no more of it. norms: every DoRA layer's, by full name.
    meaning: of the magnitudes. advance: counts layers."""
    layers = {}
    for target in targets:
        name = f"{target.component}.{target.name}"
        values = kind.values(state, name)
        if kind.form is not None:
            scaling = kind.scaling(values, target.rank, target.alpha, rslora)
            layers[name] = made_of({end: recipe(value) for end, value in values.items()}, scaling)
        else:
            a, b, m = kind.effective(values)
            layers[name] = factors = Factors(recipe(a), recipe(b), target.alpha, rslora)
            if m is not None:
                if meaning == "comfyui_released":
                    m = released_scale(m.cpu(), norms[name])
                else:
                    m = magnitude(m.cpu(), a.flatten(1).cpu(), b.flatten(1).cpu(), factors.scaling, norms[name])
                layers[name] = replace(factors, magnitude=recipe(m))
        advance(1)
    return Portable(layers, meaning)


def made_of(matrices: Mapping[str, Recipe], scaling: float) -> Factors:
    """A layer of a kind that has matrices in place of A and B. scaling: s."""
    kind = file_kind(magnitudes=False, ends=matrices)

    def factor(place: int) -> Callable[[], torch.Tensor]:
        return lambda: kind.effective({end: tensor.make().float() for end, tensor in matrices.items()})[place]

    shapes = kind.effective({end: torch.empty(tensor.shape, device="meta") for end, tensor in matrices.items()})[:2]
    a, b = (Recipe(torch.float32, tuple(meta.shape), factor(place)) for place, meta in enumerate(shapes))
    return Factors(a, b, alpha=scaling * a.shape[0], matrices=matrices)


def shrunk(factors: Factors, rank: int) -> tuple[Factors, float]:
    """(the nearest factors of rank `rank`, relative loss of ||s B A||), summed in fp64. The scale s stays; A and B keep their
    dtypes. A layer whose shorter side is below `rank` gets that as its rank.

    The nearest matrix keeps the largest singular values; the loss is the root of the sum of the others' squares (Eckart and
    Young, 1936). B A is never made: with B = Q_b R_b and A^T = Q_a R_a its singular values are those of R_b R_a^T [R, R].
    """
    if factors.form is not None:
        a, b, loss = factors.form.nearest(factors.matrix_tensors(), rank)
        return with_factors(factors, a.flatten(1), b, factors.scaling), loss
    a, b = factors.a.make().double().flatten(1), factors.b.make().double().flatten(1)
    q_b, r_b = torch.linalg.qr(b)
    q_a, r_a = torch.linalg.qr(a.t())
    u, s, vh = torch.linalg.svd(r_b @ r_a.t())
    rank = min(rank, len(s))
    roots = s[:rank].sqrt()
    new_b, new_a = (q_b @ u[:, :rank]) * roots, roots[:, None] * (vh[:rank] @ q_a.t())
    loss = float(s[rank:].square().sum().sqrt() / s.square().sum().sqrt().clamp_min(1e-300))
    return with_factors(factors, new_a, new_b, factors.scaling), loss


def with_factors(factors: Factors, a_RK: torch.Tensor, b_NR: torch.Tensor, scaling: float) -> Factors:
    """`factors` with another A and B, in its shapes and dtypes, and the scale `scaling`."""
    rank = len(a_RK)
    a = a_RK.view(rank, *factors.a.shape[1:]).to(factors.a.dtype)
    b = b_NR.reshape(len(b_NR), rank, *factors.b.shape[2:]).to(factors.b.dtype)
    return replace(factors, a=recipe(a), b=recipe(b.contiguous()), alpha=scaling * rank, rslora=False, matrices={})


def widest(tensors: Sequence[Recipe]) -> torch.dtype:
    """The dtype that holds the numbers of all."""
    return reduce(torch.promote_types, [tensor.dtype for tensor in tensors])


def by_component(portable: Portable) -> Iterator[tuple[str, dict[str, Factors]]]:
    """(component, its layers by their names there), in order."""
    for component in dict.fromkeys(name.partition(".")[0] for name in portable.layers):
        prefix = f"{component}."
        yield component, {n.removeprefix(prefix): f for n, f in portable.layers.items() if n.startswith(prefix)}
