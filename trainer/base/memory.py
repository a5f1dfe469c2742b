"""What makes a run fit: gradient checkpointing; and how it looks when it does not."""

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import wraps

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def find_blocks(denoiser: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The blocks of a denoiser by name, in module order: the outermost modules that match, with an index as last name.

    patterns: fnmatch on dotted names.
    """
    blocks: dict[str, nn.Module] = {}
    for name, module in denoiser.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in blocks)
        if name.rpartition(".")[2].isdigit() and not inside and any(fnmatchcase(name, p) for p in patterns):
            blocks[name] = module
    return blocks


def checkpoint_blocks(blocks: Mapping[str, nn.Module], every: bool | int, unread: Sequence[str] = ()) -> int:
    """Recompute the activations of every n-th block in the backward pass (True: of all). Returns how many blocks.

    blocks: by name. unread: fnmatch patterns of frozen Linears whose output no backward pass reads.
    """
    chosen = list(blocks)[:: 1 if every is True else every] if every else []
    for name in chosen:
        block = blocks[name]
        block.forward = _recomputed(block.forward)
        for layer, module in block.named_modules(prefix=name):
            # Not those under an adapter: it reads what its layer gives.
            if hasattr(module, "unread") and any(fnmatchcase(layer, pattern) for pattern in unread):
                module.unread = True
    return len(chosen)


def _recomputed(forward: Callable) -> Callable:
    @wraps(forward)
    def wrapped(*args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), _recomputing()), **kwargs)

    return wrapped


_depth = 0


@contextmanager
def _recomputing() -> Iterator[None]:
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def recomputing() -> bool:
    """Whether a checkpointed block runs again, for what its backward pass reads."""
    return _depth > 0


@contextmanager
def put_back(tensors: Sequence[torch.Tensor], changed: Callable[[], object]) -> Iterator[None]:
    """Afterwards, however it ends, these tensors are bit for bit what they are now. changed: is called then."""
    kept = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, kept, strict=True):
                tensor.copy_(value)
        changed()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out: Python's, torch's allocator's, or an untyped one of a library's."""
    untyped = ("can't allocate memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(text in str(error) for text in untyped)


def give_back() -> None:
    """What the allocator keeps of freed memory goes back to the system, where the C library has a function for that (glibc).

    What was freed between things that live on stays with the process otherwise: half a gigabyte of SDXL at full size.
    """
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
