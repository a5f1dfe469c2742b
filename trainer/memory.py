"""What makes a run fit: gradient checkpointing; and how it looks when it does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def checkpoint_blocks(blocks: Sequence[nn.Module], every: bool | int) -> int:
    """Recompute the activations of every n-th block in the backward pass (True: of all). Returns how many blocks."""
    chosen = blocks[:: 1 if every is True else every] if every else []
    for block in chosen:
        block.forward = _recomputed(block.forward)
    return len(chosen)


def _recomputed(forward: Callable) -> Callable:
    @wraps(forward)
    def wrapped(*args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return wrapped


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out: Python's, torch's allocator's, or an untyped one of a library's."""
    untyped = ("can't allocate memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(text in str(error) for text in untyped)


def what_would_fit(
    *, recomputed: bool | int, batch_size: int, resolution: int, rank: int, denoiser: str, dtype: str
) -> str:
    """After a step ran out of memory: what lowers its need, from the run's settings; first what keeps the run."""
    others = [
        *([f"data.batch_size below {batch_size}"] if batch_size > 1 else []),
        f"data.resolution below {resolution}",
        f"adapter.rank below {rank}",
        f"a smaller model.components.{denoiser}.dtype than {dtype}",
    ]
    new_run = f"start a new run (another run.output_dir) with {', '.join(others)}"
    if recomputed is True:
        return new_run
    return f"go on with --resume_from auto --set memory.gradient_checkpointing=true\nor {new_run}"
