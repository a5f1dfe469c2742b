"""What docs/benchmarks/craft.md says follows from the measurements alone."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import craft_page as page
from benchmarks.craft import CHOICES, DEFAULT

OTHERS = [choice for choice in CHOICES if choice is not DEFAULT]


def measured(cell: str, seed: int, loss: float, *, step: float = 1.0) -> dict:
    """A cell whose loss at the two draws of its exam is a tenth above and below `loss`."""
    return {
        "cell": cell,
        "seed": seed,
        "steps": 90,
        "changes": {},
        "draws": [0.9 * loss, 1.1 * loss],
        "forgetting": 0.2 * loss,
        "forgetting_before": 0.01,
        "turns": [(0.2 * step, 0.2)] * 3 + [(9.0, 0.2)],  # the machine was slow for a moment
        "parameters": 100,
        "state_bytes": 800,
        "machine": {"date": "2026-01-02", "device": "CPU, x86_64", "threads": 1, "versions": {"torch": "9"}},
    }


def below(t: float, freedom: int, pieces: int = 20_000) -> float:
    """The share of Student's distribution below t: its density (Student 1908), by Simpson's rule."""

    def density(x: float) -> float:
        scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
        return scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2)

    width = t / pieces
    inner = sum((4 if i % 2 else 2) * density(i * width) for i in range(1, pieces))
    return 0.5 + width / 3 * (density(0.0) + inner + density(t))


def test_the_band_is_students() -> None:
    for freedom, quantile in enumerate(page.STUDENT, 1):
        assert below(quantile - 5e-4, freedom) < 0.975 < below(quantile + 5e-4, freedom)
    # Three values about 2: their standard error is 1 / sqrt(3).
    assert page.interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 4.303 / math.sqrt(3), 2 + 4.303 / math.sqrt(3)))


@given(st.lists(st.floats(-0.5, 0.5), min_size=3, max_size=3))
def test_a_verdict_needs_a_band_without_zero(values: list[float]) -> None:
    low, high = page.interval(values)
    said = page.verdict(values)
    assert (said == "lower") == (high < 0) and (said == "higher") == (low > 0)
    assert (said == "equal") == (values == [0.0] * 3)


def test_one_seed_tells_nothing_apart() -> None:
    assert page.interval([0.3]) == (-math.inf, math.inf) and page.verdict([0.3]) == "one seed"


def test_differences_are_of_the_same_seed() -> None:
    """Seeds differ by more than the choice does; a seed without its default is left out."""
    choice = OTHERS[0]
    results = {
        DEFAULT.path: [measured(DEFAULT.path, seed, 0.1 * (seed + 1)) for seed in range(3)],
        choice.path: [measured(choice.path, seed, 0.09 * (seed + 1)) for seed in (2, 0, 1, 3)],
    }
    pairs = page.pairs(results, choice)
    assert [one["seed"] for one, _ in pairs] == [other["seed"] for _, other in pairs] == [2, 0, 1]
    assert page.differences(pairs) == pytest.approx([-0.1] * 3)
    assert page.differences(pairs, "forgetting") == pytest.approx([-0.1] * 3)


@pytest.mark.slow
def test_the_page(tmp_path: Path) -> None:
    """The cell's row, the control, and what was not measured; a slow moment moves no cost."""
    (tmp_path / "benchmarks").mkdir()
    better, single = OTHERS[0], OTHERS[1]
    results = {
        DEFAULT.path: [measured(DEFAULT.path, seed, 0.2 + 0.01 * seed) for seed in range(3)],
        better.path: [measured(better.path, seed, 0.1 + 0.005 * seed, step=1.5) for seed in range(3)],
        single.path: [measured(single.path, 0, 0.3)],
    }
    text = page.write(results, tmp_path).read_text()
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert rows[better.name].endswith("| -50.0 % (-50.0 to -50.0) | lower | -50.0 % | 1.50 | 8.0 |")
    assert "| +50.0 % | one seed |" in rows[single.name]
    assert all("| not measured |" in rows[choice.name] for choice in OTHERS[2:] if choice.against == "default")
    assert (
        f"with 3 seeds, but {single.name} with 1: these" in text
        and "The\n  default, timed in the same way against itself, gives 1.00" in text
    )
    assert (tmp_path / "benchmarks" / "craft-CPU-2026-01-02.json").is_file()
    assert (tmp_path / "benchmarks" / "craft" / "choices-dark.png").is_file()


def test_results_of_two_lengths_stand_in_no_table(tmp_path: Path) -> None:
    results = {DEFAULT.path: [measured(DEFAULT.path, 0, 0.2), measured(DEFAULT.path, 1, 0.2) | {"steps": 30}]}
    with pytest.raises(ValueError, match="differ in steps"):
        page.write(results, tmp_path)
