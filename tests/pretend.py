"""An accelerator that is not there: a device whose tensors have shapes, dtypes and strides, and no values.

The very code of a run goes through on it (tests/integration/test_pretend.py). A tensor on another device is refused, and so
is every read of a value, which on a GPU would make the host wait. What only a card can tell, it cannot: the results of
kernels and their time, the allocator.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial, wraps
from typing import Any
from unittest.mock import patch

import numpy
import torch
from bitsandbytes import functional
from diffusers import EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.image_processor import VaeImageProcessor
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer import kernels
from trainer.base import draws
from trainer.engine.step import Step
from workbench.planning.dry_run import without_values

# Private functions of torch, and the only ones. test_pretend.py says so when they are gone.
REGISTER, MODULE = "_setup_privateuseone_for_python_backend", "_DummyBackendModule"
NAME = "pretend"


class Waited(Exception):
    """The host would have waited for the device."""


@cache
def device() -> torch.device:
    """The pretend accelerator, registered with torch at the first call."""

    class Module(getattr(backend_registration, MODULE)):
        """What torch asks of a device's module when a checkpointed block runs again: under which autocast."""

        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float16]

    getattr(backend_registration, REGISTER)(NAME, backend_module=Module())
    return torch.device(NAME, 0)


@contextmanager
def accelerator(triton: bool) -> Iterator[torch.device]:
    """Inside, tensors have no values, and the device suits Triton where `triton`: its kernels are operators then."""
    pretended, suits = device(), kernels._is_cuda

    def suits_too(asked: torch.device, capability: tuple[int, int]) -> bool:
        return suits(asked, capability) or (triton and asked.type == pretended.type)

    with (
        without_values(),
        Answers(),
        tables_with_values(),
        FakeTensorMode(allow_non_fake_inputs=True),
        # In one thread: what fails in the thread of a device written in Python ends the process, and says nothing.
        torch.autograd.set_multithreading_enabled(False),
        # Else numbers and tensors with values would be copied to the device in earnest.
        patch.object(FakeTensorMode, "avoid_device_init", True),
        patch.object(nn.Module, "_apply", _apply),
        patch.object(VaeImageProcessor, "postprocess", lambda processor, image, **_: [image]),
        patch.object(kernels, "_is_cuda", suits_too),
    ):
        yield pretended


class Updating(Step):
    """A step whose numbers all went well, so that there is an update."""

    def read(self, told: torch.Tensor, norm: torch.Tensor) -> tuple[list[float], float, float]:
        return [1.0] + [0.0] * (len(told) - 1), 1.0, 2.0**16


