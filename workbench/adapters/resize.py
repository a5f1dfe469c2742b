"""Adapters of another rank, and adapters out of models: what low rank loses is measured and said (adapters/ranks.py)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trainer.adapters.portable import Factors, Portable
from trainer.adapters.ranks import shrunk, with_factors
from trainer.base.console import shortlist
from trainer.base.errors import UserError
from trainer.base.files import refuse_taken
from trainer.base.progress import QUIET, Phases
from workbench.adapter_files.opening import NamedModel, OpenedAdapter
from workbench.adapter_files.reading import ReadAdapter
from workbench.adapters.base_weights import BaseWeights
from workbench.adapters.convert import Converted, WeightOf, write_as
from workbench.adapters.ranks import blank, nearest, relative_error

DIFFUSERS = ("diffusers", "PEFT")  # conventions whose files `resize` writes as diffusers'


def resize(opened: OpenedAdapter, out: Path, rank: int, *, weight: WeightOf | None = None) -> Converted:
    """Write the adapter with ranks of at most `rank`: each product B A becomes the nearest of that rank.

    Scales and a DoRA's magnitudes stay, and so does the format, diffusers' or kohya's. weight: of the base model, where it
    was given.
    """
    check_rank(rank)
    layers, lost = dict(opened.portable.layers), {}
    for name, factors in layers.items():
        if factors.rank > rank:
            layers[name], lost[name] = shrunk(factors, rank)
    if not lost:
        raise UserError(f"{opened.path}: no layer has a rank above {rank}; a higher rank would hold the same")
    worst = max(lost, key=lambda name: lost[name])
    notes = [
        f"{len(lost)} of {len(layers)} layers have rank {rank} now; at most {lost[worst]:.2%} of s B A is lost ({worst})"
    ]
    if opened.portable.kind.magnitudes:
        notes.append("magnitudes stay as they were")
    native = all(convention.startswith(DIFFUSERS) for convention in opened.read.conventions)
    return write_as(opened, opened.portable.with_layers(layers), out, "diffusers" if native else "kohya", weight, notes)


@dataclass
class Extracted:
    """A LoRA made of the difference of two models. lost, change: norms over all layers. lost: what no LoRA of that rank
    has. change: the difference.

    tails: by layer, the error relative to its difference. beside: other parameters that differ, which no LoRA can hold.
    """

    converted: Converted
    lost: float
    change: float
    tails: dict[str, float] = field(default_factory=dict)
    beside: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """What was made, and what is lost, in lines for people."""
        worst = max(self.tails, key=lambda name: self.tails[name])
        relative = self.lost / max(self.change, 1e-300)
        lines = [
            f"{len(self.tails)} layers differ; of the difference the adapter leaves out {relative:.4%} in all "
            f"({self.lost:.4g} of {self.change:.4g}: the singular values' tail), {self.tails[worst]:.2%} at most ({worst})"
        ]
        if self.beside:
            names = shortlist(self.beside, 6)
            lines.append(f"left out, because a LoRA has no place for them: {len(self.beside)} other tensors differ: {names}")
        return lines + self.converted.notes


def extract(
    tuned: NamedModel, base: NamedModel, out: Path, rank: int, *, to: str = "diffusers", phases: Phases = QUIET
) -> Extracted:
    """Write the LoRA of rank `rank` that is nearest to the difference of two models, layer by layer; fp32, alpha = rank.

    Two weights are in memory at once, and the adapter. Layers that do not differ get none.
    """
    check_rank(rank)
    refuse_taken(out)
    assert tuned.source is not None and base.source is not None
    weights, theirs = BaseWeights(tuned.source), BaseWeights(base.source)
    shapes = base.full_layers(base.adaptable)
    odd = [name for name, shape in tuned.full_layers(base.adaptable).items() if shapes.get(name) != shape]
    if odd or shapes.keys() != tuned.full_layers(base.adaptable).keys():
        where = odd[0] if odd else "the number of layers"
        raise UserError(f"{tuned.label} and {base.label} are models of different shapes ({where}); there is no difference")
    layers: dict[str, Factors] = {}
    tails: dict[str, float] = {}
    lost_sq = change_sq = 0.0
    with phases("comparing the models' layers", len(shapes), "layer") as phase:
        for name, shape in shapes.items():
            phase.advance(1)
            change = weights.weight(name).double().flatten(1)
            change -= theirs.weight(name).flatten(1)  # one matrix of fp64, not three; exact all the same
            if not bool(torch.isfinite(change).all()):
                raise UserError(f"{name}: the difference of the two models is not finite")
            if not bool(change.any()):
                continue
            a, b = nearest(change, rank)
            layers[name] = with_factors(blank(shape), a, b, 1.0)
            left, whole = relative_error(change, layers[name].a.make(), layers[name].b.make(), 1.0)
            lost_sq, change_sq, tails[name] = lost_sq + left**2, change_sq + whole**2, left / whole
    if not layers:
        raise UserError(f"{tuned.label} and {base.label} have the same layers; there is nothing to extract")
    beside = _others(weights, theirs, base.adaptable, shapes)
    read = ReadAdapter(Portable(layers))
    opened = OpenedAdapter(Path(tuned.label), base, (base.label,), read)
    written = write_as(opened, read.portable, out, to, None, [])
    return Extracted(written, math.sqrt(lost_sq), math.sqrt(change_sq), tails, beside)


def _others(weights: BaseWeights, theirs: BaseWeights, components: Sequence[str], layers: dict) -> list[str]:
    """The parameters that differ and are no adaptable layer's weight: biases, norms, embeddings."""
    names = []
    for component in components:
        for parameter in theirs.reads(component):
            name = f"{component}.{parameter}"
            if name.removesuffix(".weight") in layers and name.endswith(".weight"):
                continue
            if not torch.equal(weights.tensor(component, parameter), theirs.tensor(component, parameter)):
                names.append(name)
    return names


def check_rank(rank: int) -> None:
    """Raises UserError for one below 1."""
    if rank < 1:
        raise UserError(f"--rank {rank}: a rank is at least 1")
