"""What a page says of a fork: a difference where both losses measure the same, and that they do not where they do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.base.run_layout import Layout
from workbench.pages.charts import Fork, fork_of, smoothed
from workbench.pages.history import History

CHANGE = "objective.loss: 'mse' -> 'huber'"
LOSS, HELD_OUT = "Its loss of a step is", "Its held-out loss is"


def write(path: Path, loss: float, changed: dict[int, str], mark: str) -> None:
    """The log of 8 steps. loss: of those beyond 4. changed: by step. mark: of what was measured at the end."""
    rows: list[dict[str, Any]] = [
        {"step": step, "loss": loss if step > 4 else 1.0, "lr": 1e-4, "images": step} for step in range(1, 9)
    ]
    for step, what in changed.items():
        rows[step - 1]["loss_changed"] = what
    rows[7] |= {"held_out_loss": loss, "measured_photos": mark}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def made_fork(folder: Path, ours: tuple[dict[int, str], str], theirs: tuple[dict[int, str], str]) -> Fork:
    """A fork after step 4 whose losses are lower by a half. ours, theirs: (changes by step, mark)."""
    layout = Layout(folder)
    write(layout.metrics, 0.5, *ours)
    write(layout.original, 1.0, *theirs)
    layout.phases.write_text(json.dumps({"phase": "start of the training", "started": 1.0, "done": 4}) + "\n")
    found = fork_of(History(layout.metrics).read(), layout)
    assert found is not None and found.step == 4
    return found


@pytest.mark.parametrize(
    ("ours", "theirs", "said", "charts"),
    [
        (({}, "a"), ({}, "a"), [f"{HELD_OUT} lower by 0.5 than", f"{LOSS} lower by 0.5 than that of the original on average "
         "over 4 steps"], 4),
        (({5: CHANGE}, "a"), ({}, "a"), [f"{HELD_OUT} lower by", f"{LOSS} not compared: it measures something else"], 2),
        (({}, "a"), ({7: CHANGE}, "a"), [f"{HELD_OUT} lower by", "on average over 2 steps"], 4),
        (({5: CHANGE}, "a"), ({5: CHANGE}, "a"), [f"{HELD_OUT} lower by", "on average over 4 steps"], 4),
        (({3: CHANGE}, "a"), ({3: CHANGE}, "a"), [f"{HELD_OUT} lower by", "on average over 4 steps"], 4),
        (({5: CHANGE}, "b"), ({}, "a"), [f"{HELD_OUT} not compared", f"{LOSS} not compared"], 0),
    ],
    ids=["nothing", "the fork", "later the original", "both, alike", "before", "the held-out loss, too"],
)  # fmt: skip
def test_only_losses_that_measure_the_same_are_compared(tmp_path: Path, ours, theirs, said, charts: int) -> None:
    found = made_fork(tmp_path, ours, theirs)
    assert len(found.sentences) == len(said) and len(found.charts) == charts
    for sentence, part in zip(found.sentences, said, strict=True):
        assert part in sentence


def test_a_moving_average_begins_anew_with_a_new_level() -> None:
    """After the break it is that of the later values alone: none of the earlier ones is in it."""
    series = [(step, 1.0 if step <= 50 else 9.0) for step in range(1, 101)]
    raw, average = smoothed(series, [50])
    assert [value and round(value, 9) for _, value in average.series] == [1.0] * 50 + [None] + [9.0] * 50
    assert (50, None) in raw.series
