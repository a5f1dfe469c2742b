"""How Triton kernels are called: as operators that compilers and fake tensors see, and launched at little cost of the host.

An eager call goes round the operator, whose dispatch takes as long as the launch.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.library import Library, infer_schema, register_fake
from triton import knobs
from triton.runtime.jit import JITFunction

# The interpreter computes bf16 products and rounds fp32 to bf16 and float8 wrongly: there kernels do so another way.
INTERPRETED: bool = knobs.runtime.interpret

_LIBRARY = Library("trainer", "FRAGMENT")


def operator(*written: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function that launches kernels the operator `trainer::NAME`. written: the arguments whose tensors it writes.

    The function returns nothing, its first argument is a tensor, and every argument has its type. A compiler keeps the
    operator as it is, and on fake tensors nothing runs.
    """

    def make(function: Callable[..., None]) -> Callable[..., None]:
        name = function.__name__.strip("_")
        _LIBRARY.define(name + infer_schema(function, mutates_args=written))
        # As torch.library.custom_op would, whose calls take seven times as long.
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
    """How a kernel is launched. constants: named last. contracted: whether a product and a sum may be rounded as one."""

    grid: tuple[int, ...]
    constants: dict[str, Any]
    num_warps: int = 4
    contracted: bool = True


_compiled: dict[tuple[object, ...], tuple[Any, tuple[int, ...], tuple[object, ...]]] = {}


def launch(
    kernel: Any,
    how: Callable[[], LaunchConfig],
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    facts: tuple[object, ...] = (),
) -> None:
    """kernel[grid](*tensors, *numbers, **constants), with little of the host's time once it was launched alike.

    how: follows from the tensors' dtypes, the numbers and `facts`; called where they are met for the first time, which is the
    place to refuse them. Triton looks up each launch by name, type and options of every argument, which takes longer than
    most of these kernels do: a step of SDXL has thousands of launches.
    """
    key = id(kernel), facts, numbers, *compiled_for(tensors)
    if key in _compiled:
        compiled, grid, values = _compiled[key]
        compiled[grid](*tensors, *numbers, *values)
        return
    grid, constants, num_warps, contracted = how()
    options = {"num_warps": num_warps} | ({} if contracted else {"enable_fp_fusion": False})
    compiled = kernel[grid](*tensors, *numbers, **options, **constants)
    if isinstance(kernel, JITFunction) and not INTERPRETED:
        values = tuple(constants[name] for name in kernel.arg_names[len(tensors) + len(numbers) :])
        _compiled[key] = compiled, grid + (1,) * (3 - len(grid)), values


def compiled_for(tensors: tuple[Tensor, ...]) -> list[object]:
    """What Triton compiles a kernel anew for, of its tensors: the device, and of each the dtype and whether it is aligned."""
    key: list[object] = [tensors[0].get_device()]
    for each in tensors:  # a comprehension is a call more, and there are thousands of launches
        key += each.dtype, not each.data_ptr() & 15
    return key


def ceil_div(a: int, b: int) -> int:
    """The least whole number that is a / b or more. triton.cdiv is for kernels: on the host it takes 20 times as long."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of 2 that is n or more, n >= 1."""
    return 1 << (n - 1).bit_length()
