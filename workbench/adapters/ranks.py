"""Low-rank factors of a dense change, and the norms of their errors (see trainer/adapters/portable.py). Sums are fp64."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from trainer.adapters.portable import Factors, recipe

ROWS = 256  # of a dense change that are multiplied at once


@dataclass
class Residual:
    """The error of an approximated change of weights. error, change: norms over all layers. layers: both, by layer."""

    error: float = 0.0
    change: float = 0.0
    layers: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, layer: str, error: float, change: float) -> None:
        """Add the norms of a layer, or of some of its rows."""
        self.error, self.change = math.hypot(self.error, error), math.hypot(self.change, change)
        before = self.layers.get(layer, (0.0, 0.0))
        self.layers[layer] = math.hypot(before[0], error), math.hypot(before[1], change)

    @property
    def shares(self) -> dict[str, float]:
        """error / change, by layer."""
        return {layer: _share(*norms) for layer, norms in self.layers.items()}

    @property
    def share(self) -> float:
        """error / change of all layers; infinite if nothing changes and the error is not 0."""
        return _share(self.error, self.change)

    @property
    def worst(self) -> tuple[str, float]:
        """(the layer of the largest share, its share)."""
        return max(self.shares.items(), key=lambda item: item[1])


def _share(error: float, change: float) -> float:
    if change == 0:
        return math.inf if error else 0.0
    return error / change


def matrices(factors: Factors) -> tuple[torch.Tensor, torch.Tensor]:
    """(A [R, K], B [N, R]) of an adapter, fp64."""
    return factors.a.make().double().flatten(1), factors.b.make().double().flatten(1)


def blank(shape: Sequence[int]) -> Factors:
    """An adapter of rank 0, fp32, for a weight of that shape: a template for `with_factors`."""
    ones = (1,) * (len(shape) - 2)
    return Factors(recipe(torch.empty(0, *shape[1:])), recipe(torch.empty(shape[0], 0, *ones)), 1.0)


def product_norm(b_NR: torch.Tensor, a_RK: torch.Tensor) -> float:
    """||B A|| of fp64 factors, without forming B A, and without the cancellation of sums of squares."""
    r_b, r_a = (torch.linalg.qr(factor, mode="r").R for factor in (b_NR, a_RK.t()))
    return float((r_b @ r_a.t()).norm())


def nearest(change_NK: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(A [r, K], B [N, r]), fp64, r <= rank, with B A nearest to the change.

    Uses the eigenvectors of the smaller Gram matrix, for speed: singular values below some 1e-8 of the largest are lost.
    """
    change = change_NK.double()
    tall = len(change) > change.shape[1]
    gram = change.t() @ change if tall else change @ change.t()
    rank = min(rank, len(gram))
    _, vectors = torch.linalg.eigh(gram)
    basis = vectors[:, -rank:].flip(1)  # the largest first
    a, b = (basis.t(), change @ basis) if tall else (basis.t() @ change, basis)
    # Columns of equal norm in both: better in 16 bits than unit columns in one.
    size = (b if tall else a.t()).norm(dim=0).clamp_min(1e-300)
    a, b = (a * size.sqrt()[:, None], b / size.sqrt()) if tall else (a / size.sqrt()[:, None], b * size.sqrt())
    return a, b


def relative_error(change_NK: torch.Tensor, a_RK: torch.Tensor, b_NR: torch.Tensor, scaling: float) -> tuple[float, float]:
    """(||change - s B A||, ||change||) with the stored A and B, by blocks of rows: B A is never formed as a whole."""
    a, b = a_RK.double().flatten(1), b_NR.double().flatten(1)
    error_sq = change_sq = 0.0
    for change, rows in zip(change_NK.split(ROWS), b.split(ROWS), strict=True):
        change = change.double()
        change_sq += float(change.square().sum())
        error_sq += float(torch.addmm(change, rows, a, alpha=-scaling).square().sum())
    return math.sqrt(error_sq), math.sqrt(change_sq)
