"""Operators on record: to compare what two micro-batches launch, and to replay one on a CPU as a CUDA graph would. Of
compiled blocks, into which no mode sees: what ran of them, and a replay that runs them again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from trainer.kernels.scratch import own_buffers


def of_tensor(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device.type


class Trace(TorchDispatchMode):
    """Every operator inside, with its numbers, and of its tensors shape, strides, dtype and kind of device."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operators.append(f"{func}{tree_map_only(Tensor, of_tensor, (args, kwargs or {}, out))}")
        return out


class Tape(TorchDispatchMode):
    """A CUDA graph's ways on a CPU: operators that ran inside run again over the very tensors of the first time.

    What Python knew then, it does not learn anew: a number that was read stays what it was, and so does a tensor's place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[Any, tuple, dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.ran.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, out in self.ran:
            there = [tensor for tensor in tree_leaves(out) if isinstance(tensor, Tensor)]
            # A view shows what its memory has now.
            given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            if not func._schema.is_mutable and any(t.untyped_storage().data_ptr() in given for t in there if t.numel()):
                continue
            made = [tensor for tensor in tree_leaves(func(*args, **kwargs)) if isinstance(tensor, Tensor)]
            for old, new in zip(there, made, strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Taping:
    """A Recorder (trainer/engine/graphs.py) of tapes. parameters: as `Graphs` has them; to record leaves their gradients."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters, self.warmed, self.tapes, self.replayed = parameters, 0, [], 0

    def warm(self, region: Callable[[], Tensor]) -> Tensor:
        self.warmed += 1
        return region()

    def record(self, region: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        before = [parameter.grad.clone() for parameter in self.parameters]
        with own_buffers(), Tape() as tape:
            made = region()
        self.tapes.append(tape)
        for parameter, gradient in zip(self.parameters, before, strict=True):
            parameter.grad.copy_(gradient)
        if isinstance(made, Tensor):
            made.fill_(torch.nan)

        def replay() -> None:
            self.replayed += 1
            tape.replay()

        return replay, made


# Operators that a program has in common with an eager block, one for one.
COUNTED = (
    "mm", "addmm", "bmm", "native_layer_norm", "native_layer_norm_backward", "pow", "rsqrt", "gelu", "gelu_backward", "silu",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
)  # fmt: skip


class Running:
    """A Recorder that has a region run again, without a mode, so that its compiled blocks run as programs. ran: of each
    recording, how often which of COUNTED."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters, self.ran, self.replayed = parameters, list[Counter[str]](), 0

    def warm(self, region: Callable[[], Tensor]) -> Tensor:
        return region()

    def record(self, region: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        before = [parameter.grad.clone() for parameter in self.parameters]
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            made = region()
        names = (event.name.removeprefix("aten::").removesuffix("_") for event in seen.events())
        self.ran.append(Counter(name for name in names if name in COUNTED))
        for parameter, gradient in zip(self.parameters, before, strict=True):
            parameter.grad.copy_(gradient)

        def replay() -> None:
            self.replayed += 1
            again = region()
            if isinstance(made, Tensor):
                made.copy_(again)

        return replay, made
