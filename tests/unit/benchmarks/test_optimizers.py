"""The table of docs/optimizers.md is what the code and the measurements say."""

from __future__ import annotations

import pytest

from benchmarks import optimizers
from tests.harness import ROOT
from trainer.optim import OPTIMIZERS


@pytest.mark.slow
def test_the_page_has_the_table_that_the_script_prints() -> None:
    assert f"\n\n{optimizers.table()}\n\n" in (ROOT / "docs" / "optimizers.md").read_text(encoding="utf-8")


def test_every_optimizer_is_measured_or_is_another_under_paging() -> None:
    assert {*optimizers.RATES, "paged_adamw8bit"} == OPTIMIZERS.keys()


def test_the_best_rate_is_that_of_the_largest_fall_and_an_edge_is_named(monkeypatch) -> None:
    def result(after: float) -> dict[str, list[float]]:
        return {"before": [1.0], "after": [after]}

    tried = {"0.002": result(0.4), "0.004": result(0.3), "0.001": result(0.9)}
    monkeypatch.setattr(optimizers, "measured", lambda: {"adamw": tried, "lion": tried | {"0.008": result(0.35)}})
    assert optimizers.best_rate("adamw") == 0.004 and optimizers.start("adamw").startswith(
        "0.004, the highest tried (0.001: "
    )
    assert optimizers.start("lion").startswith("0.004 (") and optimizers.start("paged_adamw8bit") == "as `adamw8bit`"
