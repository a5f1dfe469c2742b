"""The processes of one start find one another in a store that is full of what earlier starts left."""

from __future__ import annotations

import random
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from trainer.base.errors import PeerStopped, UserError
from trainer.runtime import processes, starts
from trainer.runtime.heartbeat import REPLACED
from trainer.runtime.starts import COUNTS, meet, prefix_of, refuse_nameless


def come(pool: ThreadPoolExecutor, store: HashStore, count: int, ranks: list[int]) -> list[Future]:
    return [pool.submit(meet, store, rank=rank, count=count, patience=60.0) for rank in ranks]


@pytest.mark.parametrize("seed", range(10))
def test_every_start_has_a_number_of_its_own_that_all_its_processes_know(seed: int) -> None:
    """In whatever order they come, and however many there were before."""
    drawn, store = random.Random(seed), HashStore()
    with ThreadPoolExecutor(8) as pool:
        for number in range(1, 9):
            count = drawn.randint(1, 4)
            order = drawn.sample(range(count), count)
            found = []
            for rank in order:
                found += come(pool, store, count, [rank])
                time.sleep(drawn.random() / 50)
            assert [one.result(timeout=60) for one in found] == [number] * count
            assert store.check([f"{prefix_of(number - 1)}/{REPLACED}"]), "the start before is told"
            assert not store.check([f"{prefix_of(number)}/{REPLACED}"])


def test_a_start_that_was_cut_off_before_all_had_come_is_not_taken_for_the_next() -> None:
    """Process 0 was killed while it waited, then both come again: process 1 first, which finds the old number."""
    store = HashStore()
    with ThreadPoolExecutor(4) as pool:
        with pytest.raises(PeerStopped, match="of 2 processes 1 did not come within 0 s"):
            meet(store, rank=0, count=2, patience=0.0)
        (other,) = come(pool, store, 2, [1])
        (main,) = come(pool, store, 2, [0])
        assert main.result(timeout=60) == other.result(timeout=60) == 2


def test_one_whose_rank_an_earlier_process_had_is_not_meant_by_its_number() -> None:
    store = HashStore()
    with ThreadPoolExecutor(4) as pool:
        assert [one.result(timeout=60) for one in come(pool, store, 2, [0, 1])] == [1, 1]
        with pytest.raises(PeerStopped, match="process 0, which all others wait for, did not come") as missed:
            meet(store, rank=1, count=2, patience=0.1)
    assert missed.value.status == 143


@pytest.mark.parametrize("ends", range(3))
def test_one_that_ended_before_it_met_the_others_is_heard_of_by_all(ends: int, monkeypatch) -> None:
    """At once, and with its status. Process 0 has the store, so it goes last."""
    monkeypatch.setattr(starts, "HEARING", 60.0)
    store, order = HashStore(), []

    def come_or_end(rank: int) -> None:
        try:
            meet(store, rank=rank, count=3, status=2 if rank == ends else 0)
        finally:
            order.append(rank)

    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(come_or_end, rank) for rank in range(3)]
    for one in found:
        with pytest.raises(PeerStopped, match=f"process {ends} could not go on; its message says why") as stopped:
            one.result()
        assert stopped.value.status == 2
    assert order[-1] == 0
    with ThreadPoolExecutor(3) as pool:
        assert [one.result(timeout=60) for one in come(pool, store, 3, [0, 1, 2])] == [2, 2, 2], "the next start is whole"


@pytest.mark.parametrize("name", COUNTS)
def test_processes_that_do_not_know_of_one_another_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=rf"^{name} = 4: several processes .*torchrun --nnodes") as refused:
        refuse_nameless({name: "4", "WORLD_SIZE": "4"})
    assert "\n" not in str(refused.value)
    for environment in ({name: "1"}, {name: "4", "RANK": "0", "WORLD_SIZE": "4"}, {name: ""}, {}):
        refuse_nameless(environment)


def test_it_is_refused_before_anything_is_asked_of_the_others(monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(UserError, match="PMI_SIZE = 2"):
        processes.start(torch.device("cpu"), lost_after=60.0)
