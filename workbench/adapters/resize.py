"""Changes the rank of adapters, and extracts adapters from models, with the measured error of the low rank (ranks.py)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from trainer.adapters.portable import Factors, Portable, shrunk, with_factors
from trainer.base.console import shortlist
from trainer.base.errors import UserError
from trainer.base.files import refuse_taken
from trainer.base.progress import QUIET, Phases
from workbench.adapter_files.opening import NamedModel, OpenedAdapter
from workbench.adapter_files.reading import ReadAdapter
from workbench.adapters.base_weights import BaseWeights
from workbench.adapters.convert import WeightOf, WrittenAdapter, write_as
from workbench.adapters.ranks import Residual, blank, nearest, relative_error

DIFFUSERS = ("diffusers", "PEFT")  # conventions whose files `resize` writes as diffusers'


def resize(opened: OpenedAdapter, out: Path, rank: int, *, weight: WeightOf | None = None) -> WrittenAdapter:
    """Write the adapter with ranks of at most `rank`: each product B A becomes the nearest of that rank. Scales, a DoRA's
    magnitudes and the format, diffusers' or kohya's, stay. weight: of the base model, or None."""
    check_rank(rank)
    layers, shares = dict(opened.portable.layers), {}
    for name, factors in layers.items():
        if factors.rank > rank:
            layers[name], shares[name] = shrunk(factors, rank)
    if not shares:
        raise UserError(f"{opened.path}: no layer has a rank above {rank}; a higher rank would hold the same")
    worst, most = max(shares.items(), key=lambda item: item[1])
    notes = [f"{len(shares)} of {len(layers)} layers have rank {rank} now; at most {most:.2%} of s B A is lost ({worst})"]
    if opened.portable.kind.magnitudes:
        notes.append("magnitudes stay as they were")
    native = all(convention.startswith(DIFFUSERS) for convention in opened.read.conventions)
    return write_as(opened, opened.portable.with_layers(layers), out, "diffusers" if native else "kohya", weight, notes)


def extract(
    tuned: NamedModel, base: NamedModel, out: Path, rank: int, *, to: str = "diffusers", phases: Phases = QUIET
) -> WrittenAdapter:
    """Write the LoRA of rank `rank` nearest to the difference of two models, layer by layer; fp32, alpha = rank. In memory:
    two weights at once, and the adapter. Equal layers get no factors."""
    check_rank(rank)
    refuse_taken(out)
    assert tuned.source is not None and base.source is not None
    tuned_weights, base_weights = BaseWeights(tuned.source), BaseWeights(base.source)
    shapes = base.full_layers(base.adaptable)
    odd = [name for name, shape in tuned.full_layers(base.adaptable).items() if shapes.get(name) != shape]
    if odd or shapes.keys() != tuned.full_layers(base.adaptable).keys():
        example = odd[0] if odd else "the number of layers"
        raise UserError(f"{tuned.label} and {base.label} are models of different shapes ({example}); there is no difference")
    layers: dict[str, Factors] = {}
    loss = Residual()
    with phases("comparing the models' layers", len(shapes), "layer") as phase:
        for name, shape in shapes.items():
            phase.advance(1)
            change = tuned_weights.weight(name).double().flatten(1)
            change -= base_weights.weight(name).flatten(1)  # one matrix of fp64, not three; exact, too
            if not bool(torch.isfinite(change).all()):
                raise UserError(f"{name}: the difference of the two models is not finite")
            if not bool(change.any()):
                continue
            a, b = nearest(change, rank)
            layers[name] = with_factors(blank(shape), a, b, 1.0)
            loss.add(name, *relative_error(change, layers[name].a.make(), layers[name].b.make(), 1.0))
    if not layers:
        raise UserError(f"{tuned.label} and {base.label} have the same layers; there is nothing to extract")
    (worst, most), norms = loss.worst, f"{loss.error:.4g} of {loss.change:.4g}: the singular values' tail"
    missing = f"of the difference the adapter leaves out {loss.share:.4%} in all ({norms}), {most:.2%} at most ({worst})"
    notes = [f"{len(layers)} layers differ; {missing}"]
    if others := _others(tuned_weights, base_weights, base.adaptable, shapes):
        reason = "left out, because a LoRA has no place for them"
        notes.append(f"{reason}: {len(others)} other tensors differ: {shortlist(others, 6)}")
    opened = OpenedAdapter(Path(tuned.label), base, (base.label,), ReadAdapter(Portable(layers)))
    return replace(write_as(opened, opened.portable, out, to, None, notes), loss=loss)


def _others(tuned_weights: BaseWeights, base_weights: BaseWeights, components: Sequence[str], layers: dict) -> list[str]:
    """The differing parameters that are no adaptable layer's weight: biases, norms, embeddings."""
    names = []
    for component in components:
        for parameter in base_weights.reads(component):
            name = f"{component}.{parameter}"
            if name.removesuffix(".weight") in layers and name.endswith(".weight"):
                continue
            if not torch.equal(tuned_weights.tensor(component, parameter), base_weights.tensor(component, parameter)):
                names.append(name)
    return names


def check_rank(rank: int) -> None:
    """Raises UserError for a rank below 1."""
    if rank < 1:
        raise UserError(f"--rank {rank}: a rank is at least 1")
