"""Calls of Triton kernels: as operators for compilers and fake tensors, and with launches that take little host time.

An eager call bypasses the operator, whose dispatch takes as long as the launch.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.library import Library, infer_schema, register_fake
from triton import knobs
from triton.runtime.jit import JITFunction

# The interpreter computes bf16 products and rounds fp32 to bf16 and float8 wrongly: kernels do so another way for it.
INTERPRETED: bool = knobs.runtime.interpret

_LIBRARY = Library("trainer", "FRAGMENT")


def operator(*outputs: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function that launches kernels as the operator `trainer::NAME`. outputs: the arguments that it writes.

    The function returns nothing, its first argument is a tensor, and every argument is annotated. A compiler keeps the
    operator whole, and on fake tensors nothing runs.
    """

    def make(function: Callable[..., None]) -> Callable[..., None]:
        name = function.__name__.strip("_")
        _LIBRARY.define(name + infer_schema(function, mutates_args=outputs))
        # Not torch.library.custom_op, whose calls take seven times as long.
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        register_fake(f"trainer::{name}", lambda *arguments: None, lib=_LIBRARY)
        as_operator = getattr(torch.ops.trainer, name).default

        @wraps(function)
        def call(*arguments: Any) -> None:
            plain = type(arguments[0]) in (Tensor, nn.Parameter) and not arguments[0].is_meta
            (function if plain and not torch.compiler.is_compiling() else as_operator)(*arguments)

        return call

    return make


class LaunchConfig(NamedTuple):
    """A kernel's launch. constants: its last arguments, by name. contracted: a product and a sum may be rounded as one."""

    grid: tuple[int, ...]
    constants: dict[str, Any]
    num_warps: int = 4
    contracted: bool = True


_compiled: dict[tuple[object, ...], tuple[Any, tuple[int, ...], tuple[object, ...]]] = {}


def launch(
    kernel: Any,
    config: Callable[[], LaunchConfig],
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    facts: tuple[object, ...] = (),
) -> None:
    """kernel[grid](*tensors, *numbers, **constants), with little host time from the second such launch on.

    config: depends on the tensors' dtypes, the numbers and `facts` alone; called for each new combination, which it may
    refuse. Triton looks up each launch by name, type and options of every argument, which takes longer than most of these
    kernels do: a step of SDXL has thousands of launches.
    """
    key = id(kernel), facts, numbers, *compiled_for(tensors)
    if key in _compiled:
        compiled, grid, values = _compiled[key]
        compiled[grid](*tensors, *numbers, *values)
        return
    grid, constants, num_warps, contracted = config()
    options = {"num_warps": num_warps} | ({} if contracted else {"enable_fp_fusion": False})
    compiled = kernel[grid](*tensors, *numbers, **options, **constants)
    if isinstance(kernel, JITFunction) and not INTERPRETED:
        values = tuple(constants[name] for name in kernel.arg_names[len(tensors) + len(numbers) :])
        _compiled[key] = compiled, grid + (1,) * (3 - len(grid)), values


def compiled_for(tensors: tuple[Tensor, ...]) -> list[object]:
    """The properties of its tensors for which Triton recompiles a kernel: the device, and each dtype and alignment."""
    key: list[object] = [tensors[0].get_device()]
    for tensor in tensors:  # a comprehension is one more call, and there are thousands of launches
        key += tensor.dtype, not tensor.data_ptr() & 15
    return key


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up. triton.cdiv is for kernels: on the host it takes 20 times as long."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n, n >= 1."""
    return 1 << (n - 1).bit_length()
