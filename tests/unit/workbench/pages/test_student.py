"""Intervals of paired differences: those of another implementation of Student's t, and how often a verdict is false."""

from __future__ import annotations

import random
from statistics import fmean, stdev
from typing import Any

import mpmath
import pytest

from workbench.pages.diagnosis import judge
from workbench.pages.student import interval

RUNS = 200
FALSE = RUNS * 0.05 + 2 * (RUNS * 0.05 * 0.95) ** 0.5  # 5 % and two standard errors


@pytest.mark.parametrize("count", [2, 3, 4, 12, 32])
@pytest.mark.parametrize("looks", [1, 2, 7])
def test_each_interval_misses_with_its_part_of_the_five_percent(count: int, looks: int) -> None:
    """The two tails of Student's t by the regularised incomplete beta function."""
    draw = random.Random(count)
    found = [draw.gauss(0.3, 1) for _ in range(count)]
    low, high = interval(found, looks)
    assert (low + high) / 2 == pytest.approx(fmean(found))
    t, freedom = (high - low) / 2 / (stdev(found) / count**0.5), count - 1
    tails = mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True)
    assert float(tails) == pytest.approx(0.05 / looks, rel=1e-6)


def log(looks: list[list[float]]) -> list[dict[str, Any]]:
    """The log of a run with these losses: by measurement and photo. The trained photos' loss falls on."""
    rows: list[dict[str, Any]] = [
        {"step": step, "loss": 0.5, "lr": 1e-4, "images": step, "grad_norm": 1.0} for step in range(1, 10 * len(looks))
    ]
    for place, losses in enumerate(looks):
        by = {str(photo): loss for photo, loss in enumerate(losses)}
        told = {"held_out_loss": fmean(losses), "held_out_by_photo": by, "held_out_photos": len(losses)}
        told["trained_loss"] = 0.5 - place / 100
        (rows[10 * place - 1] if place else rows[0].setdefault("at_start", {})).update(told)
    return rows


def called(draw: random.Random, photos: int, measurements: int, change: float = 0.0) -> tuple[str, int | None]:
    """(kind, step) of a run whose photos' losses lie far apart, and at each measurement are off by a random 5 %; change: of
    all of them, from the second measurement on, in these errors."""
    own = [draw.uniform(0.2, 2.0) for _ in range(photos)]
    looks = [[loss + 0.05 * (draw.gauss(0, 1) + change * bool(place)) for loss in own] for place in range(measurements)]
    found = judge(log(looks), {"unet.mid_block": 0.1})
    return found.kind, found.step


@pytest.mark.parametrize("photos", [2, 4, 12])
def test_adapters_of_random_numbers_are_seldom_called_learned(photos: int) -> None:
    draw = random.Random(photos)
    found = [called(draw, photos, 2)[0] for _ in range(RUNS)]
    assert found.count("learned") <= FALSE and found.count("unclear") >= RUNS - 2 * FALSE


@pytest.mark.parametrize("photos", [2, 4, 12])
def test_idle_runs_of_eight_measurements_seldom_name_a_step_to_take(photos: int) -> None:
    draw = random.Random(photos)
    found = [called(draw, photos, 8) for _ in range(RUNS)]
    assert sum(kind in ("worse", "memorising") and step is not None for kind, step in found) <= FALSE
    assert sum(kind in ("worse", "memorising") for kind, _ in found) <= FALSE


def test_runs_that_learn_are_called_so_and_one_photo_never_tells() -> None:
    draw = random.Random(3)
    assert sum(called(draw, 8, 3, -3.0)[0] == "learned" for _ in range(RUNS)) >= 0.9 * RUNS
    assert {called(draw, 1, 8, -20.0)[0] for _ in range(20)} == {"unclear"}


def test_a_log_without_losses_by_photo_tells_the_change_and_no_verdict() -> None:
    rows = [
        {name: value for name, value in row.items() if name not in ("held_out_by_photo", "at_start")}
        for row in log([[1.0, 1.2], [0.9, 1.1], [0.5, 0.7]])
    ]
    found = judge(rows, {"unet.mid_block": 0.1})
    assert found.kind == "unclear" and "from 1 to 0.6, and this log, begun by an earlier version" in found.sentence
