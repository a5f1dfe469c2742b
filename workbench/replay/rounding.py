"""The effect of rounding on a step, by Monte Carlo arithmetic (Parker 1997; CESTAC, Vignes 1974).

A step in fp64 is repeated with an error of random size and sign in each of its results, as large as a rounding to the run's
compute dtype can be. The spread of several repetitions is that of a run's possible results, for any order of its sums and any
kernels: the errors enter below the layers, and propagate forward and backward as roundings do.

An operation with the results r, with the unit roundoff u and the smallest step e of the compute dtype, and xi uniform in
[-1, 1]:

    r -> r + max(u |r|, e / 2) xi                       of each result in fp64, which stands for the compute dtype
    x -> x (1 + sqrt(K) 2^-24 xi)                       of an operand of a product before it: K terms are summed in fp32,
                                                        where a sum one by one of terms of random sign errs so
    x -> x + max(u |x|, e / 2) xi                       of the operands of a fused normalisation or attention, which casts its
                                                        weights, and rounds within

Results that the program keeps in fp32 are fp32 here, too, and round by themselves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from workbench.planning.op_trace import tensors_in

SUM_ROUNDOFF = 2.0**-24  # of a product's sum: cuBLAS, CUTLASS and the CPU's libraries sum 16-bit products in fp32, too

# ATen's operators. products: the operand that gets the error of the sum. fused: the operands that are cast or rounded within,
# and how many results are activations. moves: operators without arithmetic.
_OPERATORS = json.loads((resources.files("workbench.replay") / "operators.json").read_text(encoding="utf-8"))
PRODUCTS, FUSED, MOVES = _OPERATORS["products"], _OPERATORS["fused"], {*_OPERATORS["moves"]}


class InFp64(TorchFunctionMode):
    """A block in which fp64 replaces fp32 in `x.float()`, `x.to(torch.float32)` and `dtype=torch.float32`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


class Rounded(TorchDispatchMode):
    """A block in which every result in fp64 gets an error as if rounded to `dtype`. generator: of the errors, on their
    device. Tensors that are fp64 in the run itself, computed from no activation, get none."""

    def __init__(self, dtype: torch.dtype, generator: torch.Generator) -> None:
        super().__init__()
        limits = torch.finfo(dtype)
        self.unit, self.floor, self.largest = limits.eps / 2, limits.smallest_normal * limits.eps / 2, limits.max
        self.generator, self.paused = generator, 0
        self.exact = WeakIdKeyDictionary()  # tensors in fp64 that were computed from no activation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        if self.paused:
            return func(*args, **kwargs)
        inputs = [tensor for tensor in tensors_in(args) if _is_wide(tensor)]
        fused, activations = FUSED.get(name, ((), None))
        args = list(args)
        for index in fused:
            if isinstance(args[index], Tensor) and _is_wide(args[index]):
                args[index] = self.add_error(args[index].clone())
        if name in PRODUCTS and _is_wide(args[PRODUCTS[name]]):
            index = PRODUCTS[name]
            args[index] = self._noise(args[index], math.sqrt(_terms(name, args)) * SUM_ROUNDOFF, 0.0).add_(args[index])
        output = func(*args, **kwargs)
        results = [tensor for tensor in tensors_in(output) if _is_wide(tensor)]
        copies = name in ("_to_copy", "copy_")
        cast = copies and any(source.is_floating_point() and not _is_wide(source) for source in tensors_in(args)[-1:])
        if not cast and all(tensor in self.exact for tensor in inputs):
            self.exact.update(dict.fromkeys(results, True))
        elif cast or not (copies or name in MOVES or _is_view(func)):
            for tensor in results[:activations]:
                self.add_error(tensor)
        return output

    def add_error(self, tensor: Tensor, unit: float | None = None) -> Tensor:
        """Round a tensor at random, in place; too large numbers become infinite. unit: roundoff; None: the dtype's."""
        tensor.add_(self._noise(tensor, self.unit if unit is None else unit, self.floor))
        return tensor.masked_fill_(tensor.abs() > self.largest, math.inf) if self.largest < 1e30 else tensor

    def _noise(self, tensor: Tensor, unit: float, floor: float) -> Tensor:
        xi = torch.empty_like(tensor).uniform_(-1, 1, generator=self.generator)
        if floor < 1e-30:  # dtypes with the exponents of fp32: no number of a step is so small
            return xi.mul_(tensor).mul_(unit)
        return xi.mul_(tensor.abs().mul_(unit).clamp_min_(floor)).mul_(tensor != 0)


_modes: list[Rounded] = []


@contextmanager
def rounded_to(dtype: torch.dtype, generator: torch.Generator) -> Iterator[None]:
    """A block in the mode `Rounded`, which `no_errors`, `with_error` and `with_row_errors` use."""
    _modes.append(Rounded(dtype, generator))
    try:
        with _modes[-1]:
            yield
    finally:
        _modes.pop()


@contextmanager
def no_errors() -> Iterator[None]:
    """A block without errors: for operations that are one in the run, with one rounding."""
    for mode in _modes:
        mode.paused += 1
    try:
        yield
    finally:
        for mode in _modes:
            mode.paused -= 1


def with_error(tensor: Tensor, unit: float | None = None) -> Tensor:
    """The tensor with a rounding of its own; unchanged outside of `rounded_to`. unit: roundoff; None: the dtype's."""
    if not _modes:
        return tensor
    with no_errors():
        return tensor + _modes[-1].add_error(tensor.detach().clone(), unit).sub_(tensor.detach())


class _ByRow(torch.autograd.Function):
    """Errors of a float8 product's operands, whose rows have a scale each: of x in the forward pass, or of the gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, codes: torch.dtype, backward: bool) -> Tensor:
        ctx.codes, ctx.back = codes, backward
        return x.view_as(x) if backward else _row_errors(x, codes)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return (_row_errors(dy, ctx.codes) if ctx.back else dy), None, None


def with_row_errors(x: Tensor, codes: torch.dtype, *, backward: bool) -> Tensor:
    """x [..., K] with the errors of float8 codes, or with such errors in its gradient; unchanged outside of `rounded_to`."""
    return _ByRow.apply(x, codes, backward) if _modes else x


def _row_errors(x: Tensor, codes: torch.dtype) -> Tensor:
    limits = torch.finfo(codes)
    with no_errors():
        largest = x.abs().amax(-1, keepdim=True)
        step = largest / limits.max * (limits.smallest_normal * limits.eps / 2)
        xi = torch.empty_like(x).uniform_(-1, 1, generator=_modes[-1].generator)
        # The largest number is exact: it defines the scale.
        return x + torch.maximum(x.abs() * (limits.eps / 2), step) * xi * ((x != 0) & (x.abs() < largest))


def _terms(name: str, args: list) -> int:
    """The number of products in the sum of a result."""
    if name == "convolution":
        return args[1].numel() // args[1].shape[0]
    if name == "convolution_backward":
        pixels, weight = args[0].numel() // args[0].shape[1], args[2]
        return max(pixels, weight.numel() // weight.shape[1])
    return args[PRODUCTS[name]].shape[-1]


def _is_wide(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float64


def _is_view(func) -> bool:
    """Whether the result is the memory of an argument, unchanged."""
    aliases = [result.alias_info for result in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)
