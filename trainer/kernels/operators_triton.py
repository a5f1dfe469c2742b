"""How Triton kernels are called: as operators that compilers and fake tensors see, and launched at little cost of the host.

An eager call goes round the operator, whose dispatch takes as long as the launch.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import custom_op
from triton import knobs
from triton.runtime.jit import JITFunction

# The interpreter computes bf16 products and rounds fp32 to bf16 and float8 wrongly: there kernels do so another way.
INTERPRETED: bool = knobs.runtime.interpret


def operator(*written: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function that launches kernels the operator `trainer::NAME`. written: the arguments whose tensors it writes.

    The function returns nothing, its first argument is a tensor, and every argument has its type. A compiler keeps the
    operator as it is, and on fake tensors nothing runs.
    """

    def make(function: Callable[..., None]) -> Callable[..., None]:
        as_operator = custom_op(f"trainer::{function.__name__.strip('_')}", function, mutates_args=written)
        as_operator.register_fake(lambda *arguments: None)

        @wraps(function)
        def call(*arguments: Any) -> None:
            plain = type(arguments[0]) in (Tensor, nn.Parameter) and not arguments[0].is_meta
            (function if plain and not torch.compiler.is_compiling() else as_operator)(*arguments)

        return call

    return make


_compiled: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Tensor | float, num_warps: int = 4, **constants: object) -> None:
    """kernel[grid](*arguments, **constants), with less of the host's time once it was compiled for such arguments.

    Triton looks up each launch by name, type and options of every argument, which takes longer than most of these kernels do:
    a step of SDXL has thousands of launches. Here the same is looked up by what Triton compiles for (`compiled_for`). The
    kernels name their constants last.
    """
    if not isinstance(kernel, JITFunction) or INTERPRETED:
        kernel[grid](*arguments, num_warps=num_warps, **constants)
        return
    key = (id(kernel), num_warps, *constants.values(), *map(compiled_for, arguments))
    if key in _compiled:
        compiled, values = _compiled[key]
        compiled[grid + (1,) * (3 - len(grid))](*arguments, *values)
    else:
        compiled = kernel[grid](*arguments, num_warps=num_warps, **constants)
        _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])


def compiled_for(argument: Tensor | float) -> object:
    """What Triton compiles a kernel anew for: a tensor's dtype, device and alignment; of a whole number whether it is 1, a
    multiple of 16, or too long for 32 bits."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.device.index, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument >= 2**31
    return float
