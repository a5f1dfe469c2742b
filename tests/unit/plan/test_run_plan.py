"""What a plan tells of a run's length, and what it refuses, before anything is read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer import config as configs
from trainer.adapters import Target
from trainer.base.errors import UserError
from trainer.config import with_values
from trainer.config.tables import CheckpointTable
from trainer.plan.changes import never
from trainer.plan.run_plan import Length, RunPlan, refuse_idle_steps
from trainer.plan.samples import requests_of
from trainer.runtime.jobs import Every, Position


def config(run: dict[str, Any], **tables: Any) -> configs.Config:
    return configs.parse(
        {
            "run": {"name": "a", "output_dir": "out"} | run,
            "model": {"family": "sdxl", "path": "model"},
            "data": {"sources": [{"path": "photos"}]},
        }
        | tables
    )


@pytest.mark.parametrize("run", [{"max_steps": 40}, {"epochs": 8}], ids=["steps", "epochs"])
@pytest.mark.parametrize(
    ("stops", "refused"), [((39, 12), True), ((40, 12), False), ((41,), False), ((3, None), False), ((None, None), False)]
)
def test_some_layer_trains_to_the_end(run: dict[str, int], stops: tuple[int | None, ...], refused: bool) -> None:
    """The stop step itself is trained. Eight epochs are forty steps here."""
    targets = [Target("unet", str(stop), 4, 4.0, stop_step=stop) for stop in stops]
    if not refused:
        refuse_idle_steps(config(run), targets, 40)
        return
    asked = "run.max_steps = 40" if "max_steps" in run else "run.epochs = 8 is 40 steps"
    with pytest.raises(UserError, match=f"every adapted layer stops by step 39, and {asked}: nothing would be trained"):
        refuse_idle_steps(config(run), targets, 40)


@pytest.mark.parametrize(
    ("steps", "checkpoint", "before"),
    [
        (40, {"every_steps": 0, "every_minutes": 0}, False), (40, {"every_steps": 40, "every_minutes": 0}, False),
        (40, {"every_steps": 39, "every_minutes": 0}, True), (40, {"every_steps": 0, "every_minutes": 10}, True),
        (40, {}, True), (1, {}, False), (40, {"every_epochs": 7, "every_minutes": 0}, True),
        (40, {"every_epochs": 8, "every_minutes": 0}, False),
    ],
)  # fmt: skip
def test_whether_a_checkpoint_comes_before_the_last_step(steps: int, checkpoint: dict[str, Any], before: bool) -> None:
    asked = config({"max_steps": steps}, checkpoint=checkpoint)
    plan: Any = SimpleNamespace(config=asked, length=Length(processes=1, steps_per_epoch=5, max_steps=steps))
    assert RunPlan.saves_before_the_end.fget(plan) == before  # type: ignore[attr-defined]


@given(*[st.integers(1, 4)] * 2, st.integers(0, 6), st.integers(0, 3), st.integers(0, 5))
def test_what_is_asked_for_by_epochs_is_due_as_they_end(every: int, length: int, epoch: int, first: int, step: int) -> None:
    """By counting epochs as they are trained, also where training on these photos began at a later step or epoch."""
    run = Length(processes=1, steps_per_epoch=length, max_steps=40, began=(step, epoch))
    due = run.every(CheckpointTable(every_steps=0, every_epochs=every), first)
    ended = {step + count * length: epoch + count for count in range(1, 41)}
    wanted = [at for at, number in ended.items() if at <= 40 and number % every == 0 and number >= first]
    assert [at for at in range(step + 1, 41) if Position(at, 40).due(due)] == wanted
    assert run.every(CheckpointTable(every_steps=7), first) == Every(7, first=first)


def test_an_interval_in_epochs_takes_the_place_of_the_default_alone() -> None:
    asked = config({"max_steps": 9}, validation={"every_epochs": 2}, export={"every_epochs": 1, "from": 3})
    assert (asked.validation.every_steps, asked.checkpoint.every_steps, asked.export.first) == (0, 500, 3)
    assert configs.parse(configs.tree(asked)) == asked and "export.from" in configs.known_keys()
    assert config({"max_steps": 9}, export={"every_epochs": 1, "every_steps": 0}).export.every_epochs == 1
    with pytest.raises(UserError, match=r"export.every_epochs = 1 and export.every_steps = 5 are both given; leave out one"):
        config({"max_steps": 9}, export={"every_epochs": 1, "every_steps": 5})
    lack = configs.unread(config({"max_steps": 9}, export={"from": 3}))["export.from"]
    assert lack == "without every_steps or every_epochs; leave it out, or set one of them"
    assert never("validation", asked.validation) == {"validation.every_steps": 0, "validation.every_epochs": 0}
    assert not requests_of(with_values(asked, never("validation", asked.validation)).validation, [], 64, 8)
