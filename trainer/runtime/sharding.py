"""Shards a frozen base: each process has a part of every block, and the parts are gathered as blocks are streamed.

Every block is one flat buffer of bytes. Each process has an equal part of it, on the device that computes. Before a block
computes, the parts are gathered into one of the two slots of block streaming (streaming.py), in its order and by its hooks.
Tensors outside of blocks are in every process.

A gather needs all processes, but they differ: one has a micro-batch less, or runs out of memory; the main process alone draws
samples. So a round precedes each gather: every process requests a block (Processes.largest_request), and all gather the last
of these. A process that requested another repeats its request. A process without work lends its parts (Processes.settle)
until there are no requests. Torch's fully_shard cannot do this: it gathers whenever a module's forward is called, in all
processes alike.
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
    """Gathers of all processes' parts. peers: None in a plan, whose tensors have no values."""

    peers: Processes | None

    def copy(self, into: Tensor, master: Tensor) -> Any:
        return None if self.peers is None else self.peers.gather(into, master)

    def wait(self, arrived: Any) -> None:
        if self.peers is not None:
            self.peers.finish_gather(arrived)


@dataclass
class InParts:
    """The home of a layer of which this process has a part, or nothing. index: the layer's in its block. digests: computed
    when it is filled, the last time that the payload is whole."""

    sharder: "Sharder"
    block: Streamed
    index: int
    payload: Payload
    digests: dict[str, str] = field(default_factory=dict)

    def whole(self) -> Payload:
        """The payload, gathered with its block: all other processes call this, or lend."""
        return self.sharder.payloads(self.block)[self.index]

    def fill(self, payload: Payload) -> None:
        """Copy this process's part of a payload into the master."""
        starts, (first, end) = places_of(self.block.layers)[0][self.index], self.sharder.span(self.block)
        for name, tensor in payload.items():
            content, start = tensor.contiguous().reshape(-1).view(torch.uint8), starts[name]
            low, high = max(first, start), min(end, start + content.numel())
            if low < high:
                self.block.master[low - first : high - first].copy_(content[low - start : high - start])
            self.digests[name] = tensor_sha256(tensor)


class Sharder(Streamer):
    """Streams all blocks of one module; this process has one of `parts` parts of each. peers: None in a plan."""

    def __init__(self, blocks: Mapping[str, nn.Module], device: torch.device, *, parts: int, peers: Processes | None) -> None:
        self.parts, self.unit, self.peers = parts, parts * ALIGNMENT, peers
        self.last: tuple[Streamed, list[dict[str, Tensor]]] | None = None  # (block, payloads) gathered out of turn
        super().__init__(blocks, 0, device, Gathers(peers))
        self.host = 0
        if peers is not None:
            peers.lend_with(self.lend)

    def __str__(self) -> str:
        return (
            f"{self.count} blocks are shared out among {self.parts} processes: {size_text(self.master_bytes)} of "
            f"{size_text(sum(self.sizes))} in each, {size_text(self.copied)} brought together a step"
        )

    def master_device(self) -> torch.device:
        return self.device

    def master_size(self, size: int) -> int:
        return size // self.parts

    def span(self, block: Streamed) -> tuple[int, int]:
        """(first byte, end) of this process's part of a block."""
        rank, size = 0 if self.peers is None else self.peers.rank, block.master.nbytes
        return rank * size, (rank + 1) * size

    def homes(self, block: Streamed) -> Sequence[InParts]:
        forms = [{name: tensor.to("meta") for name, tensor in layer.payload().items()} for layer in block.layers]
        return [InParts(self, block, index, form) for index, form in enumerate(forms)]

    def start(self, block: Streamed, into: Tensor) -> Any:
        number = block.place + 1
        # If another process's request wins a round, its block goes to this buffer, which is free: no other memory is needed.
        while self.peers is not None and (other := self.peers.largest_request(number)) != number:
            self.transfers.wait(super().start(self.streamed[other - 1], into))
        return super().start(block, into)

    def copy(self, block: Streamed, start: Callable[[Streamed, Tensor], Any] | None = None) -> None:
        present = self.in_slot[block.slot]
        if present is not None:
            self.transfers.wait(present.arrived)  # two gathers may run side by side
        super().copy(block, start)

    def payloads(self, block: Streamed) -> list[dict[str, Tensor]]:
        """Each layer's payload in a block, gathered out of turn; cached until the next call, or until a block is entered."""
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
        """Take part in a round without a request. Returns whether any process requested a block."""
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
