"""Gradient checkpointing (recomputation of blocks), and measurements of memory."""

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
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, get_device_states, set_device_states

_recompute_depth = 0  # nesting depth of blocks being recomputed now
# Selective checkpointing: values saved by the block's first forward so far; the rest of them during its recomputation.
_values_to_save: list[Any] | None = None
_saved_values: list[Any] | None = None
# Tensors shared by a recomputed block's forward and backward, keyed by producer; None outside of recomputation.
_recompute_cache: dict[Any, torch.Tensor] | None = None


def find_blocks(denoiser: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The blocks by name, in module order: the outermost modules with an index as last name that match a fnmatch pattern."""
    blocks: dict[str, nn.Module] = {}
    for name, module in denoiser.named_modules():
        nested = any(name.startswith(f"{outer}.") for outer in blocks)
        if name.rpartition(".")[2].isdigit() and not nested and any(fnmatchcase(name, p) for p in patterns):
            blocks[name] = module
    return blocks


def checkpoint_blocks(
    blocks: Mapping[str, nn.Module],
    every: bool | int | Literal["selective"],
    unread: Sequence[str] = (),
    skipped: Sequence[str] = (),
    compiled: Collection[str] = (),
) -> int:
    """Recompute the activations of every n-th block in the backward pass (True: of all blocks); returns their number.
    "selective": of all, but save values that cost much time and little memory: attention, and a last product if the backward
    pass reads it (`save_value`).

    blocks: by name, adapters included: parameters added later get no gradient. They take tensors, also in tuples, lists and
    dictionaries, and return one tensor or a tuple. Parameter gradients go to `.grad`, past hooks and autograd.grad.
    unread: fnmatch patterns of frozen layers whose output no backward pass reads. skipped: patterns of blocks whose input
    is read outside of them, too. compiled: names of blocks compiled whole: the compiler sees the purpose of the second
    forward, saves no more than that needs, and drops unread results itself.
    """
    selective = every == "selective"
    step = 1 if isinstance(every, (bool, str)) else every
    names = list(blocks)[::step] if every else []
    for name in names:
        block = blocks[name]
        if name in compiled:
            block.forward = _checkpointed(block.forward, selective)
            continue
        # Next to blocks that are not recomputed it is unknown which of them read the same input.
        shared = step != 1 or any(fnmatchcase(name, pattern) for pattern in skipped)
        block.forward = _recomputed(block, shared, selective)
        for layer, module in block.named_modules(prefix=name):
            if any(fnmatchcase(layer, pattern) for pattern in unread):
                frozen = module.get_base_layer() if hasattr(module, "get_base_layer") else module
                if hasattr(frozen, "unread"):
                    frozen.unread = True
    return len(names)


def _checkpointed(forward: Callable, selective: bool) -> Callable:
    context = {"context_fn": partial(create_selective_checkpoint_contexts, ATTENTION)} if selective else {}

    @wraps(forward)
    def wrapped(*args, **kwargs):
        return checkpoint(forward, *args, use_reentrant=False, **context, **kwargs)

    return wrapped


def is_saving() -> bool:
    """Whether the first forward of a selectively checkpointed block is running."""
    return _values_to_save is not None


def save_value(value: Any) -> None:
    """Save a value for `saved_value` at the same place of the recomputation, if `is_saving`."""
    if _values_to_save is not None:
        _values_to_save.append(value)


def saved_value() -> Any:
    """The value saved at this place by the block's first forward; None outside of selective recomputation."""
    return _saved_values.pop(0) if _saved_values else None


def recompute_cache() -> dict[Any, torch.Tensor] | None:
    """Tensors shared by a recomputed block's forward and backward, keyed by producer; None outside of recomputation."""
    return _recompute_cache


def _recomputed(block: nn.Module, shared: bool, selective: bool) -> Callable:
    forward, parameters = block.forward, list(block.parameters())
    # Only dropout draws in a block, and saving a generator's state costs as much as a small product.
    draws = any(isinstance(module, _DROPOUTS) and module.p > 0 for module in block.modules())

    @wraps(forward)
    def wrapped(*args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        tensors: list[torch.Tensor] = []

        def take(tensor: torch.Tensor) -> object:
            if tensor.requires_grad:
                tensor.blocks = 1 + getattr(tensor, "blocks", 0)  # type: ignore[attr-defined]
            tensors.append(tensor)
            return _PLACE

        arguments = _exchanged((args, kwargs), torch.Tensor, take)
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        options = draws, shared, selective
        return _Recomputed.apply(forward, arguments, options, len(tensors), *tensors * _READERS, *trained)

    return wrapped


# Operators whose results selective checkpointing of a compiled block saves.
ATTENTION = [
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}").default
    for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
]
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
# Up to this many readers of an input, its gradient is summed in the order of an ordinary block.
_READERS = 4


class _Place:
    """Placeholder for a tensor in a block's arguments."""


_PLACE = _Place()


def _exchanged(value: Any, kind: type, replace: Callable[[Any], Any]) -> Any:
    """`value` with `replace(object)` in place of each object of that kind."""
    if isinstance(value, kind):
        return replace(value)
    if type(value) in (tuple, list):
        return type(value)([_exchanged(item, kind, replace) for item in value])
    if type(value) is dict:
        return {key: _exchanged(item, kind, replace) for key, item in value.items()}
    if isinstance(value, (tuple, list, Mapping)) or is_dataclass(value):
        raise TypeError(
            f"a recomputed block takes tensors in tuples, lists and dictionaries, not in a {type(value).__name__}"
        )
    return value


class _Recomputed(torch.autograd.Function):
    """A block's outputs; only its inputs and saved values stay in memory. Its gradients are those of a second forward.
    torch.utils.checkpoint runs Python code for each saved tensor, which takes longer than many a block."""

    @staticmethod
    def forward(ctx, forward, arguments, options, count, *tensors):
        global _values_to_save
        draws, shared, selective = options
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[:count])
        ctx.block, ctx.arguments, ctx.shared, ctx.trained = forward, arguments, shared, tensors[count * _READERS :]
        ctx.generators = (torch.get_rng_state(), *get_device_states(tensors[0])) if draws else None
        args, kwargs = _filled(arguments, tensors)
        before, _values_to_save = _values_to_save, [] if selective else None
        try:
            outputs = forward(*args, **kwargs)
        finally:
            ctx.saved_values, _values_to_save = _values_to_save, before
        if not all(isinstance(y, torch.Tensor) for y in (outputs if type(outputs) is tuple else (outputs,))):
            raise TypeError(f"a recomputed block returns a tensor or a tuple of tensors, not a {type(outputs).__name__}")
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        global _recompute_cache
        before, _recompute_cache = _recompute_cache, {}
        try:
            return _Recomputed._gradients(ctx, gradients)
        finally:
            _recompute_cache = before

    @staticmethod
    def _gradients(ctx, gradients):
        global _recompute_depth, _saved_values
        # Each input is a leaf of the graph of this block alone.
        flags = ctx.needs_input_grad[4:]
        inputs = [x.detach().requires_grad_(flag) for x, flag in zip(ctx.saved_tensors, flags, strict=False)]
        args, kwargs = _filled(ctx.arguments, inputs)
        _recompute_depth += 1
        before, _saved_values, ctx.saved_values = _saved_values, ctx.saved_values, None
        try:
            with nullcontext() if ctx.generators is None else _generators_at(*ctx.generators), torch.enable_grad():
                outputs = ctx.block(*args, **kwargs)
        finally:
            _recompute_depth -= 1
            _saved_values = before
        outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        pairs = [
            (get_gradient_edge(y), dy) for y, dy in zip(outputs, gradients, strict=True) if dy is not None and y.requires_grad
        ]
        # Else they would stay in memory during the backward pass.
        del args, kwargs, outputs
        parts: list[list[torch.Tensor]] = [[] for _ in inputs]
        if pairs:
            edges = [edge for edge, _ in pairs]
            if ctx.shared or any(getattr(tensor, "blocks", 0) > 1 for tensor in ctx.saved_tensors):
                _split_gradients([edge.node for edge in edges], inputs, parts)
            leaves = [(tensor, terms) for tensor, terms in zip(inputs, parts, strict=True) if tensor.requires_grad]
            targets = [*(leaf for leaf, _ in leaves), *ctx.trained]
            results = torch.autograd.grad(edges, targets, [dy for _, dy in pairs], allow_unused=True)
            for (_, terms), gradient in zip(leaves, results, strict=False):
                terms += [] if gradient is None else [gradient]
            _accumulate(ctx.trained, results[len(leaves) :])
        for terms in parts:
            while len(terms) > _READERS:
                last = terms.pop()
                terms[-1] = terms[-1] + last
        dx = [terms[index] if index < len(terms) else None for index in range(_READERS) for terms in parts]
        return None, None, None, None, *dx, *[None] * len(ctx.trained)


