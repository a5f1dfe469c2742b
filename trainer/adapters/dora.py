"""The LoRA and DoRA arithmetic, once.

W [N, K] frozen, A [R, K], B [N, R], s = alpha / R (rsLoRA: alpha / sqrt(R)). Axis: one magnitude per output row, as PEFT
and NVlabs have it (DoRA, arXiv 2402.09353).

    LoRA:  y = x W^T + s (x A^T) B^T + b
    DoRA:  V = W + s B A    c = ||V||_row, detached (section 4.3)    g = m / c
           y = g * z + b,   z = z0 + s t B^T,   z0 = x W^T,   t = x A^T

    Gradients, c held constant, G = dL/dy, P = (g * G) B = G (g * B):
           dx = (g * G) W + s P A        dA = s P^T x        dB = s g * (G^T t)
           dm = sum_t G * z / c = (sum_t G * z0 + s rowsum(B * (G^T t))) / c = sum_t G * (y - b) / m

    Norm without materialising V:  c^2 = ||W||^2 + 2 s rowsum(B * (W A^T)) + s^2 rowsum((B (A A^T)) * B)

For a convolution, "x W^T" and "x A^T" are convolutions of W's geometry, B is a 1x1 convolution, and rows are pixels.

m, c and g are fp32; A and B are fp32 and cast to the base's compute dtype at use; g * z + b is evaluated in fp32 and
rounded once. m starts as the very norm that the forward divides by, so g = 1 exactly and y equals the base bit for bit.
"""

from __future__ import annotations

import torch

from trainer.types import BaseLayer

# Below this a norm counts as zero: g would be 0 / 0. At 0 / TINY = 0 the row stays what it is, zero.
TINY = 1e-30


def scale_rows(m_N: torch.Tensor, c_N: torch.Tensor) -> torch.Tensor:
    """g = m / c, fp32 [N]."""
    return m_N / c_N.clamp_min(TINY)


def adapted(
    x: torch.Tensor,
    base: BaseLayer,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: float,
    m: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    keep_z: bool = True,
) -> torch.Tensor:
    """The adapted layer's output, in base.compute_dtype: x [..., K] -> [..., N], or [B, K, H, W] -> [B, N, h, w].

    a: [R, K] or [R, K, kh, kw]; b: [N, R] or [N, R, 1, 1]; m, c: magnitude and norm, fp32 [N]; None for LoRA.
    mask: dropout's keep-mask over x, already divided by the keep probability; applies to the low-rank path only (LoRA
    only: DoRA's g couples both paths).
    keep_z: save z0 for dm. False: recover g * z from the output, which the next layer saves anyway. Right only without a
    bias, whose rounding would drown a small z, and where no m starts at zero.
    """
    return _Adapted.apply(x, a, b, m, c, mask, scaling, base, keep_z)


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a, b, m, c, mask, scaling, base, keep_z):
        compute, kernels = base.compute_dtype, base.kernels
        x_c = x.to(compute)
        # Under no_grad here: the products' own autograd nodes are not recorded, their backward is written out below.
        z = base.matmul(x_c)
        x_a = x_c if mask is None else x_c * mask
        t_MR = base.rows(base.product(x_a, a.to(compute)))
        z_MN, g_N = base.rows(z), None if m is None else scale_rows(m, c)
        out_MN = torch.empty_like(z_MN) if keep_z and m is not None else z_MN
        kernels.compose(z_MN, t_MR, b.flatten(1).to(compute), scaling, g_N, base.bias_N, out_MN)
        y = base.from_rows(out_MN, z.shape)
        if y.stride() != z.stride():
            # A convolution's output keeps its memory format: what follows may round differently in another.
            y = torch.empty_like(z).copy_(y)
        if m is None:
            ctx.save_for_backward(x_a, t_MR, a, b, mask)
        else:
            ctx.save_for_backward(x_a, t_MR, a, b, mask, m, c, g_N, z_MN if keep_z else y)
        ctx.base, ctx.scaling, ctx.keep_z, ctx.x_shape, ctx.x_dtype = base, scaling, keep_z, x.shape, x.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        base, scaling = ctx.base, ctx.scaling
        x_a, t_MR, a, b, mask, *dora = ctx.saved_tensors
        compute = base.compute_dtype
        dy_MN, b_NR, g_N, dm = base.rows(dy), b.flatten(1), None, None
        if dora:
            m, c, g_N, u = dora
            db_NR, du_N = base.kernels.row_gradients(dy_MN, base.rows(u), t_MR)
            if ctx.keep_z:
                dm = du_N.add_((b_NR * db_NR).sum(1), alpha=scaling) / c.clamp_min(TINY)
            else:
                dm = du_N / torch.where(m == 0, TINY, m)
            b_NR, db_NR = b_NR * g_N[:, None], db_NR * g_N[:, None]
        else:
            db_NR = (dy_MN.t() @ t_MR).to(b.dtype)
        # P without s, which is applied once: inside a product, or to the fp32 gradient.
        p = base.from_rows(dy_MN @ b_NR.to(compute), dy.shape)
        da = base.product_weight_grad(p, x_a, a.shape).to(a.dtype)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = base.input_grad(dy, ctx.x_shape, g_N)
            if mask is None:
                base.product_input_grad(p, a.to(compute), ctx.x_shape, add_to=dx, scale=scaling)
            else:
                dx.addcmul_(base.product_input_grad(p, a.to(compute), ctx.x_shape), mask, value=scaling)
            dx = dx.to(ctx.x_dtype)
        if scaling != 1:
            da, db_NR = da.mul_(scaling), db_NR.mul_(scaling)
        return dx, da, db_NR.view_as(b), dm, None, None, None, None, None
