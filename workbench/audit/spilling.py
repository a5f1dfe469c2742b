"""A frozen base in an unnamed temporary file, gone with the process: memory holds two blocks (runtime/streaming.py)."""

import errno
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.base.tensorfile import size_text
from trainer.quantization import Payload
from trainer.runtime.streaming import Copies, Streamed, Streamer, places_of


@dataclass
class InFile:
    """A layer's storage in the file. payload: on the meta device. starts: offsets of its tensors. device: of the layer."""

    file: Any  # an unbuffered temporary file
    payload: Payload
    starts: Mapping[str, int]
    device: torch.device
    digests = {}

    def whole(self) -> Payload:
        """The payload, read out of turn."""
        payload = {}
        for name, meta in self.payload.items():
            flat = torch.empty(meta.nbytes, dtype=torch.uint8)
            _move(self.file, self.starts[name], flat, self.file.readinto)
            payload[name] = flat.view(meta.dtype).view(meta.shape).to(self.device)
        return payload

    def fill(self, payload: Payload) -> None:
        """Write the payload."""
        for name, tensor in payload.items():
            flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
            _move(self.file, self.starts[name], flat, self.file.write)


class Spiller(Streamer):
    """Streams all blocks of one module from a file in `folder`. Raises OSError if there is no room."""

    def __init__(self, blocks: Mapping[str, nn.Module], device: torch.device, folder: Path) -> None:
        self.file: Any = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  (closed in close)
        self.places: dict[int, int] = {}
        self.end = 0
        super().__init__(blocks, 0, device, Copies())

    def __str__(self) -> str:
        return f"{self.count} blocks are read from the disk as they are needed: {size_text(self.end)} in a temporary file"

    def master_size(self, size: int) -> int:
        return 0

    def homes(self, block: Streamed) -> Sequence[InFile]:
        self.places[block.place], first = self.end, self.end
        self.end += block.size
        self.file.truncate(self.end)  # so that the padding of the last layer can be read, too
        starts = [{name: first + start for name, start in places.items()} for places in places_of(block.layers)[0]]
        forms = [{name: tensor.to("meta") for name, tensor in layer.payload().items()} for layer in block.layers]
        return [InFile(self.file, form, places, self.device) for form, places in zip(forms, starts, strict=True)]

    def start(self, block: Streamed, into: Tensor) -> None:
        into = into[: block.size]
        read = into if into.device.type == "cpu" else torch.empty(block.size, dtype=torch.uint8)
        _move(self.file, self.places[block.place], read, self.file.readinto)
        if read is not into:
            into.copy_(read)

    def close(self) -> None:
        super().close()
        self.file.close()


def _move(file: Any, start: int, flat: Tensor, move: Callable[[memoryview], int]) -> None:
    """Read or write a flat tensor of bytes at offset `start`: one call may move less. Raises OSError at an early end."""
    file.seek(start)
    view = memoryview(flat.numpy())
    while view:
        if not (count := move(view)):
            raise OSError(errno.EIO, f"the temporary file of the weights ended {len(view)} bytes too early")
        view = view[count:]
