"""Where a run starts: what later steps left is set aside whole, and a schedule that cannot end is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainer.base.errors import UserError
from trainer.base.run_layout import Layout
from trainer.config import ScheduleTable
from trainer.optim import SCHEDULES, build_schedule, steps_of
from trainer.resume.start_point import _schedule_length, refuse_idle_steps, set_aside_results


def left_by(root: Path, steps: int, word: str) -> None:
    """What a run of two steps and more leaves beside its checkpoints."""
    for folder in ("samples/step-00000002", f"samples/step-{steps:08d}", "adapters"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / "0.png").write_text(word)
    (root / "adapters" / "bear.safetensors").write_text(word)
    (root / "metrics.jsonl").write_text(word)


def test_each_time_another_folder_gets_what_the_later_steps_left(tmp_path: Path) -> None:
    for again, word in enumerate(("first", "second", "third"), 1):
        left_by(tmp_path, 3, word)
        folder = set_aside_results(Layout(tmp_path), name="bear", after=2)
        assert folder is not None and folder.name == "superseded-after-step-00000002" + (f"-{again}" if again > 1 else "")
        assert not (tmp_path / "samples/step-00000003").exists() and (tmp_path / "samples/step-00000002").exists()
        assert (tmp_path / "metrics.jsonl").read_text() == word, "it is cut where it lies"
    for folder, word in zip(Layout(tmp_path).set_aside(), ("first", "second", "third"), strict=True):
        for name in ("samples/step-00000003/0.png", "adapters/bear.safetensors", "metrics.jsonl"):
            assert (folder / name).read_text() == word
    assert set_aside_results(Layout(tmp_path), name="bear", after=2) is None, "what is set aside is no result of the run"


@pytest.mark.parametrize(
    ("given", "length"),
    [
        ({"warmup": 40}, 40), ({"warmup": 41}, None), ({"warmup": 41, "total_steps": 41}, 41),
        ({"name": "wsd", "warmup": 10, "decay": 30}, 40), ({"name": "wsd", "warmup": 11, "decay": 30}, None),
        ({"name": "cosine", "warmup": 11}, 40), ({"name": "wsd", "warmup": 0.5, "decay": 0.75}, None),
    ],
)  # fmt: skip
def test_a_warm_up_that_no_schedule_ends_is_refused(given: dict, length: int | None) -> None:
    """Of a run of 40 steps. One that just fits is taken."""
    schedule = ScheduleTable(**given)
    if length is None:
        with pytest.raises(UserError, match=rf"schedule\.(warmup|decay) = {given.get('decay', given['warmup'])}"):
            _schedule_length(schedule, 40)
    else:
        assert _schedule_length(schedule, 40) == length


@pytest.mark.parametrize("more", [{}, {"end": 0.1}, {"decay": 0}, {"warmup": 0}, {"power": 5.0}, {"cycles": 3}])
@pytest.mark.parametrize("name", SCHEDULES)
def test_steps_at_a_rate_of_nothing_are_refused_and_no_others(name: str, more: dict) -> None:
    """The rates are those of the schedule itself."""
    falls = ScheduleTable(**{"name": name, "warmup": 2} | more)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    keys = {"end": falls.end, "cycles": falls.cycles, "power": falls.power, "decay": steps_of(falls.decay, 6)}
    schedule = build_schedule(name, optimizer, total_steps=6, warmup=falls.warmup, **keys)
    rates = [schedule.lr_lambdas[0](n) for n in range(12)]
    for done, last in ((0, 6), (0, 7), (3, 6), (6, 6), (3, 12), (6, 12), (8, 12)):
        idle = [step for step in range(max(done, falls.warmup) + 1, last + 1) if rates[step - 1] == 0]
        if not idle:
            refuse_idle_steps(falls, length=6, step=done, last=last)
            continue
        with pytest.raises(
            UserError, match=f"^steps {idle[0]} to {last} would train nothing: .*; leave out schedule.total_steps"
        ):
            refuse_idle_steps(falls, length=6, step=done, last=last)
        with pytest.raises(
            UserError, match=f"set schedule.total_steps = {last}, .*; with --allow; or train {idle[0] - 1} steps"
        ):
            refuse_idle_steps(falls, length=6, step=done, last=last, way="; with --allow")
