"""A run that is killed again and again ends in the same bytes as one that never was: tests/proofs/kills.py, in parts.

`slow` kills one run while photos are encoded, inside its first checkpoint and a later one, in a step and while the adapter
files are written, and stops it by a signal in a step; `proof` has all 104 kills, 20 at the calls of a start and an end, and
200 signals. What a kill at any call of a save leaves is in test_commit_protocol.py.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from dataclasses import astuple
from itertools import combinations, product
from pathlib import Path

import pytest

from tests.proofs import kills
from tests.proofs.forks import Server
from tests.proofs.kills import CELLS, LEVELS, SAVES, Cell, Moment, Result

every_cell = pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.name) for cell in CELLS])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with kills.lives() as server:
        yield server


def run(cell: Cell, moments: list[Moment], server: Server, models: Path, folder: Path) -> Result:
    result = kills.run_cell(cell, moments, server=server, models=models, folder=folder / "cell")
    assert not result.orphans and not result.lost and not result.problems, f"{result}\n{result.log}"
    assert result.ends == result.recoveries == len(moments)
    assert result.inside == sum(moment.where in SAVES for moment in moments)
    return result


@pytest.mark.slow
def test_some_kills(server: Server, models: Path, tmp_path: Path) -> None:
    moments = kills.drawn(("caching", "first save", "save", "finishing"), random.Random(0))
    (stop,) = kills.drawn(("step",), random.Random(1), (signal.SIGTERM,))
    moments.insert(2, stop)
    run(Cell("flux", "dora", "adamw8bit", "int8", 2), moments, server, models, tmp_path)


@pytest.mark.proof
@every_cell
def test_kills(cell: Cell, server: Server, models: Path, tmp_path: Path) -> None:
    run(cell, kills.kills(random.Random(cell.name)), server, models, tmp_path)


@pytest.mark.proof
def test_kills_at_the_calls_of_a_start_and_an_end(server: Server, models: Path, tmp_path: Path) -> None:
    """Every kind of call while photos and captions are encoded and while the adapter files are written, early and late."""
    moments = [
        Moment(where, part, pick, half=True, steps=0, signum=signal.SIGKILL, group=False)
        for where in ("caching", "finishing")
        for pick in (0.05, 0.15, 0.25, 0.35, 0.45)  # of five kinds, before those of a time
        for part in (0.0, 0.6)
    ]
    run(CELLS[4], moments, server, models, tmp_path)


@pytest.mark.proof
@every_cell
def test_signals(cell: Cell, server: Server, models: Path, tmp_path: Path) -> None:
    run(cell, kills.stops(200 // len(CELLS), random.Random(cell.name)), server, models, tmp_path)


def test_the_cells_cover_every_pair_of_levels() -> None:
    assert len(CELLS) == 8
    for (i, first), (j, second) in combinations(enumerate(LEVELS.values()), 2):
        assert {(astuple(cell)[i], astuple(cell)[j]) for cell in CELLS} == set(product(first, second))


def test_a_hundred_kills_and_forty_inside_a_save() -> None:
    moments = [moment for cell in CELLS for moment in kills.kills(random.Random(cell.name))]
    assert len(moments) == 104
    assert sum(moment.where in SAVES for moment in moments) >= 40
    assert {moment.where for moment in moments} == {*kills.KILLS, "caching", "first save", "finishing"}
