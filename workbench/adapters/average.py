"""The mean of several adapters of one model: checkpoints of a run, seeds, or files from anywhere.

The mean of the A and the mean of the B do not give the mean of s B A. So the mean is taken of the adapted weights W'_i, with
shares w_i that add up to 1, and factored again to one rank.

    LoRA    W'_i = W + s_i B_i A_i         mean - W = [.. w_i s_i B_i ..] [.. A_i ..]^T: of rank sum R_i, known by its
                                           factors. The nearest of rank R has the R largest singular values (ranks.py)
    DoRA    W'_i = g_i (W + s_i B_i A_i)   mean = gm * (W + X),  gm = sum w_i g_i,  X = gm^-1 sum w_i g_i s_i B_i A_i,
                                           row by row

So the mean of DoRAs is a DoRA in the direction of W + X, with m = sign(gm) ||mean||_row, exact at rank sum R_i. For a lower
rank, gm * X is truncated, then divided by gm; m stays the mean's. The loss is measured in W', on the stored factors. A LoRA
is a DoRA with g = 1; an adapter without the layer counts as no change.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.adapters.portable import Factors, Portable, recipe, shrunk, with_factors
from trainer.base.errors import UserError
from trainer.base.files import hash_file, read_json
from trainer.base.progress import QUIET, Phases
from trainer.base.run_layout import Layout
from trainer.checkpoint import store
from trainer.checkpoint.state import QUANTIZATION
from workbench.adapter_files.opening import HINTS, NamedModel, OpenedAdapter
from workbench.adapter_files.reading import ReadAdapter
from workbench.adapters.convert import WeightOf, WrittenAdapter, adapted, gain, write_as
from workbench.adapters.ranks import Residual, blank, matrices, product_norm
from workbench.adapters.resize import check_rank

# Entries of a file's header that tell its base apart from others. The hashes are those that kohya's trainers write.
BASE_ENTRIES = (*HINTS, "ss_new_sd_model_hash", "ss_sd_model_hash")
Base = Mapping[tuple[str, ...], str]  # a frozen tensor (layer, tensor, format, backend, dtype) -> its digest
# Below this share of the mean |g_i|, gm is the rounding error of numbers that cancelled.
LEAST_GAIN = 1e-6


@dataclass(frozen=True)
class Averaged:
    """An adapter in a mean. share: its weight. base: digests of its run's frozen tensors; empty if unknown."""

    path: Path
    model: NamedModel
    portable: Portable
    share: float = 1.0
    base: Base = field(default_factory=dict)

    def described(self) -> dict[str, object]:
        """The adapter's entry in the header of the mean's file."""
        file = self.path / "adapter.safetensors" if self.path.is_dir() else self.path
        return {"file": self.path.name, "sha256": hash_file(file), "weight": self.share}


def shares_of(weights: Sequence[float] | None, count: int) -> list[float]:
    """The shares of --weights, which add up to 1; None: equal ones. Raises UserError."""
    if weights is None:
        return [1 / count] * count
    if len(weights) != count:
        raise UserError(f"--weights has {len(weights)} numbers for {count} adapters; give one for each, in their order")
    if odd := [weight for weight in weights if not (math.isfinite(weight) and weight > 0)]:
        raise UserError(f"--weights: {odd[0]:g} is no weight of a mean; give finite numbers above 0")
    return [weight / sum(weights) for weight in weights]


def base_of(path: Path) -> Base:
    """The digests of the frozen weights that an adapter was trained on: of a checkpoint, or of the newest one of the run in
    whose folder the file lies. Otherwise empty: unknown."""
    folder: Path | None = path
    if not path.is_dir():
        layout = Layout(path.absolute().parent.parent)
        folder = store.newest_valid(layout.checkpoints)[0] if path.absolute().parent == layout.adapters else None
    if folder is None or not (folder / QUANTIZATION).is_file():
        return {}
    return digests_in(read_json(folder / QUANTIZATION))


def digests_in(record: Mapping[str, Mapping[str, Any]]) -> Base:
    """The digests in a record of the form of `quantization.json`."""
    return {
        (name, key, str(entry.get("format")), str(entry.get("backend")), tensor["dtype"]): tensor["sha256"]
        for name, entry in record.items()
        for key, tensor in entry["tensors"].items()
    }


def check_bases(adapters: Sequence[Averaged]) -> None:
    """Raises UserError if two of them are known to be of different models."""
    first = adapters[0]
    for other in adapters[1:]:
        pair = f"{first.path} and {other.path} are of different models"
        if first.model.family is not other.model.family:
            raise UserError(f"{pair}: of {first.model.family.name} and of {other.model.family.name}; a mean takes one base")
        for name, factors in other.portable.layers.items():
            mine = first.portable.layers.get(name)
            if mine is not None and mine.weight_shape != factors.weight_shape:
                shapes = f"{list(mine.weight_shape)} and {list(factors.weight_shape)}"
                raise UserError(f"{pair}: {name} is {shapes}; a mean takes one base")
        for key in BASE_ENTRIES:
            one, two = (adapter.portable.metadata.get(key) for adapter in (first, other))
            if one and two and one != two:
                raise UserError(f"{pair}: {key} is {one!r} and {two!r}; a mean takes one base")
    check_digests([(str(adapter.path), adapter.base) for adapter in adapters])


def check_digests(bases: Sequence[tuple[str, Base]]) -> None:
    """Raises UserError if two of `bases`, (owner, digests), differ in a tensor that both store alike."""
    first: dict[tuple[str, ...], tuple[str, str]] = {}
    for owner, base in bases:
        for place, digest in base.items():
            expected, other = first.setdefault(place, (digest, owner))
            if expected != digest:
                tensor = f"{place[0]}.{place[1]} has other bytes"
                raise UserError(f"{other} and {owner} are over different models: {tensor}; a mean takes one base")


