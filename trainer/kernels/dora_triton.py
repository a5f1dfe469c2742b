"""The kernels in Triton, for CUDA. See protocols.Kernels; operators_triton.py has the launches, upcast_triton.py the frozen
weights, norm_triton.py DoRA's norm, fp8_triton.py the products in float8.

Products of 16-bit tensors run on tensor cores and are summed in fp32. Products of fp32 tensors are exact to fp32: activations
take no tensor core at all ("ieee"), the norm takes three passes of one ("tf32x3").
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.base.types import StoredWeight
from trainer.kernels.fp8_triton import quantize_rows, scaled_input_grad, scaled_product
from trainer.kernels.norm_triton import adapted_norms
from trainer.kernels.operators_triton import INTERPRETED, LaunchConfig, ceil_div, launch, next_power_of_2, operator
from trainer.kernels.upcast_triton import check_dtypes, rank_block, rounded, row_squares, splits_of, sum_of_splits, upcast

__all__ = [
    "adapted_norms", "adapter_gradients", "compose", "has_plain_codes", "name", "quantize_rows", "rotate", "row_squares",
    "scaled_input_grad", "scaled_product", "upcast",
]  # fmt: skip

name = "triton"

# Most programs that sum the gradients of a layer: two for each of the 132 SMs of an H100 or H200. A constant, so that the
# order of a sum depends on the shape alone.
PROGRAMS = 264
# Columns of a program's tile in these sums: narrow, so that few splits, and few partial sums, fill the SMs.
SUM_COLUMNS = 64


@triton.jit
def corner(ptr, i, j, stride_i, stride_j):
    """The address of an activation's element (i, j), both scalars, in int64: all tokens of a batch exceed 2^31 elements."""
    return ptr + i.to(tl.int64) * stride_i + j.to(tl.int64) * stride_j


@triton.jit
def operand(x, INTERPRETED: tl.constexpr):
    """An operand of tl.dot; the interpreter cannot multiply bf16, so it gets fp32."""
    return x.to(tl.float32) if INTERPRETED else x


