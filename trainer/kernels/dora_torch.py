"""The kernels in plain PyTorch, for CPUs and as the reference of the fused ones. See protocols.Kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.base.types import StoredWeight
from trainer.kernels.decode import decoded, has_plain_codes, pieces, values, whole_rows, wide_dtype
from trainer.kernels.scratch import PIECE_BUFFER, SECOND_BUFFER, scratch

__all__ = [
    "adapted_norms", "adapter_gradients", "compose", "has_plain_codes", "name", "quantize_rows", "rotate", "row_squares",
    "scaled_input_grad", "scaled_product", "upcast",
]  # fmt: skip

name = "torch"

# c^2 is a sum that can cancel: a result below an fp32 roundoff of ||W||^2 is rounding error. A norm of zero there would make
# dm = sum G * z / c infinite if z is not zero.
NORM_FLOOR = 2.0**-24

# Below this a norm or a magnitude counts as zero: g would be 0 / 0. With 0 / TINY = 0 the row stays zero.
TINY = 1e-30

# The largest float8 e4m3 number, and the smallest scale of a row: the smallest normal fp32 number. A scale below it would be
# too coarse for the row's largest element to stay within LARGEST, and zero, for a row of zeros, would make 0 / 0.
LARGEST, SCALE_FLOOR = 448.0, 2.0**-126


def upcast(weight: StoredWeight, dtype: torch.dtype, g_N: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """W, or g * W row by row: `dtype` [N, K], in `out` if given."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device) if out is None else out
    wide = wide_dtype(weight.codes.dtype)
    for rows in whole_rows(weight):
        converted = out[rows]
        piece = converted if dtype == wide else scratch(converted.shape, wide, weight.device, PIECE_BUFFER)
        values(weight, rows, piece)
        if g_N is not None:
            piece.mul_(g_N[rows, None])
        if piece is not converted:
            converted.copy_(piece)
    return out


def row_squares(weight: StoredWeight) -> Tensor:
    """||W_n||^2: [N], fp32, or fp64 for fp64 codes."""
    w_sq_N = torch.empty(weight.shape[0], dtype=wide_dtype(weight.codes.dtype), device=weight.device)
    for rows, piece in decoded(weight):
        squares = scratch(piece.shape, piece.dtype, piece.device, SECOND_BUFFER)
        w_sq_N[rows] = torch.square(piece, out=squares).sum(1)
    return w_sq_N


def adapted_norms(
    weights: Sequence[StoredWeight], w_sq_N: Sequence[Tensor], a_RK: Sequence[Tensor], b_NR: Sequence[Tensor],
    scalings: Sequence[float],
) -> list[Tensor]:  # fmt: skip
    """c of each layer. All operations but products run once for all layers of a rank, over their concatenated rows.

    Each product takes the layer's own tensors: its last bits may depend on where in memory its operands begin.
    """
    norms: dict[int, Tensor] = {}
    for rank in dict.fromkeys(len(a) for a in a_RK):
        places = [place for place, a in enumerate(a_RK) if len(a) == rank]
        added = [_added(weights[place], a_RK[place], b_NR[place], scalings[place]) for place in places]
        w_sq_all, b_all = (torch.cat([tensors[place] for place in places]) for tensors in (w_sq_N, b_NR))
        # c^2 = ||W||^2 + 2 s rowsum(B * (W A^T)) + s^2 rowsum((B (A A^T)) * B), at least NORM_FLOOR ||W||^2.
        c_sq_all = torch.cat(added).mul_(b_all).sum(1).add_(w_sq_all)
        c_all = torch.maximum(c_sq_all, w_sq_all.mul_(NORM_FLOOR)).sqrt_()
        norms |= zip(places, c_all.split([len(each) for each in added]), strict=True)
    return [norms[place] for place in range(len(weights))]


def _added(weight: StoredWeight, a_RK: Tensor, b_NR: Tensor, scaling: float) -> Tensor:
    """2 s W A^T + s^2 B (A A^T), fp32 [N, R]."""
    if weight.is_dense(a_RK.dtype):
        wa_NR = torch.mm(weight.codes, a_RK.t())
    else:
        at_KR = a_RK.t().contiguous()
        # One result for all pieces: small ones allocated between the pieces would keep a CPU's heap from reusing the space.
        wa_NR = torch.empty_like(b_NR)
        for rows, piece in decoded(weight):
            torch.mm(piece, at_KR, out=wa_NR[rows])
    return wa_NR.addmm_(b_NR, a_RK @ a_RK.t(), beta=2 * scaling, alpha=scaling**2)


def compose(z_MN: Tensor, t_MR: Tensor, sb_NR: Tensor, g_N: Tensor | None, bias_N: Tensor | None, out_MN: Tensor) -> None:
    """out = g * (z + t (s B)^T) + bias, in place."""
    if g_N is None and z_MN.dtype == torch.bfloat16 and z_MN.device.type == "cpu":
        # A CPU sums a product of bf16 tensors in fp32, z with it, and rounds once. An H200 rounded some before it added z
        # (torch 2.11). The bias is one more rank.
        if bias_N is not None:
            t_MR = torch.cat([t_MR, t_MR.new_ones(len(t_MR), 1)], 1)
            sb_NR = torch.cat([sb_NR, bias_N.to(sb_NR.dtype)[:, None]], 1)
        torch.addmm(z_MN, t_MR, sb_NR.t(), out=out_MN)
        return
    wide = wide_dtype(z_MN.dtype)
    bt_RN = sb_NR.to(wide).t()
    for rows in pieces(z_MN.shape, z_MN.device):
        z, t, out = (_rows(tensor, rows) for tensor in (z_MN, t_MR, out_MN))
        y = torch.addmm(z, t, bt_RN, out=out) if z_MN.dtype == wide else z.to(wide).addmm_(t.to(wide), bt_RN)
        if g_N is not None and bias_N is not None:
            torch.addcmul(bias_N, y, g_N, out=y)
        elif g_N is not None:
            y.mul_(g_N)
        elif bias_N is not None:
            y.add_(bias_N)
        if y is not out:
            out.copy_(y)


