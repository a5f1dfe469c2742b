"""The LoRA and DoRA arithmetic, once.

W [N, K] frozen, A [R, K], B [N, R], s = alpha / R (rsLoRA: alpha / sqrt(R)). Axis: one magnitude per output row, as PEFT
and NVlabs have it (DoRA, arXiv 2402.09353).

    LoRA:  y = x W^T + s (x A^T) B^T + b
    DoRA:  V = W + s B A    c = ||V||_row, detached (section 4.3)    g = m / c
           y = g * z + b,   z = z0 + s t B^T,   z0 = x W^T,   t = x A^T

    Gradients, c held constant, G = dL/dy, P = s (g * G) B = G (s g * B):
           dx = (g * G) W + P A        dA = P^T x        dB = s g * (G^T t)
           dm = sum_t G * z / c = sum_t G * (y - b) / m = (sum_t G * z0 + s rowsum(B * (G^T t))) / c

    Norm without materialising V:  c^2 = ||W||^2 + 2 s rowsum(B * (W A^T)) + s^2 rowsum((B (A A^T)) * B)

For a convolution, "x W^T" and "x A^T" are convolutions of W's geometry, B is a 1x1 convolution, and rows are pixels.

m, c and g are fp32; A and B are fp32 and cast to the base's compute dtype at use; g * z + b is evaluated in fp32 and
rounded once. m starts as the very norm that the forward divides by, so g = 1 exactly and y equals the base bit for bit.

dm is read from y, which the next layer saves in most places anyway; only the rows of `is_drowned` save their z0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from trainer.kernels.dora_torch import TINY
from trainer.protocols import BaseLayer

# How large a bias may be beside ||W||. y errs by its rounding, up to u (|g z| + |b|), u = 2^-8 in bf16. Behind a
# normalisation the inputs' rms is about 1, so |g z| is about c, which training moves little from ||W||. One rounding has an
# rms of 0.4 u, and G, z0 and y have one each: where signs are random, dm errs by 0.4 u sqrt(3 + 4^2) = 1.7 u of itself,
# without a bias by 0.7 u. With inputs a quarter as large it is 6.5 u, or 2.5 %, the rms of a weight's rounding to float8.
LARGE_BIAS = 4.0


def is_drowned(w_sq_N: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    """The rows whose z cannot be read from their output, bool [N]: |b| >= LARGE_BIAS * ||W||, or W is zero, and so is m.

    w_sq: ||W||^2, fp32 [N]. Frozen weights alone decide, so that a resumed run decides alike.
    """
    size_N = torch.zeros_like(w_sq_N) if bias_N is None else bias_N.abs()
    return size_N >= LARGE_BIAS * w_sq_N.sqrt()


def scale_rows(m_N: torch.Tensor, c_N: torch.Tensor) -> torch.Tensor:
    """g = m / c, fp32 [N]."""
    return m_N / c_N.clamp_min(TINY)


@dataclass(frozen=True)
class Part:
    """One adapted layer. a: [R, K] or [R, K, kh, kw]; b: [N, R] or [N, R, 1, 1]; m, c: magnitude and norm, fp32 [N], None for
    LoRA.

    z_rows: int64, the rows that save z0 for dm (`is_drowned`); None: no row. The others recover g * z from the output.
    """

    base: BaseLayer
    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    m: torch.Tensor | None = None
    c: torch.Tensor | None = None
    z_rows: torch.Tensor | None = None


def adapted(x: torch.Tensor, parts: Sequence[Part], mask: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """The outputs of adapted layers that share the input x, in their base's compute dtype, which is one.

    x: [..., K] -> [..., N] each, or [B, K, H, W] -> [B, N, h, w]. Layers that share x read it once: their A are multiplied as
    one, forward and backward, and their gradients of x are summed where they are made.
    mask: dropout's keep-mask over x, already divided by the keep probability; applies to the low-rank path only (LoRA
    only: DoRA's g couples both paths).
    """
    layers = [(part.base, part.scaling) for part in parts]
    return _Adapted.apply(layers, x, mask, *(t for part in parts for t in (part.a, part.b, part.m, part.c, part.z_rows)))


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layers, x, mask, *tensors):
        first = layers[0][0]
        compute, kernels = first.compute_dtype, first.kernels
        x_c = x.to(compute)
        x_a = x_c if mask is None else x_c * mask
        factors = tensors[::5]
        # Under no_grad here: the products' own autograd nodes are not recorded, their backward is written out below.
        t_all = first.rows(first.product(x_a, _together(factors, compute)))
        splits = t_all.split([len(a) for a in factors], dim=1)
        outputs, saved = [], [x_a, mask, t_all]
        for (base, scaling), t_MR, a, b, m, c, z_rows in zip(
            layers, splits, factors, tensors[1::5], tensors[2::5], tensors[3::5], tensors[4::5], strict=True
        ):
            y = base.matmul(x_c)
            y_MN, bias_N, g_N = base.rows(y), base.bias_N, None if m is None else scale_rows(m, c)
            z_part = None if z_rows is None else y_MN.index_select(1, z_rows)
            kernels.compose(y_MN, t_MR, b.flatten(1).to(compute), scaling, g_N, bias_N, y_MN)
            base.put_rows(y_MN, y)
            outputs.append(y)
            saved += [a, b, m, c, z_rows, z_part, *((None, None, None) if m is None else (g_N, bias_N, y))]
        ctx.save_for_backward(*saved)
        ctx.layers, ctx.x_shape, ctx.x_dtype = layers, x.shape, x.dtype
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys):
        first = ctx.layers[0][0]
        compute = first.compute_dtype
        x_a, mask, t_all, *of_parts = ctx.saved_tensors
        of_parts = [of_parts[i : i + 9] for i in range(0, len(of_parts), 9)]
        factors, grads, dx, all_p = [of_part[0] for of_part in of_parts], [], None, []
        splits = t_all.split([len(a) for a in factors], dim=1)
        for (base, scaling), dy, t_MR, of_part in zip(ctx.layers, dys, splits, of_parts, strict=True):
            _, b, m, c, z_rows, z_part, g_N, bias_N, y = of_part
            dy_MN, b_NR = base.rows(dy), b.flatten(1)
            if m is None:
                db_NR, dm = (dy_MN.t() @ t_MR).to(b.dtype) * scaling, None
                sb_NR = (b_NR * scaling).to(compute)
            else:
                gradients = base.kernels.adapter_gradients
                db_NR, dm, sb_NR = gradients(dy_MN, base.rows(y), t_MR, b_NR, g_N, m, bias_N, scaling, False)
                if z_rows is not None:
                    of_rows = dy_MN.index_select(1, z_rows), z_part, t_MR, b_NR[z_rows], g_N[z_rows], c[z_rows]
                    dm[z_rows] = gradients(*of_rows, None, scaling, True)[1]
            all_p.append(dy_MN @ sb_NR)
            grads += [None, db_NR.view_as(b), dm, None, None]
            if ctx.needs_input_grad[1]:
                dx = base.input_grad(dy, ctx.x_shape, g_N, add_to=dx)
        p = first.from_rows(all_p[0] if len(all_p) == 1 else torch.cat(all_p, 1), dys[0].shape)
        a_all = _together(factors, compute)
        da_all = first.product_weight_grad(p, x_a, a_all.shape).to(factors[0].dtype)
        grads[::5] = da_all.split([len(a) for a in factors])
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
