"""A frozen base of which each process has a part: its blocks are brought together as they are streamed.

Every block is one flat buffer of bytes, whatever it stores. Each process keeps an equal part of it, on the device that
computes. Before a block computes, the parts are gathered into one of the two slots of block streaming: so the order, the
looking ahead and the hooks are those of runtime/streaming.py. Adapters, their optimizer and all that lies outside of blocks
are in every process.

A gather needs all processes, and not all do the same: one has a micro-batch less in an epoch's last update, leaves out one
that is not finite, or runs out of memory; the main process alone draws samples. So each gather comes after a round: every
process says which block it wants (Processes.wanted), and all gather the last of these. Who wanted another one says so
again. A process that has nothing to compute lends its parts (Processes.settle) until nobody wants any: before a reduction,
while it waits for others, and before it leaves. That is why this is not torch's fully_shard, which gathers as the forward
of a module is called, in all processes alike.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainer.base.tensorfile import size_text, tensor_sha256
from trainer.quantization import Payload
from trainer.runtime.streaming import ALIGNMENT, Streamed, Streamer, places_of, views_of


class Peers(Protocol):
    """What sharding asks of this process among its equals: runtime/processes.Processes."""

    rank: int

    def lend_with(self, lend: Callable[[], bool] | None) -> None:
        """Have a process without anything to compute call `lend` until it says that nobody wants a block."""

    def wanted(self, number: int) -> int:
        """The largest number that any process wants now; 0: none."""

    def gather(self, into: Tensor, part: Tensor) -> Any:
        """Start to bring the parts of all processes together, in the order of their ranks. Returns what `gathered` takes."""

    def gathered(self, work: Any) -> None:
        """Have all that the device is asked to compute from now on wait for that gather."""


class Gathers:
    """The way to the device from the parts in all processes. peers: None in a plan, where nothing has values."""

    def __init__(self, peers: Peers | None) -> None:
        self.peers = peers

    def copy(self, into: Tensor, part: Tensor) -> Any:
        """Start a gather, in all processes."""
        return None if self.peers is None else self.peers.gather(into, part)

    def wait(self, work: Any) -> None:
        """Have what computes wait for it."""
        if self.peers is not None:
            self.peers.gathered(work)


@dataclass
class InParts:
    """The home of a layer of which this process has a part, or nothing. index: of the layer in its block.

    The digests are made as it is filled, when the payload is there whole for the last time.
    """

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
    """Streams all blocks of one module, of each of which this process has a part. parts: how many there are of each.

    peers: those that have the others; None in a plan.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], device: torch.device, *, parts: int, peers: Peers | None) -> None:
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
        while self.peers is not None and (other := self.peers.wanted(number)) != number:
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
        number = self.peers.wanted(0)
        if number:
            self.leave()
            self.copy(self.streamed[number - 1], super().start)
        return number > 0

    def close(self) -> None:
        if self.peers is not None:
            self.peers.lend_with(None)
        self.last = None
        super().close()
