"""The table of docs/optimizers.md is what the code and the measurements say."""

from __future__ import annotations

import pytest

from scripts.bench import optimizers
from tests.harness import ROOT
from trainer.optim import OPTIMIZERS


@pytest.mark.slow
def test_the_page_has_the_table_that_the_script_prints() -> None:
    assert f"\n\n{optimizers.table()}\n\n" in (ROOT / "docs" / "optimizers.md").read_text(encoding="utf-8")


def test_every_optimizer_is_measured_or_is_another_under_paging() -> None:
    assert {*optimizers.RATES, "paged_adamw8bit"} == OPTIMIZERS.keys()
