"""The kernels in plain PyTorch: what the fused ones are checked against, and what a CPU runs. See types.Kernels.

Large tensors pass in pieces: a piece's fp32 temporaries stay in a CPU's cache, and none has the size of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

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


def pieces(shape: tuple[int, ...], device: torch.device) -> Iterator[slice]:
    """Slices of the rows of a matrix on that device."""
    rows, columns = shape
    step = max(1, (PIECE if device.type == "cpu" else DEVICE_PIECE) // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def values(weight: StoredWeight, rows: slice) -> torch.Tensor:
    """Rows of the weight in fp32 (fp64 where it is stored so): [rows, K]; a view of the codes where they are that."""
    columns = weight.shape[1]
    if weight.bits is None:
        codes = weight.codes[rows]
        number = codes if codes.dtype == torch.float64 else codes.float()
    else:
        per_byte = 8 // weight.bits
        first, last = rows.start * columns, rows.stop * columns
        packed = weight.codes[first // per_byte : -(-last // per_byte)]
        shifts = torch.arange(0, 8, weight.bits, dtype=torch.uint8, device=packed.device)
        codes = ((packed[:, None] >> shifts) & (2**weight.bits - 1)).flatten()
        skip = first % per_byte
        codes = codes[skip : skip + last - first]
        number = codes.float() if weight.levels is None else weight.levels[codes.long()]
        number = number.view(-1, columns)
    if weight.scale is None:
        return number
    if weight.block == columns:
        number = number * weight.scale[rows, None]
        return number if weight.offset is None else number.add_(weight.offset[rows, None])
    first, last = rows.start * columns, rows.stop * columns
    block = torch.arange(first, last, device=number.device).div_(weight.block, rounding_mode="floor").view_as(number)
    number = number * weight.scale[block]
    return number if weight.offset is None else number.add_(weight.offset[block])


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What is computed in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def upcast(
    weight: StoredWeight, dtype: torch.dtype, g_N: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device) if out is None else out
    for rows in pieces(weight.shape, weight.device):
        piece = values(weight, rows)
        if g_N is None:
            out[rows].copy_(piece)
        else:
            torch.mul(piece, g_N[rows, None], out=out[rows])
    return out


def row_squares(weight: StoredWeight) -> torch.Tensor:
    w_sq_N = torch.empty(weight.shape[0], dtype=_wide(weight.codes.dtype), device=weight.device)
    # In place where the piece is a copy, and no name for it: on a CPU a second temporary of a piece's size, or one that stays
    # until the next, takes ten times as long as the squares.
    square = torch.square if weight.codes.dtype == w_sq_N.dtype else torch.square_
    for rows in pieces(weight.shape, weight.device):
        w_sq_N[rows] = square(values(weight, rows)).sum(1)
    return w_sq_N


def adapted_norm(
    weight: StoredWeight, w_sq_N: torch.Tensor, a_RK: torch.Tensor, b_NR: torch.Tensor, scaling: float
) -> torch.Tensor:
    at_KR = a_RK.t().contiguous()
    # One result for all pieces: small ones that stay between the pieces would keep a CPU's heap from reusing the space.
    wa_NR = torch.empty_like(b_NR)
    for rows in pieces(weight.shape, weight.device):
        torch.mm(values(weight, rows), at_KR, out=wa_NR[rows])
    # c^2 = ||W||^2 + 2 s rowsum(B * (W A^T)) + s^2 rowsum((B (A A^T)) * B)
    added = wa_NR.mul_(2 * scaling).addmm_(b_NR, a_RK @ at_KR, alpha=scaling**2)
    c_sq_N = w_sq_N + added.mul_(b_NR).sum(1)
    return torch.maximum(c_sq_N, w_sq_N * NORM_FLOOR).sqrt_()


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
