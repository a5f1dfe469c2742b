"""A frozen base of which each process has a part: its blocks are brought together as they are streamed.

Every block is one flat buffer of bytes. Each process keeps an equal part of it, on the device that computes. Before a block
computes, the parts are gathered into one of the two slots of block streaming (streaming.py), in its order and by its hooks.
All that lies outside of blocks is in every process.

A gather needs all processes, and not all do the same: one has a micro-batch less, or runs out of memory; the main process
alone draws samples. So each gather comes after a round: every process says which block it wants (Processes.wanted), and all
gather the last of these. Who wanted another one says so again. A process that has nothing to compute lends its parts
(Processes.settle) until nobody wants any. That is why this is not torch's fully_shard, which gathers as the forward of a
module is called, in all processes alike.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainer.base.tensorfile import size_text, tensor_sha256
from trainer.quantization import Payload
from trainer.runtime.processes import Processes
from trainer.runtime.streaming import ALIGNMENT, Copies, Streamed, Streamer, places_of, views_of


@dataclass
class Gathers(Copies):
    """Gathers from the parts in all processes. peers: None in a plan, where nothing has values."""

    peers: Processes | None

    def copy(self, into: Tensor, master: Tensor) -> Any:
        return None if self.peers is None else self.peers.gather(into, master)

    def wait(self, arrived: Any) -> None:
        if self.peers is not None:
            self.peers.finish_gather(arrived)


@dataclass
class InParts:
    """The home of a layer of which this process has a part, or nothing. index: of the layer in its block. digests: made as it
    is filled, when the payload is there whole for the last time."""

    sharder: "Sharder"
    block: Streamed
    index: int
    payload: Payload
    digests: dict[str, str] = field(default_factory=dict)

    def whole(self) -> Payload:
        """The payload, brought together with its block: all processes come here, or lend."""
        return self.sharder.brought(self.block)[self.index]

    def fill(self, payload: Payload) -> None:
        """Keep this process's part of it."""
        starts, (first, end) = places_of(self.block.layers)[0][self.index], self.sharder.own(self.block)
        for name, tensor in payload.items():
            content, start = tensor.contiguous().reshape(-1).view(torch.uint8), starts[name]
            low, high = max(first, start), min(end, start + content.numel())
            if low < high:
                self.block.kept[low - first : high - first].copy_(content[low - start : high - start])
            self.digests[name] = tensor_sha256(tensor)


class Sharder(Streamer):
    """Streams all blocks of one module, of each of which this process has one of `parts`. peers: None in a plan."""

    def __init__(self, blocks: Mapping[str, nn.Module], device: torch.device, *, parts: int, peers: Processes | None) -> None:
        self.parts, self.unit, self.peers = parts, parts * ALIGNMENT, peers
        self.last: tuple[Streamed, list[dict[str, Tensor]]] | None = None  # that was brought out of turn
        super().__init__(blocks, 0, device, Gathers(peers))
        self.host = 0
        if peers is not None:
            peers.lend_with(self.lend)

    def __str__(self) -> str:
        return (
            f"{self.count} blocks are shared out among {self.parts} processes: {size_text(self.kept)} of "
            f"{size_text(sum(self.sizes))} in each, {size_text(self.copied)} brought together a step"
        )

    def keeps_on(self) -> torch.device:
        return self.device

    def kept_of(self, size: int) -> int:
        return size // self.parts

    def own(self, block: Streamed) -> tuple[int, int]:
        """(the first byte of a block that this process has, the first after it)."""
        rank, size = 0 if self.peers is None else self.peers.rank, block.kept.nbytes
        return rank * size, (rank + 1) * size

    def homes(self, block: Streamed) -> Sequence[InParts]:
        forms = [{name: tensor.to("meta") for name, tensor in layer.payload().items()} for layer in block.layers]
        return [InParts(self, block, index, form) for index, form in enumerate(forms)]

    def start(self, block: Streamed, into: Tensor) -> Any:
        number = block.place + 1
        # Of a round that another process won, the buffer takes the block: it is free, and nothing need be found for it.
        while self.peers is not None and (other := self.peers.largest_request(number)) != number:
            self.transfers.wait(super().start(self.streamed[other - 1], into))
        return super().start(block, into)

    def copy(self, block: Streamed, start: Callable[[Streamed, Tensor], Any] | None = None) -> None:
        held = self.held[block.slot]
        if held is not None:
            self.transfers.wait(held.arrived)  # two gathers may run side by side
        super().copy(block, start)

    def brought(self, block: Streamed) -> list[dict[str, Tensor]]:
        """The payload of each layer of a block, out of turn. It is kept until another is asked for, or a block is entered."""
        if self.last is None or self.last[0] is not block:
            self.last = None
            into = torch.empty(self.slots[0].shape, dtype=torch.uint8, device=self.device)
            self.transfers.wait(self.start(block, into))
            self.last = block, views_of(block.layers, into)
        return self.last[1]

    def enter(self, place: int, way: int) -> None:
        self.last = None
        super().enter(place, way)

    def lend(self) -> bool:
        """Take part in a round without wanting a block. Returns whether any process wanted one."""
        assert self.peers is not None
        number = self.peers.largest_request(0)
        if number:
            self.leave()
            self.copy(self.streamed[number - 1], super().start)
        return number > 0

    def close(self) -> None:
        if self.peers is not None:
            self.peers.lend_with(None)
        self.last = None
        super().close()
