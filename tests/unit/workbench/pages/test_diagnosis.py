"""What a run is called: the same from any cut of its log, and nothing called learned that was not."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness import by_photo
from trainer.monitoring import course
from trainer.monitoring.course import Course
from workbench.pages import diagnosis
from workbench.pages.diagnosis import judge

SMALL = {"unet.mid_block": 0.1}


def log(losses: list[float], *, batch: int = 8, lr: float = 1e-3, norms: list[float] | None = None) -> list[dict[str, Any]]:
    return [
        {"step": step, "loss": loss, "lr": lr, "grad_norm": norms[step - 1] if norms else 0.5, "images": batch * step,
         "skipped": loss is None}
        for step, loss in enumerate(losses, 1)
    ]  # fmt: skip


def warnings(rows: list[dict[str, Any]]) -> list[str]:
    course = Course()
    return [said for row in rows if (said := course.add(row))]


def test_a_loss_that_left_its_range_is_said_once_with_its_step_and_its_cause() -> None:
    rows = log([0.2] * 20 + [2.0] * 20, lr=0.02)
    (said,) = warnings(rows)
    # windows of four steps: 0.2, 0.2, 2, 2 is the first whose mean is above 0.8
    assert said.startswith(
        "warning: step 22: the run is diverging: the loss of the last 4 steps, 1.1, is 5.5 times that of the first ones"
    )
    assert "optimizer.lr was 0.02" in said and "schedule.warmup" in said and "bf16" not in said
    assert "step 22" in judge(rows).sentence and judge(rows).kind == "diverged" and judge(rows).step == 22
    rows[0]["lr"] = 0.0
    assert "schedule.warmup" not in warnings(rows)[0]
    assert "bf16" in warnings([row | {"loss_scale": 2.0} for row in rows])[0]
    back = log([0.2] * 20 + [2.0] * 20 + [0.1] * 20)
    assert judge(back, SMALL).kind == "recovered" and len(warnings(back)) == 1


def test_a_gradient_norm_and_weights_that_left_their_range() -> None:
    rows = log([0.2] * 40, norms=[0.1] * 20 + [30.0] * 20)
    assert "the gradient norm of the last 4 steps" in warnings(rows)[0]
    rows = log([0.2] * 40)
    rows[15]["weight_change"], rows[31]["weight_change"] = 0.4, 1.2
    (said,) = warnings(rows)
    assert said.startswith(
        "warning: step 32: the run is diverging: layers changed by up to 120% of their own weights; most often"
    )
    assert judge(rows).kind == "diverged"
    rows[31]["weight_change"] = None
    assert "to no finite number" in warnings(rows)[0] and judge(rows).kind == "diverged"


def test_the_last_step_that_is_surely_sound() -> None:
    """None of a window of losses is one, and of steps between two looks at the weights none."""
    losses = log([0.2] * 40 + [3.0] * 20)
    assert (judge(losses).step, judge(losses).sound) == (41, 37), "the window is of steps 38 to 41"
    losses[47]["weight_change"] = 0.5
    assert judge(losses).sound == 37, "what came after it makes it no later one"
    weights = log([0.2] * 40)
    weights[15]["weight_change"], weights[31]["weight_change"] = 0.4, 1.2
    assert (judge(weights).step, judge(weights).sound) == (32, 16)
    assert judge(weights[:20], {"unet.mid_block": 3.0}).sound == 16, "seen at the end alone"
    del weights[15]["weight_change"]
    assert (judge(weights).step, judge(weights).sound) == (32, 0)


def jitter(seed: int, batch: int, steps: int = 400) -> list[dict[str, Any]]:
    """Of epsilon, unweighted: by the time alone a photo's loss spans a factor of a hundred, as the pocket SDXL's does."""
    draw = random.Random(seed)

    def one() -> float:
        return draw.choice((1.8, 0.45, 0.11, 0.015)) * math.exp(draw.gauss(0, 0.4))

    return log([sum(one() for _ in range(batch)) / batch for _ in range(steps)], batch=batch)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2, 12])
def test_losses_that_only_jitter_are_no_alarm_and_no_learning(batch: int) -> None:
    for seed in range(40):
        rows = jitter(seed, batch)
        assert not warnings(rows) and judge(rows, SMALL).kind == "unclear", seed


def test_losses_that_fall_below_their_jitter_are_learning() -> None:
    for seed in range(20):
        rows = [row | {"loss": row["loss"] * (0.3 if row["step"] > 100 else 1)} for row in jitter(seed, 4)]
        assert judge(rows, SMALL).kind == "learned", seed


def spread(seed: int, batch: int, steps: int) -> list[dict[str, Any]]:
    """Losses as of SDXL without a weighting: by the time alone from 0.95 to 0.003, and by the photo beside it."""
    draw = random.Random(seed)
    at, mean = (0, 0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 1), (0.95, 0.55, 0.35, 0.2, 0.08, 0.03, 0.012, 0.003)

    def one() -> float:
        time = draw.random()
        place = min(bisect_right(at, time), 7)
        share = (time - at[place - 1]) / (at[place] - at[place - 1])
        return (mean[place - 1] * (1 - share) + mean[place] * share) * math.exp(draw.gauss(0, 0.5) - 0.125)

    return log([sum(one() for _ in range(batch)) / batch for _ in range(steps)], batch=batch)


# (seeds, alarms among them that are allowed): by a simulation of 1,000 runs each, at most one run in 1,000 has a false one
SEEDS = [(1, 0), pytest.param(40, 1, marks=pytest.mark.proof)]


@pytest.mark.parametrize(("seeds", "allowed"), SEEDS)
@pytest.mark.parametrize(("batch", "steps"), [(1, 2000), (4, 4000)])
def test_long_runs_of_widely_spread_losses_are_healthy(batch: int, steps: int, seeds: int, allowed: int) -> None:
    alarms = 0
    for seed in range(seeds):
        rows = spread(seed, batch, steps)
        alarms += bool(warnings(rows))
        assert judge(rows, SMALL).kind in ("unclear", "recovered"), seed
    assert alarms <= allowed


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_a_log_that_begins_in_mid_run(batch: int) -> None:
    """Its first line tells how many images there were in all, not of how many it is."""
    for seed in range(12):
        branch = [row | {"step": row["step"] + 500, "images": row["images"] + 500 * batch} for row in jitter(seed, batch)]
        assert not warnings(branch) and judge(branch, SMALL).kind == "unclear", seed
    rows = log([0.2] * 40 + [2.0] * 40, batch=batch)
    (said,) = warnings([row | {"step": row["step"] + 500, "images": row["images"] + 500 * batch} for row in rows])
    window = max(3, 32 // batch)
    assert f"of the last {window + (batch == 8)} steps" in said or f"of the last {window} steps" in said
    assert "schedule.warmup" not in said, "whether there was one, this log does not tell"


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=60), st.integers(0, 60), st.sampled_from([1, 5, 40]))
def test_a_resumed_run_hears_what_an_uninterrupted_one_does(losses: list[float], cut: int, batch: int) -> None:
    rows = log(losses, batch=batch)
    resumed = Course(rows[:cut])
    assert [said for row in rows[cut:] if (said := resumed.add(row))] == [
        said for said in warnings(rows) if int(said.split()[2].rstrip(":")) > cut
    ]
    assert resumed.alarm == Course(rows).alarm


def test_what_moved_next_to_nothing_learned_nothing() -> None:
    falling = log([1 - step / 50 for step in range(1, 41)], lr=1e-9)
    found = judge(falling, {"unet.a": 1e-6, "unet.b": 3e-5})
    assert (
        found.kind == "nothing" and found.bad and "no layer changed by more than 0.003% of its own weights" in found.sentence
    )
    assert "less than a picture can show" in found.sentence and "raise optimizer.lr (it was at most 1e-09)" in found.sentence
    falling[15]["weight_change"] = 1e-5
    assert judge(falling).kind == "nothing"
    assert judge(falling, SMALL).kind == "learned"
    assert judge([], {"unet.a": 0.0}).kind == "nothing"


def test_blocks_beyond_their_own_weights() -> None:
    said = judge(log([0.1] * 9), {"unet.mid_block": 1.0, "unet.up_blocks.0": 1290.95}).sentence
    assert "in 1 of 2 blocks a layer changed by more than 100% of its own weights, in unet.up_blocks.0 by 129095%" in said
    assert judge(log([0.1] * 9), {"unet.mid_block": 1.0}).kind == "unclear"
    for others in ({}, {"unet.up_blocks.0": 1290.95}):
        said = judge([], {"unet.x": math.nan} | others).sentence
        assert said.startswith("the training has diverged: in unet.x a layer changed to no finite number; most often")


def measured(held_out: list[float], trained: list[float]) -> list[dict[str, Any]]:
    rows = log([0.3] * (10 * (len(held_out) - 1)))
    for place, loss in enumerate(held_out):
        fields = {"held_out_loss": loss, "trained_loss": trained[place], "held_out_by_photo": by_photo(loss, place)}
        fields["trained_by_photo"] = by_photo(trained[place], place)
        (rows[10 * place - 1] if place else rows[0].setdefault("at_start", {})).update(fields)
    return rows


def test_the_held_out_loss_decides_where_there_is_one() -> None:
    found = judge(measured([0.5, 0.4, 0.3], [0.5, 0.3, 0.2]), SMALL)
    assert found.kind == "learned" and found.step == 20 and "from 0.5 to 0.3" in found.sentence
    found = judge(measured([0.5, 0.3, 0.4], [0.5, 0.3, 0.1]), SMALL)
    assert found.kind == "learned" and found.doubt and found.step == 10 and "from 0.5 to 0.4, and was 0.3" in found.sentence
    assert "; since step 10 it rose" in found.sentence and "by heart; take step 10; look at" in found.sentence
    found = judge(measured([0.5, 0.3, 0.5], [0.5, 0.3, 0.1]), SMALL)
    assert found.kind == "memorising" and found.step == 10 and "take step 10" in found.sentence
    assert judge(measured([0.5, 0.51, 0.5], [0.5, 0.4, 0.3]), SMALL).kind == "unclear"
    found = judge(measured([0.5, 0.3, 0.4], [0.5, 0.3, 0.4]), SMALL)
    assert found.kind == "learned", "no gap: both rose"
    assert "fell by 20 %, from 0.5 to 0.4, and was 0.3 at step 10" in found.sentence


def test_what_ended_worse_than_it_began_learned_nothing() -> None:
    found = judge(measured([0.1, 0.0985, 0.2, 0.35], [0.1, 0.0985, 0.2, 0.35]), SMALL)
    assert found.kind == "worse" and found.bad and found.step == 10
    assert "to 0.0985 at step 10, and has got worse since: 0.35 at step 30" in found.sentence
    rose = judge(measured([0.1, 0.15, 0.2], [0.1, 0.15, 0.2]), SMALL)
    assert rose.kind == "worse" and "rose from 0.1 to 0.2 and never fell" in rose.sentence
    assert "lower optimizer.lr" in rose.sentence and "raise" not in rose.sentence
    heart = judge(measured([0.1, 0.12, 0.2], [0.1, 0.09, 0.08]), SMALL)
    assert heart.kind == "memorising" and heart.step is None
    assert "rose from 0.1 to 0.2 and never fell" in heart.sentence and "take step" not in heart.sentence
    rows = measured([0.1, 0.09, 0.08], [0.1, 0.09, 0.08])
    rows[-1]["held_out_loss"] = None
    found = judge(rows, SMALL)
    assert found.kind == "diverged" and "at step 20 the loss of the held-out photos is not finite" in found.sentence
    assert judge(measured([0.1, 0.2, 0.5], [0.1, 0.2, 0.5]), SMALL).kind == "diverged"


def test_the_step_to_take_is_one_that_is_kept() -> None:
    rows = measured([0.5, 0.4, 0.3, 0.4, 0.5], [0.5, 0.4, 0.3, 0.2, 0.1])
    assert "take step 20; or" in judge(rows, SMALL, saved=[10, 20, 40]).sentence
    assert "take step 25, the nearest that is kept; or" in judge(rows, SMALL, saved=[5, 25, 40]).sentence
    assert "no earlier step is kept" in judge(rows, SMALL, saved=[40]).sentence
    assert judge(rows, SMALL, saved=[40]).step == 20


def test_after_an_alarm_the_end_decides() -> None:
    spike = [0.2] * 40 + [9.0] * 5 + [0.2] * 75
    assert judge(log(spike), SMALL).kind == "recovered"
    high = log([0.2] * 40 + [9.0] * 5 + [0.3] * 75)
    assert judge(high, SMALL).kind == "diverged"
    for end, kind in ((0.4, "recovered"), (0.6, "diverged")):
        rows = [dict(row) for row in high]
        rows[0]["at_start"] = {"held_out_loss": 0.5, "trained_loss": 0.5}
        rows[-1] |= {"held_out_loss": end, "trained_loss": end}
        assert judge(rows, SMALL).kind == kind
    assert judge(log([0.2] * 40 + [9.0] * 5), SMALL).kind == "diverged", "the log ends with the alarm's window"


def test_other_photos_make_another_curve() -> None:
    losses = [0.5, 0.4, 0.6, 0.57, 0.55]
    rows = measured(losses, losses)
    rows[0]["at_start"]["measured_photos"] = rows[9]["measured_photos"] = "a"
    for row in rows[19], rows[29], rows[39]:
        row["measured_photos"] = "b"
    found = judge(rows, SMALL)
    assert found.kind == "learned" and "from 0.6 to 0.55" in found.sentence
    assert diagnosis.mark_of(rows) == "b" and diagnosis.mark_of(rows[:15]) == "a" and diagnosis.mark_of([]) is None
    assert "from 0.6 to 0.57 at step 30" in judge(rows[:35], SMALL).sentence


CHANGE = "objective.loss: 'huber' -> 'mse'"


def changed(rows: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    return [row | ({"loss_changed": CHANGE} if row["step"] == step else {}) for row in rows]


@pytest.mark.parametrize("times", [0.1, 10.0])
def test_where_the_loss_measures_something_else_a_new_level_begins(times: float) -> None:
    """As from huber to mse and back: neither learning nor divergence, in loss and in gradient norm."""
    for seed in range(10):
        rows = [
            row | ({"loss": times * row["loss"], "grad_norm": times**2} if row["step"] > 60 else {})
            for row in jitter(seed, 8, 130)
        ]
        assert judge(rows, SMALL).kind == ("learned" if times < 1 else "diverged"), "as one curve"
        told = changed(rows, 61)
        found = judge(told, SMALL)
        assert not warnings(told) and found.kind == "unclear", seed
        assert f"before step 61 the loss measured something else ({CHANGE})" in found.sentence


def test_a_new_level_is_judged_like_any_other() -> None:
    fell = changed([row | {"loss": row["loss"] * (0.3 if row["step"] > 160 else 1)} for row in jitter(1, 4)], 101)
    found = judge(fell, SMALL)
    assert found.kind == "learned" and found.sentence.startswith("the loss of the steps fell by ")
    rows = changed(log([0.2] * 20 + [2.0] * 40 + [30.0] * 20), 21)
    (said,) = warnings(rows)
    assert said.startswith("warning: step 61: the run is diverging: ") and judge(rows).kind == "diverged"
    before = changed(log([0.2] * 20 + [2.0] * 20 + [0.1] * 40), 41)
    assert judge(before[:40]).kind == "diverged" and judge(before).kind == "unclear", "whether it came back, nothing tells"
    before[30]["loss"] = None
    assert (judge(before).kind, judge(before).step) == ("diverged", 22), "what is not finite is so in every unit"


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=60), st.data())
def test_no_loss_before_a_new_level_has_a_part_in_what_is_said_of_it(losses: list[float], data) -> None:
    first = data.draw(st.integers(2, len(losses)))
    other = data.draw(st.lists(st.floats(0.01, 100), min_size=first - 1, max_size=first - 1))
    rows, others = (changed(log(each), first) for each in (losses, other + losses[first - 1 :]))
    assert judge(rows, SMALL) == judge(others, SMALL)


def test_of_a_value_that_is_not_finite_the_rate_is_named() -> None:
    assert Course().blame() == "", "before any update no rate can be the cause"
    assert "optimizer.lr was 2 at step 1" in Course(log([0.2], lr=2.0)).blame()
    assert Course(log([0.2])).blame().startswith("one update before it was finite: ")
    assert Course(log([0.2] * 2)).blame().startswith("2 updates before it were finite: ")
    said = Course(log([0.2] * 8 + [50.0] * 8, lr=2.0)).blame()
    assert said.startswith("the run has diverged since step 9: most often the learning rate is too high (optimizer.lr was 2 ")


SEEN = "the loss on photos it never saw"
LOOK = "look at the samples"
FEW = "too few to tell: the held-out loss"
RATE = "start a new run with a lower o"
WITHIN = "(95 % interval of the change -"


def constructed(
    held_out: list[float | None] = (), trained: list[float | None] | None = None, *, photos: int = 6, copies: int = 0,
    losses: list[float | None] | None = None, lr: float = 1e-4, norms: list[float] | None = None,
    weights: dict[int, float | None] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """The log of a run. held_out, trained: before the first step and after every tenth; weights: by step."""
    rows = log(losses or [0.3] * max(40, 10 * (len(held_out) - 1)), lr=lr, norms=norms)
    count = {"held_out_photos": photos, "held_out_copies": copies}
    for place, loss in enumerate(held_out):
        other = trained[place] if trained else loss
        fields = {"held_out_loss": loss, "trained_loss": other, "held_out_by_photo": by_photo(loss, place, photos), **count}
        fields["trained_by_photo"] = by_photo(other, place)
        (rows[10 * place - 1] if place else rows[0].setdefault("at_start", {})).update(fields)
    for step, change in (weights or {}).items():
        rows[step - 1]["weight_change"] = change
    return rows


FALLS = [1.131, 0.9, 0.7, 0.6, 0.531]
NAN = math.nan
RUNS: dict[str, tuple[dict[str, Any], dict[str, float] | None, str, list[str]]] = {
    # what it is: (its log, its blocks at the end, kind, parts of its sentence)
    "a good one": ({"held_out": FALLS}, SMALL, "learned", [f"{SEEN} fell by 53 %, from 1.131 to 0.531 at step 40", LOOK]),
    "lr 0": ({"held_out": [1.146] * 5, "lr": 0.0}, {"unet.a": 0.0}, "nothing", ["nothing was learned", "raise optimizer.lr"]),
    "lr far too low": ({"held_out": [1.146, 1.146, 1.1459]}, {"unet.a": 1e-5}, "nothing", ["no layer changed by more than"]),
    "lr too low": (
        {"held_out": [1.146, 1.145, 1.141]}, SMALL, "unclear",
        [f"{SEEN} fell by 0.44 %, from 1.146 to 1.141 {WITHIN}", "hold out more photos, train longer or raise optimizer.lr"],
    ),
    "lr too high": ({"held_out": [1, 1.4, 2.2, 3.1]}, {"unet.a": 2.5}, "worse", ["rose from 1 to 3.1 and never fell", RATE]),
    "lr far too high": ({"held_out": [1, 3, 9, 30]}, {"unet.a": 9.0}, "diverged", ["the held-out loss rose from 1 to 30"]),
    "lr far too high, nothing held out": (
        {"losses": [0.2] * 20 + [5.0] * 20}, {"unet.a": 0.5}, "diverged", ["at step 21 the loss of the last 4 steps", RATE],
    ),
    "a rise that passed": (
        {"held_out": FALLS, "losses": [0.2] * 12 + [9.0] * 4 + [0.2] * 24}, SMALL, "recovered", ["came back", LOOK],
    ),
    "odd layer, small": (
        {"held_out": FALLS, "weights": {16: 110.0, 32: 400.0}}, {"unet.a": 667.08, "unet.b": 0.1}, "learned",
        [f"{SEEN} fell by 53 %", "layers changed by up to 66708.00% of their own weights", LOOK],
    ),
    "odd layer, nothing held out": ({}, {"unet.a": 667.08}, "diverged", ["has probably diverged: in 1 of 1 blocks", RATE]),
    "weights far away before the second measurement, and then losses out of range": (
        {"held_out": [1.0, 0.9, 0.8], "losses": [0.3] * 30 + [12.0] * 10, "weights": {8: 1.5}}, {"unet.a": 1.5}, "diverged",
        ["at step 31 the loss of the last 4 steps", "the loss since is 12, above that of the first steps", RATE],
    ),
    "weights far away, and the second measurement is to come": (
        {"held_out": [1.0], "weights": {16: 1.5}}, {"unet.a": 1.5}, "unclear",
        [f"{FEW} was measured once", "layers changed by up to 150.00% of their own weights", LOOK],
    ),
    "weights far away before the second measurement, and then a fall": (
        {"held_out": FALLS, "weights": {8: 1.5}}, {"unet.a": 0.5}, "learned", [f"{SEEN} fell by 53 %"],
    ),
    "weights far away, and a rise that was measured twice": (
        {"held_out": [1.0, 1.2], "weights": {8: 1.5}}, {"unet.a": 1.5}, "worse", ["rose from 1 to 1.2 and never fell"],
    ),
    "weights far away, and a rise out of range that was measured twice": (
        {"held_out": [1.0, 9.0], "weights": {8: 1.5}}, {"unet.a": 1.5}, "diverged", ["held-out loss rose from 1 to 9;"],
    ),
    "a weight that is none": ({"held_out": FALLS}, {"unet.a": NAN}, "diverged", ["in unet.a a layer changed to no finite"]),
    "weights that are none in mid-run": ({"held_out": FALLS, "weights": {32: None}}, None, "diverged", ["no finite number"]),
    "a held-out loss that is none": ({"held_out": [*FALLS[:4], None]}, SMALL, "diverged", ["step 40 the loss of the held"]),
    "a trained loss that is none": (
        {"held_out": FALLS, "trained": [*FALLS[:4], None]}, SMALL, "diverged", ["at step 40 the loss of the trained"],
    ),
    "a held-out loss that is none in mid-run": (
        {"held_out": [1.131, 0.9, None, 0.6, 0.531]}, SMALL, "diverged",
        ["at step 20 the loss of the held-out photos is not finite, though the held-out loss of step 40 is: 0.531;", RATE],
    ),
    "a trained loss that is none in mid-run": (
        {"held_out": FALLS, "trained": [1, None, 1, 1, 1]}, SMALL, "diverged",
        ["at step 10 the loss of the trained photos is not finite, though"],
    ),
    "weights that are none, and later are some": (
        {"held_out": FALLS, "weights": {16: None, 32: 0.2}}, SMALL, "diverged", ["at step 16 layers changed to no finite"],
    ),
    "a held-out loss that never was one": (
        {"held_out": [None] * 5, "trained": FALLS}, SMALL, "unclear",
        ["jitters", "the loss of the held-out photos tells nothing: it was not finite before any step changed it"],
    ),
    "a trained loss that never was one": (
        {"held_out": FALLS, "trained": [None, 1, None, 1, None]}, SMALL, "learned",
        [f"{SEEN} fell by 53 %", "the loss of the trained photos tells nothing: it was not finite before"],
    ),
    "next to no change": (
        {"held_out": FALLS}, {"unet.a": 3e-6}, "learned", [" (layers changed by less than 0.01% of their own weights)"],
    ),
    "memorising": (
        {"held_out": [1, 0.8, 0.9, 1.0], "trained": [1, 0.7, 0.4, 0.2]}, SMALL, "memorising",
        ["fell from 1 to 0.8 at step 10, and rose to 1 since (95 % interval of the rise 0.19", "by heart", "take step 10",
         ", all 3 measurements before it at once), while the"],
    ),
    "memorising from the start": (
        {"held_out": [1, 1.1, 1.3], "trained": [1, 0.6, 0.3]}, SMALL, "memorising",
        ["and never fell (95 %", "), while the loss of the trained"],
    ),
    "random captions": (
        {"held_out": [1, 1.004, 0.999, 1.002], "trained": [1, 0.99, 0.985, 0.98]}, SMALL, "unclear",
        ["too few photos to tell", f"{SEEN} rose by 0.2 %, from 1 to 1.002 {WITHIN}", ", 6 photos): that may be chance"],
    ),
    "two photos held out": ({"held_out": FALLS, "photos": 2}, SMALL, "learned", [f"at step 40 {WITHIN}", ", 2 photos)"]),
    "two photos held out, that fell by less": (
        {"held_out": [1, 0.995, 0.99], "photos": 2}, SMALL, "unclear", [f"{SEEN} fell by 1 %", f"{WITHIN}", "may be chance"],
    ),
    "one photo held out, and weights far away": (
        {"held_out": FALLS, "photos": 1}, {"unet.a": 3.0}, "unclear",
        [f"{FEW} went from 1.131 to 0.531, and one photo never tells; hold out more", "300.00%"],
    ),
    "measured twice": ({"held_out": [1, 0.36]}, SMALL, "learned", [f"from 1 to 0.36 at step 10 {WITHIN}"]),
    "measured once": ({"held_out": [1.0]}, SMALL, "unclear", [f"{FEW} was measured once, 1, so no change is known"]),
    "leaks": (
        {"held_out": FALLS, "copies": 2}, SMALL, "learned",
        [f"{SEEN} fell by 53 %", "2 of the 6 held-out photos have a near duplicate among those that are trained on"],
    ),
    "leaks among few": ({"held_out": FALLS, "photos": 3, "copies": 3}, SMALL, "learned", ["3 of the 3 held-out photos"]),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_the_sentence_that_a_run_must_get(name: str) -> None:
    history, blocks, kind, parts = RUNS[name]
    found = judge(constructed(**history), blocks)
    assert found.kind == kind, found.sentence
    for part in parts:
        assert part in found.sentence
    assert ("diverged" in found.sentence) == (kind == "diverged") or kind == "recovered"
    if found.measured:
        assert found.sentence.startswith(found.measured) and LOOK in found.sentence


def test_there_are_twenty_runs_and_each_kind_is_among_them() -> None:
    from typing import get_args

    assert len(RUNS) >= 20 and {kind for _, _, kind, _ in RUNS.values()} == set(get_args(diagnosis.Kind))


@given(
    st.lists(st.floats(0.01, 10), min_size=3, max_size=8), st.integers(1, 8), st.floats(1e-6, 1e3),
    st.sampled_from([None, "weights", "held-out", "trained"]), st.data(),
)  # fmt: skip
def test_what_is_not_finite_has_diverged_and_what_fell_at_every_measurement_has_not(
    losses, photos, change, spoilt, data
) -> None:
    """At any measurement, but for the one before the first step: no step made that."""
    losses = sorted(set(losses), reverse=True)
    after = data.draw(st.integers(0, len(losses) - 1), "measurement that is spoilt")
    rows = constructed(losses, photos=photos, weights={16: change})
    if spoilt == "weights":
        rows[15]["weight_change"] = None
    elif spoilt:
        place = rows[10 * after - 1] if after else rows[0]["at_start"]
        place[f"{spoilt.replace('-', '_')}_loss"] = None
    found = judge(rows)
    if spoilt == "weights" or (spoilt and after):
        assert found.kind == "diverged"
    elif spoilt:  # before the first step
        assert found.kind != "diverged" or change > course.TOO_FAR
    elif len(losses) > 1:
        assert found.kind != "diverged" and "diverged" not in found.sentence
        if photos == 1:
            assert found.kind in ("unclear", "nothing") and "too few to tell" in found.sentence


def test_a_measured_loss_that_is_none_is_an_alarm_and_what_came_after_it_is_not_sound() -> None:
    rows = constructed([1.131, 0.9, None, 0.6, 0.531], weights={16: 0.1, 32: 0.2})
    (said,) = warnings(rows)
    assert said.startswith(
        "warning: step 20: the run is diverging: the loss of the held-out photos is not finite; most often"
    )
    assert (judge(rows).step, judge(rows).sound) == (20, 16)
    (said,) = warnings([row | ({"loss": None} if row["step"] == 30 else {}) for row in constructed(FALLS)])
    assert said.startswith("warning: step 30: the run is diverging: the loss of the step is not finite")
    assert not warnings([row | ({"loss": None, "skipped": True} if row["step"] == 30 else {}) for row in constructed(FALLS)])


def test_weights_are_no_alarm_while_the_held_out_loss_falls() -> None:
    rows = constructed(FALLS, weights={16: 3.0, 32: 300.0})
    assert not warnings(rows)
    far = "layers changed by up to 300% of their own weights"
    for photos, said in (
        (6, f"note: step 16: {far}; whether that is too far, the held-out loss tells"),
        (1, f"warning: step 16: the run is diverging: {far}; most often"),
    ):
        (line,) = warnings(constructed([1, 1.2, 1.3, 1.4], photos=photos, weights={16: 3.0, 32: 3.0}))
        assert line.startswith(said), photos
    (line,) = warnings(constructed([1, 5.0, 9.0], weights={16: 3.0}))
    assert line.startswith("warning: step 16: the run is diverging: layers"), "a loss out of all range tells, too"


@pytest.mark.parametrize(
    ("held_out", "far", "first"),
    [([1.0, 1.1, 0.9, 0.8], 16, "note: step 16: layers changed"), ([1.0, 1.1, 1.1, 1.1], 31, None),
     ([], 16, "warning: step 16: the run is diverging: layers changed")],
)  # fmt: skip
def test_no_alarm_of_weights_silences_that_of_a_loss(held_out: list[float], far: int, first: str | None) -> None:
    """Nor at the same step, nor of a run whose held-out loss was fine so far."""
    rows = constructed(held_out, losses=[0.3] * 30 + [12.0] * 30, weights={far: 1.5})
    *before, said = warnings(rows)
    assert [line[: len(first)] for line in before] == [first] if first else not before
    assert said.startswith("warning: step 31: the run is diverging: the loss of the last 4 steps")
    found, blamed = judge(rows, SMALL), 31 if held_out else 16
    assert (found.kind, found.step) == ("diverged", blamed), "where the held-out loss decides, the weights are no alarm"
    assert found.sound == (27 if held_out else 0)


def test_every_kind_is_documented() -> None:
    from typing import get_args

    from tests.harness import ROOT

    page = (ROOT / "docs" / "verdict.md").read_text(encoding="utf-8")
    for kind in get_args(diagnosis.Kind):
        assert f"| `{kind}` |" in page, kind
    for number in (course.LOSS_TIMES, course.GRAD_TIMES):
        assert f"{number:g} times" in page
    assert f"{course.TOO_LITTLE:.2%}".replace("%", " %") in page and f"{course.IMAGES} images" in page


PRODIGY = "optimizer.options.d0 or d_coef"


def test_the_rate_of_an_optimizer_that_finds_it_is_what_it_found_and_its_own_keys_are_the_remedy() -> None:
    rows = [row | {"d": 1e-3} for row in log([0.2] * 20 + [2.0] * 20, lr=1.0)]
    course = Course(levers=PRODIGY)
    (said,) = (said for row in rows if (said := course.add(row)))
    assert "the rate it found was 0.001 at step 1" in said and f"a lower {PRODIGY}, a tenth" in said
    for sentence in (said, judge(rows, levers=PRODIGY).sentence, course.blame()):
        assert "optimizer.lr" not in sentence and PRODIGY in sentence
    finite = Course([row | {"d": None} for row in log([0.2] * 5, lr=1.0)], PRODIGY)
    assert finite.blame().endswith(f"start a new run with a lower {PRODIGY}")
    nothing = judge(log([0.2] * 40), {"unet.a": 1e-6}, PRODIGY).sentence
    unclear = judge(measured([0.2] * 3, [0.2] * 3), SMALL, PRODIGY).sentence
    assert f"raise {PRODIGY}" in nothing and unclear.endswith(f"raise {PRODIGY}")


def test_the_highest_rate_of_all_groups_is_what_is_blamed() -> None:
    """LoRA+ and rates of magnitudes are not those of the first group."""
    assert course.rates((1e-3, 1e-3)) == {"lr": 1e-3} and course.rates((1e-3, 1.6e-2)) == {"lr": 1e-3, "highest_lr": 1.6e-2}
    (said,) = warnings([row | {"highest_lr": 1.6e-2} for row in log([0.2] * 20 + [2.0] * 20, lr=1e-3)])
    assert "the highest rate of a group (optimizer.lr times lora_plus, magnitude_lr" in said and "was 0.016 at step 1" in said


def test_a_change_of_weights_is_said_as_no_less_and_no_more_than_it_is() -> None:
    said = {0.0: "0%", 1e-12: "less than 0.01%", 9.9e-5: "less than 0.01%", 1e-4: "up to 0.01%", 0.065: "up to 6.50%"}
    assert {change: course.moved_by(change) for change in said} == said


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_number_that_is_not_finite_is_the_largest_wherever_it_stands(place: int) -> None:
    numbers = [0.5, 0.25]
    numbers.insert(place, math.nan)
    assert math.isnan(diagnosis.largest(numbers))
    assert (diagnosis.largest([0.25, 0.5]), diagnosis.largest([])) == (0.5, 0.0)
