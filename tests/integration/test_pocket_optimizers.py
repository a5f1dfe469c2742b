"""Every optimizer teaches the pocket SDXL: the loss of a style that it never saw falls."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from benchmarks import lessons, optimizers
from tests.harness import built, take_step

STEPS, DRAWS = 12, 1


@pytest.fixture(scope="module")
def known(tmp_path_factory) -> tuple[Path, dict[str, float]]:
    """(the cache of all runs, what was measured once for all of them)."""
    return tmp_path_factory.mktemp("pocket") / "cache", {}


# One whose state is in 8 bits, one that finds its rate, one with modes; of all others the steps are those of their
# libraries (unit/optim/test_table.py), and the rates are measured by benchmarks/optimizers.py.
SHORT = ("adamw8bit", "prodigy", "schedulefree_adamw")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SHORT else pytest.mark.proof) for name in optimizers.RATES]
)
def test_the_held_out_loss_falls(name: str, known: tuple[Path, dict[str, float]], tmp_path: Path, capsys) -> None:
    """In twelve steps, at the rate that docs/optimizers.md names first."""
    cache, measured = known
    tried = json.loads(optimizers.MEASURED.read_text())[name]
    rate = float(max(tried, key=lambda rate: optimizers.fall(tried[rate])))
    changes = optimizers.changes(name, rate)
    chosen = lessons.config("sdxl", 0, tmp_path / "run", cache, changes=changes, steps=STEPS, known=())
    with built(chosen) as run:
        for stop in (signal.SIGINT, signal.SIGTERM):
            signal.signal(stop, signal.SIG_DFL)
        examiner = lessons.Examiner(run)
        if "before" not in measured:  # an adapter begins as nothing: alike for all
            measured["before"] = lessons.mean(examiner.held_out(DRAWS))
        for number, update in zip(range(1, STEPS + 1), lessons.updates(run), strict=False):
            take_step(run, number, update)
        after = lessons.mean(examiner.held_out(DRAWS))
    with capsys.disabled():
        print(f"\n{name} at {rate:g}: {measured['before']:.4f} -> {after:.4f}", flush=True)
    assert after < 0.95 * measured["before"]
