"""Streams a frozen base from host memory to the device, block by block.

Every streamed block has a master: one flat buffer in host memory, pinned for a GPU and only read. The device has two slots,
each as large as the largest block. Streamed block number j always uses slot j % 2, so its layers always read from the same
address. While one block computes, the next one is copied into the other slot, on a CUDA stream of its own.

Hooks enter blocks and never leave them: in the forward pass a hook on the module, in the backward pass a hook on the node of
the block's output, which runs before the block's other nodes and its recomputation. Autograd runs ready nodes in reverse
order of their creation, and no node of a block waits for one created before the block: so a later block is finished before an
earlier one begins. To enter a block is to leave all others.

A layer that computes out of turn copies its own payload (FrozenLayer.stored): a wrong order costs time, but stays correct.
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

# Directions: a forward pass before a backward pass, which starts at the last blocks; the latter; forward passes in a cycle.
FORWARD, BACK, ROUND = 1, -1, 0
SLOTS = 2
ALIGNMENT = 256  # bytes: of each tensor in a flat buffer, as in torch's own allocators


class Copies:
    """Copies to the device; this class, for a CPU, from memory to memory at once."""

    def copy(self, into: Tensor, master: Tensor) -> Any:
        """Start a copy, after all work queued on the device so far. Returns the argument of `wait`."""
        into.copy_(master)

    def wait(self, arrived: Any) -> None:
        """Have the device's later work wait for that copy."""


class CudaCopies(Copies):
    """Copies from pinned memory on a CUDA stream of their own. The host never waits."""

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
    """A layer's payload in its block's master. device: the one that computes."""

    payload: Payload
    device: torch.device
    digests: Mapping[str, str] = field(default_factory=dict)

    def whole(self) -> Payload:
        """The payload on the device; a copy if the device has memory of its own."""
        return {name: tensor.to(self.device) for name, tensor in self.payload.items()}

    def fill(self, payload: Payload) -> None:
        """Copy a payload into the master."""
        copy_payload(payload, self.payload)


@dataclass(eq=False)
class Streamed:
    """A streamed block. place: its index among all blocks. size: bytes. master: this process's flat buffer. slot: its number.
    arrived: `Copies.copy` of its last copy. bound: whether its layers read from the slot."""

    place: int
    layers: Sequence[FrozenLayer]
    size: int
    master: Tensor
    slot: int
    arrived: Any = None
    bound: bool = False

    def bind(self, passing: bool) -> None:
        """Have its layers read from the slot, or from their homes."""
        if self.bound != passing:
            self.bound = passing
            for layer in self.layers:
                layer.bind(passing)


