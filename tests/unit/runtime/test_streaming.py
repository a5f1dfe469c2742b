"""Blocks that pass over a device: what is there when a block computes, which copies are made, and when."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from trainer.kernels import dora_torch
from trainer.quantization import FORMATS, FrozenLinear
from trainer.runtime import streaming
from trainer.runtime.streaming import BACK, FORWARD, ROUND, InMaster, Streamer, device_bytes, stays

CPU = torch.device("cpu")


class Device:
    """Stands for a card that runs its queue as late as it may, beside one that copies as early as it may.

    A kernel runs when a copy has to wait for it, or at the end. What it finds in its slot is noted then.
    """

    def __init__(self) -> None:
        self.kernels: list[Callable[[], None]] = []
        self.waits: set[int] = set()  # copies that kernels asked from now on wait for
        self.arrived = 0

    def ask(self, kernel: Callable[[], None]) -> None:
        self.kernels.append(kernel)

    def copy(self, into: Tensor, master: Tensor) -> int:
        """After all kernels asked so far."""
        self.finish()
        into.copy_(master)
        self.arrived += 1
        return self.arrived

    def wait(self, arrived: int) -> None:
        self.waits.add(arrived)

    def finish(self) -> None:
        for kernel in self.kernels:
            kernel()
        self.kernels = []


class Hasty(Device):
    """One whose copies wait for no kernel."""

    def copy(self, into: Tensor, master: Tensor) -> int:
        into.copy_(master)
        self.arrived += 1
        return self.arrived


class Slow(Device):
    """The other way round: kernels run at once, and copies no earlier than a kernel is told to wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Callable[[], Tensor]] = []

    def ask(self, kernel: Callable[[], None]) -> None:
        kernel()

    def copy(self, into: Tensor, master: Tensor) -> int:
        self.copies.append(lambda: into.copy_(master))
        self.arrived += 1
        return self.arrived

    def wait(self, arrived: int) -> None:
        """One queue: what was to be copied before comes before."""
        for copy in self.copies[: arrived - self.arrived + len(self.copies)]:
            copy()
        del self.copies[: arrived - self.arrived + len(self.copies)]


def made(count: int, resident: int, transfers: Any = None) -> tuple[nn.ModuleList, Streamer]:
    """Blocks of one layer each, whose payload is the block's number."""
    options = {"bias": False, "format": FORMATS["bf16"], "compute_dtype": torch.bfloat16, "kernels": dora_torch}
    blocks = nn.ModuleList(nn.Sequential(FrozenLinear(8, 8, device="meta", **options)) for _ in range(count))
    streamer = Streamer({str(place): block for place, block in enumerate(blocks)}, resident, CPU, transfers)
    for place, block in enumerate(blocks):
        (layer,) = block
        if place not in streamer.streamed:
            layer.to_empty(device=CPU)
        layer.load_weight(torch.full((8, 8), float(place), dtype=torch.bfloat16))
    return blocks, streamer


def walks(count: int, steps: int) -> list[tuple[int, int]]:
    """(block, way) of so many steps: forward with gradients, and back."""
    there = [(place, FORWARD) for place in range(count)]
    return [*there, *[(place, BACK) for place in reversed(range(count))]] * steps


def computed(blocks: nn.ModuleList, streamer: Streamer, device: Any, order: list[tuple[int, int]]) -> list[tuple[int, float]]:
    """(block, what its kernel found) of each entry."""
    found: list[tuple[int, float]] = []
    for place, way in order:
        streamer.enter(place, way)
        (layer,) = blocks[place]
        read = layer.payload_weight
        device.ask(lambda place=place, read=read: found.append((place, float(read[0, 0]))))
    device.finish()
    return found


@pytest.mark.parametrize(("count", "resident"), [(1, 0), (2, 0), (3, 0), (6, 0), (6, 2), (7, 3), (5, 4), (4, 4)])
def test_a_step_copies_each_block_there_and_back_but_for_the_ends(count: int, resident: int) -> None:
    device = Device()
    blocks, streamer = made(count, resident, device)
    streamed = count - resident
    assert [place for place in range(count) if not stays(place, count, resident)] == sorted(streamer.streamed)
    for step in range(3):
        before, held = streamer.copies, list(streamer.in_slot)
        found = computed(blocks, streamer, device, walks(count, 1))
        assert all(place == value for place, value in found)
        # The first ones are there from the step before, the last ones from the way there.
        assert streamer.copies - before == 2 * max(0, streamed - 2) + (min(streamed, 2) if step == 0 else 0)
        assert step == 0 or held == streamer.in_slot
    assert streamer.copied == 2 * max(0, streamed - 2) * (streamer.sizes[0] if streamed else 0)
    assert streamer.master_bytes == streamed * streamer.sizes[0]
    assert device_bytes(streamer.sizes, resident) == (resident + min(2, streamed)) * streamer.sizes[0]


