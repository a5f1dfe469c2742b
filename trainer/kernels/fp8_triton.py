"""Products of float8 e4m3 operands, both scaled row by row, for CUDA (protocols.Kernels). dora_torch.py has the plain twins.

cuBLAS multiplies, through `torch._scaled_mm`: private by name, but its signature has been the same since torch 2.5, and
Inductor knows it. Ours are the quantiser, one pass over its input, and the transposition that the input gradient needs:
Hopper multiplies float8 only if both operands are contiguous along the dimension that is summed over.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.base.types import StoredWeight
from trainer.kernels.dora_torch import LARGEST, SCALE_FLOOR
from trainer.kernels.operators_triton import INTERPRETED, LaunchConfig, ceil_div, launch, next_power_of_2, operator
from trainer.kernels.scratch import scratch
from trainer.kernels.upcast_triton import check_dtypes, flat, rounded

# Whether Hopper's tensor cores may sum a whole product in their own 22 bits or so, instead of passing partial sums to fp32
# registers. Faster by a tenth on Flux's layers (H100): benchmarks/bench_float8.py times both.
FAST_SUMS = False

# A row up to this long stays in registers between its largest element and its codes; a longer one is read twice.
LONGEST_ROW = 16384


@triton.jit
def row_piece(x_ptr, by_ptr, k, K, x_k, GAIN: tl.constexpr):
    """fp32 x * by at the columns k of a row, 0 outside."""
    x = tl.load(x_ptr + k * x_k, mask=k < K, other=0.0).to(tl.float32)
    return x * tl.load(by_ptr + k, mask=k < K, other=0.0) if GAIN else x


@triton.jit
def quantize_rows_kernel(
    x_ptr, by_ptr, codes_ptr, scale_ptr, K, x_m, x_k, GAIN: tl.constexpr, WHOLE: tl.constexpr, LARGEST: tl.constexpr,
    FLOOR: tl.constexpr, INTERPRETED: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """scale_m = max(FLOOR, max_k |x_mk by_k| / LARGEST),  code_mk = x_mk by_k / scale_m.  x_i: the stride of x along i.

    Grid: one program for each row. Its division is exact, so that the codes equal the plain twin's bit for bit.
    """
    m = tl.program_id(0).to(tl.int64)
    x_ptr += m * x_m
    codes_ptr += m * K
    k = tl.arange(0, BLOCK_K)
    x = row_piece(x_ptr, by_ptr, k, K, x_k, GAIN)
    largest = tl.abs(x)
    if not WHOLE:
        for first in range(BLOCK_K, K, BLOCK_K):
            largest = tl.maximum(largest, tl.abs(row_piece(x_ptr, by_ptr, first + k, K, x_k, GAIN)))
    # NaN may get lost in the maximum, but not in the codes.
    scale = tl.maximum(tl.div_rn(tl.max(largest, 0), LARGEST), FLOOR)
    inverse = tl.div_rn(1.0, scale)
    tl.store(codes_ptr + k, rounded(x * inverse, codes_ptr.dtype.element_ty, INTERPRETED), mask=k < K)
    if not WHOLE:
        for first in range(BLOCK_K, K, BLOCK_K):
            x = row_piece(x_ptr, by_ptr, first + k, K, x_k, GAIN)
            code = rounded(x * inverse, codes_ptr.dtype.element_ty, INTERPRETED)
            tl.store(codes_ptr + first + k, code, mask=first + k < K)
    tl.store(scale_ptr + m, scale)


@triton.jit
def transpose_kernel(w_ptr, out_ptr, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """out_kn = w_nk, bytes.  Grid: one program for each tile [BLOCK_N, BLOCK_K]."""
    tile, tiles_K = tl.program_id(0), tl.cdiv(K, BLOCK_K)
    n = tile // tiles_K * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tile % tiles_K * BLOCK_K + tl.arange(0, BLOCK_K)
    w = tl.load(w_ptr + n[:, None] * K + k[None, :], mask=(n[:, None] < N) & (k[None, :] < K))
    tl.store(out_ptr + k[:, None] * N + n[None, :], tl.trans(w), mask=(k[:, None] < K) & (n[None, :] < N))


@operator("codes_MK", "scale_M")
def _quantize_rows(x_MK: Tensor, by_K: Tensor | None, codes_MK: Tensor, scale_M: Tensor) -> None:
    rows, columns = x_MK.shape

    def config() -> LaunchConfig:
        check_dtypes(x_MK)
        block = min(next_power_of_2(columns), LONGEST_ROW)
        constants = dict(
            GAIN=by_K is not None, WHOLE=columns <= block, LARGEST=LARGEST, FLOOR=SCALE_FLOOR, INTERPRETED=INTERPRETED,
            BLOCK_K=block,
        )  # fmt: skip
        # 32 elements for each thread, 8 for each load; 64 for the longest rows.
        return LaunchConfig((rows,), constants, max(1, min(8, block // 1024)))

    tensors = x_MK, x_MK if by_K is None else by_K, codes_MK, scale_M
    launch(quantize_rows_kernel, config, tensors, (columns, *x_MK.stride()), (rows, by_K is None))


@operator("out_KN")
def _transpose(w_NK: Tensor, out_KN: Tensor) -> None:
    rows, columns = w_NK.shape

    def config() -> LaunchConfig:
        block = 128  # whole cache lines of bytes on either side
        return LaunchConfig((ceil_div(rows, block) * ceil_div(columns, block),), dict(BLOCK_N=block, BLOCK_K=block), 8)

    launch(transpose_kernel, config, (w_NK, out_KN), (rows, columns))


def quantize_rows(x_MK: Tensor, by_K: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x * by, row by row in float8: (e4m3 codes [M, K], scale fp32 [M])."""
    codes_MK = torch.empty(x_MK.shape, dtype=torch.float8_e4m3fn, device=x_MK.device)
    scale_M = torch.empty(x_MK.shape[0], dtype=torch.float32, device=x_MK.device)
    if x_MK.numel():
        _quantize_rows(x_MK, by_K, codes_MK, scale_M)
    return codes_MK, scale_M


