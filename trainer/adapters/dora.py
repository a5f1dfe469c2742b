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

dm is computed from y, which the next layer saves in most places anyway; only the rows of `is_drowned` save their z0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from trainer.base import memory
from trainer.base.protocols import BaseLayer
from trainer.kernels.dora_torch import TINY

# Largest |b| / ||W||. y errs by its rounding, up to u (|g z| + |b|), u = 2^-8 in bf16. Behind a normalisation the inputs' rms
# is about 1, so |g z| is about c, which training moves little from ||W||. One rounding has an rms of 0.4 u, and G, z0 and y
# have one each: with random signs dm errs by 0.4 u sqrt(3 + 4^2) = 1.7 u of itself, without a bias by 0.7 u. With inputs a
# quarter as large it is 6.5 u, or 2.5 %, the rms of a weight's rounding to float8.
LARGE_BIAS = 4.0
# Smallest |m| / (u |b|): at |m| = 4 u |b| the rounding of y, 0.4 u |b| beside |g z| = |m|, is a tenth of dm, and dm is 0
# where y rounds to the bias.
SMALL_MAGNITUDE = 4.0


def is_drowned(w_sq_N: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    """The rows whose z cannot be recovered from their output, bool [N]: |b| >= LARGE_BIAS * ||W||, or W and m are zero.

    w_sq: ||W||^2, fp32 [N]. Frozen weights alone decide, so that a resumed run decides alike.
    """
    size_N = torch.zeros_like(w_sq_N) if bias_N is None else bias_N.abs()
    return size_N >= LARGE_BIAS * w_sq_N.sqrt()


def is_lost(m_N: torch.Tensor, bias_N: torch.Tensor | None, z_rows: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The rows whose dm is wrong by a tenth or more, bool [N]: |m| <= SMALL_MAGNITUDE u |b|, u the roundoff of the compute
    dtype, and the row saves no z0. It depends on trained values, so no step uses it."""
    size_N = torch.zeros_like(m_N) if bias_N is None else bias_N.abs()
    is_small_N = m_N.abs() <= SMALL_MAGNITUDE * torch.finfo(dtype).eps / 2 * size_N
    return is_small_N if z_rows is None else is_small_N.index_fill(0, z_rows, False)


def scale_rows(m_N: torch.Tensor, c_N: torch.Tensor) -> torch.Tensor:
    """g = m / c, fp32 [N]."""
    return m_N / c_N.clamp_min(TINY)


def divisor(m_N: torch.Tensor) -> torch.Tensor:
    """m as the divisor of dm, fp32 [N]: no element is below TINY in size."""
    return torch.where(m_N.abs() < TINY, TINY, m_N)


class Ready(NamedTuple):
    """Tensors of a layer that only an update changes.

    a: A in the compute dtype. sb: s B in it, [N, R]. g: m / c; over: `divisor` of m; fp32 [N], None for LoRA.
    """

    a: torch.Tensor
    sb_NR: torch.Tensor
    g_N: torch.Tensor | None = None
    over_N: torch.Tensor | None = None


@dataclass
class Part:
    """One adapted layer. a: [R, K] or [R, K, kh, kw]; b: [N, R] or [N, R, 1, 1]; m, c: magnitude and norm, fp32 [N], None for
    LoRA.

    z_rows: int64, the rows that save z0 for dm (`is_drowned`); None: no row. The others recover g * z from the output.
    ready: made here if not given (layers.refresh makes those of many layers at once).
    """

    base: BaseLayer
    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    m: torch.Tensor | None = None
    c: torch.Tensor | None = None
    z_rows: torch.Tensor | None = None
    ready: Ready | None = None

    def __post_init__(self) -> None:
        if self.ready is None:
            compute, gains = self.base.compute_dtype, ()
            with torch.no_grad():
                if self.m is not None:
                    assert self.c is not None
                    gains = scale_rows(self.m, self.c), divisor(self.m)
                sb_NR = (self.b.detach().flatten(1) * self.scaling).to(compute)
            self.ready = Ready(self.a.detach().to(compute), sb_NR, *gains)
        # The arguments of _Adapted, looked up once for an update. Only tensors with a gradient pass through autograd.
        self.layer = self.base, self.scaling, len(self.a), self.b.shape, self.base.bias_N, self.c, self.z_rows, self.ready
        self.tensors = self.a, self.b, self.m

    def output(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """The layer's output, computed by `adapted` for it alone."""
        (y,) = adapted(x, [self], mask)
        return y


def adapted(
    x: torch.Tensor, parts: Sequence[Part], mask: torch.Tensor | None = None, a_all: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """The outputs of adapted layers that share the input x, in their bases' common compute dtype.

    x: [..., K] -> [..., N] each, or [B, K, H, W] -> [B, N, h, w]. Layers that share x read it once: their A are multiplied as
    one, forward and backward, and their gradients of x are summed as they are computed.
    mask: dropout's keep-mask over x, already divided by the keep probability; applies to the low-rank path only (LoRA
    only: DoRA's g couples both paths).
    a_all: `joined_a` of the parts; None: computed here.
    """
    if a_all is None:
        a_all = joined_a([part.ready.a for part in parts])
    tensors = [tensor for part in parts for tensor in part.tensors]  # a list: a generator is resumed for each
    arguments = [part.layer for part in parts], x, mask, a_all, *tensors
    # Without a graph autograd has nothing to record, and its call takes longer than a small layer.
    return _Adapted.apply(*arguments) if torch.is_grad_enabled() else tuple(_composed(*arguments)[0])


def joined_a(factors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The A of layers that share x as one: [sum of R, K, ...]."""
    return factors[0] if len(factors) == 1 else torch.cat(factors)


_PER_PART = 3  # tensors of a part: A, B, m


def _composed(layers, x, mask, a_all, *tensors):
    """(outputs, tensors saved for their gradients)."""
    first = layers[0][0]
    compute, kernels = first.compute_dtype, first.kernels
    x = x if x.dtype == compute else x.to(compute)
    x_c = first.collapsed(x)
    # x itself rather than its collapsed view: a compiler does not save a view of an input.
    x_a = x if mask is None else x * mask
    ranks = [layer[2] for layer in layers]
    t = first.product(first.collapsed(x_a), a_all)
    t_all = first.rows(t)
    outputs, saved = [], [x_a, mask, t_all, a_all]
    for at, (layer, t_MR) in enumerate(zip(layers, _split(t_all, ranks, 1), strict=True)):
        base, _, _, _, bias_N, _, z_rows, (_, sb_NR, g_N, _) = layer
        y, z_part = _y_again(base, x, t, g_N) if base.unread else None, None
        if y is None:
            y = base.matmul(x_c, again=g_N is None)
            y_MN = base.rows(y)
            z_part = None if z_rows is None else y_MN.index_select(1, z_rows)
            kernels.compose(y_MN, t_MR, sb_NR, g_N, bias_N, y_MN)
            base.put_rows(y_MN, y)
            y = base.expanded(y, x.shape)
            if base.unread and g_N is not None:
                memory.save_value(y if z_rows is None else None)  # z0 of some rows is not in y
        outputs.append(y)
        # A LoRA saves B too: s B may be B itself, and autograd then sees a change of it in between.
        saved += (tensors[at * _PER_PART + 1],) if g_N is None else (tensors[at * _PER_PART + 1], z_part, y)
    return outputs, saved


def _y_again(base: BaseLayer, x: torch.Tensor, t: torch.Tensor, g_N: torch.Tensor | None) -> torch.Tensor | None:
    """The output, when its block is recomputed, of a layer whose output only its own backward reads; None: compute it.
    A LoRA's gradients need no output, so it is NaN: a reader after all makes the gradient not finite."""
    if g_N is None and memory.recomputing():
        y_MN = t.new_full((len(base.rows(t)), base.weight_shape[0]), torch.nan)
        return base.expanded(base.from_rows(y_MN, t.shape), x.shape)
    return memory.saved_value()


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layers, x, mask, a_all, *tensors):
        # Autograd is off in here: the backward of the products is written out below.
        outputs, saved = _composed(layers, x, mask, a_all, *tensors)
        ctx.save_for_backward(*saved)
        ctx.layers, ctx.x_shape, ctx.x_dtype, ctx.dtype = layers, x.shape, x.dtype, tensors[0].dtype
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys):
        first = ctx.layers[0][0]
        x_a, mask, t_all, a_all, *saved = ctx.saved_tensors
        needs_dx, grads, dx, all_p, ps_shape = ctx.needs_input_grad[1], [], None, [], None
        x_a = first.collapsed(x_a)
        x_shape, at = x_a.shape, 0
        ranks, dtype = [layer[2] for layer in ctx.layers], ctx.dtype
        for layer, dy, t_MR in zip(ctx.layers, dys, _split(t_all, ranks, 1), strict=True):
            base, scaling, _, b_shape, bias_N, c, z_rows, (_, sb_NR, g_N, over_N) = layer
            dy = base.collapsed(dy)
            dy_MN, dm = base.rows(dy), None
            if g_N is not None:
                b, z_part, y = saved[at : at + 3]
                at += 3
                b_NR, gradients = b.flatten(1), base.kernels.adapter_gradients
                db_NR, dm, sb_NR = gradients(dy_MN, base.rows(y), t_MR, b_NR, g_N, over_N, bias_N, scaling, False)
                if z_rows is not None:
                    inputs = dy_MN.index_select(1, z_rows), z_part, t_MR, b_NR[z_rows], g_N[z_rows], divisor(c[z_rows])
                    dm[z_rows] = gradients(*inputs, None, scaling, True)[1]
            else:
                at += 1
                db_NR = (dy_MN.t() @ t_MR).to(dtype)
                if scaling != 1:
                    db_NR *= scaling
            all_p.append(dy_MN @ sb_NR)
            grads += [None, db_NR.view(b_shape), dm]
            if needs_dx:
                dx = base.input_grad(dy, x_shape, g_N, add_to=dx)
            ps_shape = dy.shape
        p = first.from_rows(all_p[0] if len(all_p) == 1 else torch.cat(all_p, 1), ps_shape)
        da_all = first.product_weight_grad(p, x_a, a_all.shape).to(dtype)
        grads[::_PER_PART] = _split(da_all, ranks, 0)
        if needs_dx:
            if mask is None:
                first.product_input_grad(p, a_all, x_shape, add_to=dx)
            else:
                dx.addcmul_(first.product_input_grad(p, a_all, x_shape), first.collapsed(mask))
            dx = dx.view(ctx.x_shape).to(ctx.x_dtype)
        return None, dx, None, None, *grads


def _split(tensor: torch.Tensor, ranks: Sequence[int], dim: int) -> Sequence[torch.Tensor]:
    return (tensor,) if len(ranks) == 1 else tensor.split(ranks, dim)
