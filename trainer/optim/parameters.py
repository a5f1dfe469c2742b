"""Views of an adapter's parameters for its optimizer, which share their memory: one flat tensor, or matrices."""

from collections.abc import Sequence

import torch
from torch import nn

ALIGNMENT = 256  # elements: the block of 8-bit optimizers, so that no block spans two parameters


def padded(elements: int) -> int:
    """The elements of a flat parameter that a parameter of so many elements occupies: whole blocks."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


def flatten(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """One fp32 parameter; the given ones become its slices, and so do their gradients, which start at zero.

    An adapter is hundreds of small tensors; a flat one takes one kernel each for update, norm, clipping and reduction.
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
    """Each parameter as [N, K], convolutions [N, C, h, w] with K = C h w; magnitudes as [N]. Gradients start at zero."""
    views = []
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
        shape = (-1,) if magnitudes else (parameter.shape[0], -1)
        views.append(nn.Parameter(parameter.data.view(shape)))
        views[-1].grad = parameter.grad.view(shape)
    return views
