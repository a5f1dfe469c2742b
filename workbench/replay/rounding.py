"""What rounding may do to a step, found out by doing it: Monte Carlo arithmetic (Parker 1997; CESTAC, Vignes 1974).

A step in fp64 is run again with an error of random size and sign in each of its results, as large as a rounding to the run's
compute dtype can be. Several such repetitions are spread as results of the run may be, whatever the order of its sums and
whichever kernels compute them: the error is put in below the layers, and passes forward and backward as a rounding does.

Of an operation with the results r, in the unit roundoff u and the smallest step e of the compute dtype, and xi uniform in
[-1, 1]:

    r -> r + max(u |r|, e / 2) xi                       of each result in fp64, which stands for the compute dtype
    x -> x (1 + sqrt(K) 2^-24 xi)                       of an operand of a product before it: K terms are summed in fp32,
                                                        where a sum one by one of terms of random sign errs so
    x -> x + max(u |x|, e / 2) xi                       of the operands of a fused normalisation or attention, which casts its
                                                        weights, and rounds within

Results in fp32 are what they are in the run: there the program says so, and they round by themselves.
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

SUM_ROUNDOFF = 2.0**-24  # of a product: cuBLAS, CUTLASS and the CPU's libraries sum 16-bit products in fp32, too

# ATen's operators. products: the operand that errs for its sum. fused: the operands that one casts, or rounds on its way, and
# how many of its results are activations. moves: what gives numbers that were there before.
_OPERATORS = json.loads((resources.files("workbench.replay") / "operators.json").read_text(encoding="utf-8"))
PRODUCTS, FUSED, MOVES = _OPERATORS["products"], _OPERATORS["fused"], {*_OPERATORS["moves"]}


class InFp64(TorchFunctionMode):
    """A block in which what is said to be fp32 is fp64: `x.float()`, `x.to(torch.float32)`, `dtype=torch.float32`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if each is torch.float32 else each for each in args]
        kwargs = {key: torch.float64 if each is torch.float32 else each for key, each in (kwargs or {}).items()}
        return func(*args, **kwargs)


class Rounded(TorchDispatchMode):
    """A block in which every result in fp64 errs as if it were rounded to `dtype`. generator: of the errors, on their device.
    A run's own fp64, which no activation entered, is left alone."""

    def __init__(self, dtype: torch.dtype, generator: torch.Generator) -> None:
        super().__init__()
        limits = torch.finfo(dtype)
        self.unit, self.floor, self.largest = limits.eps / 2, limits.smallest_normal * limits.eps / 2, limits.max
        self.generator, self.quiet = generator, 0
        self.own = WeakIdKeyDictionary()  # tensors in fp64 that no activation entered

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        if self.quiet:
            return func(*args, **kwargs)
        entered = [each for each in tensors_in(args) if _is_wide(each)]
        fused, activations = FUSED.get(name, ((), None))
        args = list(args)
        for place in fused:
            if isinstance(args[place], Tensor) and _is_wide(args[place]):
                args[place] = self.erring(args[place].clone())
        if name in PRODUCTS and _is_wide(args[PRODUCTS[name]]):
            place = PRODUCTS[name]
            args[place] = self._noise(args[place], math.sqrt(_terms(name, args)) * SUM_ROUNDOFF, 0.0).add_(args[place])
        given = func(*args, **kwargs)
        results = [each for each in tensors_in(given) if _is_wide(each)]
        cast = name in ("_to_copy", "copy_") and any(
            each.is_floating_point() and not _is_wide(each) for each in tensors_in(args)[-1:]
        )
        if not cast and all(each in self.own for each in entered):
            self.own.update(dict.fromkeys(results, True))
            return given
        if cast or not (name in MOVES or name in ("_to_copy", "copy_") or _is_view(func)):
            for each in results[:activations]:
                self.erring(each)
        return given

    def erring(self, tensor: Tensor, unit: float | None = None) -> Tensor:
        """The tensor, in place, with a rounding of each number; too large ones are infinite. unit: the roundoff; None:
        dtype's."""
        tensor.add_(self._noise(tensor, self.unit if unit is None else unit, self.floor))
        return tensor.masked_fill_(tensor.abs() > self.largest, math.inf) if self.largest < 1e30 else tensor

    def _noise(self, tensor: Tensor, unit: float, floor: float) -> Tensor:
        xi = torch.empty_like(tensor).uniform_(-1, 1, generator=self.generator)
        if floor < 1e-30:  # of dtypes with the exponents of fp32 no number of a step comes near it
            return xi.mul_(tensor).mul_(unit)
        return xi.mul_(tensor.abs().mul_(unit).clamp_min_(floor)).mul_(tensor != 0)


_now: list[Rounded] = []


@contextmanager
def rounded_to(dtype: torch.dtype, generator: torch.Generator) -> Iterator[None]:
    """A block in which the step is run as `Rounded` says, and `quietly`, `erring` and `by_row` know of it."""
    _now.append(Rounded(dtype, generator))
    try:
        with _now[-1]:
            yield
    finally:
        _now.pop()


@contextmanager
def quietly() -> Iterator[None]:
    """A block of operations that are one in the run, which rounds once: none of their results errs."""
    for mode in _now:
        mode.quiet += 1
    try:
        yield
    finally:
        for mode in _now:
            mode.quiet -= 1


def erring(tensor: Tensor, unit: float | None = None) -> Tensor:
    """The tensor with a rounding of its own, or as it is where nothing is to err. unit: another roundoff than the dtype's."""
    if not _now:
        return tensor
    with quietly():
        return tensor + _now[-1].erring(tensor.detach().clone(), unit).sub_(tensor.detach())


class _ByRow(torch.autograd.Function):
    """Errors of a float8 product's operands, whose rows have a scale each: of x on the way forward, or of the gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, codes: torch.dtype, backward: bool) -> Tensor:
        ctx.codes, ctx.back = codes, backward
        return x.view_as(x) if backward else _by_row(x, codes)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return (_by_row(dy, ctx.codes) if ctx.back else dy), None, None


def by_row(x: Tensor, codes: torch.dtype, *, backward: bool) -> Tensor:
    """x [..., K] as its float8 codes may have it, or with such errors in its gradient; as it is where nothing is to err."""
    return _ByRow.apply(x, codes, backward) if _now else x


def _by_row(x: Tensor, codes: torch.dtype) -> Tensor:
    limits = torch.finfo(codes)
    with quietly():
        largest = x.abs().amax(-1, keepdim=True)
        step = largest / limits.max * (limits.smallest_normal * limits.eps / 2)
        xi = torch.empty_like(x).uniform_(-1, 1, generator=_now[-1].generator)
        # The largest is a code itself: it makes the scale.
        return x + torch.maximum(x.abs() * (limits.eps / 2), step) * xi * ((x != 0) & (x.abs() < largest))


def _terms(name: str, args: list) -> int:
    """How many products a result is the sum of."""
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
    aliases = [each.alias_info for each in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)