class Streamer:
    """Streams the blocks of one module except `resident` of them, spread evenly among the others. The argument `blocks` is in
    forward order, with payloads on the meta device. device: the one that computes.

    blocks: the streamed ones by name. sizes: each block's payload in bytes, streamed or not. copies: the number started.
    master_bytes: this process's masters. copied: bytes that one step copies. host: the part of `master_bytes` in host memory.
    """

    unit = ALIGNMENT  # bytes: a block's size is a multiple of it

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
        # A compiled block saves views of its slot for its backward pass, before which it is entered again: another block in
        # the slot meanwhile does not matter. So copies bypass autograd's version counter (`data`).
        self.slots = [torch.empty(max(sizes, default=0), dtype=torch.uint8, device=device) for _ in sizes[:SLOTS]]
        self.streamed: dict[int, Streamed] = {}
        for number, (place, size) in enumerate(zip(places, sizes, strict=True)):
            slot, mine = number % SLOTS, layers[place]
            master = torch.empty(self.master_size(size), dtype=torch.uint8, device=self.master_device())
            block = self.streamed[place] = Streamed(place, mine, size, master, slot)
            for layer, home, passing in zip(mine, self.homes(block), views_of(mine, self.slots[slot]), strict=True):
                layer.stream(home, passing)
        self.transfers = transfers or self.make_transfers()
        self.master_bytes = self.host = sum(block.master.nbytes for block in self.streamed.values())
        self.copied = sum(sizes[SLOTS:]) + sum(sizes[:-SLOTS])
        self.in_slot: list[Streamed | None] = [None] * len(self.slots)  # the block in each slot
        self.current: tuple[int, int] | None = None  # (the place of the block that computes, the direction)
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

    # --- where masters are (overridden in sharding.py) ----------------------------------------------------------------

    def master_device(self) -> torch.device:
        """The device of the masters."""
        return torch.device("meta") if self.device.type == "meta" else torch.device("cpu")

    def master_size(self, size: int) -> int:
        """The bytes of this process's master for a block of `size` bytes."""
        return size

    def homes(self, block: Streamed) -> Sequence[Home]:
        """The home of each layer of a block."""
        return [InMaster(views, self.device) for views in views_of(block.layers, block.master)]

    def make_transfers(self) -> Copies:
        """The copies to the device. Pins the masters for a GPU."""
        if self.device.type != "cuda":
            return Copies()
        masters = [block.master for block in self.streamed.values()]
        _pin(masters)
        weakref.finalize(self, _unpin, masters)
        return CudaCopies(self.device)

    def start(self, block: Streamed, into: Tensor) -> Any:
        """Start to copy a block's bytes to the beginning of a buffer of the device, which has a slot's size."""
        return self.transfers.copy(into[: block.size], block.master)

    def at_home(self) -> Collection[Tensor]:
        """The module's tensors that stay off the device."""
        return [tensor for block in self.streamed.values() for layer in block.layers for tensor in layer.payload().values()]

    def __str__(self) -> str:
        return (
            f"{len(self.streamed)} of {self.count} blocks are streamed: {size_text(self.master_bytes)} in host memory, "
            f"{size_text(self.copied)} copied a step"
        )

    def enter(self, place: int, way: int) -> None:
        """Prepare a block that is about to compute: have it in its slot, and start to copy the next one."""
        if self.current == (place, way):
            return
        self.current = place, way
        block = self.streamed.get(place)
        if block is not None:
            if self.in_slot[block.slot] is not block:
                self.copy(block)
            self.transfers.wait(block.arrived)
            block.bind(True)
        self._look_ahead(place, way)

    def leave(self) -> None:
        """Note that no block computes: any slot may be overwritten."""
        self.current = None

    def enter_block(self, name: str) -> None:
        """Enter a streamed block by its name, in the forward direction."""
        place = next(place for place, block in zip(self.streamed, self.blocks, strict=True) if block == name)
        self.enter(place, FORWARD)

    def close(self) -> None:
        """Free the masters and the slots, and detach from the blocks."""
        for hook in self._hooks:
            hook.remove()
        for block in self.streamed.values():
            for layer in block.layers:
                layer.end_stream()
        self.blocks, self.streamed, self.slots = {}, {}, []
        self.in_slot, self._hooks, self.ahead = [], [], {}

    def _look_ahead(self, place: int, way: int) -> None:
        """Start to copy the next blocks, unless their slots have blocks that are used before them."""
        used = [self.streamed.get(place)] if self.current is not None else []
        for following in self.ahead[way][place]:
            present = self.in_slot[following.slot]
            if present is not following:
                if present in used:
                    break
                self.copy(following)
            used.append(following)

    def copy(self, block: Streamed, start: Callable[[Streamed, Tensor], Any] | None = None) -> None:
        """Start the copy of a block into its slot. start: replaces `self.start`."""
        present = self.in_slot[block.slot]
        if present is not None:
            present.bind(False)
        self.in_slot[block.slot] = None
        block.arrived = (start or self.start)(block, self.slots[block.slot].data)
        self.in_slot[block.slot] = block
        self.copies += 1

    # --- hooks --------------------------------------------------------------------------------------------------------

    def _before(self, place: int, block: nn.Module, inputs: tuple) -> None:
        self.enter(place, FORWARD if torch.is_grad_enabled() else ROUND)

    def _after(self, place: int, back: Any, block: nn.Module, inputs: tuple, output: Any) -> None:
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        nodes = {each.grad_fn for each in outputs if isinstance(each, Tensor) and each.grad_fn is not None}
        for node in nodes:
            node.register_prehook(back)
        if not nodes:  # there is no backward pass
            self.leave()
            self._look_ahead(place, ROUND)

    def _back(self, place: int, gradients: tuple) -> None:
        self.enter(place, BACK)


def stays(place: int, count: int, resident: int) -> bool:
    """Whether a block stays on the device: `resident` of `count` do, spread evenly."""
    return (place + 1) * resident // count > place * resident // count


def device_bytes(blocks: Sequence[int], resident: int) -> int:
    """Bytes of all blocks' payloads on the device: the resident blocks and the slots. blocks: bytes of each."""
    staying = [size for place, size in enumerate(blocks) if stays(place, len(blocks), resident)]
    passing = [size for place, size in enumerate(blocks) if not stays(place, len(blocks), resident)]
    return sum(staying) + len(passing[:SLOTS]) * max(passing, default=0)


def _ahead(streamed: Sequence[Streamed], place: int, way: int) -> list[Streamed]:
    """The next blocks in a direction, as many as there are slots."""
    before = [block for block in streamed if block.place < place]
    after = [block for block in streamed if block.place > place]
    at = [block for block in streamed if block.place == place]
    return {FORWARD: after, BACK: before[::-1], ROUND: [*after, *before, *at]}[way][:SLOTS]


def places_of(layers: Sequence[FrozenLayer]) -> tuple[list[dict[str, int]], int]:
    """(each layer's offsets in a flat buffer, by tensor name; the bytes of that buffer)."""
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
    # Torch's allocator of pinned memory would take up to twice as much: powers of two.
    for master in masters:
        master.zero_()  # touches pages by all threads: the driver, page by page, took four times as long with an H200
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(master.data_ptr(), master.nbytes, 0)))


def _unpin(masters: Sequence[Tensor]) -> None:
    for master in masters:
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(master.data_ptr())))
