"""What memory.fit chooses: the cheapest that fits, in the order of memory.fit_by; and that a run keeps what it chose."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.harness import Workbench
from trainer import config as configs
from trainer.base.errors import UserError
from trainer.kernels import dora_torch
from trainer.plan.run_plan import RunPlan, make_plan, open_source, resolve
from trainer.resume.start_point import as_chosen
from trainer.runtime.device import Memory
from workbench.commands import launch
from workbench.planning import estimate, fitting
from workbench.planning.estimate import STEP, Forecast, Stage, forecast
from workbench.planning.fitting import cheapest, fitted
from workbench.planning.suggestions import with_keys

LEVERS = ["checkpointing", "resident_blocks", "optimizer_bits", "batch"]


def needing(size: int) -> Forecast:
    return Forecast((Stage(f"{STEP} 64x64, batch 1", {"weights": size}),), 0, 0)


SAVED = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=4)


@given(SAVED, st.integers(0, 60))
@example([[5], [1, 8]], 55)
def test_of_all_settings_that_fit_the_cheapest_are_taken(saved: list[list[int]], memory: int) -> None:
    """Against all combinations. saved: GiB that each further level of a remedy takes off."""
    levels = [(0, *itertools.accumulate(more)) for more in saved]

    def fits(settings: Sequence[int]) -> bool:
        return 60 - sum(settings) <= memory

    fit = [settings for settings in itertools.product(*levels) if fits(settings)]
    places = [[each.index(setting) for each, setting in zip(levels, s, strict=True)][::-1] for s in fit]
    assert cheapest(levels, fits) == (list(fit[places.index(min(places))]) if fit else None)


def planned(bench: Workbench, **more: Any) -> RunPlan:
    config = bench.config(
        "flux", adapter__targets="attention+mlp", adapter__type="dora", data__batch_size=16, adapter__rank=64,
        model__components={"transformer": {"dtype": "bf16"}}, precision__compute="bf16", **more,
    )  # fmt: skip
    source = open_source(config)
    return make_plan(resolve(config, source), source, processes=1)


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(LEVERS, marks=pytest.mark.slow),
        pytest.param(["optimizer_bits", "batch", "checkpointing", "resident_blocks"], marks=pytest.mark.proof),
    ],
)
def test_every_budget_is_kept_and_what_is_listed_first_goes_first(bench: Workbench, monkeypatch, order) -> None:
    """On an accelerator, by the real forecast: from what the run needs as it is, to what it needs at the least."""
    monkeypatch.setattr(estimate, "CONTEXT", 0)  # larger than this model
    plan, said, seen = planned(bench, memory__fit="auto", memory__fit_by=order), [], []
    as_it_is = forecast(plan, dora_torch)
    most, eager = as_it_is.total + int(1.03 * as_it_is.graphs), as_it_is.total
    with pytest.raises(UserError, match=r"memory\.fit = 'auto' \(1.0 MiB\): with .* the run needs .*, in") as raised:
        fitted(plan, Memory(2**20, None, dora_torch))
    for words in ("every block recomputed", "every block streamed", "state in 8 bits", "one photo at a time", "larger card"):
        assert words in str(raised.value)
    for memory in (most + 1, most - 1, 0.96 * eager, 0.3 * eager):
        said.clear()
        found = fitted(plan, Memory(int(memory), None, dora_torch), say=said.append)
        assert forecast(found, dora_torch).fits(int(memory), graphs=True)
        config = found.config
        changed = [
            config.memory.gradient_checkpointing is not False, config.memory.offload == "blocks",
            config.optimizer.name == "adamw8bit", config.data.batch_size < 16,
        ]  # fmt: skip
        assert config.data.batch_size * config.step.accumulation == 16
        assert len(said) == sum(changed) + (config.step.graphs is False)
        assert all(re.fullmatch(r"memory\.fit = 'auto': .* \(.*(no byte changes|another run)\)", line) for line in said)
        seen.append([name for name in order if dict(zip(LEVERS, changed, strict=True))[name]])
    assert seen[0] == [] and seen[1] == ["checkpointing"], "rather than eager steps"
    assert {*seen[2]} <= {*order[:2]} and len(seen[-1]) > 1


@pytest.mark.slow
def test_nothing_else_is_changed_without_being_named(bench: Workbench, monkeypatch) -> None:
    monkeypatch.setattr(estimate, "CONTEXT", 0)
    plan = planned(bench, memory__fit="1GiB")
    assert plan.config.memory.fit_by == ("checkpointing",)
    every = forecast(with_keys(plan, {"memory.gradient_checkpointing": True}), dora_torch).total
    with pytest.raises(UserError, match=r"with every block recomputed the run needs .*\n- data.batch_size = 1, ") as raised:
        fitted(planned(bench, memory__fit=f"{every - 1000}B"), Memory(0, None, dora_torch))
    assert "one photo" not in str(raised.value)
    with_all = planned(bench, memory__fit="auto", memory__fit_by=LEVERS)
    kept = fitted(with_all, Memory(every, None, dora_torch), fixed=LEVERS[1:])
    assert kept.config.memory.gradient_checkpointing is True and kept.config.data.batch_size == 16
    amsgrad = planned(bench, memory__fit="auto", memory__fit_by=["optimizer_bits"], optimizer__options={"amsgrad": True})
    with pytest.raises(UserError, match="with nothing that memory.fit_by may change the run needs"):
        fitted(amsgrad, Memory(every, None, dora_torch))


def result(folder: Path) -> list[bytes]:
    (last,) = folder.glob("checkpoints/step-00000004")
    return [(last / f"{name}.safetensors").read_bytes() for name in ("adapter", "optimizer")]


@pytest.mark.slow
def test_a_run_keeps_the_batch_that_was_chosen(bench: Workbench, monkeypatch, capsys) -> None:
    """Stopped, and resumed where there is room for the whole batch: the bytes of one that was given the smaller batch."""

    def stub(plan: RunPlan, kernels: Any, *, base: Any) -> Forecast:
        return needing(plan.config.data.batch_size * 2**30)

    def config(out: str, **more: Any) -> configs.Config:
        return bench.config(run__output_dir=str(bench.tmp / out), run__max_steps=4, adapter__targets=["*.to_q"], **more)

    monkeypatch.setattr(fitting, "forecast", stub)
    monkeypatch.setattr(fitting, "changes", lambda *_: [])
    by = {"memory__fit_by": ["batch"], "data__batch_size": 4}
    launch.train(config("given", data__batch_size=2, step__accumulation=2), resume_from=None)
    launch.train(config("fitted", memory__fit="3GiB", run__stop_after=2, **by), resume_from=None)
    said = capsys.readouterr().out
    assert "memory.fit = '3GiB': data.batch_size = 2, step.accumulation = 2 (as many photos in an update" in said
    resolved = configs.read_resolved(bench.tmp / "fitted" / "config.toml")
    assert (resolved["data"]["batch_size"], resolved["step"]["accumulation"]) == (2, 2)
    with pytest.raises(UserError, match=r"'2GiB': with nothing that memory.fit_by may change the run needs 2.86 GiB"):
        launch.train(config("fitted", memory__fit="2GiB", **by), resume_from="auto")
    launch.train(config("fitted", memory__fit="9GiB", **by), resume_from="auto")
    assert result(bench.tmp / "fitted") == result(bench.tmp / "given")


def test_a_run_keeps_the_optimizer_that_was_chosen_and_compiled_blocks_their_recomputation(bench: Workbench) -> None:
    config = bench.config(memory__fit="auto", memory__fit_by=LEVERS, optimizer__name="lion")
    saved = {"optimizer": {"name": "lion8bit"}, "memory": {"gradient_checkpointing": 3}}
    chosen = as_chosen(config, saved)
    assert (chosen.optimizer.name, chosen.memory.gradient_checkpointing) == ("lion8bit", False)
    compiled = bench.config(memory__fit="auto", step__compile="blocks")
    assert as_chosen(compiled, saved).memory.gradient_checkpointing == 3
    for other in (bench.config(optimizer__name="lion"), bench.config(memory__fit="auto", optimizer__name="lion")):
        assert as_chosen(other, saved) == other, "what was not asked for is another run's"
    for odd in ({}, {"data": {"batch_size": "1"}}, {"data": {"batch_size": 3}}, {"optimizer": {"name": None}}):
        assert as_chosen(config, odd) == config


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"memory__fit": True}, r'memory\.fit.*"12GiB", or "auto" for the card at hand; memory\.fit_by names what'),
        ({"memory__fit": 12}, r'memory\.fit.*"12GiB", or "auto"'),
        ({"memory__fit": "12"}, r"memory\.fit.*unit"),
        ({"memory__fit": "auto", "memory__fit_by": ["batch", "batch"]}, r"fit_by.*'batch' stands there twice"),
        ({"memory__fit": "auto", "memory__fit_by": []}, r"fit_by"),
        ({"memory__fit": "auto", "memory__fit_by": ["rank"]}, r"fit_by"),
        ({"memory__fit": "auto", "memory__fit_by": ["resident_blocks"], "step__graphs": True}, r"graphs.*resident_blocks"),
    ],
)
def test_what_cannot_be_meant_is_refused(bench: Workbench, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        bench.config(**keys)


def test_levers_without_a_size_are_refused(bench: Workbench) -> None:
    with pytest.raises(UserError, match=r"memory\.fit_by.*without memory\.fit"):
        planned(bench, memory__fit_by=["batch"])