def adapter_gradients(
    dy_MN: Tensor, u_MN: Tensor, t_MR: Tensor, b_NR: Tensor, g_N: Tensor, over_N: Tensor, bias_N: Tensor | None,
    scaling: float, with_z: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dB: fp32 [N, R], dm: fp32 [N], s g * B in dy's dtype: [N, R])."""
    wide, du_N = wide_dtype(dy_MN.dtype), None
    for rows in pieces(dy_MN.shape, dy_MN.device):
        u, dy = _rows(u_MN, rows), _rows(dy_MN, rows)
        u = u.to(wide) if bias_N is None else u - bias_N
        piece_du_N = (u * dy).sum(0)
        du_N = piece_du_N if du_N is None else du_N.add_(piece_du_N)
    du_N = torch.zeros_like(g_N) if du_N is None else du_N
    # A product of 16-bit tensors is summed in fp32, but returned in 16 bits: a CPU has no other.
    d_NR = (dy_MN.t() @ t_MR).to(wide)
    if with_z:
        du_N.add_((b_NR * d_NR).sum(1), alpha=scaling)
    sg_N1 = (g_N if scaling == 1 else scaling * g_N)[:, None]
    sb_NR = (b_NR * sg_N1).to(dy_MN.dtype)
    return d_NR.mul_(sg_N1), du_N.div_(over_N), sb_NR


def _rows(tensor: Tensor, rows: slice) -> Tensor:
    """tensor[rows], without a view if that is all of it."""
    return tensor if rows.stop - rows.start == len(tensor) else tensor[rows]


def rotate(q_BSHD: Tensor, k_BSHD: Tensor, cos_SD: Tensor, sin_SD: Tensor, *, back: bool = False) -> tuple[Tensor, Tensor]:
    """Queries and keys rotated pair by pair; with back, the gradients of that rotation."""
    turn = _turned_back if back else _turned
    return turn(q_BSHD, cos_SD[:, None], sin_SD[:, None]), turn(k_BSHD, cos_SD[:, None], sin_SD[:, None])


def _turned(x_BSHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x_BSHD.float()
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return (x * cos).add_(turned * sin).to(x_BSHD.dtype)


def _turned_back(dy_BSHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation's gradient. Each product is rounded to its dtype."""
    dy = dy_BSHD.float()
    by_cos, by_sin = (dy * cos).to(dy_BSHD.dtype), (dy * sin).to(dy_BSHD.dtype)
    return by_cos.add_(torch.stack([by_sin[..., 1::2], -by_sin[..., ::2]], -1).flatten(-2))


def quantize_rows(x_MK: Tensor, by_K: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x * by, row by row in float8: (e4m3 codes [M, K], scale fp32 [M])."""
    codes_MK = torch.empty(x_MK.shape, dtype=torch.float8_e4m3fn, device=x_MK.device)
    scale_M = torch.empty(x_MK.shape[0], dtype=torch.float32, device=x_MK.device)
    for rows in pieces(x_MK.shape, x_MK.device):
        x = x_MK[rows].float()
        x = x if by_K is None else x * by_K
        # Divide by a tensor: CUDA divides by a number by multiplying by its inverse, which rounds in another way.
        scale = x.abs().amax(1).div_(torch.full((), LARGEST, device=x.device)).clamp_min_(SCALE_FLOOR)
        codes_MK[rows] = (x * scale.reciprocal()[:, None]).to(codes_MK.dtype)
        scale_M[rows] = scale
    return codes_MK, scale_M


def scaled_product(x_codes_MK: Tensor, x_scale_M: Tensor, weight: StoredWeight, dtype: torch.dtype) -> Tensor:
    """x W^T from codes, both sides scaled by row: `dtype` [M, N]."""
    assert weight.scale is not None
    # Products of two codes are exact in fp32.
    x_MK, z_MN = x_codes_MK.float(), x_codes_MK.new_empty(x_codes_MK.shape[0], weight.shape[0], dtype=dtype)
    for rows in pieces(weight.shape, weight.device):
        # The scale of W first: that of x may be as large or as small as fp32 allows.
        z_MN[:, rows] = (x_MK @ weight.codes[rows].float().t()).mul_(weight.scale[rows]).mul_(x_scale_M[:, None])
    return z_MN


def scaled_input_grad(d_codes_MN: Tensor, d_scale_M: Tensor, weight: StoredWeight, dtype: torch.dtype) -> Tensor:
    """d W from codes, d scaled by row, without the scales of W: `dtype` [M, K]."""
    dx_MK = d_codes_MN.new_zeros(d_codes_MN.shape[0], weight.shape[1], dtype=torch.float32)
    for rows in pieces(weight.shape, weight.device):
        dx_MK.addmm_(d_codes_MN[:, rows].float(), weight.codes[rows].float())
    return dx_MK.mul_(d_scale_M[:, None]).to(dtype)