def check(adapters: Sequence[Averaged], rank: int, weight: WeightOf | None) -> None:
    """Raises UserError or NonFiniteError if it is clear before the computation that there is no such mean."""
    check_rank(rank)
    if len(adapters) < 2:
        raise UserError(f"average takes at least two adapters, and there is {len(adapters)}: {adapters[0].path}")
    check_bases(adapters)
    for adapter in adapters:
        adapter.portable.check_finite()
    if weight is None and any(adapter.portable.kind.magnitudes for adapter in adapters):
        raise UserError("the mean of a DoRA takes the weights of the model that it was trained over: give it with --base")


def average(
    adapters: Sequence[Averaged], out: Path, rank: int, *, weight: WeightOf | None = None, to: str = "diffusers",
    phases: Phases = QUIET,
) -> WrittenAdapter:  # fmt: skip
    """Write the mean of at least two adapters with ranks of at most `rank`; fp32, alpha = rank. weight: of the base, for a
    DoRA. In memory: one layer at a time, and the mean. Raises what `check` does."""
    check(adapters, rank, weight)
    magnitudes = any(adapter.portable.kind.magnitudes for adapter in adapters)
    names = list(dict.fromkeys(name for adapter in adapters for name in adapter.portable.layers))
    layers: dict[str, Factors] = {}
    loss = Residual()
    with phases("averaging", len(names), "layer") as phase:
        for name in names:
            parts = [(adapter.share, adapter.portable.layers.get(name), adapter.portable) for adapter in adapters]
            if magnitudes:
                assert weight is not None
                layers[name], *norms = _mean_dora(name, parts, weight(name), rank)
            else:
                layers[name], *norms = _mean_lora(parts, rank)
            loss.add(name, *norms)
            phase.advance(1)
    origin = {"averaged_from": json.dumps([adapter.described() for adapter in adapters], sort_keys=True)}
    model = adapters[0].model
    opened = OpenedAdapter(adapters[0].path, model, (model.label,), ReadAdapter(Portable(layers, metadata=origin)))
    (worst, most), whole = loss.worst, f"of the mean's change of the weights {100 * loss.share:.4g}% is lost in all"
    notes = [f"{whole}, {100 * most:.4g}% at most ({worst})"]
    return replace(write_as(opened, opened.portable, out, to, weight, notes), loss=loss)


Parts = Sequence[tuple[float, Factors | None, Portable]]  # one layer: (share, its factors, the whole adapter)


def _mean_lora(parts: Parts, rank: int) -> tuple[Factors, float, float]:
    """(the mean of a layer's LoRAs, the norm of its error, the norm of the exact mean)."""
    shared = [(share, factors) for share, factors, _ in parts if factors is not None]
    a_s, b_s = zip(*(matrices(factors) for _, factors in shared), strict=True)
    a = torch.cat(a_s)
    b = torch.cat([share * factors.scaling * b for (share, factors), b in zip(shared, b_s, strict=True)], 1)
    mean = with_factors(blank(shared[0][1].weight_shape), *_truncated(a, b, rank), 1.0)
    new_a, new_b = matrices(mean)
    error = product_norm(torch.cat([b, -new_b], 1), torch.cat([a, new_a]))
    return mean, error, product_norm(b, a)


def _mean_dora(name: str, parts: Parts, weight: Tensor, rank: int) -> tuple[Factors, float, float]:
    """As `_mean_lora`, for DoRAs, or DoRAs and LoRAs."""
    w = weight.double().flatten(1)
    ones = torch.ones(len(w), dtype=w.dtype)
    gm, size, a_s, gb_s = torch.zeros_like(ones), torch.zeros_like(ones), [], []
    for share, factors, portable in parts:
        g = ones
        if factors is not None:
            if factors.axis == "input" and factors.magnitude is not None:
                axes = "of the input axis, and the mean has those of the output axis"
                remedy = "make a LoRA of it: python scripts/adapter.py convert --to lora"
                raise UserError(f"the magnitude of {name} is {axes}; {remedy}")
            g = ones if factors.magnitude is None else gain(weight, factors, portable.meaning)
            a, b = matrices(factors)
            a_s.append(a)
            gb_s.append((share * factors.scaling * g)[:, None] * b)
        gm, size = gm + share * g, size + share * g.abs()
    if bool((gm.abs() <= LEAST_GAIN * size).any()):
        raise UserError(f"the magnitudes of {name} cancel out in a row, so that no DoRA is their mean; leave one adapter out")
    a, gb = torch.cat(a_s), torch.cat(gb_s, 1)
    mean = torch.addmm(gm[:, None] * w, gb, a)
    new_a, new_gb = _truncated(a, gb, rank)
    m = gm.sign() * mean.norm(dim=1)
    dora = with_factors(blank(weight.shape), new_a, new_gb / gm[:, None], 1.0)
    dora = replace(dora, magnitude=recipe(m.float()))
    error = gain(weight, dora, "magnitude")[:, None] * adapted(weight, dora) - mean
    return dora, float(error.norm()), float((mean - w).norm())


def _truncated(a_RK: Tensor, b_NR: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """(A, B), fp64, of at most `rank`, with the product nearest to B A."""
    if len(a_RK) <= rank:
        return a_RK, b_NR
    factors, _ = shrunk(Factors(recipe(a_RK), recipe(b_NR), float(len(a_RK))), rank)
    return factors.a.make(), factors.b.make()
