"""What docs/benchmarks/learning.md says follows from the measurements alone; cells that were not measured are left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import cells, learning, pages
from benchmarks import learning_page as page
from benchmarks.learning import CELLS


def measured(cell: str, seed: int, *, last: float, seconds: float = 30.0) -> dict:
    """A cell that fell on a straight line from 1 to `last` in 90 steps."""
    curve = [(step, seconds * step / 90, 1 + (last - 1) * step / 90) for step in (0, 30, 60, 90)]
    losses = {"held_out": 1.0, "forgetting": 1.0}
    return {"cell": cell, "seed": seed, "steps": 90, "first": losses, "last": {"held_out": last, "forgetting": 1.1}} | {
        "curve": curve,
        "seconds": seconds,
        "quantised": 0.0,
        "machine": {"date": "2026-01-02", "device": "CPU, x86_64", "threads": 2, "versions": {}, "cells at a time": 1},
    }


def test_falls_and_shares() -> None:
    results = {
        "sdxl/stored-fp32": [measured("sdxl/stored-fp32", seed, last=0.4) for seed in range(3)],
        "sdxl/default": [measured("sdxl/default", seed, last=0.4 + 0.01 * seed) for seed in range(3)],
        "sdxl/stored-int2-quanto": [measured("sdxl/stored-int2-quanto", 0, last=0.7)],
    }
    assert page.kept(results) == pytest.approx({"fp8_e4m3": 0.59 / 0.6, "fp32": 1.0, "int2-quanto": 0.5})
    assert pages.band(page.falls(results["sdxl/default"])) == "59.0 % (58.0 to 60.0)"
    results["sdxl/stored-nf4"] = [measured("sdxl/stored-nf4", 0, last=0.4) | {"quantised": 0.3}]
    results["sdxl/default"][0]["quantised"] = 0.95
    text = page.formats(results)
    assert "| int2-quanto | 0.0 % | 30.0 % | 50.0 % | no |" in text
    assert "| fp32 | - | 60.0 % (60.0 to 60.0) | 100.0 % | yes |" in text
    assert "| fp8_e4m3 | 95.0 % | 59.0 % (58.0 to 60.0) | 98.3 % | yes |" in text
    assert "| nf4 | 30.0 % | 60.0 % | 100.0 % | yes, of the Linears alone |" in text
    assert "`int2-quanto`" in page.advice(page.kept(results)) and "fp32" not in page.advice(page.kept(results))


@given(st.floats(0.1, 0.9), st.floats(0.0, 1.0), st.floats(1.0, 100.0))
def test_when_a_curve_reaches_a_loss(last: float, part: float, seconds: float) -> None:
    curve = measured("x", 0, last=last, seconds=seconds)["curve"]
    goal = 1 + (last - 1) * part
    reached = page.seconds_to(curve, goal + 1e-12)
    assert reached == pytest.approx(seconds * part, abs=1e-6 * seconds)
    assert page.seconds_to(curve, last - 0.01) is None


def test_a_page_of_a_few_cells(tmp_path: Path) -> None:
    """The page comes with what is there; the other cells' names stand in no table."""
    (tmp_path / "benchmarks").mkdir()
    paths = ["sdxl/default", "sdxl/rank-4", "flux/default", "flux/stored-nf4"]
    results = {path: [measured(path, seed, last=0.5) for seed in range(2)] for path in paths}
    text = page.write(results, tmp_path).read_text()
    assert "90 steps on 12 icons" in text and "Each cell was trained with 2 seeds." in text
    rows = {line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if line.startswith("| ")}
    assert {"default", "rank-4", "stored-nf4"} <= rows
    assert not rows & {cell.name for cell in CELLS} - {"default", "rank-4", "stored-nf4"}
    assert "nf4 stores 0.0 % of the weights." in text
    assert "on 2026-01-02 on CPU, x86_64, 2 threads" in text and "Ours and theirs ran side by side" in text


@pytest.mark.parametrize("what", ["steps", "device"])
def test_what_cannot_stand_in_one_table_is_refused(what: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    one, other = measured("sdxl/default", 0, last=0.5), measured("sdxl/lora", 0, last=0.5)
    elsewhere = measured("flux/default", 0, last=0.5)
    for run in (other, elsewhere):
        if what == "steps":
            run["steps"] = 30
        else:
            run["machine"]["device"] = "GPU"
    page.check({"sdxl/default": [one], "flux/default": [elsewhere]})  # another family may take its own
    together = tmp_path / "together.json"
    together.write_text(json.dumps({"sdxl/default": [one], "sdxl/lora": [other]}))
    with pytest.raises(SystemExit):
        pages.main("", learning.BENCH, page.write, [str(together)])
    assert f"results of sdxl differ in {what}" in capsys.readouterr().err


def test_results_of_another_length_are_not_taken_for_these(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    cells.write_whole(cells.result_file(tmp_path, "sdxl/default", 0), measured("sdxl/default", 0, last=0.5))
    with pytest.raises(SystemExit):
        learning.BENCH.main(["--out", str(tmp_path), "--cells", "sdxl/default", "--seeds", "1", "--steps", "30"])
    assert "sdxl-default-0.json is of 90 steps, not of 30" in capsys.readouterr().err


@pytest.mark.slow
def test_what_is_together_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file carries the results to another machine, where the rest is measured."""
    asked: list[tuple[str, int]] = []

    def measure(cell: learning.Cell, seed: int, *others: object) -> dict:
        asked.append((cell.path, seed))
        return measured(cell.path, seed, last=0.5)

    monkeypatch.setattr(learning, "measure", measure)
    together = tmp_path / "together.json"
    command = ["--cells", "sdxl/rank-*", "--together", str(together), "--steps", "90"]
    assert learning.BENCH.main(["--out", str(tmp_path / "here"), *command, "--seeds", "1"]) == 0
    assert learning.BENCH.main(["--out", str(tmp_path / "there"), *command, "--seeds", "2"]) == 0
    assert asked == [("sdxl/rank-4", 0), ("sdxl/rank-64", 0), ("sdxl/rank-4", 1), ("sdxl/rank-64", 1)]
    assert json.loads(together.read_text()) == learning.BENCH.read(tmp_path / "there")
    assert [len(runs) for runs in learning.BENCH.read(tmp_path / "there").values()] == [2, 2]
