"""Adapters of a dense change, and the norms of what they lose (trainer/adapters/ranks.py). Sums are fp64."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from trainer.adapters.portable import Factors, recipe

ROWS = 256  # of a dense change at once


@dataclass
class Residual:
    """What is lost of a change of weights. lost, change: norms over all layers. layers: the same two of each."""

    lost: float = 0.0
    change: float = 0.0
    layers: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, layer: str, lost: float, change: float) -> None:
        """Enter norms of a layer, or of some of its rows."""
        self.lost, self.change = math.hypot(self.lost, lost), math.hypot(self.change, change)
        before = self.layers.get(layer, (0.0, 0.0))
        self.layers[layer] = math.hypot(before[0], lost), math.hypot(before[1], change)

    @property
    def shares(self) -> dict[str, float]:
        """Lost by change, of each layer."""
        return {layer: _share(*norms) for layer, norms in self.layers.items()}

    @property
    def share(self) -> float:
        """Lost by change, of all layers; infinite where nothing changes and something is lost."""
        return _share(self.lost, self.change)

    @property
    def worst(self) -> tuple[str, float]:
        """(the layer that loses most, its share)."""
        return max(self.shares.items(), key=lambda item: item[1])


def _share(lost: float, change: float) -> float:
    if change == 0:
        return math.inf if lost else 0.0
    return lost / change


def matrices(factors: Factors) -> tuple[torch.Tensor, torch.Tensor]:
    """(A [R, K], B [N, R]) of an adapter, fp64."""
    return factors.a.make().double().flatten(1), factors.b.make().double().flatten(1)


def blank(shape: Sequence[int]) -> Factors:
    """An adapter of rank 0, fp32, for a weight of that shape: to take shapes and dtypes from (`with_factors`)."""
    ones = (1,) * (len(shape) - 2)
    return Factors(recipe(torch.empty(0, *shape[1:])), recipe(torch.empty(shape[0], 0, *ones)), 1.0)


def product_norm(b_NR: torch.Tensor, a_RK: torch.Tensor) -> float:
    """||B A|| of fp64 factors, without making it, and without the cancellation of sums of squares."""
    r_b, r_a = (torch.linalg.qr(factor, mode="r").R for factor in (b_NR, a_RK.t()))
    return float((r_b @ r_a.t()).norm())


def nearest(change_NK: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(A [r, K], B [N, r]), fp64, r <= rank: B A is the nearest to the change.

    By the eigenvectors of its smaller Gram matrix, for speed: singular values below some 1e-8 of the largest are lost in it.
    """
    change = change_NK.double()
    tall = len(change) > change.shape[1]
    gram = change.t() @ change if tall else change @ change.t()
    rank = min(rank, len(gram))
    _, vectors = torch.linalg.eigh(gram)
    basis = vectors[:, -rank:].flip(1)  # the largest first
    a, b = (basis.t(), change @ basis) if tall else (basis.t() @ change, basis)
    # Both of one size: kinder to 16 bits than one of unit columns.
    size = (b if tall else a.t()).norm(dim=0).clamp_min(1e-300)
    a, b = (a * size.sqrt()[:, None], b / size.sqrt()) if tall else (a / size.sqrt()[:, None], b * size.sqrt())
    return a, b


def relative_error(change_NK: torch.Tensor, a_RK: torch.Tensor, b_NR: torch.Tensor, scaling: float) -> tuple[float, float]:
    """(||change - s B A||, ||change||), with A and B as they are stored. Row by row: B A is never there as a whole."""
    a, b = a_RK.double().flatten(1), b_NR.double().flatten(1)
    left_sq = whole_sq = 0.0
    for change, rows in zip(change_NK.split(ROWS), b.split(ROWS), strict=True):
        change = change.double()
        whole_sq += float(change.square().sum())
        left_sq += float(torch.addmm(change, rows, a, alpha=-scaling).square().sum())
    return math.sqrt(left_sq), math.sqrt(whole_sq)
