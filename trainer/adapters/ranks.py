"""Adapters of another rank: grown without a change, or shrunk to the nearest of that rank.

The nearest matrix of rank r keeps the r largest singular values; what is lost is the root of the sum of the others' squares
(Eckart and Young, 1936). Sums are fp64.
"""

from dataclasses import replace

import torch

from trainer.adapters.portable import Factors, recipe


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
