"""A batch on its way from a worker to the main process."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch

from trainer.base.types import Batch, Conditioning

LARGE = 2**18  # bytes of a tensor: from here on sharing its memory is quicker than sending it


@dataclass(frozen=True)
class Sent:
    """A batch on its way from a worker: large tensors in shared memory, small ones as bytes. torch would share the memory of
    every tensor, which takes longer than to read the batch (docs/benchmarks/programs.md)."""

    packed: Any

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """The batch, ready to be sent."""
        return cls(_pack(batch))

    def batch(self) -> Batch:
        """The batch that was sent."""
        return _unpack(self.packed)

    def pin_memory(self) -> Batch:
        """Called by torch's loader, in a thread of its own."""
        return self.batch().pin_memory()


@dataclass(frozen=True)
class _Bytes:
    """A tensor as the bytes of its values, row by row."""

    data: bytearray
    dtype: torch.dtype
    shape: tuple[int, ...]


def _pack(value: Any) -> Any:
    """A copy with each small tensor as _Bytes. value: a Batch, or a part of one."""
    if isinstance(value, torch.Tensor) and value.nbytes < LARGE:
        flat = value.detach().contiguous().reshape(-1)
        return _Bytes(bytearray(flat.view(torch.uint8).numpy()), value.dtype, tuple(value.shape))
    return _map_parts(value, _pack)


def _unpack(value: Any) -> Any:
    """The inverse of `_pack`."""
    if isinstance(value, _Bytes):
        flat = torch.frombuffer(value.data, dtype=value.dtype) if value.data else torch.empty(0, dtype=value.dtype)
        return flat.reshape(value.shape)
    return _map_parts(value, _unpack)


def _map_parts(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple):
        return tuple(map(change, value))
    if not isinstance(value, (Batch, Conditioning)):
        return value
    return replace(value, **{field.name: change(getattr(value, field.name)) for field in fields(value)})
