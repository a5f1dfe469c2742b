"""What makes a run fit: gradient checkpointing."""

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
