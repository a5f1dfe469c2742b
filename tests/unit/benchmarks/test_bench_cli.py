"""benchmarks/bench_cli.py --against: its interval, and that its worktree does not stay."""

from __future__ import annotations

import math
import random
import statistics
import subprocess
from pathlib import Path

import pytest

from benchmarks import bench_cli
from tests.harness import ROOT
from tests.proofs.shared import worktree


def run_of(seconds: float) -> bench_cli.Measured:
    return bench_cli.Measured(seconds, 2 * seconds, 3 * seconds, 2**20, 8, seconds / 10)


def test_the_interval_holds_the_true_ratio_in_95_of_100_tries() -> None:
    random.seed(0)
    tries = 2000
    held = 0
    for _ in range(tries):
        ratios = [1.05 * math.exp(random.gauss(0, 0.1)) for _ in range(5)]
        ratio, low, high = bench_cli.interval(ratios)
        assert low < ratio < high and ratio == pytest.approx(statistics.geometric_mean(ratios))
        held += low <= 1.05 <= high
    assert abs(held / tries - 0.95) < 4 * math.sqrt(0.95 * 0.05 / tries)


def test_ratios_are_now_over_then_within_a_round() -> None:
    # The machine is three times slower in the second round; the ratio is 1.1 in both.
    rounds = [{"then": run_of(t), "now": run_of(1.1 * t)} for t in (1.0, 3.0)]
    figures = bench_cli.ratios_of(rounds)
    assert set(figures) == {"process start to end of step 1", "a step", "whole process"}
    for figure in figures.values():
        assert (figure["ratio"], figure["low"], figure["high"]) == pytest.approx((1.1, 1.1, 1.1))
    assert "| a step | 0.2 s | 0.22 s | 1.100 | 1.100 to 1.100 |" in bench_cli.against_table("lora", figures)


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout, so there is no earlier commit")
def test_the_worktree_is_of_that_commit_and_does_not_stay(tmp_path: Path) -> None:
    listing = ["git", "-C", str(ROOT), "worktree", "list"]
    with pytest.raises(KeyboardInterrupt), worktree("HEAD", tmp_path / "then") as tree:
        assert (tree / "train.py").exists() and str(tree) in subprocess.check_output(listing, text=True)
        raise KeyboardInterrupt
    assert not tree.exists() and str(tree) not in subprocess.check_output(listing, text=True)
    with pytest.raises(SystemExit, match="commit nowhere"), worktree("nowhere", tmp_path / "then"):
        pass
