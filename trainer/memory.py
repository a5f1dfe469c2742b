"""What makes a run fit: gradient checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import wraps

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_blocks(denoiser: nn.Module, patterns: Sequence[str], every: bool | int) -> int:
    """Recompute the activations of every n-th block in the backward pass (True: of all). Returns how many blocks.

    patterns: fnmatch on dotted names; a block is the outermost module that matches with its last name an index.
    """
    if every is False:
        return 0
    blocks: list[nn.Module] = []
    names: list[str] = []
    for name, module in denoiser.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in names)
        if name.rpartition(".")[2].isdigit() and not inside and any(fnmatchcase(name, p) for p in patterns):
            names.append(name)
            blocks.append(module)
    chosen = blocks[:: 1 if every is True else every]
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
