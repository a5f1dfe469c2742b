"""DoRA's norm in Triton: c = ||W + s B A||_row of a weight as it is stored (formula: adapters/dora.py).

Two launches, and the gram matrix by cuBLAS: 2 s W A^T in splits along K, so that layers of few rows occupy the whole card,
and what is left for each row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.kernels.dora_torch import NORM_FLOOR
from trainer.kernels.operators_triton import launch, operator
from trainer.kernels.upcast_triton import Weight, flat, rank_block, splits_of, sum_of_splits, weight_tile
from trainer.types import StoredWeight

# Programs that read the weight, at most: four for each of the 132 SMs of an H100 or H200.
PROGRAMS = 528


@triton.jit
def weight_product_kernel(
    codes_ptr, scale_ptr, offset_ptr, levels_ptr, a_ptr, wa_ptr, factor, N, K, columns, R: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr, SCALED: tl.constexpr, SHIFTED: tl.constexpr, LEVELS: tl.constexpr,
    E4M3: tl.constexpr, STEP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """wa_snr = factor sum_k w_nk a_rk,  k in the s-th `columns` columns.

    Grid: (tiles of N, splits s of K, tiles of R). `columns` is a multiple of BLOCK_K. W is read once up to rank 128.
    """
    n, split, tile_R = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1), tl.program_id(2)
    r = tile_R * BLOCK_R + tl.arange(0, BLOCK_R)
    factor = tl.cast(factor, tl.float32)  # a compiler hands numbers on as fp64
    wa_NR = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    # Not copied ahead: of packed codes and their scales the loads are many and small, which took 5 times as long (H100).
    for start in tl.range(split * columns, tl.minimum(split * columns + columns, K), BLOCK_K, num_stages=1):
        start = tl.cast(start, tl.int32)
        k = start + tl.arange(0, BLOCK_K)
        w_NK = weight_tile(
            codes_ptr, scale_ptr, offset_ptr, levels_ptr, n, start, N, K, BLOCK_K, BITS,
            BLOCK, SCALED, SHIFTED, LEVELS, E4M3, STEP,
        )  # fmt: skip
        a_KR = tl.load(a_ptr + r[None, :] * K + k[:, None], mask=(r[None, :] < R) & (k[:, None] < K), other=0.0)
        # A tensor core rounds its sums toward zero: long ones are made outside of it, which the factor sees to. Were
        # it applied after the loop, the compiler would sum inside.
        wa_NR += factor * tl.dot(w_NK, a_KR, input_precision="tf32x3")
    wa_at = wa_ptr + split.to(tl.int64) * N * R + (n[:, None] * R + r[None, :])
    tl.store(wa_at, wa_NR, mask=(n[:, None] < N) & (r[None, :] < R))


@triton.jit
def adapted_norm_kernel(
    w_sq_ptr, wa_ptr, b_ptr, gram_ptr, c_ptr, s_squared, N, splits, R: tl.constexpr, FLOOR: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """c_n = sqrt(max(FLOOR w_sq_n, w_sq_n + sum_r b_nr (sum_s wa_snr + s^2 (B gram)_nr))),  gram = A A^T,  wa = 2 s W A^T.

    Grid: one program to BLOCK_N rows.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    s_squared = tl.cast(s_squared, tl.float32)
    w_sq = tl.load(w_sq_ptr + n, mask=n < N, other=0.0)
    c_sq = w_sq
    for first in range(0, R, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        added = sum_of_splits(wa_ptr, n, r, N, splits, R, BLOCK_N, BLOCK_R, BLOCK_S)
        for start in range(0, R, BLOCK_R):
            q = start + tl.arange(0, BLOCK_R)
            b_NQ = tl.load(b_ptr + n[:, None] * R + q[None, :], mask=(n[:, None] < N) & (q[None, :] < R), other=0.0)
            gram_QR = tl.load(gram_ptr + q[:, None] * R + r[None, :], mask=(q[:, None] < R) & (r[None, :] < R), other=0.0)
            added += s_squared * tl.dot(b_NQ, gram_QR, input_precision="tf32x3")
        b_NR = tl.load(b_ptr + n[:, None] * R + r[None, :], mask=(n[:, None] < N) & (r[None, :] < R), other=0.0)
        c_sq += tl.sum(b_NR * added, 1)
    c_sq = tl.where(c_sq < w_sq * FLOOR, w_sq * FLOOR, c_sq)  # not maximum, which would hide a NaN
    tl.store(c_ptr + n, tl.sqrt_rn(c_sq), mask=n < N)


class Tiles(NamedTuple):
    """How W A^T is divided among programs."""

    block_n: int
    block_k: int
    splits: int
    columns: int  # to a split
    warps: int


def _tiles(weight: Weight, rank: int) -> Tiles:
    """A constant of the shape, and with it the order of each sum."""
    # 64 rows are what Hopper's tensor cores take at once. Shared memory holds two halves of each fp32 operand.
    block_n, block_k = 64, 64 if rank_block(rank, 128) <= 32 else 32
    # Partial sums are written and read again: at most a quarter of the weight's elements.
    most = max(1, weight.columns // (4 * rank))
    splits, share = splits_of(weight.columns, block_k, min(most, PROGRAMS // triton.cdiv(weight.rows, block_n)))
    return Tiles(block_n, block_k, splits, share, 4 if rank <= 64 else 8)


@operator("wa_SNR", "c_N")
def _adapted_norm(
    codes: Tensor, scale: Tensor | None, offset: Tensor | None, levels: Tensor | None, rows: int, columns: int, bits: int,
    block: int, w_sq_N: Tensor, a_RK: Tensor, b_NR: Tensor, gram_RR: Tensor, scaling: float, wa_SNR: Tensor, c_N: Tensor,
) -> None:  # fmt: skip
    weight = Weight(codes, scale, offset, levels, rows, columns, bits, block)
    rank, block_r = a_RK.shape[0], rank_block(a_RK.shape[0], 128)
    how = _tiles(weight, rank)
    launch(
        weight_product_kernel, (triton.cdiv(rows, how.block_n), how.splits, triton.cdiv(rank, block_r)), *weight.pointers(),
        a_RK, wa_SNR, 2 * scaling, rows, columns, how.columns, R=rank, **weight.layout(), BLOCK_N=how.block_n,
        BLOCK_K=how.block_k, BLOCK_R=block_r, num_warps=how.warps,
    )  # fmt: skip
    block_n, block_r = 16, min(block_r, 64)
    launch(
        adapted_norm_kernel, (triton.cdiv(rows, block_n),), w_sq_N, wa_SNR, b_NR, gram_RR, c_N, scaling**2, rows,
        how.splits, R=rank, FLOOR=NORM_FLOOR, BLOCK_N=block_n, BLOCK_R=block_r,
        BLOCK_S=min(8, triton.next_power_of_2(how.splits)),
    )  # fmt: skip


def adapted_norms(
    weights: Sequence[StoredWeight], w_sq_N: Sequence[Tensor], a_RK: Sequence[Tensor], b_NR: Sequence[Tensor],
    scalings: Sequence[float],
) -> list[Tensor]:  # fmt: skip
    """Layer by layer: each has enough rows to fill a card."""
    return [_of_one(*given) for given in zip(weights, w_sq_N, a_RK, b_NR, scalings, strict=True)]


def _of_one(weight: StoredWeight, w_sq_N: Tensor, a_RK: Tensor, b_NR: Tensor, scaling: float) -> Tensor:
    stored, a_RK, b_NR = flat(weight), a_RK.contiguous(), b_NR.contiguous()
    for tensor in (w_sq_N, a_RK, b_NR):
        if tensor.dtype != torch.float32:
            raise ValueError(f"the norm takes fp32 A, B and squares, not {tensor.dtype}")
    rank, c_N = len(a_RK), torch.empty_like(w_sq_N)
    wa_SNR = torch.empty(_tiles(stored, rank).splits, stored.rows, rank, dtype=torch.float32, device=c_N.device)
    _adapted_norm(*stored, w_sq_N, a_RK, b_NR, a_RK @ a_RK.t(), scaling, wa_SNR, c_N)
    return c_N
