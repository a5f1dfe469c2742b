"""It learns: over fixed draws the loss falls, and every promised storage format keeps most of that.

What is measured, and how, stands in scripts/proofs/learning_table.py; docs/learning.md has the figures of all formats.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from scripts.proofs import learning_table
from scripts.proofs.learning_table import CASES, NOT_PROMISED, Case, Losses
from tests.harness import Workbench

# The quickest; SDXL takes four times as long.
DEFAULT = (Case("flux", "dora", "fp8_e4m3-native", "fp32"),)


@pytest.fixture(scope="module")
def measure(models: Path, tmp_path_factory) -> Callable[[Case], Losses]:
    """Each case once: the fp32 base serves all that are compared with it."""
    bench = Workbench(models, tmp_path_factory.mktemp("learning"))
    return cache(lambda case: learning_table.measure(case, bench))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case in DEFAULT else pytest.mark.slow)
        for case in sorted(CASES, key=lambda case: case not in DEFAULT)
        if case != case.exact and case.storage not in NOT_PROMISED
    ],
)
def test_the_loss_falls_and_the_format_keeps_it(measure, record_property, case: Case) -> None:
    exact, losses = measure(case.exact), measure(case)
    record_property("fall over fp32", exact.fall)
    record_property(f"fall over {case.storage} in {case.compute}", losses.fall)
    print(f"{case.name}: the loss falls by {losses.fall:.1%}, over fp32 by {exact.fall:.1%}")
    assert learning_table.broken_promise(case.exact, exact, exact) is None
    assert learning_table.broken_promise(case, losses, exact) is None


def test_a_broken_promise_is_told_from_a_kept_one() -> None:
    case, exact = DEFAULT[0], Losses(1.0, 0.9)
    assert learning_table.broken_promise(case.exact, Losses(1.0, 0.96), exact) == "the loss falls by 4.0%"
    assert learning_table.broken_promise(case, Losses(1.0, 0.935), exact) == "keeps 65% of the fall"
    assert learning_table.broken_promise(case, Losses(1.0, 0.92), exact) is None
    assert learning_table.broken_promise(case, Losses(1.0, float("nan")), exact) is not None
    unpromised = Case(case.family, case.kind, NOT_PROMISED[0], "fp32")
    assert learning_table.broken_promise(unpromised, Losses(1.0, 1.0), exact) is None
