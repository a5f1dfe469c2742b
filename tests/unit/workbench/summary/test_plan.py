"""The warnings on keys of the optimizer that work badly together."""

from __future__ import annotations

import pytest
import torch

from tests.unit.plan.test_optimizer_rules import PRODIGY, config
from trainer.plan import optimizer_rules
from workbench.summary.plan import optimizer_warnings


@pytest.mark.parametrize(
    ("options", "schedule", "warned"),
    [
        ({}, {"warmup": 10}, ""), ({}, {"name": "cosine_restarts"}, ""),
        ({"safeguard_warmup": False}, {"warmup": 10}, "schedule.warmup with"),
        ({"safeguard_warmup": False}, {"warmup": 0, "name": "cosine_restarts"}, "schedule.name = 'cosine_restarts' with"),
        ({"safeguard_warmup": False}, {"warmup": 0}, ""), ({"safeguard_warmup": False}, {"warmup": 0, "name": "cosine"}, ""),
    ],
)  # fmt: skip
def test_prodigy_is_warned_of_low_rates_without_its_safeguard(options: dict, schedule: dict, warned: str) -> None:
    given = config(optimizer=PRODIGY | {"options": options}, schedule=schedule)
    lines = optimizer_warnings(given.model_copy(update={"optimizer": optimizer_rules.resolve(given.optimizer)}), 1000)
    assert [line.startswith(warned) and "grows too far" in line for line in lines] == ([True] if warned else [])


@pytest.mark.parametrize(("options", "steps", "warned"), [({}, 100, True), ({"d0": 1e-4}, 100, False), ({}, 1000, False)])
def test_prodigys_start_is_named_where_a_run_is_short(options: dict, steps: int, warned: bool) -> None:
    lines = optimizer_warnings(config(optimizer=PRODIGY | {"options": options}, schedule={"warmup": 0}), steps)
    assert [f"a run of {steps} steps" in line and "optimizer.options.d0" in line for line in lines] == [True] * warned


@pytest.mark.parametrize(("cuda", "device", "warned"), [(False, "auto", True), (True, "auto", False), (True, "cpu", True)])
def test_paging_is_warned_of_where_there_is_none(monkeypatch, cuda: bool, device: str, warned: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    given = config(optimizer={"name": "paged_adamw8bit"})
    given = given.model_copy(update={"run": given.run.model_copy(update={"device": device})})
    assert optimizer_warnings(given, 1000) == (
        ["paged_adamw8bit pages its state only on CUDA; on a CPU it is adamw8bit"] if warned else []
    )
