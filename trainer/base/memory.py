"""What makes a run fit: gradient checkpointing; and how it looks when it does not."""

import ctypes
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass
from fnmatch import fnmatchcase
from functools import partial, wraps
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

_depth = 0  # of blocks that run again just now
# Of a block that keeps some of what it computes: what it kept so far as it runs, and what is left of it as it runs again.
_keeping: list[Any] | None = None
_kept: list[Any] | None = None
# Of a block that runs again: what is made there once for both its forward and its backward, by who makes it.
_once: dict[Any, torch.Tensor] | None = None


def find_blocks(denoiser: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The blocks of a denoiser by name, in module order: the outermost modules whose dotted names match one of the fnmatch
    patterns, with an index as last name."""
    blocks: dict[str, nn.Module] = {}
    for name, module in denoiser.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in blocks)
        if name.rpartition(".")[2].isdigit() and not inside and any(fnmatchcase(name, p) for p in patterns):
            blocks[name] = module
    return blocks


def checkpoint_blocks(
    blocks: Mapping[str, nn.Module],
    every: bool | int | Literal["selective"],
    unread: Sequence[str] = (),
    skipped: Sequence[str] = (),
    compiled: Collection[str] = (),
) -> int:
    """Recompute the activations of every n-th block in the backward pass (True: of all). Returns how many blocks.
    "selective": of all, but for what costs much time and little memory: attention, and a last product that is read (`keep`).

    blocks: by name, with their adapters: what is put in later gets no gradient. They take tensors, in tuples, lists and
    dictionaries too, and return one or a tuple. Gradients of their parameters go to `.grad`, past hooks and autograd.grad.
    unread: fnmatch patterns of frozen layers whose output no backward pass reads. skipped: of blocks whose input is read
    again outside of them. compiled: names of blocks that a compiler takes whole: it sees what a second forward is for, keeps
    no more, and leaves out by itself what nothing reads.
    """
    selective = every == "selective"
    step = 1 if isinstance(every, (bool, str)) else every
    every_nth = list(blocks)[::step] if every else []
    for name in every_nth:
        block = blocks[name]
        if name in compiled:
            block.forward = _checkpointed(block.forward, selective)
            continue
        # Beside blocks that are not recomputed nothing tells which of them read what this one reads.
        shared = step != 1 or any(fnmatchcase(name, pattern) for pattern in skipped)
        block.forward = _recomputed(block, shared, selective)
        for layer, module in block.named_modules(prefix=name):
            if any(fnmatchcase(layer, pattern) for pattern in unread):
                frozen = module.get_base_layer() if hasattr(module, "get_base_layer") else module
                if hasattr(frozen, "unread"):
                    frozen.unread = True
    return len(every_nth)


def _checkpointed(forward: Callable, selective: bool) -> Callable:
    keeping = {"context_fn": partial(create_selective_checkpoint_contexts, ATTENTION)} if selective else {}

    @wraps(forward)
    def wrapped(*args, **kwargs):
        return checkpoint(forward, *args, use_reentrant=False, **keeping, **kwargs)

    return wrapped


def keeping() -> bool:
    """Whether a block runs for the first time that keeps some of what it computes."""
    return _keeping is not None


def keep(value: Any) -> None:
    """Have `kept` give the value at the same place when the block runs again, if it runs for the first time and keeps some of
    what it computes."""
    if _keeping is not None:
        _keeping.append(value)


def kept() -> Any:
    """What a block that runs again has kept at this place; None elsewhere, and in one that keeps nothing."""
    return _kept.pop(0) if _kept else None


def once() -> dict[Any, torch.Tensor] | None:
    """What a block that runs again has made for its backward pass, too, by who makes it; None outside of both."""
    return _once


def _recomputed(block: nn.Module, shared: bool, selective: bool) -> Callable:
    forward, parameters = block.forward, list(block.parameters())
    # Nothing else in a block draws, and to keep a generator's state costs as much as a small product.
    draws = any(isinstance(module, _DROPOUTS) and module.p > 0 for module in block.modules())

    @wraps(forward)
    def wrapped(*args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        tensors: list[torch.Tensor] = []

        def taken(tensor: torch.Tensor) -> object:
            if tensor.requires_grad:
                tensor.blocks = 1 + getattr(tensor, "blocks", 0)  # type: ignore[attr-defined]
            tensors.append(tensor)
            return _PLACE

        given = _exchanged((args, kwargs), torch.Tensor, taken)
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        how = draws, shared, selective
        return _Recomputed.apply(forward, given, how, len(tensors), *tensors * _READERS, *trained)

    return wrapped


# What a compiler keeps of a block that is recomputed but for attention.
ATTENTION = [
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}").default
    for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
]
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
# By how many operators an input is read at most for its gradient to be summed in the order of an ordinary block.
_READERS = 4


class _Place:
    """Stands for a tensor among a block's arguments."""


_PLACE = _Place()


def _exchanged(value: Any, kind: type, new: Callable[[Any], Any]) -> Any:
    """`value`, with what `new` makes of each object of that kind in it."""
    if isinstance(value, kind):
        return new(value)
    if type(value) in (tuple, list):
        return type(value)([_exchanged(each, kind, new) for each in value])
    if type(value) is dict:
        return {key: _exchanged(each, kind, new) for key, each in value.items()}
    if isinstance(value, (tuple, list, Mapping)) or is_dataclass(value):
        raise TypeError(
            f"a recomputed block takes tensors in tuples, lists and dictionaries, not in a {type(value).__name__}"
        )
    return value


class _Recomputed(torch.autograd.Function):
    """A block's outputs, of which only the inputs are kept, and what it keeps itself. Its gradients are those of a second
    forward. torch.utils.checkpoint meets each tensor that is saved with Python of its own, which takes longer than many a
    block."""

    @staticmethod
    def forward(ctx, forward, given, how, count, *tensors):
        global _keeping
        draws, shared, selective = how
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[:count])
        ctx.block, ctx.given, ctx.shared, ctx.trained = forward, given, shared, tensors[count * _READERS :]
        ctx.drawn = _generators(tensors[0].device) if draws else None
        args, kwargs = _filled(given, tensors)
        before, _keeping = _keeping, [] if selective else None
        try:
            outputs = forward(*args, **kwargs)
        finally:
            ctx.kept, _keeping = _keeping, before
        if not all(isinstance(each, torch.Tensor) for each in (outputs if type(outputs) is tuple else (outputs,))):
            raise TypeError(f"a recomputed block returns a tensor or a tuple of tensors, not a {type(outputs).__name__}")
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        global _once
        before, _once = _once, {}
        try:
            return _Recomputed._gradients(ctx, gradients)
        finally:
            _once = before

    @staticmethod
    def _gradients(ctx, gradients):
        global _depth, _kept
        # Each a leaf, of the graph of this block alone.
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[4:], strict=False)
        inputs = [tensor.detach().requires_grad_(need) for tensor, need in needed]
        args, kwargs = _filled(ctx.given, inputs)
        _depth += 1
        before, _kept, ctx.kept = _kept, ctx.kept, None
        try:
            with nullcontext() if ctx.drawn is None else _drawing(ctx.drawn, inputs[0].device), torch.enable_grad():
                outputs = ctx.block(*args, **kwargs)
        finally:
            _depth -= 1
            _kept = before
        outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        read = [
            (get_gradient_edge(y), dy) for y, dy in zip(outputs, gradients, strict=True) if dy is not None and y.requires_grad
        ]
        # Else they would live as long as the walk back.
        del args, kwargs, outputs
        parts: list[list[torch.Tensor]] = [[] for _ in inputs]
        if read:
            edges = [edge for edge, _ in read]
            if ctx.shared or any(getattr(tensor, "blocks", 0) > 1 for tensor in ctx.saved_tensors):
                _keep_parts([edge.node for edge in edges], inputs, parts)
            leaves = [(tensor, into) for tensor, into in zip(inputs, parts, strict=True) if tensor.requires_grad]
            wanted = [*(leaf for leaf, _ in leaves), *ctx.trained]
            made = torch.autograd.grad(edges, wanted, [dy for _, dy in read], allow_unused=True)
            for (_, into), whole in zip(leaves, made, strict=False):
                into += [] if whole is None else [whole]
            _accumulate(ctx.trained, made[len(leaves) :])
        for those in parts:
            while len(those) > _READERS:
                last = those.pop()
                those[-1] = those[-1] + last
        of_inputs = [those[place] if place < len(those) else None for place in range(_READERS) for those in parts]
        return None, None, None, None, *of_inputs, *[None] * len(ctx.trained)


