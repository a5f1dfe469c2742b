"""When the clock asks for a checkpoint: so long after the last save of any kind, and never for a step that is saved. What is
not worth keeping is refused."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from trainer.base.errors import NonFiniteError
from trainer.base.progress import QUIET
from trainer.run.checkpointing import Saves
from trainer.runtime.jobs import Position


class Saver:
    """Notes the steps that it is given."""

    failed, background = False, True

    def __init__(self) -> None:
        self.step, self.steps = 0, []

    def save(self, step: int, contents, watch) -> None:
        self.step = step
        self.steps.append(step)


def saves(now: list[float], minutes: float) -> Saves:
    context = SimpleNamespace(processes=SimpleNamespace(is_main=True), phases=QUIET)
    return Saves(
        pieces=SimpleNamespace(pack=dict), saver=Saver(), progress=SimpleNamespace(step=0), is_finite=lambda: True, lr=1.0,
        on_failure="stop", context=context, every_minutes=minutes, clock=lambda: now[0],
    )  # fmt: skip


def test_no_save_is_longer_ago_than_asked_and_every_save_restarts_the_clock() -> None:
    """Steps of all lengths, and other saves between them: after each step that the clock was looked at, at most that long
    ago a step was saved; and the clock never asks earlier."""
    drawn, now = random.Random(7), [100.0]
    asked = saves(now, 10)
    last, by_clock = now[0], 0
    for step in range(1, 500):
        now[0] += drawn.choice((1.0, 60.0, 599.0, 700.0))
        asked.progress.step = step
        assert asked.overdue == (now[0] - last >= 600)
        if asked.overdue or drawn.random() < 0.1:
            by_clock += asked.overdue
            asked.save()
            assert not asked.overdue and asked.saver.steps[-1] == step
            last = now[0]
    assert 50 < by_clock < len(asked.saver.steps)


def test_the_clock_asks_for_no_step_that_is_saved_and_zero_is_never() -> None:
    now = [0.0]
    asked, never = saves(now, 0.5), saves(now, 0)
    now[0] = 1e9  # samples before the first step took long: there is nothing to save yet
    assert not asked.overdue and not never.overdue
    asked.progress.step = never.progress.step = 1
    assert asked.overdue and not never.overdue


def test_a_state_that_is_not_finite_is_not_saved_and_what_is_saved_is_not_asked_again() -> None:
    """The checkpoints before it stand. A step that was saved when it was sound is no refusal at the end."""
    now = [0.0]
    asked = saves(now, 0)
    asked.progress.step = 1
    asked.save()
    asked.is_finite = lambda: False
    asked.save()
    asked.progress.step = 2
    with pytest.raises(NonFiniteError, match=r"step 2: .* is not saved, and the checkpoints before it stand\n.* than 1"):
        asked.save()
    assert asked.saver.steps == [1]


@pytest.mark.parametrize(("every", "stop_after", "due"), [(3, 7, [3, 6, 7]), (0, 7, [7]), (3, 6, [3, 6]), (0, 9, [9])])
def test_a_checkpoint_comes_every_so_many_steps_and_the_last_one_of_a_start_is_waited_for(every, stop_after, due) -> None:
    """A step that this start only found is saved already."""
    made, how = saves([0.0], 0), []
    made.save = lambda **final: how.append((made.progress.step, *final))
    job = made.job(every, stop_after)
    for step in range(1, stop_after + 1):
        made.progress.step = step
        assert job.due(Position(step, 9)) == (step in due) and not job.due(Position(step, 9, fresh=False))
        if step in due:
            job.run(Position(step, 9))
    assert list(dict.fromkeys(step for step, *_ in how)) == due and how[-1] == (stop_after, "final")
    assert not [step for step, *final in how[:-1] if final]
