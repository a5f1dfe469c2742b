"""The LoRA and DoRA arithmetic, once.

W [N, K] frozen, A [R, K], B [N, R], s = alpha / R (rsLoRA: alpha / sqrt(R)). Axis: one magnitude per output row, as PEFT
and NVlabs have it (DoRA, arXiv 2402.09353).

    LoRA:  y = x W^T + s (x A^T) B^T + b
    DoRA:  V = W + s B A    c = ||V||_row, detached (section 4.3)    g = m / c
           y = g * (x W^T + s (x A^T) B^T) + b

    Gradients, c held constant, G = dL/dy:
           dZ = g * G       P = s dZ B          dx = dZ W + P A
           dA = P^T x       dB = s dZ^T (x A^T) dm = sum_t G * z / c,  z = x W^T + s (x A^T) B^T

    Norm without materialising V:  c^2 = ||W||^2 + 2 s rowsum(B * (W A^T)) + s^2 rowsum((B (A A^T)) * B)

m, c and g are fp32; A and B are fp32 and cast to the base's compute dtype at use; g * z + b is evaluated in fp32 and
rounded once. m starts as the very norm that the forward divides by, so g = 1 exactly and y equals the base bit for bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from trainer.types import BaseLayer

# Below this a row counts as zero: g would be 0 / 0. At 0 / TINY = 0 the row stays what it is, zero.
TINY = 1e-30


def weight_norm(
    w_sq_N: torch.Tensor, wa_NR: torch.Tensor, a_RK: torch.Tensor, b_NR: torch.Tensor, scaling: float
) -> torch.Tensor:
    """c = ||W + s B A||_row, fp32 [N], from ||W||^2 (fp32 [N]), W A^T (fp32 [N, R]), A and B flattened to matrices."""
    a, b = a_RK.float(), b_NR.float()
    cross = (b * wa_NR).sum(1)
    square = ((b @ (a @ a.t())) * b).sum(1)
    return (w_sq_N + 2 * scaling * cross + scaling**2 * square).clamp_min(0).sqrt()


def scale_rows(m_N: torch.Tensor, c_N: torch.Tensor) -> torch.Tensor:
    """g = m / c, fp32 [N]."""
    return m_N / c_N.clamp_min(TINY)


def adapted_linear(
    x: torch.Tensor,
    base: BaseLayer,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: float,
    m: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The adapted Linear. x [..., K] -> [..., N] in base.compute_dtype.

    m, c: magnitude and norm, fp32 [N]; None for LoRA. mask: dropout's keep-mask over x, already divided by the keep
    probability; applies to the low-rank path only (LoRA only: DoRA's g couples both paths).
    """
    return _AdaptedLinear.apply(x, a, b, m, c, mask, scaling, base)


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a, b, m, c, mask, scaling, base):
        compute = base.compute_dtype
        x_c = x.to(compute)
        # Under no_grad here: the product's own autograd node is not recorded, its backward is written out below.
        z = base.matmul(x_c)
        x_MK, z_MN = x_c.flatten(0, -2), z.flatten(0, -2)
        if mask is not None:
            x_MK = x_MK * mask.view(x_MK.shape)
        a_c, b_c = a.to(compute), b.to(compute)
        t_MR = x_MK @ a_c.t()
        z_MN.addmm_(t_MR, b_c.t(), alpha=scaling)
        bias = base.compute_bias
        if m is None:
            y = z if bias is None else z.add_(bias)
            ctx.save_for_backward(x_MK, t_MR, a_c, b_c, mask)
        else:
            g = scale_rows(m, c)
            y = (z * g if bias is None else torch.addcmul(bias.float(), z, g)).to(compute)
            ctx.save_for_backward(x_MK, t_MR, a_c, b_c, mask, m, c, z_MN)
        ctx.base, ctx.scaling, ctx.x_like = base, scaling, (x.shape, x.dtype)
        return y

    @staticmethod
    def backward(ctx, dy):
        base, scaling = ctx.base, ctx.scaling
        x_MK, t_MR, a_c, b_c, mask, *dora = ctx.saved_tensors
        dy_MN, dm = dy.flatten(0, -2), None
        if dora:
            m, c, z_MN = dora
            if ctx.needs_input_grad[3]:
                dm = (dy_MN.float() * z_MN).sum(0) / c.clamp_min(TINY)
            dz_MN = (dy_MN * scale_rows(m, c)).to(base.compute_dtype)
        else:
            dz_MN = dy_MN.to(base.compute_dtype)
        # P without s, which is applied once: inside a product, or to the fp32 gradient.
        p_MR = dz_MN @ b_c
        da = _scaled_outer(p_MR, x_MK, scaling)
        db = _scaled_outer(dz_MN, t_MR, scaling)
        dx = None
        if ctx.needs_input_grad[0]:
            dx_MK = base.input_grad(dz_MN)
            if mask is None:
                dx_MK.addmm_(p_MR, a_c, alpha=scaling)
            else:
                dx_MK.add_((p_MR @ a_c).mul_(scaling).mul_(mask.view(dx_MK.shape)))
            shape, dtype = ctx.x_like
            dx = dx_MK.view(shape).to(dtype)
        return dx, da, db, dm, None, None, None, None


def _scaled_outer(u_MN: torch.Tensor, v_MK: torch.Tensor, scaling: float) -> torch.Tensor:
    """s u^T v as fp32 [N, K]."""
    product = (u_MN.t() @ v_MK).float()
    return product if scaling == 1 else product.mul_(scaling)


def adapted_conv2d(
    x: torch.Tensor,
    base: BaseLayer,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: float,
    m: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The adapted Conv2d: A is a convolution of the base's geometry to R channels, B a 1x1 convolution.

    Shapes: a [R, K, kh, kw], b [N, R, 1, 1], m and c fp32 [N]. Written with differentiable operations.
    """
    compute = base.compute_dtype
    x = x.to(compute)
    z = base.matmul(x)
    t = F.conv2d(x if mask is None else x * mask, a.to(compute), None, base.stride, base.padding, base.dilation)
    z = z + scaling * F.conv2d(t, b.to(compute))
    if m is not None:
        assert c is not None
        z = z * scale_rows(m, c).view(-1, 1, 1)
    if base.compute_bias is not None:
        z = z + base.compute_bias
    return z.to(compute)
