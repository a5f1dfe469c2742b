"""Where parameters and gradients lie. Gradients are there from the start, zero, and accumulate in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

ALIGNMENT = 256  # elements: the block of 8-bit optimizers, so that no block spans two parameters


def flatten(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """One fp32 parameter whose slices the given ones become, gradients included.

    An adapter is hundreds of small tensors. Flat, they take one kernel each for the update, the norm, the clipping and the
    reduction over processes.
    """
    starts, total = [], 0
    for parameter in parameters:
        starts.append(total)
        total += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
    flat = nn.Parameter(torch.zeros(total, dtype=torch.float32, device=parameters[0].device))
    flat.grad = torch.zeros_like(flat)
    for parameter, start in zip(parameters, starts, strict=True):
        assert parameter.dtype == torch.float32
        piece = slice(start, start + parameter.numel())
        flat.data[piece].copy_(parameter.data.reshape(-1))
        parameter.data = flat.data[piece].view(parameter.shape)
        parameter.grad = flat.grad[piece].view(parameter.shape)
    return [flat]


def shaped(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """The given ones where they lie."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return list(parameters)
