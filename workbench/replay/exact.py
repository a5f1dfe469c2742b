"""The model and its adapter in fp64, from the formulas, without kernels and hand-written backward passes of a run:

    y = g * (x W^T + s (x A^T) B^T) + b,   g = m / ||W + s B A||_row with the norm held constant; 1 for a LoRA

The decoded weight is recomputed in the backward pass, so that only one is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainer.base.types import StoredWeight
from trainer.engine.components import Components
from trainer.kernels.dora_torch import TINY
from trainer.quantization import FrozenLinear
from trainer.quantization.layers import FrozenLayer
from trainer.runtime.precision import OutputCast
from workbench.replay.rounding import SUM_ROUNDOFF, no_errors, with_error, with_row_errors


@contextmanager
def computing_exactly(components: Components) -> Iterator[None]:
    """A context in which the loaded model and its adapter compute in fp64, with unchanged payloads and parameters. At its end
    everything is restored bit by bit, also parameters and gradients that changed within."""
    from trainer.adapters.layers import AdaptedLayer  # it loads PEFT, which takes a second: not to read a config

    with ExitStack() as restore:
        if components.attention.kinds:  # kernels of 16 bits
            values = components.model.modules[components.family.denoiser].__dict__
            restore.callback(values.__setitem__, "forward", values.pop("forward"))
        for module in components.model.modules.values():
            for layer in [*module.modules()]:
                restore.enter_context(_returning_fp64(layer))
                if isinstance(layer, (FrozenLayer, AdaptedLayer)):
                    restore.callback(setattr, layer, "__class__", type(layer))
                    layer.__class__ = _frozen(type(layer)) if isinstance(layer, FrozenLayer) else _adapted(type(layer))
                else:
                    restore.enter_context(_widened(layer))
        compute = components.model.compute
        restore.callback(compute.update, dict(compute))
        compute.update(dict.fromkeys(compute, torch.float64))
        yield


@contextmanager
def _widened(module: torch.nn.Module) -> Iterator[None]:
    """A context in which the module's own floating-point parameters and buffers are fp64, without gradients."""
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    before = [(each, each.data, each.grad) for each in tensors if each.is_floating_point()]
    for each, _, _ in before:
        each.data, each.grad = each.data.double(), None
    try:
        yield
    finally:
        for each, data, gradient in before:
            each.grad = None  # of the other dtype
            each.data, each.grad = data, gradient


@contextmanager
def _returning_fp64(module: torch.nn.Module) -> Iterator[None]:
    """A context in which the module returns fp64 in place of its compute dtype (precision.keep_activations)."""
    before = [(hook, hook.compute) for hook in module._forward_hooks.values() if isinstance(hook, OutputCast)]
    for hook, _ in before:
        hook.compute = torch.float64
    try:
        yield
    finally:
        for hook, compute in before:
            hook.compute = compute


@cache
def _frozen(kind: type) -> type:
    """A subclass of a frozen layer that computes exactly."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(_plain, self, x.to(torch.float64), use_reentrant=False)

    return type(f"Exact{kind.__name__}", (kind,), {"forward": forward})


@cache
def _adapted(kind: type) -> type:
    """A subclass of an adapted layer that computes exactly. It is never stale: it caches nothing between two forwards."""

    def forward(self, x: Tensor) -> Tensor:
        name, *_, dropout = self.active()
        base, (a, b, m) = self.get_base_layer(), self.effective(name)
        mask = None
        if self.training and dropout is not None:
            mask = dropout(torch.ones_like(x, dtype=base.compute_dtype)).double()  # the mask of the run
        rank, alpha = self.r[name], self.lora_alpha[name]
        unscaled = self.kinds[name].unscaled(self.trained(name))
        scaling = 1.0 if unscaled else alpha / (rank**0.5 if self.use_rslora[name] else rank)
        arguments = base, scaling, self.current.rows, x.to(torch.float64), mask, a, b, m
        return checkpoint(_with_adapter, *arguments, use_reentrant=False)

    return type(f"Exact{kind.__name__}", (kind,), {"forward": forward, "stale": False})


def decoded(weight: StoredWeight) -> Tensor:
    """The weight in fp64, [N, K], by the definition of StoredWeight: no code is shared with the kernels."""
    rows, columns = weight.shape
    if weight.bits is None:
        number = weight.codes.double().flatten()
    else:
        mask = 2**weight.bits - 1
        parts = [(weight.codes.int() >> shift) & mask for shift in range(0, 8, weight.bits)]
        codes = torch.stack(parts, dim=1).flatten()[: rows * columns].long()
        number = codes.double() if weight.levels is None else weight.levels.double()[codes]
    for factor, combine in ((weight.scale, torch.Tensor.mul_), (weight.offset, torch.Tensor.add_)):
        if factor is not None:
            combine(number, factor.double().repeat_interleave(weight.block or columns)[: rows * columns])
    return number.view(rows, columns)


def _weight(layer: FrozenLayer) -> Tensor:
    """W in its own shape; with the rounding error of its conversion if the run converts it."""
    stored = layer.in_use()
    with no_errors():
        weight = decoded(stored).view(layer.weight_shape)
    return weight if stored.is_dense(layer.compute_dtype) else with_error(weight)


def _with_bias(layer: FrozenLayer, y: Tensor) -> Tensor:
    if layer.bias is None:
        return y
    with no_errors():
        bias = layer.broadcast(layer.bias.double())
    return y + with_error(bias)


def _product(layer: FrozenLayer, x: Tensor, weight: Tensor) -> Tensor:
    """x W^T; with the errors of float8 if the run multiplies in it."""
    codes = None
    if isinstance(layer, FrozenLinear) and (scaled := layer.scaled_weight(x[..., 0].numel())) is not None:
        codes = scaled.codes.dtype
        x = with_row_errors(x, codes, backward=False)
    z = layer.product(x, weight)
    return z if codes is None else with_row_errors(z, codes, backward=True)


def _plain(layer: FrozenLayer, x: Tensor) -> Tensor:
    return _with_bias(layer, _product(layer, x, _weight(layer)))


def _with_adapter(
    base: Any, scaling: float, rows: Tensor | None, x: Tensor, mask: Tensor | None, *trained: Tensor | None
) -> Tensor:
    """The adapted layer's output. trained: A, B and m; m is None for a LoRA. rows: factors of A's rows."""
    a, b, m = trained
    assert a is not None and b is not None
    weight = _weight(base)
    g = None if m is None else _gain(base, weight, scaling, a, b, m)
    a = with_error(a if rows is None else a * rows.view(-1, *[1] * (a.dim() - 1)))
    t = base.product(x if mask is None else x * mask, a)
    z, sb = _product(base, x, weight), with_error(scaling * b)
    with no_errors():
        y = z + (F.conv2d(t, sb) if t.dim() == 4 and b.dim() == 4 else t @ sb.flatten(1).t())
        if g is not None:
            y = base.broadcast(g) * y
        y = _with_bias(base, y)
    return with_error(y)


def _gain(base: Any, weight: Tensor, scaling: float, a: Tensor, b: Tensor, m: Tensor) -> Tensor:
    """g = m / c, [N], which the run computes in fp32."""
    with no_errors():
        v_NK = weight.detach().flatten(1) + scaling * (b.flatten(1) @ a.flatten(1)).detach()
        g = m / v_NK.norm(dim=1).clamp_min(TINY)
    return with_error(g, SUM_ROUNDOFF * v_NK.shape[1] ** 0.5)
