"""Decodes stored weights in plain PyTorch, in pieces.

The fp32 temporaries of a piece stay in a CPU's cache, and none has the size of the whole tensor.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from trainer.base.types import StoredWeight
from trainer.kernels.scratch import PIECE_BUFFER, SECOND_BUFFER, scratch

# Elements of a piece: on a CPU 2 MiB in fp32, which two cores share in their own caches; elsewhere 64 MiB, few launches.
PIECE, DEVICE_PIECE = 1 << 19, 1 << 24


def pieces(shape: tuple[int, ...], device: torch.device, multiple: int = 1) -> Iterator[slice]:
    """Slices of the rows of a matrix on that device. multiple: divides the rows of each slice but the last."""
    rows, columns = shape
    if torch.compiler.is_compiling():
        yield slice(0, rows)  # the compiler fuses all into one loop, and would write each piece out
        return
    step = max(1, (PIECE if device.type == "cpu" else DEVICE_PIECE) // max(1, columns))
    step = max(multiple, step // multiple * multiple)
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


# float8 by integer arithmetic: (shift, mask, power). A code's bits, sign-extended to 32 bits, shifted left and masked, are an
# fp32 number: the code's value divided by 2 ** power, since the two formats have different exponent biases. Exact for every
# finite code, subnormal ones included. torch's own cast of float8 on a CPU has a tenth of this rate.
FLOAT8_FIELDS = {torch.float8_e4m3fn: (20, 0x87F00000 - 2**32, 120), torch.float8_e5m2: (21, 0x8FE00000 - 2**32, 112)}


def has_plain_codes(weight: StoredWeight) -> bool:
    """Whether FLOAT8_FIELDS decodes the weight: float8 codes, all finite, with scales that stay finite when enlarged."""
    if weight.codes.dtype not in FLOAT8_FIELDS or weight.scale is None:
        return False
    if torch.tensor(2.0**-127, device=weight.device) * 2.0**120 == 0:
        return False  # torch.set_flush_denormal flushes fp32's subnormal numbers to zero, and so would float8's
    largest = torch.finfo(weight.codes.dtype).max
    last = torch.tensor(largest, dtype=weight.codes.dtype).view(torch.uint8).item()
    bits_NK, finite = weight.codes.view(torch.uint8), True
    for rows in pieces(weight.shape, weight.device):
        finite = finite and bool(bits_NK[rows].bitwise_and(0x7F).amax() <= last)
    enlarged = weight.scale * 2.0 ** FLOAT8_FIELDS[weight.codes.dtype][2]
    return finite and bool(torch.isfinite(enlarged).all())


def values(weight: StoredWeight, rows: slice, out: Tensor | None = None) -> Tensor:
    """Rows of the weight in fp32 (fp64 if it is stored so): [rows, K], in `out` if given, contiguous.

    Allocates nothing else of that size, unless the rows begin or end within a byte or a scale's block, or float8 codes are
    not known to be plain.
    """
    columns, bits, codes = weight.shape[1], weight.bits or 8, weight.codes
    if out is None:
        out = torch.empty(rows.stop - rows.start, columns, dtype=wide_dtype(codes.dtype), device=weight.device)
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


def _unpack(packed: Tensor, bits: int, levels: Tensor | None, out: Tensor) -> None:
    """Write whole bytes of codes as numbers, or as the levels they stand for, into fp32 `out`."""
    device = packed.device
    if levels is not None and bits == 4:
        # Two fp32 levels are moved as one fp64: one look-up for a byte.
        pairs = torch.stack([levels.repeat(16), levels.repeat_interleave(16)], dim=1).view(torch.float64).flatten()
        index = scratch(packed.shape, torch.int32, device, SECOND_BUFFER).copy_(packed)
        torch.index_select(pairs, 0, index, out=out.view(-1).view(torch.float64))
        return
    # A byte's codes, spread over as many bytes, the first in the lowest: b | b << 4, or b | b << 6 | b << 12 | b << 18.
    wide, shifts, mask = {4: (torch.int16, (4,), 0x0F0F), 2: (torch.int32, (12, 6), 0x03030303)}[bits]
    spread = scratch(packed.shape, wide, device, PIECE_BUFFER).copy_(packed)
    for shift in shifts:
        spread.bitwise_or_(torch.bitwise_left_shift(spread, shift, out=scratch(packed.shape, wide, device, SECOND_BUFFER)))
    codes = spread.bitwise_and_(mask).view(torch.int8)
    out.view(-1).copy_(codes if levels is None else levels[codes.int()])


def _element_by_element(weight: StoredWeight, first: int, last: int, out: Tensor) -> Tensor:
    """`values` for packed elements that begin or end within a byte or a block."""
    assert weight.bits is not None, "whole codes have a scale for each row"
    per_byte = 8 // weight.bits
    packed = weight.codes[first // per_byte : -(-last // per_byte)]
    shifts = torch.arange(0, 8, weight.bits, dtype=torch.uint8, device=packed.device)
    codes = ((packed[:, None] >> shifts) & (2**weight.bits - 1)).flatten()[first % per_byte :][: last - first]
    number = codes.float() if weight.levels is None else weight.levels[codes.long()]
    block = torch.arange(first, last, device=out.device).div_(weight.block, rounding_mode="floor")
    number = number * weight.scale[block]
    return out.copy_((number if weight.offset is None else number.add_(weight.offset[block])).view_as(out))


def whole_rows(weight: StoredWeight) -> Iterator[slice]:
    """Pieces of rows that begin with a byte and with a scale's block, unless that takes more than 4,096 rows."""
    columns = weight.shape[1]
    unit = math.lcm(weight.block or 1, 8 // (weight.bits or 8))
    multiple = unit // math.gcd(unit, columns)
    return pieces(weight.shape, weight.device, multiple if multiple <= 4096 else 1)


def decoded(weight: StoredWeight) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their values) of the whole weight, in pieces. A piece is valid until the next one: they share a buffer."""
    wide = wide_dtype(weight.codes.dtype)
    for rows in whole_rows(weight):
        if weight.is_dense(wide):
            yield rows, weight.codes[rows]
        else:
            # A buffer that stays: new memory for every piece would cost more than the arithmetic.
            shape = rows.stop - rows.start, weight.shape[1]
            yield rows, values(weight, rows, scratch(shape, wide, weight.device, PIECE_BUFFER))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def squares_and_product(weight: StoredWeight, a_RK: Tensor) -> tuple[Tensor, Tensor]:
    """(||W_n||^2 [N], W A^T [N, R]), summed in fp64: for a table at the end of a run."""
    rows, at_KR = weight.shape[0], a_RK.double().t().contiguous()
    w_sq_N = at_KR.new_empty(rows)
    wa_NR = at_KR.new_empty(rows, len(a_RK))
    for piece_rows, piece in decoded(weight):
        wide = scratch(piece.shape, torch.float64, piece.device, SECOND_BUFFER).copy_(piece)
        torch.mm(wide, at_KR, out=wa_NR[piece_rows])
        w_sq_N[piece_rows] = wide.square_().sum(1)
    return w_sq_N, wa_NR
