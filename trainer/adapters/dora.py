"""The LoRA and DoRA arithmetic, once.

W [N, K] frozen, A [R, K], B [N, R], s = alpha / R (rsLoRA: alpha / sqrt(R)). Axis: one magnitude per output row, as PEFT
and NVlabs have it (DoRA, arXiv 2402.09353).

    LoRA:  y = x W^T + s (x A^T) B^T + b
    DoRA:  V = W + s B A    c = ||V||_row, detached (section 4.3)    g = m / c
           y = g * z + b,   z = z0 + s t B^T,   z0 = x W^T,   t = x A^T

    Gradients, c held constant, G = dL/dy, P = s (g * G) B = G (s g * B):
           dx = (g * G) W + P A        dA = P^T x        dB = s g * (G^T t)
           dm = sum_t G * z / c = (sum_t G * z0 + s rowsum(B * (G^T t))) / c = sum_t G * (y - b) / m

    Norm without materialising V:  c^2 = ||W||^2 + 2 s rowsum(B * (W A^T)) + s^2 rowsum((B (A A^T)) * B)

For a convolution, "x W^T" and "x A^T" are convolutions of W's geometry, B is a 1x1 convolution, and rows are pixels.

m, c and g are fp32; A and B are fp32 and cast to the base's compute dtype at use; g * z + b is evaluated in fp32 and
rounded once. m starts as the very norm that the forward divides by, so g = 1 exactly and y equals the base bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from trainer.protocols import BaseLayer

# Below this a norm counts as zero: g would be 0 / 0. At 0 / TINY = 0 the row stays what it is, zero.
TINY = 1e-30


def scale_rows(m_N: torch.Tensor, c_N: torch.Tensor) -> torch.Tensor:
    """g = m / c, fp32 [N]."""
    return m_N / c_N.clamp_min(TINY)


@dataclass(frozen=True)
class Part:
    """One adapted layer. a: [R, K] or [R, K, kh, kw]; b: [N, R] or [N, R, 1, 1]; m, c: magnitude and norm, fp32 [N], None for
    LoRA.

    keep_z: save z0 for dm. False: recover g * z from the output, which the next layer saves anyway. Right only without a
    bias, whose rounding would drown a small z, and where no m starts at zero.
    """

    base: BaseLayer
    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    m: torch.Tensor | None = None
    c: torch.Tensor | None = None
    keep_z: bool = True


def adapted(x: torch.Tensor, parts: Sequence[Part], mask: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """The outputs of adapted layers that share the input x, in their base's compute dtype, which is one.

    x: [..., K] -> [..., N] each, or [B, K, H, W] -> [B, N, h, w]. Layers that share x read it once: their A are multiplied as
    one, forward and backward, and their gradients of x are summed where they are made.
    mask: dropout's keep-mask over x, already divided by the keep probability; applies to the low-rank path only (LoRA
    only: DoRA's g couples both paths).
    """
    layers = [(part.base, part.scaling, part.keep_z) for part in parts]
    return _Adapted.apply(layers, x, mask, *(t for part in parts for t in (part.a, part.b, part.m, part.c)))


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layers, x, mask, *tensors):
        first = layers[0][0]
        compute, kernels = first.compute_dtype, first.kernels
        x_c = x.to(compute)
        x_a = x_c if mask is None else x_c * mask
        factors = tensors[::4]
        # Under no_grad here: the products' own autograd nodes are not recorded, their backward is written out below.
        t_all = first.rows(first.product(x_a, _together(factors, compute)))
        splits = t_all.split([len(a) for a in factors], dim=1)
        outputs, saved = [], [x_a, mask, t_all]
        for (base, scaling, keep_z), t_MR, a, b, m, c in zip(
            layers, splits, factors, tensors[1::4], tensors[2::4], tensors[3::4], strict=True
        ):
            z = base.matmul(x_c)
            g_N = None if m is None else scale_rows(m, c)
            y = torch.empty_like(z) if m is not None and keep_z else z
            z_MN, y_MN = base.rows(z), base.rows(y)
            kernels.compose(z_MN, t_MR, b.flatten(1).to(compute), scaling, g_N, base.bias_N, y_MN)
            base.put_rows(y_MN, y)
            outputs.append(y)
            saved += [a, b, m, c, g_N, None if m is None else z_MN if keep_z else y]
        ctx.save_for_backward(*saved)
        ctx.layers, ctx.x_shape, ctx.x_dtype = layers, x.shape, x.dtype
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys):
        first = ctx.layers[0][0]
        compute = first.compute_dtype
        x_a, mask, t_all, *of_parts = ctx.saved_tensors
        of_parts = [of_parts[i : i + 6] for i in range(0, len(of_parts), 6)]
        factors, grads, dx, all_p = [of_part[0] for of_part in of_parts], [], None, []
        splits = t_all.split([len(a) for a in factors], dim=1)
        for (base, scaling, keep_z), dy, t_MR, (_, b, m, c, g_N, u) in zip(ctx.layers, dys, splits, of_parts, strict=True):
            dy_MN, b_NR, dm = base.rows(dy), b.flatten(1), None
            if m is None:
                db_NR, sg = (dy_MN.t() @ t_MR).to(b.dtype), scaling
            else:
                db_NR, du_N = base.kernels.row_gradients(dy_MN, base.rows(u), t_MR)
                if keep_z:
                    dm = du_N.add_((b_NR * db_NR).sum(1), alpha=scaling) / c.clamp_min(TINY)
                else:
                    dm = du_N / torch.where(m == 0, TINY, m)
                sg = scaling * g_N[:, None]
            all_p.append(dy_MN @ (b_NR * sg).to(compute))
            grads += [None, (db_NR * sg).view_as(b), dm, None]
            if ctx.needs_input_grad[1]:
                dx = base.input_grad(dy, ctx.x_shape, g_N, add_to=dx)
        p = first.from_rows(all_p[0] if len(all_p) == 1 else torch.cat(all_p, 1), dys[0].shape)
        a_all = _together(factors, compute)
        da_all = first.product_weight_grad(p, x_a, a_all.shape).to(factors[0].dtype)
        grads[::4] = da_all.split([len(a) for a in factors])
        if dx is not None:
            if mask is None:
                first.product_input_grad(p, a_all, ctx.x_shape, add_to=dx)
            else:
                dx.addcmul_(first.product_input_grad(p, a_all, ctx.x_shape), mask)
            dx = dx.to(ctx.x_dtype)
        return None, dx, None, *grads


def _together(factors: Sequence[torch.Tensor], compute: torch.dtype) -> torch.Tensor:
    """The A of all parts as one, in the compute dtype: [sum of R, K, ...]."""
    cast = [a.to(compute) for a in factors]
    return cast[0] if len(cast) == 1 else torch.cat(cast)
