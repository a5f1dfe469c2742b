"""A frozen base in a file without a name, gone with the process: memory holds two blocks (runtime/streaming.py)."""

import errno
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from trainer.base.tensorfile import size_text
from trainer.quantization import Payload
from trainer.runtime.streaming import Copies, Streamed, Streamer, places_of


@dataclass
class InFile:
    """The home of a layer in the file. payload: its form alone. starts: the place of each tensor. device: that computes."""

    file: BinaryIO
    payload: Payload
    starts: Mapping[str, int]
    device: torch.device
    digests = {}

    def whole(self) -> Payload:
        """The payload, read for whoever asks out of turn."""
        return {name: self._read(name, form).to(self.device) for name, form in self.payload.items()}

    def _read(self, name: str, form: Tensor) -> Tensor:
        flat = torch.empty(form.numel() * form.itemsize, dtype=torch.uint8)
        _fill(self.file, self.starts[name], flat)
        return flat.view(form.dtype).view(form.shape)

    def fill(self, payload: Payload) -> None:
        """Write the payload."""
        for name, tensor in payload.items():
            view = memoryview(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
            _whole(self.file, self.starts[name], view, self.file.write)


class Spiller(Streamer):
    """Streams all blocks of one module from a file in `folder`. Raises OSError where there is no room."""

    def __init__(self, blocks: Mapping[str, nn.Module], device: torch.device, folder: Path) -> None:
        self.file: Any = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  (close has its end)
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
        self.file.truncate(self.end)  # the padding of its last layer, too, can be read
        starts = [{name: first + start for name, start in places.items()} for places in places_of(block.layers)[0]]
        forms = [{name: tensor.to("meta") for name, tensor in layer.payload().items()} for layer in block.layers]
        return [InFile(self.file, form, places, self.device) for form, places in zip(forms, starts, strict=True)]

    def start(self, block: Streamed, into: Tensor) -> None:
        into = into[: block.size]
        read = into if into.device.type == "cpu" else torch.empty(block.size, dtype=torch.uint8)
        _fill(self.file, self.places[block.place], read)
        if read is not into:
            into.copy_(read)

    def close(self) -> None:
        super().close()
        self.file.close()


def _fill(file: BinaryIO, start: int, flat: Tensor) -> None:
    """Read a flat tensor of bytes. Raises OSError where the file gives less."""
    _whole(file, start, memoryview(flat.numpy()), file.readinto)  # type: ignore[attr-defined]


def _whole(file: BinaryIO, start: int, view: memoryview, move: Callable[[memoryview], int]) -> None:
    """Read or write all of `view` from that place on: the system may move less at once. Raises OSError at an early end."""
    file.seek(start)
    while view:
        if not (count := move(view)):
            raise OSError(errno.EIO, f"the temporary file of the weights ended {len(view)} bytes too early")
        view = view[count:]
