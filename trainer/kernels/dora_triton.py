"""The kernels in Triton, for CUDA. See protocols.Kernels; upcast_triton.py has the frozen weights, and how launches are made;
fp8_triton.py has the products in float8.

Products of 16-bit tensors run on tensor cores and are summed in fp32. Products of fp32 tensors are exact to fp32: activations
take no tensor core at all ("ieee"), the norm's three passes of one ("tf32x3").
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from trainer.kernels.dora_torch import NORM_FLOOR
from trainer.kernels.fp8_triton import quantize_rows, scaled_input_grad, scaled_product
from trainer.kernels.upcast_triton import INTERPRETED, Weight, check_dtypes, flat, rounded, row_squares, upcast, weight_tile
from trainer.types import StoredWeight

__all__ = [
    "adapted_norm", "compose", "has_plain_codes", "name", "quantize_rows", "row_gradients", "row_squares",
    "scaled_input_grad", "scaled_product", "upcast",
]  # fmt: skip

name = "triton"

# What a kernel that can divide its work freely divides it into: two programs for each of the 132 SMs of an H100 or H200. A
# constant, so that the order of a sum depends on the shape alone.
PROGRAMS = 264


@triton.jit
def adapted_norm_kernel(
    codes_ptr, scale_ptr, offset_ptr, levels_ptr, w_sq_ptr, a_ptr, b_ptr, gram_ptr, c_ptr, s_twice, s_squared, N, K,
    R: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, SHIFTED: tl.constexpr,
    LEVELS: tl.constexpr, STEP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    FLOOR: tl.constexpr,
):  # fmt: skip
    """c_n = sqrt(max(FLOOR w_sq_n, w_sq_n + sum_r b_nr (2 s (W A^T)_nr + s^2 (B gram)_nr))),  gram = A A^T.

    Grid: one program to BLOCK_N rows of W, read once for each BLOCK_R ranks: once, up to rank 128.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_sq = tl.load(w_sq_ptr + n, mask=n < N, other=0.0)
    c_sq = w_sq
    for first in range(0, R, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        added = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            w_NK = weight_tile(
                codes_ptr, scale_ptr, offset_ptr, levels_ptr, n, start, N, K, BLOCK_K, BITS, BLOCK, SCALED, SHIFTED, LEVELS,
                STEP,
            )  # fmt: skip
            a_KR = tl.load(a_ptr + r[None, :] * K + k[:, None], mask=(r[None, :] < R) & (k[:, None] < K), other=0.0)
            # A tensor core rounds its sums toward zero: long ones are made outside of it, which the factor sees to. Were
            # it applied after the loop, the compiler would sum inside.
            added += s_twice * tl.dot(w_NK, a_KR, input_precision="tf32x3")
        for start in range(0, R, BLOCK_K):
            q = start + tl.arange(0, BLOCK_K)
            b_NQ = tl.load(b_ptr + n[:, None] * R + q[None, :], mask=(n[:, None] < N) & (q[None, :] < R), other=0.0)
            gram_QR = tl.load(gram_ptr + q[:, None] * R + r[None, :], mask=(q[:, None] < R) & (r[None, :] < R), other=0.0)
            added += s_squared * tl.dot(b_NQ, gram_QR, input_precision="tf32x3")
        b_NR = tl.load(b_ptr + n[:, None] * R + r[None, :], mask=(n[:, None] < N) & (r[None, :] < R), other=0.0)
        c_sq += tl.sum(b_NR * added, 1)
    c_sq = tl.where(c_sq < w_sq * FLOOR, w_sq * FLOOR, c_sq)  # not maximum, which would hide a NaN
    tl.store(c_ptr + n, tl.sqrt_rn(c_sq), mask=n < N)


@triton.jit
def corner(ptr, i, j, stride_i, stride_j):
    """The address of an activation's element (i, j), both scalars: counted in int64, as all tokens of a batch pass 2^31."""
    return ptr + i.to(tl.int64) * stride_i + j.to(tl.int64) * stride_j


@triton.jit
def operand(x, INTERPRETED: tl.constexpr):
    """What a product multiplies: bf16 as fp32 where tl.dot cannot do bf16."""
    return x.to(tl.float32) if INTERPRETED else x


@triton.jit
def compose_kernel(
    z_ptr, t_ptr, b_ptr, g_ptr, bias_ptr, out_ptr, scaling, M, N, z_m, z_n, t_m, t_r, out_m, out_n, R: tl.constexpr,
    GAIN: tl.constexpr, BIAS: tl.constexpr, INTERPRETED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """out_mn = g_n (z_mn + s sum_r t_mr b_nr) + bias_n.  x_i: the stride of x along i.

    Grid: one program to a tile [BLOCK_M, BLOCK_N], columns first; a program reads all of its z before it writes, and nobody
    else's, so that `out` may be z.
    """
    tile, tiles_N = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    m_0, n_0 = tile // tiles_N * BLOCK_M, tile % tiles_N * BLOCK_N
    i, j = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    n = n_0 + tl.arange(0, BLOCK_N)
    has_m, has_n = m_0 + i < M, n_0 + j < N
    z = tl.load(corner(z_ptr, m_0, n_0, z_m, z_n) + (i * z_m + j * z_n), mask=has_m & has_n, other=0.0).to(tl.float32)
    update = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, R, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        t_at = t_ptr + m_0.to(tl.int64) * t_m + (i * t_m + r[None, :] * t_r)
        t_MR = tl.load(t_at, mask=has_m & (r[None, :] < R), other=0.0)
        b_RN = tl.load(b_ptr + (n[None, :] * R + r[:, None]), mask=has_n & (r[:, None] < R), other=0.0)
        update = tl.dot(operand(t_MR, INTERPRETED), operand(b_RN, INTERPRETED), update, input_precision="ieee")
    y = z + scaling * update
    if GAIN:
        y = y * tl.load(g_ptr + n, mask=n < N)[None, :]
    if BIAS:
        y = y + tl.load(bias_ptr + n, mask=n < N)[None, :]
    out_at = corner(out_ptr, m_0, n_0, out_m, out_n) + (i * out_m + j * out_n)
    tl.store(out_at, rounded(y, out_ptr.dtype.element_ty, INTERPRETED), mask=has_m & has_n)


@triton.jit
def row_gradients_kernel(
    dy_ptr, u_ptr, t_ptr, db_ptr, du_ptr, M, N, rows, dy_m, dy_n, u_m, u_n, t_m, t_r, R: tl.constexpr,
    INTERPRETED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """db_snr = sum_m dy_mn t_mr,  du_sn = sum_m dy_mn u_mn,  m in the s-th `rows` rows.

    Grid: (tiles of N, splits s of M, tiles of R). A program owns its sums: no atomics, so the order is fixed. `rows` is a
    multiple of BLOCK_M. There is one tile of R up to rank 128, so dy is read once; further tiles write the same du.
    """
    n_0, split, tile_R = tl.program_id(0) * BLOCK_N, tl.program_id(1), tl.program_id(2)
    i, j = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    n, r = n_0 + tl.arange(0, BLOCK_N), tile_R * BLOCK_R + tl.arange(0, BLOCK_R)
    db_NR = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    du_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for m_0 in range(split * rows, tl.minimum(split * rows + rows, M), BLOCK_M):
        m_0 = tl.cast(m_0, tl.int32)
        inside = (m_0 + i < M) & (n_0 + j < N)
        dy = tl.load(corner(dy_ptr, m_0, n_0, dy_m, dy_n) + (i * dy_m + j * dy_n), mask=inside, other=0.0)
        u = tl.load(corner(u_ptr, m_0, n_0, u_m, u_n) + (i * u_m + j * u_n), mask=inside, other=0.0)
        t_at = t_ptr + m_0.to(tl.int64) * t_m + (i * t_m + r[None, :] * t_r)
        t = tl.load(t_at, mask=(m_0 + i < M) & (r[None, :] < R), other=0.0)
        db_NR = tl.dot(tl.trans(operand(dy, INTERPRETED)), operand(t, INTERPRETED), db_NR, input_precision="ieee")
        du_MN += dy.to(tl.float32) * u.to(tl.float32)
    db_at = db_ptr + split.to(tl.int64) * N * R + (n[:, None] * R + r[None, :])
    tl.store(db_at, db_NR, mask=(n[:, None] < N) & (r[None, :] < R))
    tl.store(du_ptr + split * N + n, tl.sum(du_MN, 0), mask=n < N)


def rank_block(rank: int, largest: int) -> int:
    """Ranks to a tile: a power of two, 16 at least, which is what tl.dot wants."""
    return min(max(16, triton.next_power_of_2(rank)), largest)


def _launch_adapted_norm(
    kernel: Any, weight: Weight, w_sq_N: Tensor, a_RK: Tensor, b_NR: Tensor, gram_RR: Tensor, scaling: float, c_N: Tensor
) -> None:
    rank = a_RK.shape[0]
    block_r = rank_block(rank, 128)
    # 64 rows are what Hopper's tensor cores take at once; fewer where that leaves SMs idle.
    block_n = next((rows for rows in (64, 32) if weight.rows >= rows * PROGRAMS // 2), 16)
    # Shared memory holds two halves of each fp32 operand, and a pipeline of A; registers hold a sum for each (row, rank).
    block_k, warps = (64, 4) if block_r <= 32 else (32, 4 if block_r <= 64 else 8)
    kernel[(triton.cdiv(weight.rows, block_n),)](
        *weight.pointers(), w_sq_N, a_RK, b_NR, gram_RR, c_N, 2 * scaling, scaling**2, weight.rows, weight.columns,
        R=rank, **weight.layout(), BLOCK_N=block_n, BLOCK_K=block_k, BLOCK_R=block_r, FLOOR=NORM_FLOOR, num_warps=warps,
    )  # fmt: skip


def _launch_compose(
    kernel: Any, z_MN: Tensor, t_MR: Tensor, b_NR: Tensor, scaling: float, g_N: Tensor | None, bias_N: Tensor | None,
    out_MN: Tensor,
) -> None:  # fmt: skip
    (rows, columns), rank = z_MN.shape, b_NR.shape[1]
    # Whole cache lines of z, and of t little read again. A product of fp32 runs on registers: larger tiles spill.
    block_m, block_n, largest = (32, 64, 32) if z_MN.dtype == torch.float32 else (64, 128, 64)
    kernel[(triton.cdiv(rows, block_m) * triton.cdiv(columns, block_n),)](
        z_MN, t_MR, b_NR, z_MN if g_N is None else g_N, z_MN if bias_N is None else bias_N, out_MN, scaling, rows, columns,
        *z_MN.stride(), *t_MR.stride(), *out_MN.stride(), R=rank, GAIN=g_N is not None, BIAS=bias_N is not None,
        INTERPRETED=INTERPRETED, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_R=rank_block(rank, largest),
    )  # fmt: skip


def _row_blocks(dy_MN: Tensor) -> tuple[int, int, int, int]:
    """(BLOCK_M, BLOCK_N, splits, rows to a split) of row_gradients."""
    rows, columns = dy_MN.shape
    # Narrow along N, so that few splits, and few partial sums, fill the SMs. fp32 as in compose.
    block_m, block_n = (32 if dy_MN.dtype == torch.float32 else 64), 64
    splits = max(1, min(PROGRAMS // triton.cdiv(columns, block_n), triton.cdiv(rows, block_m)))
    share = triton.cdiv(triton.cdiv(rows, splits), block_m) * block_m
    return block_m, block_n, triton.cdiv(rows, share), share


def _launch_row_gradients(kernel: Any, dy_MN: Tensor, u_MN: Tensor, t_MR: Tensor, db_SNR: Tensor, du_SN: Tensor) -> None:
    (rows, columns), rank = dy_MN.shape, t_MR.shape[1]
    block_m, block_n, splits, share = _row_blocks(dy_MN)
    block_r = rank_block(rank, 128)
    kernel[(triton.cdiv(columns, block_n), splits, triton.cdiv(rank, block_r))](
        dy_MN, u_MN, t_MR, db_SNR, du_SN, rows, columns, share, *dy_MN.stride(), *u_MN.stride(), *t_MR.stride(), R=rank,
        INTERPRETED=INTERPRETED, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_R=block_r, num_warps=4 if block_r <= 64 else 8,
    )  # fmt: skip


@triton_op("trainer::adapted_norm", mutates_args={"c_N"})
def _adapted_norm_op(
    codes: Tensor, scale: Tensor | None, offset: Tensor | None, levels: Tensor | None, rows: int, columns: int,
    bits: int, block: int, w_sq_N: Tensor, a_RK: Tensor, b_NR: Tensor, gram_RR: Tensor, scaling: float, c_N: Tensor,
) -> None:  # fmt: skip
    weight = Weight(codes, scale, offset, levels, rows, columns, bits, block)
    _launch_adapted_norm(wrap_triton(adapted_norm_kernel), weight, w_sq_N, a_RK, b_NR, gram_RR, scaling, c_N)


@triton_op("trainer::compose", mutates_args={"out_MN"})
def _compose_op(
    z_MN: Tensor, t_MR: Tensor, b_NR: Tensor, scaling: float, g_N: Tensor | None, bias_N: Tensor | None, out_MN: Tensor
) -> None:
    _launch_compose(wrap_triton(compose_kernel), z_MN, t_MR, b_NR, scaling, g_N, bias_N, out_MN)


@triton_op("trainer::row_gradients", mutates_args={"db_SNR", "du_SN"})
def _row_gradients_op(dy_MN: Tensor, u_MN: Tensor, t_MR: Tensor, db_SNR: Tensor, du_SN: Tensor) -> None:
    _launch_row_gradients(wrap_triton(row_gradients_kernel), dy_MN, u_MN, t_MR, db_SNR, du_SN)


def has_plain_codes(weight: StoredWeight) -> bool:
    return False  # every code is decoded alike here, and to look would be a wait for each layer


def adapted_norm(weight: StoredWeight, w_sq_N: Tensor, a_RK: Tensor, b_NR: Tensor, scaling: float) -> Tensor:
    stored, a_RK, b_NR = flat(weight), a_RK.contiguous(), b_NR.contiguous()
    for tensor in (w_sq_N, a_RK, b_NR):
        if tensor.dtype != torch.float32:
            raise ValueError(f"the norm takes fp32 A, B and squares, not {tensor.dtype}")
    c_N = torch.empty_like(w_sq_N)
    arguments = (w_sq_N, a_RK, b_NR, a_RK @ a_RK.t(), scaling, c_N)
    if torch.compiler.is_compiling():
        _adapted_norm_op(*stored, *arguments)
    else:
        _launch_adapted_norm(adapted_norm_kernel, stored, *arguments)
    return c_N


def compose(
    z_MN: Tensor, t_MR: Tensor, b_NR: Tensor, scaling: float, g_N: Tensor | None, bias_N: Tensor | None, out_MN: Tensor
) -> None:
    check_dtypes(z_MN, t_MR, b_NR, out_MN)
    if not z_MN.numel():
        return
    arguments = (z_MN, t_MR, b_NR.contiguous(), scaling, g_N, bias_N, out_MN)
    if torch.compiler.is_compiling():
        _compose_op(*arguments)
    else:
        _launch_compose(compose_kernel, *arguments)


def row_gradients(dy_MN: Tensor, u_MN: Tensor, t_MR: Tensor) -> tuple[Tensor, Tensor]:
    check_dtypes(dy_MN, t_MR, u_MN)
    columns, rank = dy_MN.shape[1], t_MR.shape[1]
    if not dy_MN.numel():
        return dy_MN.new_zeros(columns, rank, dtype=torch.float32), dy_MN.new_zeros(columns, dtype=torch.float32)
    splits = _row_blocks(dy_MN)[2]
    db_SNR = torch.empty(splits, columns, rank, dtype=torch.float32, device=dy_MN.device)
    du_SN = torch.empty(splits, columns, dtype=torch.float32, device=dy_MN.device)
    if torch.compiler.is_compiling():
        _row_gradients_op(dy_MN, u_MN, t_MR, db_SNR, du_SN)
    else:
        _launch_row_gradients(row_gradients_kernel, dy_MN, u_MN, t_MR, db_SNR, du_SN)
    return (db_SNR[0], du_SN[0]) if splits == 1 else (db_SNR.sum(0), du_SN.sum(0))
