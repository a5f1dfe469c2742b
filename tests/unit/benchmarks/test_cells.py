"""Measuring many cells: what is there is kept, whatever ended the measuring before it."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.cells import Bench


@dataclass(frozen=True)
class Way:
    path: str


WAYS = (Way("default"), Way("lr/high"), Way("lr/low"))


class Killed(BaseException):
    pass


def bench(measured: list[tuple[str, int]], ends: Callable[[Way, int], bool] = lambda way, seed: False) -> Bench:
    def measure(way: Way, seed: int, asked: Namespace) -> dict:
        measured.append((way.path, seed))
        if ends(way, seed):
            raise Killed
        return {"cell": way.path, "seed": seed, "machine": {}, "steps": asked.steps, "loss": len(way.path) + seed}

    return Bench(Path("bench.py"), "", WAYS, measure, lambda way, asked: {"steps": asked.steps}, lambda found: "measured")


@pytest.mark.slow
def test_what_was_measured_before_a_kill_is_kept(tmp_path: Path) -> None:
    arguments, first = ["--out", str(tmp_path / "out"), "--seeds", "2", "--steps", "3"], list[tuple[str, int]]()
    with pytest.raises(Killed):
        bench(first, lambda way, seed: (way.path, seed) == ("lr/high", 1)).main(arguments)
    assert first == [("default", 0), ("lr/high", 0), ("lr/low", 0), ("default", 1), ("lr/high", 1)]
    there = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert there.keys() == {"default-0.json", "lr-high-0.json", "lr-low-0.json", "default-1.json"}

    second: list[tuple[str, int]] = []
    again = bench(second)
    assert again.main(arguments) == 0
    assert second == [("lr/high", 1), ("lr/low", 1)]
    assert all((tmp_path / "out" / name).read_bytes() == content for name, content in there.items())
    found = again.read(tmp_path / "out")
    assert {path: [run["seed"] for run in runs] for path, runs in found.items()} == {way.path: [0, 1] for way in WAYS}


def test_results_in_one_file_are_kept_and_those_of_other_settings_refused(tmp_path: Path, capsys) -> None:
    together = tmp_path / "all.json"
    arguments = ["--cells", "lr/*", "--seeds", "1", "--together", str(together)]
    assert bench([]).main([*arguments, "--out", str(tmp_path / "one"), "--steps", "3"]) == 0
    assert json.loads(together.read_text()).keys() == {"lr/high", "lr/low"}
    measured: list[tuple[str, int]] = []
    assert bench(measured).main([*arguments, "--out", str(tmp_path / "two"), "--steps", "3"]) == 0
    assert not measured
    with pytest.raises(SystemExit):
        bench(measured).main([*arguments, "--out", str(tmp_path / "two"), "--steps", "4"])
    assert "is of 3 steps, not of 4" in capsys.readouterr().err and not measured