def test_masters_are_pinned_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """AnimaLora #511: torch's own allocator of pinned memory took up to twice their bytes, powers of two."""
    pinned: dict[int, int] = {}
    runtime = SimpleNamespace(
        cudaHostRegister=lambda place, size, flags: pinned.__setitem__(place, size) or 0,
        cudaHostUnregister=lambda place: pinned.pop(place) * 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    _, streamer = made(6, 2)
    masters = [block.master for block in streamer.streamed.values()]
    streaming._pin(masters)
    assert (
        pinned == {master.data_ptr(): master.nbytes for master in masters} and sum(pinned.values()) == streamer.master_bytes
    )
    streaming._unpin(masters)
    assert not pinned


def test_without_gradients_the_blocks_go_round() -> None:
    """As samples do: the first ones are on their way when the last ones compute."""
    device = Device()
    blocks, streamer = made(5, 0, device)
    order = [(place, ROUND) for place in range(5)] * 3
    assert all(place == value for place, value in computed(blocks, streamer, device, order))
    assert streamer.copies == 15


class Ahead(Device):
    """Notes after how many entries a copy was started."""

    def __init__(self) -> None:
        super().__init__()
        self.entries, self.started = 0, list[int]()

    def copy(self, into: Tensor, master: Tensor) -> int:
        self.started.append(self.entries)
        return super().copy(into, master)


@pytest.mark.parametrize("resident", [0, 3])
def test_a_copy_starts_as_soon_as_its_slot_is_free(resident: int) -> None:
    """That is when the block after the one that was there is entered, a streamed one or not; so none that could have been
    started a block earlier is waited for."""
    device = Ahead()
    blocks, streamer = made(9, resident, device)
    order = walks(9, 2)
    slot = {place: number % 2 for number, place in enumerate(sorted(streamer.streamed))}
    lies: dict[int, tuple[int, int]] = {}  # by slot: the block there, and the entry at which it was left
    expected = []
    for number, (place, way) in enumerate(order):
        if place in slot:
            held, left = lies.get(slot[place], (-1, -1))
            if held != place:
                expected.append(left + 1)
            lies[slot[place]] = place, number
        streamer.enter(place, way)
        device.entries += 1
    assert device.started == expected


def test_a_slot_is_not_written_while_a_kernel_still_reads_it() -> None:
    """On a card that runs late. Where copies wait for nothing, kernels find another block."""
    late, hasty = Device(), Hasty()
    for device, right in ((late, True), (hasty, False)):
        blocks, streamer = made(6, 0, device)
        found = computed(blocks, streamer, device, walks(6, 2))
        assert all(place == value for place, value in found) == right


def test_a_kernel_waits_for_the_copy_of_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card that copies late. Where kernels wait for nothing, they find another block."""
    for right in (True, False):
        device = Slow()
        blocks, streamer = made(6, 1, device)
        if not right:
            monkeypatch.setattr(device, "wait", lambda arrived: None)
        found = computed(blocks, streamer, device, walks(6, 2))
        assert all(place == value for place, value in found) == right


def test_a_card_copies_beside_what_computes_and_each_waits_for_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls, on streams that are not there. A copy waits for all that was asked for before it; what is asked for after
    `wait` waits for the copy."""
    told: list[Any] = []

    class Stream:
        def __init__(self, name: Any) -> None:
            self.name = name if isinstance(name, str) else "beside"

        def wait_stream(self, other: Stream) -> None:
            told.append(f"{self.name} waits for {other.name}")

        def record_event(self) -> str:
            return f"what {self.name} did"

        def wait_event(self, event: str) -> None:
            told.append(f"{self.name} waits for {event}")

        def __enter__(self) -> None:
            told.append(f"from here on {self.name}")

        def __exit__(self, *_: object) -> None:
            told.append("as before")

    class Slot:
        def copy_(self, master: Tensor, non_blocking: bool) -> None:
            told.append(("copy", non_blocking))

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("computing"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    copies = streaming.CudaCopies(torch.device("cuda"))
    arrived: Any = copies.copy(Slot(), torch.ones(1))  # type: ignore[arg-type]
    assert told == ["beside waits for computing", "from here on beside", ("copy", True), "as before"]
    copies.wait(arrived)
    assert told[4:] == ["computing waits for what beside did"]


def test_where_host_and_device_are_two_a_layer_out_of_turn_brings_in_its_own_payload() -> None:
    """The meta device stands for a card, which has no values but a place."""
    layer = FrozenLinear(
        4, 3, bias=False, format=FORMATS["fp8_e4m3"], compute_dtype=torch.float32, kernels=dora_torch, device="meta"
    )
    passing = layer.payload()
    host = {name: torch.ones(tensor.shape).to(tensor.dtype) for name, tensor in passing.items()}
    layer.stream(InMaster(host, torch.device("meta")), passing)
    assert layer.payload_weight.device == CPU and layer.qweight.is_meta, "an adapter is put where the layer computes"
    assert layer.stored().codes.is_meta and layer.stored().codes is not passing["weight"]
    layer.bind(True)
    assert layer.payload()["weight"] is passing["weight"]
    layer.bind(False)
    assert layer.payload()["scale"] is host["scale"]


def test_a_block_that_is_used_twice_or_out_of_order_is_right() -> None:
    device = Device()
    blocks, streamer = made(6, 1, device)
    order = [(place, FORWARD) for place in (0, 1, 1, 5, 2, 2, 0)] + [(place, BACK) for place in (0, 5, 1, 1, 3, 4, 0)]
    assert all(place == value for place, value in computed(blocks, streamer, device, order))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 7).flatmap(
        lambda count: st.tuples(
            st.just(count),
            st.integers(0, count),
            st.lists(st.tuples(st.integers(0, count - 1), st.sampled_from([FORWARD, BACK, ROUND])), max_size=40),
        )
    )
)
def test_whatever_the_order_each_kernel_finds_its_block(drawn: tuple[int, int, list[tuple[int, int]]]) -> None:
    count, resident, order = drawn
    device = Device()
    blocks, streamer = made(count, resident, device)
    assert all(place == value for place, value in computed(blocks, streamer, device, order))