class Answers(TorchFunctionMode):
    """Inside, every question about a tensor without values is answered with no, without a look at it."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.Tensor.__bool__ and isinstance(args[0], FakeTensor):
            return False
        return func(*args, **(kwargs or {}))


@contextmanager
def tables_with_values() -> Iterator[None]:
    """Inside, libraries read tables that they make: a sampler's noise levels, the codes of an 8-bit optimizer."""
    reading = {
        EulerDiscreteScheduler: ("__init__", "scale_model_input", "step"),
        FlowMatchEulerDiscreteScheduler: ("__init__", "step"),
    }
    with ExitStack() as stack:
        for owner, name, value in (
            (functional, "create_dynamic_map", _with_values(functional.create_dynamic_map)),
            *((each, name, _with_values(getattr(each, name))) for each, names in reading.items() for name in names),
            *((each, "set_timesteps", _timed(each.set_timesteps)) for each in reading),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield


def _with_values(method: Callable) -> Callable:
    @wraps(method)
    def wrapped(*arguments: Any, **keys: Any) -> Any:
        with unset_fake_temporarily():
            return method(*arguments, **keys)

    return wrapped


def _timed(set_timesteps: Callable[..., None]) -> Callable[..., None]:
    """A sampler's method. The noise levels of its steps keep their values; the times that the model sees have none."""

    @wraps(set_timesteps)
    def wrapped(sampler: Any, *arguments: Any, device: Any = None, **keys: Any) -> None:
        with unset_fake_temporarily():
            set_timesteps(sampler, *arguments, device="cpu", **keys)
            sampler.set_begin_index(0)
        sampler.timesteps = torch.empty_like(sampler.timesteps, device=device)

    return wrapped


def _apply(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """nn.Module._apply (to, float, ...), which swaps tensors in place and so refuses those without values that are known
    elsewhere. Here the modules get new ones; what several of them share they share again."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for child in module.modules() if recurse else (module,):
        named = partial(child.named_parameters, recurse=False, remove_duplicate=False)
        buffers = partial(child.named_buffers, recurse=False, remove_duplicate=False)
        for name, tensor in [*named(), *buffers()]:
            if tensor not in made:
                with torch.no_grad():
                    new = fn(tensor)
                made[tensor] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
            setattr(child, name, made[tensor])
    return module


@contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, a copy from the device to the CPU raises Waited, and so does a question about a tensor there."""
    with NoQuestions(), NoCopies():
        yield


class NoQuestions(TorchFunctionMode):
    """Inside, bool() of a tensor on the device raises Waited."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.Tensor.__bool__ and args[0].device.type == NAME:
            raise Waited("a tensor on the device is asked a question")
        return func(*args, **(kwargs or {}))


class NoCopies(TorchDispatchMode):
    """Inside, a copy from the device to the CPU raises Waited. Other reads of a value raise without it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [t for t in (*args, *(kwargs or {}).values()) if isinstance(t, torch.Tensor)]
        to_cpu = isinstance(out, torch.Tensor) and out.device.type == "cpu"
        if to_cpu and any(t.device.type == NAME for t in given):
            raise Waited(f"{func} copies from the device to the CPU")
        return out


class Uncapturable(Exception):
    """A CUDA graph could not hold this, or would do it once and never again."""


@contextmanager
def capturable(sizes: set[int] | None = None) -> Iterator[None]:
    """Inside, whatever a CUDA graph cannot hold raises: a read of the device, a wait for it, a tensor of the host, a draw.

    sizes: of the memory that was taken for the same before, in bytes; another raises, too. Left out: none does.
    """

    def refuse(what: str) -> Callable[..., None]:
        def refused(*_: Any, **keys: Any) -> None:
            raise Uncapturable(what)

        return refused

    waits = [(owner, "synchronize") for owner in (torch.cuda, torch.accelerator, torch.cuda.Stream, torch.cuda.Event)]
    before = _generators()
    with ExitStack() as stack:
        for owner, name in waits:
            stack.enter_context(patch.object(owner, name, refuse(f"{name}: the host waits for the device")))
        stack.enter_context(patch.object(draws, "_text", refuse("a draw of the host")))
        stack.enter_context(NoQuestions())
        stack.enter_context(OnDevice(sizes))
        yield
    if _generators() != before:
        raise Uncapturable("a generator of the host was drawn from")


def _generators() -> list[Any]:
    with unset_fake_temporarily():
        return [random.getstate(), repr(numpy.random.get_state()), torch.get_rng_state().tolist()]


class OnDevice(TorchDispatchMode):
    """Inside, an operator raises Uncapturable that takes or makes a tensor of the host, or draws; see `capturable`.

    taken: bytes of each memory that was taken.
    """

    def __init__(self, sizes: set[int] | None = None) -> None:
        super().__init__()
        self.sizes, self.taken = sizes, set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given, made = (
            [tensor for tensor in tree_leaves(value) if isinstance(tensor, torch.Tensor)] for value in ((args, kwargs), out)
        )
        if any(tensor.device.type != NAME for tensor in (*given, *made)):
            raise Uncapturable(f"{func} of a tensor of the host")
        # Attention draws for its dropout alone, which no denoiser has.
        if torch.Tag.nondeterministic_seeded in func.tags and "scaled_dot_product" not in str(func):
            raise Uncapturable(f"{func} draws")
        known = {tensor.untyped_storage()._cdata for tensor in given}
        new = {t.untyped_storage().nbytes() for t in made if t.untyped_storage()._cdata not in known}
        if self.sizes is not None and not new <= self.sizes:
            raise Uncapturable(f"{func} takes memory of another size: {sorted(new - self.sizes)} bytes")
        self.taken |= new
        return out
