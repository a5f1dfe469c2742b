"""Every schedule: against the formula written anew, and against the libraries that have the same one."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.base.errors import UserError
from trainer.config import ScheduleTable
from trainer.optim import SCHEDULES, ScheduleState, build_schedule, steps_of
from trainer.resume import start_point

KEYS: dict[str, Any] = {"cycles": 3, "power": 1.7, "decay": 12}


def rates(name: str, total: int = 40, *, warmup: int = 5, beyond: int = 4, lr: float = 3e-3, **keys: Any) -> list[float]:
    """The rate of each update, of some beyond the schedule's end too."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=lr)
    return walk(optimizer, build_schedule(name, optimizer, warmup=warmup, total_steps=total, **KEYS | keys), total + beyond)


def walk(optimizer: torch.optim.Optimizer, schedule: Any, count: int) -> list[float]:
    found = []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def of_library(make: Callable[..., Any], count: int, lr: float = 3e-3, **keys: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=lr)
    return walk(optimizer, make(optimizer, **keys), count)


def test_the_config_names_every_schedule_and_each_key_is_one() -> None:
    assert set(get_args(ScheduleTable.model_fields["name"].annotation)) == SCHEDULES.keys()
    assert {key for descent in SCHEDULES.values() for key in descent.reads} <= ScheduleTable.model_fields.keys()


# progress p in [0, 1] after the warm-up, of 28 steps -> the share of the base rate at end = 0: another way of writing each
FORMULAS: dict[str, Callable[[Fraction], float]] = {
    "constant": lambda p: 1.0,
    "linear": lambda p: float(1 - p),
    "cosine": lambda p: math.cos(math.pi * p / 2) ** 2,
    "cosine_restarts": lambda p: math.cos(math.pi * (3 * p - math.floor(3 * p)) / 2) ** 2 if p < 1 else 0.0,
    "polynomial": lambda p: math.exp(1.7 * math.log(1 - p)) if p < 1 else 0.0,
    "rex": lambda p: float(2 * (1 - p) / (2 - p)),
    "wsd": lambda p: float(min(1, (1 - p) * 28 / 12)),
}


@pytest.mark.parametrize("end", [0.0, 0.25])
@pytest.mark.parametrize("name", SCHEDULES)
def test_against_the_formula(name: str, end: float) -> None:
    found = rates(name, 33, warmup=5, lr=1.0, end=end)
    expected = [n / 5 for n in range(5)] + [FORMULAS[name](Fraction(min(n, 28), 28)) for n in range(32)]
    if name != "constant":
        expected[5:] = [(1 - end) * share + end for share in expected[5:]]
    assert found == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(
    ("name", "library", "more"),
    [
        ("constant", "constant_with_warmup", {}), ("linear", "linear", {}), ("cosine", "cosine", {}),
        ("cosine_restarts", "cosine_with_restarts", {"num_cycles": 3}),
    ],
)  # fmt: skip
def test_bit_for_bit_as_diffusers(name: str, library: str, more: dict[str, Any], warmup: int) -> None:
    """Runs of before had diffusers' schedules."""
    from diffusers.optimization import get_scheduler

    theirs = of_library(
        lambda optimizer: get_scheduler(library, optimizer, num_warmup_steps=warmup, num_training_steps=40, **more), 40
    )
    ours = rates(name, 40, warmup=warmup, beyond=0)
    assert ours == theirs if name != "cosine_restarts" else ours == pytest.approx(theirs, rel=1e-12)


def test_as_other_libraries_with_a_rate_at_the_end() -> None:
    from diffusers.optimization import get_linear_schedule_with_warmup, get_polynomial_decay_schedule_with_warmup
    from transformers import get_cosine_with_min_lr_schedule_with_warmup, get_wsd_schedule

    counts = {"num_warmup_steps": 5, "num_training_steps": 40}
    linear = of_library(get_linear_schedule_with_warmup, 41, f_min=0.2, **counts)
    assert rates("linear", end=0.2)[5:41] == pytest.approx(linear[5:])
    polynomial = of_library(get_polynomial_decay_schedule_with_warmup, 41, lr_end=0.2 * 3e-3, power=1.7, **counts)
    assert rates("polynomial", end=0.2)[:41] == pytest.approx(polynomial)
    cosine = of_library(get_cosine_with_min_lr_schedule_with_warmup, 41, min_lr_rate=0.2, **counts)
    assert rates("cosine", end=0.2)[5:41] == pytest.approx(cosine[5:])
    annealed = of_library(torch.optim.lr_scheduler.CosineAnnealingLR, 36, T_max=35, eta_min=0.2 * 3e-3)
    assert rates("cosine", end=0.2)[5:41] == pytest.approx(annealed)
    wsd = of_library(get_wsd_schedule, 41, num_decay_steps=12, decay_type="linear", min_lr_ratio=0.2, **counts)
    assert rates("wsd", end=0.2)[5:41] == pytest.approx(wsd[5:])


