"""A frozen base that lies in host memory, and passes over the device block by block.

Every streamed block has a master: one flat buffer of the host, pinned beside a GPU and only read. On the device there are two
slots, each as large as the largest block. Streamed block number j always passes through slot j % 2, so its layers read from
the same place each time. While one block computes, the next one is copied into the other slot, on a stream of its own.

Blocks are only entered, never left: in the forward pass by a hook on the module, in the backward pass by a hook on the node
that gave the block's output, which runs before the block's other nodes and its recomputation. Autograd runs what is ready by
the order in which it was made, the last first, and nothing of a block can wait for what was made before it: so all of a later
block is done before the first of an earlier one. To enter a block is to leave all others.

A layer that computes out of turn brings in its own payload (FrozenLayer.stored): a wrong order costs time, not truth.
"""

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from trainer.base.tensorfile import size_text
from trainer.quantization import FrozenLayer, Home, Payload, copy_payload

# The ways through the blocks: forward with a way back, which begins at the last blocks; back; and forward again and again.
FORWARD, BACK, ROUND = 1, -1, 0
SLOTS = 2
ALIGNMENT = 256  # bytes: of each tensor in a flat buffer, as torch's own allocators have it


class Copies:
    """The way to the device: copies from memory to memory, at once, for a CPU."""

    def copy(self, into: Tensor, master: Tensor) -> Any:
        """Start a copy, after all that the device was asked to compute so far. Returns what `wait` takes."""
        into.copy_(master)

    def wait(self, arrived: Any) -> None:
        """Have all that the device is asked to compute from now on wait for that copy."""


class CudaCopies(Copies):
    """Copies of pinned memory on a stream of their own, beside the one that computes. The host never waits."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def copy(self, into: Tensor, master: Tensor) -> torch.cuda.Event:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            into.copy_(master, non_blocking=True)
        return self.stream.record_event()

    def wait(self, arrived: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(arrived)


@dataclass
class InMaster:
    """The home of a layer in its block's master. device: that computes."""

    payload: Payload
    device: torch.device
    digests: Mapping[str, str] = field(default_factory=dict)

    def whole(self) -> Payload:
        """A copy, where the device has a memory of its own."""
        return {name: tensor.to(self.device) for name, tensor in self.payload.items()}

    def fill(self, payload: Payload) -> None:
        """Copy it into the master."""
        copy_payload(payload, self.payload)


@dataclass(eq=False)
class Streamed:
    """A streamed block. place: among all blocks. size: bytes. kept: this process's flat buffer. arrived: of its last copy."""

    place: int
    layers: Sequence[FrozenLayer]
    size: int
    kept: Tensor
    slot: int
    arrived: Any = None
    bound: bool = False

    def bind(self, passing: bool) -> None:
        """Let its layers compute with what lies in the slot, or with what they have at home."""
        if self.bound != passing:
            self.bound = passing
            for layer in self.layers:
                layer.bind(passing)


