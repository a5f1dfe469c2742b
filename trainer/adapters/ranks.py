"""Adapters of another rank: grown without a change, shrunk or made from a dense change by the nearest of that rank.

The nearest matrix of rank r keeps the r largest singular values; what is lost is the root of the sum of the others' squares
(Eckart and Young, 1936). Sums are fp64.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from trainer.adapters.portable import Factors, recipe

ROWS = 256  # of a dense change at once


def shrunk(factors: Factors, rank: int) -> tuple[Factors, float]:
    """(the nearest of rank `rank`, what is lost of ||s B A||, relative). The scale s stays; A and B keep their dtypes. A
    layer with a shorter side holds no more than that side: its rank is that.

    B A is never made: with B = Q_b R_b and A^T = Q_a R_a its singular values are those of R_b R_a^T [R, R].
    """
    if factors.form is not None:
        a, b, lost = factors.form.nearest(factors.held(), rank)
        return with_factors(factors, a.flatten(1), b, factors.scaling), lost
    a, b = factors.a.make().double().flatten(1), factors.b.make().double().flatten(1)
    q_b, r_b = torch.linalg.qr(b)
    q_a, r_a = torch.linalg.qr(a.t())
    u, s, vh = torch.linalg.svd(r_b @ r_a.t())
    rank = min(rank, len(s))
    kept = s[:rank].sqrt()
    new_b, new_a = (q_b @ u[:, :rank]) * kept, kept[:, None] * (vh[:rank] @ q_a.t())
    lost = float(s[rank:].square().sum().sqrt() / s.square().sum().sqrt().clamp_min(1e-300))
    return with_factors(factors, new_a, new_b, factors.scaling), lost


def with_factors(factors: Factors, a_RK: torch.Tensor, b_NR: torch.Tensor, scaling: float) -> Factors:
    """Factors for the layer and in the dtypes of `factors`, with another A and B and the scale `scaling`."""
    rank = len(a_RK)
    a = a_RK.view(rank, *factors.a.shape[1:]).to(factors.a.dtype)
    b = b_NR.reshape(len(b_NR), rank, *factors.b.shape[2:]).to(factors.b.dtype)
    return replace(factors, a=recipe(a), b=recipe(b.contiguous()), alpha=scaling * rank, rslora=False, matrices={})


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
