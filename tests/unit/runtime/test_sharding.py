"""Blocks of which each process has a part: threads stand for the processes, and a table for what connects them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from trainer.base.tensorfile import tensor_sha256
from trainer.kernels import dora_torch, scratch
from trainer.quantization import FORMATS, ConvertedWeights, FrozenConv2d, FrozenLinear, Geometry, record
from trainer.runtime.sharding import Sharder
from trainer.runtime.streaming import BACK, FORWARD, ROUND, SLOTS, Streamer

CPU = torch.device("cpu")
PATIENCE = 20  # seconds: whoever waits longer waits for nobody


class ByThread(dict):
    """The buffers that products share in a process: each thread has its own."""

    def __contains__(self, key: object) -> bool:
        return super().__contains__((key, threading.get_ident()))

    def __getitem__(self, key: object) -> Any:
        return super().__getitem__((key, threading.get_ident()))

    def __setitem__(self, key: object, value: Any) -> None:
        super().__setitem__((key, threading.get_ident()), value)

    def pop(self, key: object, *default: Any) -> Any:
        return super().pop((key, threading.get_ident()), *default)


@pytest.fixture(autouse=True)
def _threads_are_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_buffers", ByThread())


class Table:
    """What connects the processes: each lays something on it, and takes what all have laid there."""

    def __init__(self, count: int) -> None:
        self.laid: list[Any] = [None] * count
        self.barrier = threading.Barrier(count)

    def exchange(self, rank: int, mine: Any) -> list[Any]:
        self.laid[rank] = mine
        self.barrier.wait(PATIENCE)
        there = list(self.laid)
        self.barrier.wait(PATIENCE)
        return there


class Peer:
    """A process among its equals. late: a gather writes as late as it may: when it is waited for, and those that were started
    before it just after."""

    def __init__(self, rank: int, table: Table, *, late: bool = True) -> None:
        self.rank, self.table, self.late = rank, table, late
        self.lend: Callable[[], bool] | None = None
        self.gathers, self.under_way = 0, list[Callable[[], object]]()

    def lend_with(self, lend: Callable[[], bool] | None) -> None:
        self.lend = lend

    def settle(self) -> None:
        while self.lend is not None and self.lend():
            pass

    def largest_request(self, number: int) -> int:
        return max(self.table.exchange(self.rank, number))

    def gather(self, into: Tensor, part: Tensor) -> Callable[[], object]:
        parts = self.table.exchange(self.rank, part.clone())
        assert into.nbytes == sum(each.nbytes for each in parts), "not all gather the same block"
        self.gathers += 1
        work = lambda: into.copy_(torch.cat(parts))  # noqa: E731
        self.under_way.append(work)
        if not self.late:
            self.finish_gather(work)
        return work

    def finish_gather(self, work: Callable[[], object]) -> None:
        if work in self.under_way:
            at = self.under_way.index(work)
            for each in (work, *self.under_way[:at]):
                each()
            del self.under_way[: at + 1]


class Block(nn.Sequential):
    """A Linear, which its forward computes with, and a convolution."""

    def forward(self, x: Tensor) -> Tensor:
        return self[0](x).tanh()[:, : x.shape[1]]


def blocks_of(count: int, storage: str = "bf16", *, width: int = 8) -> nn.ModuleList:
    """Blocks without memory."""
    options: dict[str, Any] = {"compute_dtype": torch.float32, "kernels": dora_torch, "device": "meta"}
    return nn.ModuleList(
        Block(
            FrozenLinear(width, width * (1 + place % 2), bias=False, format=FORMATS[storage], **options),
            FrozenConv2d((width, width, 3, 3), Geometry(), bias=False, format=FORMATS["bf16"], **options),
        )
        for place in range(count)
    )


def filled(blocks: nn.ModuleList) -> None:
    """Every weight is a function of its place."""
    for place, layer in enumerate(layer for block in blocks for layer in block):
        weight = torch.randn(layer.weight_shape, generator=torch.Generator().manual_seed(place), dtype=torch.float32)
        layer.load_weight(weight.bfloat16())


def whole(count: int, storage: str = "bf16", **more: Any) -> nn.ModuleList:
    """The blocks that one process has whole."""
    blocks = blocks_of(count, storage, **more).to_empty(device=CPU)
    filled(blocks)
    return blocks


def shared(peer: Peer, parts: int, count: int, storage: str = "bf16", **more: Any) -> tuple[nn.ModuleList, Sharder]:
    blocks = blocks_of(count, storage, **more)
    sharder = Sharder({str(place): block for place, block in enumerate(blocks)}, CPU, parts=parts, peers=peer)
    filled(blocks)
    return blocks, sharder


def side_by_side(works: Sequence[Callable[[Peer], Any]], **more: Any) -> list[Any]:
    """What each of the processes gives. One that fails takes the others with it, which would wait for it."""
    table = Table(len(works))

    def run(rank: int) -> Any:
        try:
            return works[rank](Peer(rank, table, **more))
        except BaseException:
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(len(works)) as pool:
        jobs = [pool.submit(run, rank) for rank in range(len(works))]
        errors = [error for job in jobs if (error := job.exception()) is not None]
        cause = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        if errors:
            raise (cause or errors)[0]
        return [job.result() for job in jobs]


PASSES = {
    "step": [(place, FORWARD) for place in range(5)] + [(place, BACK) for place in reversed(range(5))],
    "sample": [(place, ROUND) for place in range(5)],
    "out of memory": [(0, FORWARD), (1, FORWARD), (2, FORWARD)],
    "out of turn": [(3, None), (3, None), (0, None), (4, None)],
    "settle": [],
}


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(st.lists(st.sampled_from([*PASSES]), max_size=4), min_size=2, max_size=4), st.booleans())
def test_each_finds_its_blocks_whatever_the_others_do(stories: list[list[str]], late: bool) -> None:
    """Each process has a story of its own between two times that all meet, as in updates with more or fewer micro-batches;
    they meet after each chapter that says so, as often as the longest story has it."""
    right = whole(5)
    meetings = max(story.count("settle") for story in stories)

    def tell(peer: Peer, story: list[str]) -> None:
        blocks, sharder = shared(peer, len(stories), 5)
        for chapter in story + ["settle"] * (meetings - story.count("settle")):
            for place, way in PASSES[chapter]:
                if way is not None:
                    sharder.enter(place, way)
                    assert sharder.streamed[place].bound
                for layer, expected in zip(blocks[place], right[place], strict=True):
                    assert torch.equal(layer.stored().codes, expected.stored().codes), (chapter, place, way)
            if chapter == "settle":
                peer.settle()
        peer.settle()

    side_by_side([lambda peer, story=story: tell(peer, story) for story in stories], late=late)


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_each_keeps_its_part_and_room_for_two_blocks(parts: int) -> None:
    def kept(peer: Peer) -> tuple[int, int, int, int]:
        blocks, sharder = shared(peer, parts, 6)
        assert all(tensor.is_meta for block in blocks for layer in block for tensor in layer.payload().values())
        slots = {slot.data_ptr() for slot in sharder.slots}
        assert len(slots) == SLOTS
        buffers = [*sharder.slots, *(block.master for block in sharder.streamed.values())]
        return sharder.master_bytes, sum(sharder.sizes), max(sharder.sizes), sum(buffer.nbytes for buffer in buffers)

    payload = sum(t.nbytes for block in whole(6) for layer in block for t in layer.payload().values())
    for part, size, largest, held in side_by_side([kept] * parts):
        assert part * parts == size and 0 <= size - payload <= 6 * (2 + parts) * 256
        assert held == part + SLOTS * largest


@pytest.mark.parametrize("storage", ["bf16", "fp8_e4m3", "int8", "nf4"])
def test_a_payload_in_parts_is_that_of_one_process(storage: str, tmp_path: Path) -> None:
    """Its bytes, what was lost, the norms, the digests, and the file of converted weights that the main process stores."""
    one = whole(3, storage, width=64)
    options = {"fingerprint": "model", "library": "torch"}
    (tmp_path / "one").mkdir()
    stored = ConvertedWeights(tmp_path / "one", **options)
    stored.total = 3
    stored.store(one)

    def same(peer: Peer) -> None:
        blocks, _ = shared(peer, 2, 3, storage, width=64)
        assert record([("blocks", blocks)]) == record([("blocks", one)])
        for layer, expected in zip((e for b in blocks for e in b), (e for b in one for e in b), strict=True):
            assert layer.relative_error == expected.relative_error and layer._plain == expected._plain
            assert layer.digests == {name: tensor_sha256(tensor) for name, tensor in expected.payload().items()}
            for name, tensor in layer.whole_payload().items():
                assert torch.equal(tensor.view(torch.uint8), expected.payload()[name].view(torch.uint8))
            assert torch.equal(layer.row_norms(), expected.row_norms())
            if expected.original_norms is not None:
                assert torch.equal(layer.original_norms, expected.original_norms)
        if peer.rank == 0 and storage != "bf16":
            folder = tmp_path / "shared"
            folder.mkdir()
            cache = ConvertedWeights(folder, **options)
            cache.total = 3
            cache.store(blocks)
            (file,), (whole_file,) = folder.iterdir(), (tmp_path / "one").iterdir()
            assert file.read_bytes() == whole_file.read_bytes()
            again = blocks_of(3, storage, width=64).to_empty(device=CPU)
            assert len(ConvertedWeights(folder, **options).fill(again)) == 3
        peer.settle()

    side_by_side([same] * 2)


def gradient(blocks: nn.ModuleList, batches: Sequence[Tensor]) -> Tensor:
    """Of a weight in front of the blocks, over the batches."""
    scale = torch.ones(64, requires_grad=True)
    for batch in batches:
        x = batch * scale
        for block in blocks:
            x = block(x)
        x.sum().backward()
    return torch.zeros(64) if scale.grad is None else scale.grad


def test_gradients_are_those_of_one_process_however_many_batches_each_has() -> None:
    batches = [torch.randn(2, 64, generator=torch.Generator().manual_seed(number)) for number in range(4)]
    right = whole(5, "fp8_e4m3", width=64)

    def share(mine: Sequence[Tensor]) -> Callable[[Peer], None]:
        def work(peer: Peer) -> None:
            blocks, sharder = shared(peer, 3, 5, "fp8_e4m3", width=64)
            assert torch.equal(gradient(blocks, mine), gradient(right, mine)) and sharder.last is None
            peer.settle()
            assert sharder.copies >= 2 * 5, "who has no batch takes part"

        return work

    side_by_side([share(batches[:3]), share(batches[3:]), share([])])


def test_in_step_no_block_is_gathered_for_nothing() -> None:
    """Where all do the same, as many gathers as block streaming makes copies: none twice, and none for one process alone."""

    def work(peer: Peer) -> int:
        _, sharder = shared(peer, 2, 6)
        for _ in range(3):
            for place, way in [(place, FORWARD) for place in range(6)] + [(place, BACK) for place in reversed(range(6))]:
                sharder.enter(place, way)
        peer.settle()
        return peer.gathers

    streamer = Streamer({str(place): block for place, block in enumerate(blocks_of(6))}, 0, CPU)
    for _ in range(3):
        for place, way in [(place, FORWARD) for place in range(6)] + [(place, BACK) for place in reversed(range(6))]:
            streamer.enter(place, way)
    assert side_by_side([work] * 2) == [streamer.copies] * 2


def test_a_block_that_had_to_make_room_is_there_again() -> None:
    """As of a process that ran out of memory in its first block, and lends until the next step."""

    def early(peer: Peer) -> None:
        _, sharder = shared(peer, 2, 5)
        for _ in range(2):
            sharder.enter(0, FORWARD)
            assert sharder.in_slot[0] is sharder.streamed[0]
            peer.settle()

    def late(peer: Peer) -> None:
        _, sharder = shared(peer, 2, 5)
        for _ in range(2):
            for place in range(5):
                sharder.enter(place, FORWARD)
            peer.settle()

    side_by_side([early, late])


def test_a_slot_is_not_written_by_two_gathers() -> None:
    """The second one may be done before the first, of which nobody waited for what it brought."""

    def work(peer: Peer) -> None:
        _, sharder = shared(peer, 2, 5)
        for place in (0, 2, 4):
            sharder.copy(sharder.streamed[place])
        sharder.transfers.wait(sharder.streamed[4].arrived)
        (linear, _), (expected, _) = sharder.streamed[4].layers, whole(5)[4]
        linear.bind(True)
        assert torch.equal(linear.stored().codes, expected.stored().codes)
        peer.settle()

    side_by_side([work] * 2)


def test_closed_nothing_is_held_or_lent() -> None:
    def work(peer: Peer) -> None:
        blocks, sharder = shared(peer, 2, 3)
        blocks[0][0].whole_payload()
        peer.settle()
        sharder.close()
        assert peer.lend is None and sharder.last is None
        assert not sharder.streamed and not sharder.slots and not list(blocks.buffers())

    side_by_side([work] * 2)