class Twice(nn.Module):
    """Two blocks in the order a, b, a, b: each is used twice in one pass."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for block in self.blocks:
                x = torch.tanh(block(x))
        return x


def gradient(streamed: bool, monkeypatch: pytest.MonkeyPatch | None = None, back: bool = True) -> Tensor:
    """Of the input of four blocks that are used twice. back: whether blocks are entered on the way back."""
    torch.manual_seed(0)
    weights = [torch.randn(8, 8) / 3 for _ in range(4)]
    blocks, _ = made(4, 0 if streamed else 4)
    for block, weight in zip(blocks, weights, strict=True):
        block[0].load_weight(weight.bfloat16())
    if monkeypatch is not None and not back:
        monkeypatch.setattr(streaming.Streamer, "_back", lambda *_: None)
    x = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True)
    Twice(blocks)(x).sum().backward()
    assert x.grad is not None
    return x.grad


def test_a_backward_pass_enters_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the layers would still be right, one by one, from host memory: no copy ahead, and no slot."""
    assert torch.equal(gradient(True), gradient(False))
    entered: list[tuple[int, int]] = []
    enter = Streamer.enter
    monkeypatch.setattr(Streamer, "enter", lambda self, place, way: (entered.append((place, way)), enter(self, place, way)))
    gradient(True)
    assert entered[:8] == [(place, FORWARD) for place in (0, 1, 2, 3)] * 2
    assert list(dict.fromkeys(entered[8:12])) == [(place, BACK) for place in (3, 2, 1, 0)] and len(entered) == 16


def test_a_layer_out_of_turn_has_its_own_payload() -> None:
    """As norms at a checkpoint read it, and a file: not what lies in the slot."""
    blocks, streamer = made(5, 0)
    for place in (0, 1, 2, 3):
        streamer.enter(place, FORWARD)
        for other, (layer,) in enumerate(blocks):
            assert float(layer.stored().codes[0, 0]) == float(layer.dequantize(torch.float32)[0, 0]) == other


def test_closed_nothing_is_held() -> None:
    blocks, streamer = made(3, 0)
    assert streamer.streamed and streamer.slots
    streamer.close()
    assert not streamer.streamed and not streamer.slots and not list(blocks.buffers())
