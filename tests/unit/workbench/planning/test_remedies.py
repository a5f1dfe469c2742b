"""The one ladder of what saves memory: what its entries agree on."""

from __future__ import annotations

from typing import get_args

import pytest

from tests.harness import Workbench
from trainer import config as configs
from trainer.config import with_values
from trainer.config.training_tables import MayChange
from trainer.plan.changes import in_words, keeps
from trainer.plan.run_plan import RunPlan, make_plan, open_source, resolve
from trainer.resume.start_point import fixed_levers
from workbench.planning.remedies import REMEDIES, remedies


@pytest.fixture(scope="module")
def plan(models, tmp_path_factory) -> RunPlan:
    config = configs.parse(
        Workbench(models, tmp_path_factory.mktemp("out")).tree(data__batch_size=4, adapter__targets=["*.to_q"])
    )
    source = open_source(config)
    return make_plan(resolve(config, source), source, processes=1)


@pytest.mark.slow
def test_memory_fit_may_name_what_has_levels(plan: RunPlan) -> None:
    """Each begins with a run without the remedy, and says its price."""
    levels = {remedy.name: remedy.levels(plan) for remedy in REMEDIES if remedy.levels(plan)}
    assert {*levels} == {*get_args(MayChange)}
    for remedy in REMEDIES:
        if remedy.name in levels:
            assert remedy.least and remedy.price and with_values(plan.config, levels[remedy.name][0]) == plan.config


def test_a_price_says_whether_the_run_is_another_one(plan: RunPlan) -> None:
    for remedy in REMEDIES:
        if remedy.price and remedy.name != "pictures":
            assert remedy.price.endswith("no byte changes" if keeps(remedy.name, plan.config.step) else "another run")
    compiled = with_values(plan.config, {"step.compile": "blocks"})
    assert {*fixed_levers(compiled)} - {*fixed_levers(plan.config)} == {"checkpointing"}


def test_only_what_helps_a_cpu_is_there_for_one() -> None:
    names = [{remedy.name for remedy in remedies(on_cpu=on_cpu)} for on_cpu in (False, True)]
    assert names[0] - names[1] == {"resident_blocks", "optimizer_bits"} and names[1] < names[0]


def test_keys_are_written_as_a_config_has_them() -> None:
    keys = {"memory.gradient_checkpointing": True, "data.batch_size": 2, "optimizer.name": "adamw8bit"}
    assert in_words(keys) == "memory.gradient_checkpointing = true, data.batch_size = 2, optimizer.name = 'adamw8bit'"