@given(
    st.sampled_from(sorted(SCHEDULES)), st.integers(1, 60), st.integers(0, 60), st.floats(0, 1), st.integers(1, 9),
    st.floats(0.1, 9), st.integers(0, 60),
)  # fmt: skip
def test_between_the_base_rate_and_the_end_and_there_it_stays(
    name: str, total: int, warmup: int, end: float, cycles: int, power: float, decay: int
) -> None:
    warmup = min(warmup, total)
    decay = min(decay, total - warmup)
    keys = {"end": end, "cycles": cycles, "power": power, "decay": decay}
    found = rates(name, total, warmup=warmup, lr=1.0, beyond=3, **keys)
    assert found[:warmup] == [n / warmup for n in range(warmup)]
    falls = name != "constant" and not (name == "wsd" and decay == 0)
    low = end if falls else 1.0
    assert all(low - 1e-12 <= rate <= 1.0 for rate in found[warmup:])
    assert found[total:] == [low] * 3


def test_a_fall_that_begins_in_the_warm_up_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"schedule.decay = 0.8 and schedule.warmup = 30 are 80 \+ 30 steps, more than .* 100"
    ):
        start_point._schedule_length(ScheduleTable(name="wsd", warmup=30, decay=0.8), 100)
    assert start_point._schedule_length(ScheduleTable(name="wsd", warmup=20, decay=0.8), 100) == 100
    assert start_point._schedule_length(ScheduleTable(name="cosine", warmup=30, decay=0.8), 100) == 100, "it has no such fall"
    assert steps_of(0.8, 101) == 80 and steps_of(7, 100) == 7


def test_a_share_is_the_number_that_is_written() -> None:
    """0.29 of 100 is 28.999999999999996 in fp64. Of the default the count is what it was before that was rounded."""
    assert steps_of(0.29, 100) == 29 and steps_of(0.57, 100) == 57
    for total in (1, 3, 100, 700, 1999, 100_000, 123_456_789):
        for hundredths in range(100):
            assert steps_of(hundredths / 100, total) == hundredths * total // 100, (hundredths, total)
    assert all(steps_of(0.05, total) == int(0.05 * total) for total in range(1, 20_000))


@pytest.mark.parametrize("name", ["linear", "cosine", "cosine_restarts", "polynomial", "rex"])
def test_one_that_is_all_warm_up_ends_at_its_end(name: str) -> None:
    assert rates(name, 8, warmup=8, beyond=2, lr=1.0, end=0.25)[7:] == [7 / 8, 0.25, 0.25]


def test_one_that_never_falls_stays_at_its_rate() -> None:
    assert rates("wsd", 8, warmup=2, beyond=2, lr=1.0, decay=0, end=0.25)[2:] == [1.0] * 8


def test_a_schedule_that_was_lengthened_says_what_rate_comes_next() -> None:
    def state(total: int, **more: Any) -> ScheduleState:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
        return ScheduleState(build_schedule("cosine", optimizer, warmup=0, total_steps=total), **more)

    short = state(10)
    for _ in range(8):
        short.schedule.optimizer.step()
        short.schedule.step()
    lines: list[str] = []
    for total in (10, 20):
        state(total, anew=True, say=lines.append).load_state_dict(short.state_dict())
    now, then = (1e-3 * (1 + math.cos(math.pi * 8 / total)) / 2 for total in (20, 10))
    assert lines == [f"learning rate of the next step: {now:.3g}; it would have been {then:.3g}"]


def test_rates_that_were_set_are_not_kept() -> None:
    """What trainer.Session.lr does to a schedule ends with its process."""

    def state() -> ScheduleState:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
        return ScheduleState(build_schedule("cosine", optimizer, warmup=0, total_steps=10))

    whole, changed, resumed = state(), state(), state()
    changed.schedule.base_lrs = [2e-4]
    for each in (whole, changed):
        for _ in range(4):
            each.schedule.optimizer.step()
            each.schedule.step()
    assert changed.schedule.get_last_lr() != whole.schedule.get_last_lr()
    resumed.load_state_dict(changed.state_dict())
    set_there = [group["lr"] for group in resumed.schedule.optimizer.param_groups]
    assert resumed.schedule.get_last_lr() == set_there == whole.schedule.get_last_lr()