def _keep_parts(outputs: list[Any], inputs: Sequence[torch.Tensor], parts: Sequence[list[torch.Tensor]]) -> None:
    """Have a walk back from the nodes `outputs` put what each reader of an input adds to its gradient into `parts`, unsummed:
    parts of readers outside of the block come first, and sums of floating-point numbers depend on the order."""
    leaves = {get_gradient_edge(leaf).node: into for leaf, into in zip(inputs, parts, strict=True) if leaf.requires_grad}
    seen, ahead = set(), list(outputs)
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        read = {}
        for place, (following, _) in enumerate(node.next_functions):
            if following in leaves:
                read[place] = leaves[following]
            else:
                ahead.append(following)
        if read:
            node.register_hook(partial(_put_apart, read))


def _put_apart(read: dict[int, list[torch.Tensor]], made: tuple, _: tuple) -> tuple:
    for place, into in read.items():
        if made[place] is not None:
            into.append(made[place])
    return tuple(None if place in read else gradient for place, gradient in enumerate(made))


def _accumulate(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    """Add gradients to those that the parameters have, as autograd does for each by itself; here in one operator."""
    there, added = [], []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and parameter.grad is None:
            parameter.grad = torch.empty_like(parameter).copy_(gradient)  # two parameters may have been given one tensor
        elif gradient is not None:
            there.append(parameter.grad)
            added.append(gradient)
    if there:
        torch._foreach_add_(there, added)


def _filled(given: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """What a block is called with: `given` with the tensors in their places."""
    in_turn = iter(tensors)
    return _exchanged(given, _Place, lambda place: next(in_turn))


def _generators(device: torch.device) -> list[tuple[Callable[[torch.Tensor], None], torch.Tensor]]:
    """The state of each generator that is drawn from there, with what sets it."""
    states = [(torch.set_rng_state, torch.get_rng_state())]
    if device.type == "cuda":
        states.append((partial(torch.cuda.set_rng_state, device=device), torch.cuda.get_rng_state(device)))
    return states


@contextmanager
def _drawing(states: list[tuple[Callable[[torch.Tensor], None], torch.Tensor]], device: torch.device) -> Iterator[None]:
    """A block that draws what was drawn from these states. Afterwards the generators are as they were before it."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for put, state in states:
            put(state)
        yield


def recomputing() -> bool:
    """Whether a checkpointed block runs again, for what its backward pass reads."""
    return _depth > 0


@contextmanager
def put_back(tensors: Sequence[torch.Tensor], changed: Callable[[], object]) -> Iterator[None]:
    """Afterwards, however it ends, these tensors are bit for bit what they are now. changed: is called then."""
    copies = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, copies, strict=True):
                tensor.copy_(value)
        changed()


def give_back() -> None:
    """What the allocator keeps of freed memory goes back to the system, where the C library has a function for that (glibc):
    half a gigabyte of SDXL at full size."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def reset_peak(device: torch.device) -> None:
    """Begin a new span of `peak_bytes`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """The most that the device's tensors took since `reset_peak`; None where that is not counted."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
