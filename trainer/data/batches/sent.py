"""A batch on its way from a worker to the main process."""

from dataclasses import dataclass
from typing import Any, Self

import torch

from trainer.base.types import Batch, each_tensor

LARGE = 2**18  # bytes of a tensor: from here on sharing its memory is quicker than sending it


@dataclass(frozen=True)
class Sent:
    """A batch on its way from a worker: its large tensors in shared memory, the small ones as bytes. torch itself would share
    the memory of each, which takes longer than to read the batch (docs/benchmarks/programs.md)."""

    packed: Any

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """The batch, ready to be sent."""
        return cls(each_tensor(batch, _packed))

    def batch(self) -> Batch:
        """The batch that was sent."""
        return each_tensor(self.packed, _unpacked, _Bytes)

    def pin_memory(self) -> Batch:
        """torch's loader asks for it, in a thread of its own."""
        return self.batch().pin_memory()


@dataclass(frozen=True)
class _Bytes:
    """A tensor: its values, row by row."""

    data: bytearray
    dtype: torch.dtype
    shape: tuple[int, ...]


def _packed(tensor: torch.Tensor) -> torch.Tensor | _Bytes:
    if tensor.nbytes >= LARGE:
        return tensor
    flat = tensor.detach().contiguous().reshape(-1)
    return _Bytes(bytearray(flat.view(torch.uint8).numpy()), tensor.dtype, tuple(tensor.shape))


def _unpacked(value: _Bytes) -> torch.Tensor:
    flat = torch.frombuffer(value.data, dtype=value.dtype) if value.data else torch.empty(0, dtype=value.dtype)
    return flat.reshape(value.shape)
