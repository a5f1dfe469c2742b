"""Reused buffers for tensors needed during a single matrix product, or for one piece of a weight."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch

# Buffer numbers: 0 is the converted weight of a product (quantization/layers.py), the others are decode.py's.
PIECE_BUFFER, SECOND_BUFFER = 1, 2
# Each with its views by shape: creating a view takes as long as a small product.
_buffers: dict[tuple[torch.device, torch.dtype, int], tuple[torch.Tensor, dict[tuple[int, ...], torch.Tensor]]] = {}


def scratch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, which: int = 0) -> torch.Tensor:
    """Uninitialised [shape], overwritten by the next call: use it at once, never save it for a backward pass.

    One buffer for each device, dtype and `which`: two in use at a time need different numbers. A buffer grows to the largest
    request and is never freed. Work on one CUDA stream is ordered, so that suffices. A compiler plans memory by itself and
    gets a fresh tensor: to it, a reused buffer would be a mutation to order around.
    """
    if torch.compiler.is_compiling():
        return torch.empty(shape, dtype=dtype, device=device)
    key = device, dtype, which
    if key in _buffers and shape in _buffers[key][1]:
        return _buffers[key][1][shape]
    size = prod(shape)
    with torch.inference_mode(False):  # code outside of that mode must be able to write to it
        if key not in _buffers or _buffers[key][0].numel() < size:
            _buffers.pop(key, None)
            _buffers[key] = torch.empty(size, dtype=dtype, device=device), {}
        whole, views = _buffers[key]
        views[shape] = whole[:size].view(shape)
    return views[shape]


@contextmanager
def own_buffers() -> Iterator[None]:
    """A context with new buffers; the previous ones return at its end."""
    global _buffers
    previous, _buffers = _buffers, {}
    try:
        yield
    finally:
        _buffers = previous
