"""What docs/learning.md says follows from the measurements alone, and cells that were not measured are left out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.bench import learning_page as page
from scripts.bench.learning import CELLS


def measured(cell: str, seed: int, *, last: float, seconds: float = 30.0) -> dict:
    """A cell that fell on a straight line from 1 to `last` in 90 steps."""
    curve = [(step, seconds * step / 90, 1 + (last - 1) * step / 90) for step in (0, 30, 60, 90)]
    losses = {"held_out": 1.0, "forgetting": 1.0}
    return {"cell": cell, "seed": seed, "steps": 90, "first": losses, "last": {"held_out": last, "forgetting": 1.1}} | {
        "curve": curve,
        "seconds": seconds,
    }


def test_falls_and_shares() -> None:
    results = {
        "sdxl/stored-fp32": [measured("sdxl/stored-fp32", seed, last=0.4) for seed in range(3)],
        "sdxl/default": [measured("sdxl/default", seed, last=0.4 + 0.01 * seed) for seed in range(3)],
        "sdxl/stored-int2-quanto": [measured("sdxl/stored-int2-quanto", 0, last=0.7)],
    }
    assert page.kept(results) == pytest.approx({"fp8_e4m3": 0.59 / 0.6, "fp32": 1.0, "int2-quanto": 0.5})
    assert page.band(page.falls(results["sdxl/default"])) == "59.0 % (58.0 to 60.0)"
    text = page.formats(results)
    assert "| int2-quanto | 30.0 % | 50.0 % | no |" in text and "| fp32 | 60.0 % (60.0 to 60.0) | 100.0 % | yes |" in text
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
    paths = ["sdxl/default", "sdxl/rank-4"]
    results = {path: [measured(path, seed, last=0.5) for seed in range(2)] for path in paths}
    text = page.write(results, tmp_path).read_text()
    assert "90 steps on 12 icons" in text and "Each cell was trained with 2 seeds." in text
    rows = {line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if line.startswith("| ")}
    assert {"default", "rank-4"} <= rows
    assert not rows & {cell.name for cell in CELLS} - {"default", "rank-4"}
