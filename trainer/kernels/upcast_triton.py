"""Frozen weights in Triton: read from storage, decoded to fp32 in registers. See types.StoredWeight and protocols.Kernels.

The shape fixes block sizes; they were timed on an H100. The kernels run under Triton's CPU interpreter too
(TRITON_INTERPRET=1), for tests without a GPU.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.base.types import StoredWeight
from trainer.kernels.operators_triton import INTERPRETED, LaunchConfig, ceil_div, launch, next_power_of_2, operator

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CODES = (*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


@triton.jit
def per_block(ptr, n, at, N, mask, BLOCK: tl.constexpr):
    """The scale or offset of the elements `at` in rows n: one for each `BLOCK` consecutive elements, or for each row (0)."""
    if BLOCK == 0:
        return tl.load(ptr + n, mask=n < N)[:, None]
    else:
        return tl.load(ptr + at // BLOCK, mask=mask)


@triton.jit
def e4m3(byte):
    """The exact fp32 number of a float8 e4m3 code, for cards that Triton has no conversion for. byte: int32.

    1 bit sign, 4 bits exponent (bias 7), 3 bits mantissa; exponent 0 has no leading 1; all ones are NaN, none is infinite.
    """
    small = (byte & 7).to(tl.float32) * 0.001953125  # 2^-9
    normal = (((byte & 0x7F) << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    size = tl.where((byte & 0x78) == 0, small, normal)
    size = tl.where((byte & 0x7F) == 0x7F, float("nan"), size)
    return tl.where((byte & 0x80) == 0, size, -size)


@triton.jit
def number(code, scale, offset, levels_ptr, SCALED: tl.constexpr, SHIFTED: tl.constexpr, LEVELS: tl.constexpr):
    """fp32 levels[code] * scale + offset."""
    value = tl.load(levels_ptr + code) if LEVELS else code.to(tl.float32)
    value = value * scale if SCALED else value
    return value + offset if SHIFTED else value


@triton.jit
def weight_tile(
    codes_ptr, scale_ptr, offset_ptr, levels_ptr, n, first, N, K, WIDTH: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr, SCALED: tl.constexpr, SHIFTED: tl.constexpr, LEVELS: tl.constexpr,
    E4M3: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Rows n (int32 vector) and columns first .. first + WIDTH - 1 of the weight: fp32 [n, WIDTH], 0 outside of [N, K].

    BITS: of a packed code, 8 if codes are elements. BLOCK: elements for each scale, 0: a row. STEP: elements for each load of
    a byte and its scale: all of the byte if no byte spans two rows or two blocks, else 1.
    """
    PER_BYTE: tl.constexpr = 8 // BITS
    j = first // STEP + tl.arange(0, WIDTH // STEP)
    mask = (n[:, None] < N) & (j[None, :] < K // STEP)
    at = n[:, None] * (K // STEP) + j[None, :]
    codes = tl.load(codes_ptr + at // (PER_BYTE // STEP), mask=mask)
    scale = per_block(scale_ptr, n, at, N, mask, BLOCK // STEP) if SCALED else 1.0
    offset = per_block(offset_ptr, n, at, N, mask, BLOCK // STEP) if SHIFTED else 0.0
    if BITS == 8:
        if E4M3:
            codes = e4m3(codes.to(tl.int32))
        w = number(codes, scale, offset, levels_ptr, SCALED, SHIFTED, LEVELS)
    else:
        LAST: tl.constexpr = 2**BITS - 1
        byte = codes.to(tl.int32)
        if STEP == 1:
            code = byte >> (at % PER_BYTE * BITS) & LAST
            w = number(code, scale, offset, levels_ptr, SCALED, SHIFTED, LEVELS)
        elif BITS == 4:
            w_0 = number(byte & LAST, scale, offset, levels_ptr, SCALED, SHIFTED, LEVELS)
            w_1 = number(byte >> 4 & LAST, scale, offset, levels_ptr, SCALED, SHIFTED, LEVELS)
            w = tl.interleave(w_0, w_1)
        else:
            w_0 = number(byte & LAST, scale, offset, levels_ptr, SCALED, SHIFTED, LEVELS)
            w_1 = number(byte >> 2 & LAST, scale, offset, levels_ptr, SCALED, SHIFTED, LEVELS)
            w_2 = number(byte >> 4 & LAST, scale, offset, levels_ptr, SCALED, SHIFTED, LEVELS)
            w_3 = number(byte >> 6 & LAST, scale, offset, levels_ptr, SCALED, SHIFTED, LEVELS)
            w = tl.interleave(tl.interleave(w_0, w_2), tl.interleave(w_1, w_3))
    columns = first + tl.arange(0, WIDTH)
    return tl.where((n[:, None] < N) & (columns[None, :] < K), w, 0.0)


@triton.jit
def rounded(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """fp32 to the nearest of `dtype`, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:  # the interpreter truncates: round the bits first
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    if INTERPRETED and dtype == tl.float8e4nv:  # the interpreter loses the carry into the exponent, and the ties
        bits = x.to(tl.uint32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000).to(tl.float32, bitcast=True)
        # Below 2^-6 a code's step is 2^-9, which is fp32's at 1.5 * 2^14.
        x = tl.where(tl.abs(x) < 2**-6, (x + 24576.0) - 24576.0, normal)
    return x.to(dtype)


@triton.jit
def sum_of_splits(
    x_ptr, n, r, N, splits, R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr
):
    """fp32 [n, r]: sum_s x_snr of partial sums [splits, N, R], BLOCK_S at a time: their loads do not wait for one another."""
    x_SNR = tl.zeros([BLOCK_S, BLOCK_N, BLOCK_R], tl.float32)
    mask = ((n < N)[:, None] & (r < R)[None, :])[None, :, :]
    at = (n[:, None] * R + r[None, :])[None, :, :]
    for first in range(0, splits, BLOCK_S):
        split = (first + tl.arange(0, BLOCK_S))[:, None, None]
        x_SNR += tl.load(x_ptr + split.to(tl.int64) * N * R + at, mask=mask & (split < splits), other=0.0)
    return tl.sum(x_SNR, 0)


@triton.jit
def upcast_kernel(
    codes_ptr, scale_ptr, offset_ptr, levels_ptr, g_ptr, out_ptr, N, K, BITS: tl.constexpr, BLOCK: tl.constexpr,
    SCALED: tl.constexpr, SHIFTED: tl.constexpr, LEVELS: tl.constexpr,
    E4M3: tl.constexpr, STEP: tl.constexpr, GAIN: tl.constexpr,
    INTERPRETED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out_nk = g_n * w_nk.  Grid: one program for each tile [BLOCK_N, BLOCK_K], columns first, in memory order."""
    tile, tiles_K = tl.program_id(0), tl.cdiv(K, BLOCK_K)
    n = tile // tiles_K * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tile % tiles_K * BLOCK_K
    k = first + tl.arange(0, BLOCK_K)
    w = weight_tile(
        codes_ptr, scale_ptr, offset_ptr, levels_ptr, n, first, N, K, BLOCK_K, BITS,
        BLOCK, SCALED, SHIFTED, LEVELS, E4M3, STEP,
    )  # fmt: skip
    if GAIN:
        w = w * tl.load(g_ptr + n, mask=n < N)[:, None]
    w = rounded(w, out_ptr.dtype.element_ty, INTERPRETED)
    tl.store(out_ptr + (n[:, None] * K + k[None, :]), w, mask=(n[:, None] < N) & (k[None, :] < K))


@triton.jit
def row_squares_kernel(
    codes_ptr, scale_ptr, offset_ptr, levels_ptr, out_ptr, N, K, BITS: tl.constexpr, BLOCK: tl.constexpr,
    SCALED: tl.constexpr, SHIFTED: tl.constexpr, LEVELS: tl.constexpr, E4M3: tl.constexpr, STEP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out_n = sum_k w_nk^2.  Grid: one program for BLOCK_N rows, which loops over K and so needs no second pass."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    squares = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for first in range(0, K, BLOCK_K):
        w = weight_tile(
            codes_ptr, scale_ptr, offset_ptr, levels_ptr, n, first, N, K, BLOCK_K, BITS,
            BLOCK, SCALED, SHIFTED, LEVELS, E4M3, STEP,
        )  # fmt: skip
        squares += w * w
    tl.store(out_ptr + n, tl.sum(squares, 1), mask=n < N)


def rank_block(rank: int, largest: int) -> int:
    """Ranks in a tile: a power of two, at least 16, as tl.dot requires."""
    return min(max(16, next_power_of_2(rank)), largest)


def splits_of(length: int, block: int, most: int) -> tuple[int, int]:
    """(splits, length of each) of a sum over `length`, divided into whole blocks among at most `most` programs."""
    share = max(1, ceil_div(ceil_div(length, max(1, most)), block)) * block
    return max(1, ceil_div(length, share)), share


class Weight(NamedTuple):
    """A StoredWeight as an operator's arguments: tensors and numbers."""

    codes: Tensor
    scale: Tensor | None
    offset: Tensor | None
    levels: Tensor | None
    rows: int
    columns: int
    bits: int
    block: int

    def pointers(self) -> tuple[Tensor, ...]:
        """The tensors that a kernel reads; the codes stand in for an absent one, and are not read there."""
        codes, scale, offset, levels = self[:4]
        # Written out: a loop would take as long as the rest of a launch.
        return (
            codes, codes if scale is None else scale, codes if offset is None else offset, codes if levels is None else levels
        )  # fmt: skip

    def layout(self) -> dict[str, Any]:
        """Constants for the kernels that read it."""
        per_byte, by_row = 8 // self.bits, self.block == self.columns
        return dict(
            BITS=self.bits, BLOCK=0 if by_row else self.block, SCALED=self.scale is not None,
            SHIFTED=self.offset is not None, LEVELS=self.levels is not None,
            E4M3=self.codes.dtype == torch.uint8 and self.bits == 8,
            STEP=per_byte if self.columns % per_byte == 0 and (by_row or self.block % per_byte == 0) else 1,
        )  # fmt: skip

    def facts(self) -> tuple[object, ...]:
        """The values that determine `layout`, together with the codes' dtype and the columns."""
        return self.bits, self.block, self.scale is None, self.offset is None, self.levels is None


@torch.compiler.assume_constant_result
def converts_e4m3(device: torch.device) -> bool:
    """Whether Triton converts e4m3 codes for that device (Ada and newer); if not, the kernels read their bits."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def flat(weight: StoredWeight) -> Weight:
    """The weight as an operator's arguments, cached. Raises ValueError for codes of a dtype that the kernels cannot read."""
    if torch.compiler.is_compiling():
        return _flat(weight)  # a graph is built once
    memo = weight.__dict__  # where functools.cached_property, too, keeps a frozen object's derived values
    if "of_triton" not in memo:
        memo["of_triton"] = _flat(weight)
    return memo["of_triton"]


def _flat(weight: StoredWeight) -> Weight:
    codes = weight.codes
    allowed = CODES if weight.bits is None else (torch.uint8,)
    if codes.dtype not in allowed:
        raise ValueError(f"no Triton kernel reads a weight stored as {codes.dtype}; set adapter.kernels = 'torch'")
    if codes.dtype == torch.float8_e4m3fn and not converts_e4m3(codes.device):
        codes = codes.view(torch.uint8)
    rows, columns = weight.shape
    # The kernels count elements in int32. The largest layer of the supported models, 18432 x 3072, has 2^25.8.
    assert rows * columns < 2**31 and codes.is_contiguous()
    return Weight(codes, weight.scale, weight.offset, weight.levels, rows, columns, weight.bits or 8, weight.block)


def check_dtypes(*tensors: Tensor) -> None:
    """Raises ValueError unless every tensor is of one floating dtype that the kernels compute in."""
    for tensor in tensors:
        if tensor.dtype not in FLOATS:
            raise ValueError(f"the Triton kernels compute in fp32, bf16 and fp16, not in {tensor.dtype}")
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(f"the Triton kernels take tensors of one dtype, not {tensors[0].dtype} and {tensor.dtype}")


@operator("out")
def _upcast(
    codes: Tensor, scale: Tensor | None, offset: Tensor | None, levels: Tensor | None, rows: int, columns: int, bits: int,
    block: int, g_N: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    weight = Weight(codes, scale, offset, levels, rows, columns, bits, block)

    def config() -> LaunchConfig:
        check_dtypes(out)
        # 4096 elements: 32 for each thread, 16-byte loads even of one-byte codes, and rows of 128 fill whole cache lines.
        block_n, block_k = 32, 128
        constants = dict(GAIN=g_N is not None, INTERPRETED=INTERPRETED, BLOCK_N=block_n, BLOCK_K=block_k)
        return LaunchConfig((ceil_div(rows, block_n) * ceil_div(columns, block_k),), weight.layout() | constants)

    tensors = *weight.pointers(), out if g_N is None else g_N, out
    launch(upcast_kernel, config, tensors, (rows, columns), (g_N is None, *weight.facts()))


@operator("out_N")
def _row_squares(
    codes: Tensor, scale: Tensor | None, offset: Tensor | None, levels: Tensor | None, rows: int, columns: int, bits: int,
    block: int, out_N: Tensor,
) -> None:  # fmt: skip
    weight = Weight(codes, scale, offset, levels, rows, columns, bits, block)

    def config() -> LaunchConfig:
        # Few rows for each program, so that the narrowest layers (640) still occupy most SMs; long steps along K.
        block_n, block_k = 4, 512
        return LaunchConfig((ceil_div(rows, block_n),), weight.layout() | dict(BLOCK_N=block_n, BLOCK_K=block_k))

    launch(row_squares_kernel, config, (*weight.pointers(), out_N), (rows, columns), weight.facts())


def upcast(weight: StoredWeight, dtype: torch.dtype, g_N: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """W, or g * W row by row: `dtype` [N, K], contiguous, in `out` if given."""
    stored = flat(weight)
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device) if out is None else out
    assert out.is_contiguous() and out.dtype == dtype and out.numel() == stored.rows * stored.columns
    _upcast(*stored, g_N, out)
    return out


def row_squares(weight: StoredWeight) -> Tensor:
    """||W_n||^2: fp32 [N]."""
    stored = flat(weight)
    out_N = torch.empty(stored.rows, dtype=torch.float32, device=weight.device)
    _row_squares(*stored, out_N)
    return out_N