@triton.jit
def compose_kernel(
    z_ptr, t_ptr, b_ptr, g_ptr, bias_ptr, out_ptr, M, N, z_m, z_n, t_m, t_r, out_m, out_n, R: tl.constexpr,
    GAIN: tl.constexpr, BIAS: tl.constexpr, INTERPRETED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """out_mn = g_n (z_mn + sum_r t_mr b_nr) + bias_n.  x_i: the stride of x along i.

    Grid: one program for each tile [BLOCK_M, BLOCK_N], columns first; a program reads all of its z before it writes, and no
    other's, so that `out` may be z.
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
    y = z + update
    if GAIN:
        y = y * tl.load(g_ptr + n, mask=n < N)[None, :]
    if BIAS:
        y = y + tl.load(bias_ptr + n, mask=n < N)[None, :]
    out_at = corner(out_ptr, m_0, n_0, out_m, out_n) + (i * out_m + j * out_n)
    tl.store(out_at, rounded(y, out_ptr.dtype.element_ty, INTERPRETED), mask=has_m & has_n)


@triton.jit
def row_sums_kernel(
    dy_ptr, u_ptr, t_ptr, bias_ptr, d_ptr, du_ptr, M, N, rows, dy_m, dy_n, u_m, u_n, t_m, t_r, R: tl.constexpr,
    BIAS: tl.constexpr, INTERPRETED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """d_snr = sum_m dy_mn t_mr,  du_sn = sum_m dy_mn (u_mn - bias_n),  m in the s-th `rows` rows.

    Grid: (tiles of N, splits s of M, tiles of R). A program owns its sums: no atomics, so the order is fixed. `rows` is a
    multiple of BLOCK_M. There is one tile of R up to rank 128, so dy is read once; further tiles write the same du.
    """
    n_0, split, tile_R = tl.program_id(0) * BLOCK_N, tl.program_id(1), tl.program_id(2)
    i, j = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    n, r = n_0 + tl.arange(0, BLOCK_N), tile_R * BLOCK_R + tl.arange(0, BLOCK_R)
    d_NR = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    du_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    bias = tl.load(bias_ptr + n, mask=n < N, other=0.0)[None, :] if BIAS else 0.0
    for m_0 in tl.range(split * rows, tl.minimum(split * rows + rows, M), BLOCK_M, num_stages=3):
        m_0 = tl.cast(m_0, tl.int32)
        mask = (m_0 + i < M) & (n_0 + j < N)
        dy = tl.load(corner(dy_ptr, m_0, n_0, dy_m, dy_n) + (i * dy_m + j * dy_n), mask=mask, other=0.0)
        u = tl.load(corner(u_ptr, m_0, n_0, u_m, u_n) + (i * u_m + j * u_n), mask=mask, other=0.0)
        t_at = t_ptr + m_0.to(tl.int64) * t_m + (i * t_m + r[None, :] * t_r)
        t = tl.load(t_at, mask=(m_0 + i < M) & (r[None, :] < R), other=0.0)
        d_NR = tl.dot(tl.trans(operand(dy, INTERPRETED)), operand(t, INTERPRETED), d_NR, input_precision="ieee")
        du_MN += dy.to(tl.float32) * (u.to(tl.float32) - bias)
    d_at = d_ptr + split.to(tl.int64) * N * R + (n[:, None] * R + r[None, :])
    tl.store(d_at, d_NR, mask=(n[:, None] < N) & (r[None, :] < R))
    tl.store(du_ptr + split * N + n, tl.sum(du_MN, 0), mask=n < N)


@triton.jit
def adapter_gradients_kernel(
    d_ptr, du_ptr, b_ptr, g_ptr, over_ptr, db_ptr, dm_ptr, sb_ptr, scaling, N, splits, R: tl.constexpr,
    WITH_Z: tl.constexpr, INTERPRETED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The gradients from the sums d_snr and du_sn of row_sums_kernel: see protocols.Kernels.adapter_gradients.

    Grid: one program for BLOCK_N rows of B.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    sg_N = tl.cast(scaling, tl.float32) * tl.load(g_ptr + n, mask=n < N, other=0.0)
    du_N = tl.sum(sum_of_splits(du_ptr, n, tl.arange(0, 1), N, splits, 1, BLOCK_N, 1, BLOCK_S), 1)
    for first in range(0, R, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        mask, at = (n[:, None] < N) & (r[None, :] < R), n[:, None] * R + r[None, :]
        d_NR = sum_of_splits(d_ptr, n, r, N, splits, R, BLOCK_N, BLOCK_R, BLOCK_S)
        b_NR = tl.load(b_ptr + at, mask=mask, other=0.0)
        tl.store(db_ptr + at, sg_N[:, None] * d_NR, mask=mask)
        tl.store(sb_ptr + at, rounded(sg_N[:, None] * b_NR, sb_ptr.dtype.element_ty, INTERPRETED), mask=mask)
        if WITH_Z:
            du_N += tl.cast(scaling, tl.float32) * tl.sum(b_NR * d_NR, 1)
    tl.store(dm_ptr + n, tl.div_rn(du_N, tl.load(over_ptr + n, mask=n < N, other=1.0)), mask=n < N)


@operator("out_MN")
def _compose(
    t_MR: Tensor, sb_NR: Tensor, g_N: Tensor | None, bias_N: Tensor | None, z_MN: Tensor | None, out_MN: Tensor
) -> None:
    # z is None if it is `out`: a compiler copies a tensor that is read and written under two names.
    z_MN = out_MN if z_MN is None else z_MN
    (rows, columns), rank = z_MN.shape, sb_NR.shape[1]

    def config() -> LaunchConfig:
        check_dtypes(z_MN, t_MR, sb_NR, out_MN)
        # Whole cache lines of z, and little of t read again. A product of fp32 runs on registers: larger tiles spill.
        block_m, block_n, largest = (32, 64, 32) if z_MN.dtype == torch.float32 else (64, 128, 64)
        constants = dict(
            R=rank, GAIN=g_N is not None, BIAS=bias_N is not None, INTERPRETED=INTERPRETED, BLOCK_M=block_m, BLOCK_N=block_n,
            BLOCK_R=rank_block(rank, largest),
        )  # fmt: skip
        return LaunchConfig((ceil_div(rows, block_m) * ceil_div(columns, block_n),), constants)

    tensors = z_MN, t_MR, sb_NR, z_MN if g_N is None else g_N, z_MN if bias_N is None else bias_N, out_MN
    strides = *z_MN.stride(), *t_MR.stride(), *out_MN.stride()
    launch(compose_kernel, config, tensors, (rows, columns, *strides), (rank, g_N is None, bias_N is None))


@triton.jit
def rotate_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, ROWS, S, H, PAIRS: tl.constexpr, BACK: tl.constexpr,
    INTERPRETED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """A rotated tile: rows [B S H] and all pairs of a head, of queries or of keys. Compiled without contracting products and
    sums, so that they round as separate operators."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    pair = tl.arange(0, BLOCK_P)[None, :]
    mask = (row < ROWS) & (pair < PAIRS)
    at, angle = row * (2 * PAIRS) + 2 * pair, row // H % S * (2 * PAIRS) + 2 * pair
    if tl.program_id(1) == 0:
        _rotate_tile(q_ptr + at, cos_ptr + angle, sin_ptr + angle, q_out_ptr + at, mask, BACK, INTERPRETED)
    else:
        _rotate_tile(k_ptr + at, cos_ptr + angle, sin_ptr + angle, k_out_ptr + at, mask, BACK, INTERPRETED)


@triton.jit
def _rotate_tile(x_ptr, cos_ptr, sin_ptr, out_ptr, mask, BACK: tl.constexpr, INTERPRETED: tl.constexpr):
    x_1 = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    x_2 = tl.load(x_ptr + 1, mask=mask, other=0.0).to(tl.float32)
    cos_1, cos_2 = tl.load(cos_ptr, mask=mask), tl.load(cos_ptr + 1, mask=mask)
    sin_1, sin_2 = tl.load(sin_ptr, mask=mask), tl.load(sin_ptr + 1, mask=mask)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if BACK:
        y_1 = _as(x_1 * cos_1, dtype, INTERPRETED) + _as(x_2 * sin_2, dtype, INTERPRETED)
        y_2 = _as(x_2 * cos_2, dtype, INTERPRETED) - _as(x_1 * sin_1, dtype, INTERPRETED)
    else:
        y_1 = x_1 * cos_1 - x_2 * sin_1
        y_2 = x_2 * cos_2 + x_1 * sin_2
    tl.store(out_ptr, rounded(y_1, dtype, INTERPRETED), mask=mask)
    tl.store(out_ptr + 1, rounded(y_2, dtype, INTERPRETED), mask=mask)


@triton.jit
def _as(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    return rounded(x, dtype, INTERPRETED).to(tl.float32)


@operator("q_out", "k_out")
def _rotate(q_BSHD: Tensor, k_BSHD: Tensor, cos_SD: Tensor, sin_SD: Tensor, back: bool, q_out: Tensor, k_out: Tensor) -> None:
    _, tokens, heads, size = q_BSHD.shape
    rows = q_BSHD.numel() // size

    def config() -> LaunchConfig:
        if {cos_SD.dtype, sin_SD.dtype} != {torch.float32} or size % 2 or q_BSHD.dtype != k_BSHD.dtype:
            raise ValueError(f"a rotation takes fp32 angles, an even head and one dtype, not {cos_SD.dtype} and {size}")
        pairs = next_power_of_2(size // 2)
        block_m = max(1, 1024 // pairs)
        constants = dict(PAIRS=size // 2, BACK=back, INTERPRETED=INTERPRETED, BLOCK_M=block_m, BLOCK_P=pairs)
        return LaunchConfig((ceil_div(rows, block_m), 2), constants, contracted=False)

    launch(rotate_kernel, config, (q_BSHD, k_BSHD, cos_SD, sin_SD, q_out, k_out), (rows, tokens, heads), (size, back))


def row_block(dtype: torch.dtype) -> int:
    """Rows of an activation in a tile of these sums. A product of fp32 runs on registers: larger tiles spill."""
    return 32 if dtype == torch.float32 else 64


@operator("d_SNR", "du_SN", "db_NR", "dm_N", "sb_NR")
def _adapter_gradients(
    dy_MN: Tensor, u_MN: Tensor, t_MR: Tensor, b_NR: Tensor, g_N: Tensor, over_N: Tensor, bias_N: Tensor | None,
    scaling: float, with_z: bool, share: int, d_SNR: Tensor, du_SN: Tensor, db_NR: Tensor, dm_N: Tensor, sb_NR: Tensor,
) -> None:  # fmt: skip
    """share: rows to a split."""
    (rows, columns), rank, splits = dy_MN.shape, t_MR.shape[1], len(d_SNR)

    def config_of_sums() -> LaunchConfig:
        check_dtypes(dy_MN, t_MR, u_MN)
        for tensor in (b_NR, g_N, over_N, *(() if bias_N is None else (bias_N,))):
            if tensor.dtype != torch.float32:
                raise ValueError(f"the gradients take fp32 B, gains, norms and biases, not {tensor.dtype}")
        block_r = rank_block(rank, 128)
        constants = dict(
            R=rank, BIAS=bias_N is not None, INTERPRETED=INTERPRETED, BLOCK_M=row_block(dy_MN.dtype), BLOCK_N=SUM_COLUMNS,
            BLOCK_R=block_r,
        )  # fmt: skip
        grid = ceil_div(columns, SUM_COLUMNS), splits, ceil_div(rank, block_r)
        return LaunchConfig(grid, constants, 4 if rank <= 64 else 8)

    def config_of_gradients() -> LaunchConfig:
        block_r = rank_block(rank, 128)
        block_n, most = (8, 8) if block_r <= 32 else (4, 2)
        constants = dict(
            R=rank, WITH_Z=with_z, INTERPRETED=INTERPRETED, BLOCK_N=block_n, BLOCK_R=block_r,
            BLOCK_S=min(most, next_power_of_2(splits)),
        )  # fmt: skip
        return LaunchConfig((ceil_div(columns, block_n),), constants)

    tensors = dy_MN, u_MN, t_MR, u_MN if bias_N is None else bias_N, d_SNR, du_SN
    strides = *dy_MN.stride(), *u_MN.stride(), *t_MR.stride()
    facts = rank, bias_N is None, b_NR.dtype, g_N.dtype, over_N.dtype
    launch(row_sums_kernel, config_of_sums, tensors, (rows, columns, share, *strides), facts)
    tensors = d_SNR, du_SN, b_NR, g_N, over_N, db_NR, dm_N, sb_NR
    launch(adapter_gradients_kernel, config_of_gradients, tensors, (float(scaling), columns, splits), (rank, with_z))


def has_plain_codes(weight: StoredWeight) -> bool:
    """Always False: these kernels decode every code alike, and a look would wait for the device at each layer."""
    return False


def compose(z_MN: Tensor, t_MR: Tensor, sb_NR: Tensor, g_N: Tensor | None, bias_N: Tensor | None, out_MN: Tensor) -> None:
    """out = g * (z + t (s B)^T) + bias, in place."""
    if not z_MN.numel():
        return
    _compose(t_MR, sb_NR.contiguous(), g_N, bias_N, None if z_MN is out_MN else z_MN, out_MN)


def rotate(q_BSHD: Tensor, k_BSHD: Tensor, cos_SD: Tensor, sin_SD: Tensor, *, back: bool = False) -> tuple[Tensor, Tensor]:
    """Queries and keys rotated pair by pair; with back, gradients. Raises ValueError for angles that are not fp32."""
    q_BSHD, k_BSHD = q_BSHD.contiguous(), k_BSHD.contiguous()
    q_out, k_out = torch.empty_like(q_BSHD), torch.empty_like(k_BSHD)
    if q_BSHD.numel():
        _rotate(q_BSHD, k_BSHD, cos_SD.contiguous(), sin_SD.contiguous(), back, q_out, k_out)
    return q_out, k_out


def adapter_gradients(
    dy_MN: Tensor, u_MN: Tensor, t_MR: Tensor, b_NR: Tensor, g_N: Tensor, over_N: Tensor, bias_N: Tensor | None,
    scaling: float, with_z: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dB: fp32 [N, R], dm: fp32 [N], s g * B in dy's dtype: [N, R]). Raises ValueError for B, gains, norms or biases that
    are not fp32."""
    (columns, rank), b_NR = b_NR.shape, b_NR.contiguous()
    db_NR, dm_N, sb_NR = torch.empty_like(b_NR), torch.empty_like(g_N), torch.empty_like(b_NR, dtype=dy_MN.dtype)
    splits, share = splits_of(dy_MN.shape[0], row_block(dy_MN.dtype), PROGRAMS // ceil_div(columns, SUM_COLUMNS))
    d_SNR = torch.empty(splits, columns, rank, dtype=torch.float32, device=dy_MN.device)
    du_SN = torch.empty(splits, columns, dtype=torch.float32, device=dy_MN.device)
    _adapter_gradients(dy_MN, u_MN, t_MR, b_NR, g_N, over_N, bias_N, scaling, with_z, share, d_SNR, du_SN, db_NR, dm_N, sb_NR)
    return db_NR, dm_N, sb_NR