class Streamer:
    """Streams the blocks of one module, but for `resident` of them, which are spread evenly among the others. Those given are
    in the order of a forward pass, and their payloads have no memory yet (meta device). device: that computes.

    blocks: the streamed ones by name. sizes: bytes of payload in each of all. copies: that were started. kept: bytes that
    this process has of the streamed ones. copied: bytes that one step copies. host: the part of `kept` in the host's memory.
    """

    unit = ALIGNMENT  # bytes: the size of a block is a multiple of it

    def __init__(
        self, blocks: Mapping[str, nn.Module], resident: int, device: torch.device, transfers: Copies | None = None
    ) -> None:
        self.count, self.copies, self.device = len(blocks), 0, device
        places = [place for place in range(self.count) if not stays(place, self.count, resident)]
        names = [*blocks]
        self.blocks = {names[place]: blocks[names[place]] for place in places}
        layers = [[e for e in block.modules() if isinstance(e, FrozenLayer)] for block in blocks.values()]
        self.sizes = [-(-places_of(mine)[1] // self.unit) * self.unit for mine in layers]
        sizes = [self.sizes[place] for place in places]
        # A compiled block saves what it computes with for its backward pass, before which it is entered again: that the slot
        # held another block meanwhile is no change. So the copies write past autograd's count of changes (`data`).
        self.slots = [torch.empty(max(sizes, default=0), dtype=torch.uint8, device=device) for _ in sizes[:SLOTS]]
        self.streamed: dict[int, Streamed] = {}
        for number, (place, size) in enumerate(zip(places, sizes, strict=True)):
            slot, mine = number % SLOTS, layers[place]
            memory = torch.empty(self.kept_of(size), dtype=torch.uint8, device=self.keeps_on())
            block = self.streamed[place] = Streamed(place, mine, size, memory, slot)
            for layer, home, passing in zip(mine, self.homes(block), views_of(mine, self.slots[slot]), strict=True):
                layer.stream(home, passing)
        self.transfers = transfers or self.way()
        self.kept = self.host = sum(block.kept.nbytes for block in self.streamed.values())
        self.copied = sum(sizes[SLOTS:]) + sum(sizes[:-SLOTS])
        self.held: list[Streamed | None] = [None] * len(self.slots)
        self.now: tuple[int, int] | None = None  # the block that computes, and the way
        in_order = [*self.streamed.values()]
        self.ahead = {way: [_ahead(in_order, place, way) for place in range(self.count)] for way in (FORWARD, BACK, ROUND)}
        self._hooks = [
            hook
            for place, block in enumerate(blocks.values())
            for hook in (
                block.register_forward_pre_hook(partial(self._before, place)),
                block.register_forward_hook(partial(self._after, place, partial(self._back, place))),
            )
        ]

    # --- where the bytes are (elsewhere in sharding.py) ---------------------------------------------------------------

    def keeps_on(self) -> torch.device:
        """The device that keeps what this process has of the blocks."""
        return torch.device("meta") if self.device.type == "meta" else torch.device("cpu")

    def kept_of(self, size: int) -> int:
        """The bytes that this process keeps of a block of `size` bytes."""
        return size

    def homes(self, block: Streamed) -> Sequence[Home]:
        """The home of each layer of a block."""
        return [InMaster(views, self.device) for views in views_of(block.layers, block.kept)]

    def way(self) -> Copies:
        """The way to the device. Pins the masters beside a GPU."""
        if self.device.type != "cuda":
            return Copies()
        masters = [block.kept for block in self.streamed.values()]
        _pin(masters)
        weakref.finalize(self, _unpin, masters)
        return CudaCopies(self.device)

    def start(self, block: Streamed, into: Tensor) -> Any:
        """Start to bring a block's bytes to the beginning of a buffer of the device, which is as large as a slot."""
        return self.transfers.copy(into[: block.size], block.kept)

    def at_home(self) -> Collection[Tensor]:
        """The tensors of the module that get no memory of the device."""
        return [tensor for block in self.streamed.values() for layer in block.layers for tensor in layer.payload().values()]

    def __str__(self) -> str:
        return (
            f"{len(self.streamed)} of {self.count} blocks are streamed: {size_text(self.kept)} in host memory, "
            f"{size_text(self.copied)} copied a step"
        )

    def enter(self, place: int, way: int) -> None:
        """A block is about to compute: it is there from now on, and the next one is on its way."""
        if self.now == (place, way):
            return
        self.now = place, way
        block = self.streamed.get(place)
        if block is not None:
            if self.held[block.slot] is not block:
                self.copy(block)
            self.transfers.wait(block.arrived)
            block.bind(True)
        self._look_ahead(place, way)

    def leave(self) -> None:
        """Nothing computes: any slot may be taken."""
        self.now = None

    def enter_block(self, name: str) -> None:
        """Enter a streamed block by its name, on the way forward."""
        place = next(place for place, block in zip(self.streamed, self.blocks, strict=True) if block == name)
        self.enter(place, FORWARD)

    def close(self) -> None:
        """Let go of the masters and the slots, and of the blocks."""
        for hook in self._hooks:
            hook.remove()
        for block in self.streamed.values():
            for layer in block.layers:
                layer.end_stream()
        self.blocks, self.streamed, self.slots = {}, {}, []
        self.held, self._hooks, self.ahead = [], [], {}

    def _look_ahead(self, place: int, way: int) -> None:
        needed = [self.streamed.get(place)] if self.now is not None else []  # it computes
        for following in self.ahead[way][place]:
            held = self.held[following.slot]
            if held is not following:
                if held in needed:
                    break
                self.copy(following)
            needed.append(following)

    def copy(self, block: Streamed, start: Callable[[Streamed, Tensor], Any] | None = None) -> None:
        """Start the copy of a block into its slot. start: in place of `self.start`."""
        held = self.held[block.slot]
        if held is not None:
            held.bind(False)
        self.held[block.slot] = None
        block.arrived = (start or self.start)(block, self.slots[block.slot].data)
        self.held[block.slot] = block
        self.copies += 1

    # --- hooks --------------------------------------------------------------------------------------------------------

    def _before(self, place: int, block: nn.Module, given: tuple) -> None:
        self.enter(place, FORWARD if torch.is_grad_enabled() else ROUND)

    def _after(self, place: int, back: Any, block: nn.Module, given: tuple, output: Any) -> None:
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        nodes = {each.grad_fn for each in outputs if isinstance(each, Tensor) and each.grad_fn is not None}
        for node in nodes:
            node.register_prehook(back)
        if not nodes:  # there is no way back
            self.leave()
            self._look_ahead(place, ROUND)

    def _back(self, place: int, gradients: tuple) -> None:
        self.enter(place, BACK)


def stays(place: int, count: int, resident: int) -> bool:
    """Whether a block stays on the device: `resident` of `count` do, as evenly spread as can be."""
    return (place + 1) * resident // count > place * resident // count


def device_bytes(blocks: Sequence[int], resident: int) -> int:
    """What the payloads of all blocks take on the device: the resident blocks and the slots. blocks: bytes of each."""
    staying = [size for place, size in enumerate(blocks) if stays(place, len(blocks), resident)]
    passing = [size for place, size in enumerate(blocks) if not stays(place, len(blocks), resident)]
    return sum(staying) + len(passing[:SLOTS]) * max(passing, default=0)


def _ahead(streamed: Sequence[Streamed], place: int, way: int) -> list[Streamed]:
    """The next blocks on that way, as many as there are slots."""
    before = [block for block in streamed if block.place < place]
    after = [block for block in streamed if block.place > place]
    at = [block for block in streamed if block.place == place]
    return {FORWARD: after, BACK: before[::-1], ROUND: [*after, *before, *at]}[way][:SLOTS]


def places_of(layers: Sequence[FrozenLayer]) -> tuple[list[dict[str, int]], int]:
    """(where each tensor of each layer begins in a flat buffer, the bytes of that buffer)."""
    starts, end = [], 0
    for layer in layers:
        places = {}
        for name, tensor in layer.payload().items():
            places[name] = end
            end += -(-tensor.numel() * tensor.itemsize // ALIGNMENT) * ALIGNMENT
        starts.append(places)
    return starts, end


def views_of(layers: Sequence[FrozenLayer], flat: Tensor) -> list[dict[str, Tensor]]:
    """Each layer's payload in a flat buffer, by name."""
    views = []
    for layer, starts in zip(layers, places_of(layers)[0], strict=True):
        pieces = {}
        for name, like in layer.payload().items():
            size = prod(like.shape) * like.itemsize
            pieces[name] = flat[starts[name] : starts[name] + size].view(like.dtype).view(like.shape)
        views.append(pieces)
    return views


def _pin(masters: Sequence[Tensor]) -> None:
    # Not by torch's allocator of pinned memory: that takes up to twice as much, powers of two.
    for master in masters:
        master.zero_()  # by all threads: the driver, which touches page by page, took four times as long beside an H200
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(master.data_ptr(), master.nbytes, 0)))


def _unpin(masters: Sequence[Tensor]) -> None:
    for master in masters:
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(master.data_ptr())))
