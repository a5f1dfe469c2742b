"""How an optimizer sees an adapter's parameters: as one flat tensor, or as matrices. They share memory."""

from collections.abc import Sequence

import torch
from torch import nn

ALIGNMENT = 256  # elements: the block of 8-bit optimizers, so that no block spans two parameters


def padded(elements: int) -> int:
    """What a parameter of so many elements takes of a flat one."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


def flatten(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """One fp32 parameter whose slices the given ones become, gradients included. These are there from the start, zero.

    An adapter is hundreds of small tensors. Flat, they take one kernel each for the update, the norm, the clipping and the
    reduction over processes.
    """
    sizes = [padded(parameter.numel()) for parameter in parameters]
    flat = nn.Parameter(torch.zeros(sum(sizes), dtype=torch.float32, device=parameters[0].device))
    flat.grad = torch.zeros_like(flat)
    for parameter, *pieces in zip(parameters, flat.data.split(sizes), flat.grad.split(sizes), strict=True):
        assert parameter.dtype == torch.float32
        data, grad = (piece[: parameter.numel()].view(parameter.shape) for piece in pieces)
        parameter.data, parameter.grad = data.copy_(parameter.data), grad
    return [flat]


def matrices(parameters: Sequence[nn.Parameter], *, magnitudes: bool) -> list[nn.Parameter]:
    """Each of the given ones as [N, K], convolutions [N, C, h, w] with K = C h w; magnitudes as [N]. Gradients are zero."""
    views = []
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
        shape = (-1,) if magnitudes else (parameter.shape[0], -1)
        views.append(nn.Parameter(parameter.data.view(shape)))
        views[-1].grad = parameter.grad.view(shape)
    return views
