"""What a plan tells of a run's length, and what it refuses, before anything is read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainer import config as configs
from trainer.adapters import Target
from trainer.base.errors import UserError
from trainer.plan.run_plan import Length, RunPlan, refuse_idle_steps


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
        (40, {}, True), (1, {}, False),
    ],
)  # fmt: skip
def test_whether_a_checkpoint_comes_before_the_last_step(steps: int, checkpoint: dict[str, Any], before: bool) -> None:
    asked = config({"max_steps": steps}, checkpoint=checkpoint)
    plan: Any = SimpleNamespace(config=asked, length=Length(processes=1, steps_per_epoch=5, max_steps=steps))
    assert RunPlan.saves_before_the_end.fget(plan) == before  # type: ignore[attr-defined]