def _split_gradients(outputs: list[Any], inputs: Sequence[torch.Tensor], parts: Sequence[list[torch.Tensor]]) -> None:
    """Make the backward pass from the nodes `outputs` append each reader's term of an input's gradient to `parts`, unsummed:
    terms of readers outside of the block come first, and sums of floating-point numbers depend on the order."""
    leaves = {get_gradient_edge(leaf).node: terms for leaf, terms in zip(inputs, parts, strict=True) if leaf.requires_grad}
    visited, stack = set(), list(outputs)
    while stack:
        node = stack.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        collected = {}
        for index, (following, _) in enumerate(node.next_functions):
            if following in leaves:
                collected[index] = leaves[following]
            else:
                stack.append(following)
        if collected:
            node.register_hook(partial(_take_terms, collected))


def _take_terms(collected: dict[int, list[torch.Tensor]], gradients: tuple, _: tuple) -> tuple:
    for index, terms in collected.items():
        if gradients[index] is not None:
            terms.append(gradients[index])
    return tuple(None if index in collected else gradient for index, gradient in enumerate(gradients))


def _accumulate(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    """Add gradients to the parameters' `.grad`, as autograd does one by one; here in one operator."""
    sums, added = [], []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and parameter.grad is None:
            parameter.grad = torch.empty_like(parameter).copy_(gradient)  # two parameters may have been given one tensor
        elif gradient is not None:
            sums.append(parameter.grad)
            added.append(gradient)
    if sums:
        torch._foreach_add_(sums, added)


def _filled(arguments: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """A block's arguments with the tensors in place of their placeholders."""
    remaining = iter(tensors)
    return _exchanged(arguments, _Place, lambda place: next(remaining))


@contextmanager
def _generators_at(cpu: torch.Tensor, devices: list[int], states: list[torch.Tensor]) -> Iterator[None]:
    """A block that draws from these generator states; afterwards the generators are as before it."""
    with torch.random.fork_rng(devices):
        torch.set_rng_state(cpu)
        set_device_states(devices, states)
        yield


def recomputing() -> bool:
    """Whether a checkpointed block is being recomputed for its backward pass."""
    return _recompute_depth > 0


@contextmanager
def preserved(tensors: Sequence[torch.Tensor], changed: Callable[[], object]) -> Iterator[None]:
    """Restore these tensors bit for bit after the block, however it ends. changed: called after that."""
    copies = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, copies, strict=True):
                tensor.copy_(value)
        changed()


def give_back() -> None:
    """Return freed memory that the allocator holds to the system (0.5 GB for SDXL), if the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def reset_peak(device: torch.device) -> None:
    """Restart the measurement of `peak_bytes`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """The peak of the device's tensors in bytes since `reset_peak`; None on devices that do not count it."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
