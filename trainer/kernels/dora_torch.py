"""The kernels in plain PyTorch: what the fused ones are checked against, and what a CPU runs. See types.Kernels.

Large tensors pass in pieces: a piece's fp32 temporaries stay in a CPU's cache, and none has the size of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from trainer.kernels.scratch import scratch
from trainer.types import StoredWeight

name = "torch"

# c^2 is a sum that can cancel: what is left below an fp32 roundoff of ||W||^2 is its rounding. A norm of zero there would
# make dm = sum G * z / c infinite, where z is not zero.
NORM_FLOOR = 2.0**-24

# Of float8 e4m3. A row's scale is at least the smallest normal fp32 number: one below it would be too coarse for the row's
# largest element to stay within LARGEST, and zero, of a row of zeros, would make 0 / 0.
LARGEST, SCALE_FLOOR = 448.0, 2.0**-126

# Elements of a piece: on a CPU 2 MiB in fp32, which two cores share in their own caches; elsewhere 64 MiB, few launches.
PIECE, DEVICE_PIECE = 1 << 19, 1 << 24


# Which scratch buffer holds what: 0 is the converted weight of a product (quantization/layers.py).
PIECE_BUFFER, SECOND_BUFFER = 1, 2


def pieces(shape: tuple[int, ...], device: torch.device, multiple: int = 1) -> Iterator[slice]:
    """Slices of the rows of a matrix on that device. multiple: of rows, in each slice but the last."""
    rows, columns = shape
    step = max(1, (PIECE if device.type == "cpu" else DEVICE_PIECE) // max(1, columns))
    step = max(multiple, step // multiple * multiple)
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


# float8 by integer arithmetic. Sign-extended to 32 bits, shifted left by the first number and masked by the second, a code's
# bits are an fp32 number: the code's value divided by 2 ** third, since the two formats count exponents from different zeros.
# Exact for every finite code, subnormal ones included. torch's own cast of float8 on a CPU has a tenth of this rate.
FLOAT8_FIELDS = {
    torch.float8_e4m3fn: (20, 0x87F00000 - 2**32, 120),
    torch.float8_e5m2: (21, 0x8FE00000 - 2**32, 112),
}


def has_plain_codes(weight: StoredWeight) -> bool:
    """Whether FLOAT8_FIELDS decodes the weight: float8 codes, all finite, with scales that stay finite when enlarged."""
    if weight.codes.dtype not in FLOAT8_FIELDS or weight.scale is None or _flushes_denormals(weight.device):
        return False
    largest = torch.finfo(weight.codes.dtype).max
    last = torch.tensor(largest, dtype=weight.codes.dtype).view(torch.uint8).item()
    bits_NK, finite = weight.codes.view(torch.uint8), True
    for rows in pieces(weight.shape, weight.device):
        finite = finite and bool(bits_NK[rows].bitwise_and(0x7F).amax() <= last)
    enlarged = weight.scale * 2.0 ** FLOAT8_FIELDS[weight.codes.dtype][2]
    return finite and bool(torch.isfinite(enlarged).all())


def _flushes_denormals(device: torch.device) -> bool:
    """Whether fp32's subnormal numbers count as zero (torch.set_flush_denormal): so would float8's."""
    return bool(torch.tensor(2.0**-127, device=device) * 2.0**120 == 0)


def values(weight: StoredWeight, rows: slice, out: torch.Tensor | None = None) -> torch.Tensor:
    """Rows of the weight in fp32 (fp64 where it is stored so): [rows, K], in `out` where one is given, contiguous.

    Nothing else of that size is made, but where the rows begin or end within a byte or within a scale's block, and for
    float8 whose codes are not known to be plain.
    """
    columns, bits, codes = weight.shape[1], weight.bits or 8, weight.codes
    if out is None:
        out = torch.empty(rows.stop - rows.start, columns, dtype=_wide(codes.dtype), device=weight.device)
    first, last = rows.start * columns, rows.stop * columns
    block, power = weight.block or columns, 0
    if any(end % block or end * bits % 8 for end in (first, last)):
        return _element_by_element(weight, first, last, out)
    if weight.bits is not None:
        _unpack(codes[first * bits // 8 : last * bits // 8], bits, weight.levels, out)
    elif weight.plain:
        shift, mask, power = FLOAT8_FIELDS[codes.dtype]
        fields = out.view(torch.int32)
        fields.copy_(codes[rows].view(torch.int8))
        fields.bitwise_left_shift_(shift).bitwise_and_(mask)
    else:
        out.copy_(codes[rows])
    blocks = slice(first // block, last // block)
    if weight.scale is not None:
        scale = weight.scale[blocks, None]
        out.view(-1, block).mul_(scale * 2.0**power if power else scale)
    if weight.offset is not None:
        out.view(-1, block).add_(weight.offset[blocks, None])
    return out


def _unpack(packed: torch.Tensor, bits: int, levels: torch.Tensor | None, out: torch.Tensor) -> None:
    """Whole bytes of codes as numbers, or as the levels they stand for, into fp32 `out`."""
    device = packed.device
    if levels is not None and bits == 4:
        # Two levels are one fp64 as far as moving them goes: one look-up for a byte.
        pairs = torch.stack([levels.repeat(16), levels.repeat_interleave(16)], dim=1).view(torch.float64).flatten()
        index = scratch(packed.shape, torch.int32, device, SECOND_BUFFER).copy_(packed)
        torch.index_select(pairs, 0, index, out=out.view(-1).view(torch.float64))
        return
    # A byte's codes, spread over as many bytes, the first in the lowest: b | b << 4, or b | b << 6 | b << 12 | b << 18.
    wide, shifts, mask = {4: (torch.int16, (4,), 0x0F0F), 2: (torch.int32, (12, 6), 0x03030303)}[bits]
    spread = scratch(packed.shape, wide, device, PIECE_BUFFER).copy_(packed)
    for shift in shifts:
        spread.bitwise_or_(
            torch.bitwise_left_shift(spread, shift, out=scratch(packed.shape, wide, device, SECOND_BUFFER))
        )
    codes = spread.bitwise_and_(mask).view(torch.int8)
    out.view(-1).copy_(codes if levels is None else levels[codes.int()])


def _element_by_element(weight: StoredWeight, first: int, last: int, out: torch.Tensor) -> torch.Tensor:
    """`values` of packed elements that begin or end within a byte or a block."""
    assert weight.bits is not None, "whole codes have a scale for each row"
    per_byte = 8 // weight.bits
    packed = weight.codes[first // per_byte : -(-last // per_byte)]
    shifts = torch.arange(0, 8, weight.bits, dtype=torch.uint8, device=packed.device)
    codes = ((packed[:, None] >> shifts) & (2**weight.bits - 1)).flatten()[first % per_byte :][: last - first]
    number = codes.float() if weight.levels is None else weight.levels[codes.long()]
    block = torch.arange(first, last, device=out.device).div_(weight.block, rounding_mode="floor")
    number = number * weight.scale[block]
    return out.copy_((number if weight.offset is None else number.add_(weight.offset[block])).view_as(out))


def _whole_rows(weight: StoredWeight) -> Iterator[slice]:
    """Pieces of rows that begin with a byte and with a scale's block, where not more than 4,096 rows are needed for that."""
    columns = weight.shape[1]
    unit = math.lcm(weight.block or 1, 8 // (weight.bits or 8))
    multiple = unit // math.gcd(unit, columns)
    return pieces(weight.shape, weight.device, multiple if multiple <= 4096 else 1)


def decoded(weight: StoredWeight) -> Iterator[tuple[slice, torch.Tensor]]:
    """(rows, their values) of the whole weight, in pieces. A piece is good until the next one: they share a buffer."""
    wide = _wide(weight.codes.dtype)
    for rows in _whole_rows(weight):
        if weight.is_dense(wide):
            yield rows, weight.codes[rows]
        else:
            # A buffer that stays: new memory for every piece would cost more than the arithmetic.
            shape = rows.stop - rows.start, weight.shape[1]
            yield rows, values(weight, rows, scratch(shape, wide, weight.device, PIECE_BUFFER))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What is computed in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def upcast(
    weight: StoredWeight, dtype: torch.dtype, g_N: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device) if out is None else out
    wide = _wide(weight.codes.dtype)
    for rows in _whole_rows(weight):
        converted = out[rows]
        piece = converted if dtype == wide else scratch(converted.shape, wide, weight.device, PIECE_BUFFER)
        values(weight, rows, piece)
        if g_N is not None:
            piece.mul_(g_N[rows, None])
        if piece is not converted:
            converted.copy_(piece)
    return out


def row_squares(weight: StoredWeight) -> torch.Tensor:
    w_sq_N = torch.empty(weight.shape[0], dtype=_wide(weight.codes.dtype), device=weight.device)
    for rows, piece in decoded(weight):
        squares = scratch(piece.shape, piece.dtype, piece.device, SECOND_BUFFER)
        w_sq_N[rows] = torch.square(piece, out=squares).sum(1)
    return w_sq_N


def adapted_norm(
    weight: StoredWeight, w_sq_N: torch.Tensor, a_RK: torch.Tensor, b_NR: torch.Tensor, scaling: float
) -> torch.Tensor:
    at_KR = a_RK.t().contiguous()
    # One result for all pieces: small ones that stay between the pieces would keep a CPU's heap from reusing the space.
    wa_NR = torch.empty_like(b_NR)
    for rows, piece in decoded(weight):
        torch.mm(piece, at_KR, out=wa_NR[rows])
    # c^2 = ||W||^2 + 2 s rowsum(B * (W A^T)) + s^2 rowsum((B (A A^T)) * B)
    added = wa_NR.mul_(2 * scaling).addmm_(b_NR, a_RK @ at_KR, alpha=scaling**2)
    c_sq_N = w_sq_N + added.mul_(b_NR).sum(1)
    return torch.maximum(c_sq_N, w_sq_N * NORM_FLOOR).sqrt_()


def squares_and_product(weight: StoredWeight, a_RK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(||W_n||^2 [N], W A^T [N, R]), summed in fp64. Not one of the kernels: for a table at the end of a run."""
    rows, at_KR = weight.shape[0], a_RK.double().t().contiguous()
    w_sq_N = at_KR.new_empty(rows)
    wa_NR = at_KR.new_empty(rows, len(a_RK))
    for piece_rows, piece in decoded(weight):
        wide = scratch(piece.shape, torch.float64, piece.device, SECOND_BUFFER).copy_(piece)
        torch.mm(wide, at_KR, out=wa_NR[piece_rows])
        w_sq_N[piece_rows] = wide.square_().sum(1)
    return w_sq_N, wa_NR


def compose(
    z_MN: torch.Tensor, t_MR: torch.Tensor, b_NR: torch.Tensor, scaling: float, g_N: torch.Tensor | None,
    bias_N: torch.Tensor | None, out_MN: torch.Tensor,
) -> None:  # fmt: skip
    wide = _wide(z_MN.dtype)
    bt_RN = b_NR.to(wide).t()
    for rows in pieces(z_MN.shape, z_MN.device):
        t, out = t_MR[rows].to(wide), out_MN[rows]
        if z_MN.dtype == wide:
            y = torch.addmm(z_MN[rows], t, bt_RN, alpha=scaling, out=out)
        else:
            y = z_MN[rows].to(wide).addmm_(t, bt_RN, alpha=scaling)
        if g_N is not None:
            y.mul_(g_N)
        if bias_N is not None:
            y.add_(bias_N)
        if y is not out:
            out.copy_(y)


def row_gradients(dy_MN: torch.Tensor, u_MN: torch.Tensor, t_MR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = _wide(dy_MN.dtype)
    du_N = torch.zeros(dy_MN.shape[1], dtype=wide, device=dy_MN.device)
    for rows in pieces(dy_MN.shape, dy_MN.device):
        du_N += (u_MN[rows].to(wide) * dy_MN[rows]).sum(0)
    # A product of 16-bit tensors is summed in fp32, but this one leaves in 16 bits: there is no other on a CPU.
    return (dy_MN.t() @ t_MR).to(wide), du_N


def quantize_rows(x_MK: torch.Tensor, by_K: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    codes_MK = torch.empty(x_MK.shape, dtype=torch.float8_e4m3fn, device=x_MK.device)
    scale_M = torch.empty(x_MK.shape[0], dtype=torch.float32, device=x_MK.device)
    for rows in pieces(x_MK.shape, x_MK.device):
        x = x_MK[rows].float()
        x = x if by_K is None else x * by_K
        # By a tensor: CUDA divides by a number as it multiplies by its inverse, which rounds in another way.
        scale = x.abs().amax(1).div_(x.new_tensor(LARGEST)).clamp_min_(SCALE_FLOOR)
        codes_MK[rows] = (x * scale.reciprocal()[:, None]).to(codes_MK.dtype)
        scale_M[rows] = scale
    return codes_MK, scale_M


def scaled_product(
    x_codes_MK: torch.Tensor, x_scale_M: torch.Tensor, weight: StoredWeight, dtype: torch.dtype
) -> torch.Tensor:
    assert weight.scale is not None
    # Products of two codes are exact in fp32.
    x_MK, z_MN = x_codes_MK.float(), x_codes_MK.new_empty(x_codes_MK.shape[0], weight.shape[0], dtype=dtype)
    for rows in pieces(weight.shape, weight.device):
        # The scale of W first: that of x may be as large or as small as fp32 goes.
        z_MN[:, rows] = (x_MK @ weight.codes[rows].float().t()).mul_(weight.scale[rows]).mul_(x_scale_M[:, None])
    return z_MN


def scaled_input_grad(
    d_codes_MN: torch.Tensor, d_scale_M: torch.Tensor, weight: StoredWeight, dtype: torch.dtype
) -> torch.Tensor:
    dx_MK = d_codes_MN.new_zeros(d_codes_MN.shape[0], weight.shape[1], dtype=torch.float32)
    for rows in pieces(weight.shape, weight.device):
        dx_MK.addmm_(d_codes_MN[:, rows].float(), weight.codes[rows].float())
    return dx_MK.mul_(d_scale_M[:, None]).to(dtype)
