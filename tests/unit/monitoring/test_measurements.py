"""The log of a run, from whichever steps it is resumed: what is said of it once, and what TensorBoard shows of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.base.errors import DataError, NonFiniteError
from trainer.monitoring.measurements import Measurements, change_due
from trainer.monitoring.metrics import Metrics
from trainer.runtime.jobs import Position
from workbench.trackers.trackers import TensorBoard


def entry(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "loss": loss, "lr": 0.02, "grad_norm": 0.5, "images": 8 * step, "skipped": False}


def start(
    folder: Path, losses: Sequence[float], first: int, last: int, error: Exception | None = None, changed: str = ""
) -> list[str]:
    """One start of a run, of the steps from `first` to `last`: what it says. error: what ends it. changed: as it takes it."""
    said: list[str] = []
    processes: Any = SimpleNamespace(say=said.append, largest=lambda *numbers: numbers, is_main=True)
    log = Metrics(folder / "metrics.jsonl", total_steps=99, initial_step=first - 1, enabled=True)
    measured = Measurements([], log, "optimizer.lr", processes, changed=changed)
    assert measured.begin(Position(first - 1, 99, fresh=False)) is None
    for step in range(first, last + 1):
        assert measured.step(entry(step, losses[step - 1]), Position(step, 99)) is None
    if error is not None:
        measured.end(error)
    log.close()
    return said


@pytest.mark.parametrize("cut", [1, 19, 21, 22, 23, 39])
def test_a_resumed_run_goes_on_from_what_its_log_tells(tmp_path: Path, cut: int) -> None:
    """Alone, the steps after the cut tell neither of a rise before it nor that it was said."""
    losses = [0.2] * 20 + [2.0] * 20
    whole = start(tmp_path, losses, 1, 40)
    (tmp_path / "metrics.jsonl").unlink()
    parts = start(tmp_path, losses, 1, cut), start(tmp_path, losses, cut + 1, 40)
    assert [*parts[0], *parts[1]] == whole and len(whole) == 1
    assert whole[0].startswith("warning: step 22: the run is diverging: ") and bool(parts[0]) == (cut >= 22)


def test_the_first_line_after_a_changed_loss_says_so_also_where_its_start_was_killed(tmp_path: Path) -> None:
    """A start that left no line is made again, and says it again; the next one has nothing to say."""
    what = "objective.loss: 'huber' -> 'mse'"
    assert start(tmp_path, [0.2] * 9, 1, 3) == start(tmp_path, [0.2] * 9, 7, 9) == []
    (tmp_path / "metrics.jsonl").unlink()
    start(tmp_path, [0.2] * 9, 1, 3)
    new = ["from step 4 on the loss measures something else: its level begins anew there"]
    assert start(tmp_path, [0.2] * 9, 4, 3, changed=what) == start(tmp_path, [0.2] * 9, 4, 6, changed=what) == new
    assert start(tmp_path, [0.2] * 9, 7, 9) == []
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"]: line["loss_changed"] for line in lines if "loss_changed" in line} == {4: what}


@pytest.mark.parametrize(
    ("rise", "error", "told"),
    [(2.0, NonFiniteError("step 41"), True), (0.2, NonFiniteError("step 41"), False), (2.0, DataError("a photo"), False)],
)
def test_a_run_that_diverged_to_a_value_that_is_not_finite_ends_with_its_verdict(
    tmp_path: Path, rise: float, error: Exception, told: bool
) -> None:
    said = "\n".join(start(tmp_path, [0.2] * 20 + [rise] * 20, 1, 40, error))
    assert ("\n  verdict  diverged" in said) == told
    assert (
        "\nwarning: the training has diverged: at step 22 the loss of the last 4 steps, 1.1, is 5.5 times" in said
    ) == told


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """By name and step, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Of a line of metrics.jsonl, as they ought to be named there."""
    named = {}
    for key, value in line.items():
        if isinstance(value, list):
            named |= {f"train/{key}/{place}": number for place, number in enumerate(value, 1)}
        elif isinstance(value, (int, float)) and key not in ("step", "time"):
            named[f"train/{key}"] = float(value)
    return named


def test_tensorboard_shows_the_whole_line_that_a_later_start_added_to(tmp_path: Path) -> None:
    """A later start hides what the earlier one logged of its step, and has to show it again."""

    def metrics(before: int) -> Metrics:
        path = tmp_path / "metrics.jsonl"
        return Metrics(path, trackers=[TensorBoard(tmp_path / "events")], total_steps=3, initial_step=before, enabled=True)

    first = metrics(0)
    for step in (1, 2):
        first.log(entry(step, 0.5 / step) | ({"at_start": {"held_out_loss": 0.75}} if step == 1 else {}))
    first.close()
    again = metrics(2)
    again.add({"held_out_loss": 0.25, "held_out_quarters": [0.5, 0.25, 0.125, 0.125]})
    again.log(entry(3, 0.125))
    again.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    expected: dict[str, dict[int, float]] = {}
    for line in lines:
        for name, number in numbers(line).items():
            expected.setdefault(name, {})[line["step"]] = number
    expected["train/held_out_loss"][0] = 0.75
    shown = scalars(tmp_path / "events")
    assert shown.keys() == expected.keys()
    for name, curve in expected.items():
        assert shown[name] == pytest.approx(curve), name


def test_the_weights_are_measured_after_twice_as_many_steps_each_time() -> None:
    """Every weight is read: a run of any length does so few times."""
    assert [step for step in range(1000) if change_due(Position(step, 1000))] == [16, 32, 64, 128, 256, 512]