def scaled_product(x_codes_MK: Tensor, x_scale_M: Tensor, weight: StoredWeight, dtype: torch.dtype) -> Tensor:
    """x W^T from codes, both sides scaled by row: `dtype` [M, N]."""
    stored = flat(weight)
    assert stored.scale is not None
    return _multiply(x_codes_MK, x_scale_M, stored.codes, stored.scale, dtype)


def scaled_input_grad(d_codes_MN: Tensor, d_scale_M: Tensor, weight: StoredWeight, dtype: torch.dtype) -> Tensor:
    """d W from codes. Transposes W at each use, 2 bytes of traffic an element: a copy would double the weights' memory."""
    stored = flat(weight)
    # Nothing else uses the scratch buffer of this dtype: the codes of d, in use beside it, are a tensor of their own.
    codes_KN = scratch((stored.columns, stored.rows), torch.float8_e4m3fn, weight.device)
    _transpose(stored.codes.view(torch.uint8), codes_KN.view(torch.uint8))
    ones_K = torch.ones(stored.columns, dtype=torch.float32, device=weight.device)
    return _multiply(d_codes_MN, d_scale_M, codes_KN, ones_K, dtype)


def _multiply(a_MK: Tensor, a_scale_M: Tensor, b_NK: Tensor, b_scale_N: Tensor, dtype: torch.dtype) -> Tensor:
    """(a b^T) * a_scale * b_scale: `dtype` [M, N], all in the layout that cuBLAS requires."""
    return torch._scaled_mm(a_MK, b_NK.t(), a_scale_M[:, None], b_scale_N[None, :], out_dtype=dtype, use_fast_accum=FAST_SUMS)
