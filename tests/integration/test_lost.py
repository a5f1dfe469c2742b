"""Under torchrun's agent a run that loses processes ends as one that lost none: tests/proofs/lost.py, in parts.

`slow` has four seeds, in which every kind of fault comes; `proof` has sixty, and a machine that is frozen, missed and comes
back. That a start reads no key of another is in unit/runtime/test_starts.py.
"""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Workbench
from tests.integration.test_processes import assert_same_course
from tests.proofs import lost
from tests.proofs.forks import Server
from tests.proofs.lost import PLACES, Run, drawn
from trainer import config as configs

SEEDS = (1, 5, 7, 22)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with lost.lives() as server:
        yield server


@pytest.fixture(scope="module")
def config(models: Path, tmp_path_factory) -> Path:
    return lost.config_of(Workbench(models, tmp_path_factory.mktemp("config")))


@pytest.fixture(scope="module")
def whole(server: Server, config: Path, tmp_path_factory) -> dict[str, Any]:
    """What a run leaves that loses no process."""
    return lost.whole_run(server, config, tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_that_loses_processes_ends_in_the_same_bytes(seed: int, server, config, whole, tmp_path: Path) -> None:
    assert not lost.problems(Run(server, config, tmp_path / "run"), drawn(seed), whole)


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(60))
def test_many_seeds(seed: int, server, config, whole, tmp_path: Path) -> None:
    assert not lost.problems(Run(server, config, tmp_path / "run"), drawn(seed), whole)


def test_the_seeds_have_every_kind_of_fault_and_both_processes() -> None:
    few, many = ([fault for seed in seeds for fault in drawn(seed)] for seeds in (SEEDS, range(60)))
    assert {fault.kind for fault in few} == set(PLACES) and {fault.victim for fault in few} == {0, 1}
    assert {(fault.kind, fault.place) for fault in many} == {(kind, at) for kind in PLACES for at in PLACES[kind]}


@pytest.mark.proof
def test_a_machine_that_freezes_is_done_without_and_comes_back(server: Server, bench: Workbench) -> None:
    """--nnodes=1:2, an agent for each of two machines. The first goes on alone with the update of both, and the second is
    taken in again when it wakes up. Its old process ends before it does anything."""
    length = {"run__max_steps": 40, "checkpoint__every_steps": 0}
    one = Run(server, lost.config_of(bench, **length), bench.tmp / "without a fault")
    one.start(nodes=1)
    assert one.wait() == [0], one.said[-3000:]

    run = Run(server, one.config, bench.tmp / "frozen")
    try:
        more = {"nodes": 2, "pace_alone": 0.7}
        run.start(**more)
        run.until(lambda: answers(run.port))  # the first has the store, and the main process
        frozen = run.start(**more)
        run.until(lambda: run.logged >= 3 and run.starts[-1] == 2)
        os.killpg(frozen, signal.SIGSTOP)
        alone = len(run.starts) + 1
        run.until(lambda: len(run.starts) == alone)
        run.until(lambda: goes_on_alone(run))
        os.killpg(frozen, signal.SIGCONT)
        assert run.wait() == [0, 0], run.said[-3000:]
    finally:
        run.kill()

    assert run.starts[alone - 1 : alone + 1] == [1, 2], run.starts
    assert run.said.count("error: this process was stopped or cut off, and a later start goes on without it") == 1
    assert configs.read_resolved(run.folder / "out" / "config.toml")["step"]["accumulation"] == 2
    assert_same_course(bench, "without a fault/out", "frozen/out")


def goes_on_alone(run: Run) -> bool:
    """Whether a step was made since."""
    resumed = re.search(r"shared by 1 process\n.*^resuming \S+ at step (\d+)$", run.said, re.M | re.S)
    return resumed is not None and run.logged > int(resumed[1])


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
