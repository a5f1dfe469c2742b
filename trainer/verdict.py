"""Did it learn, diverge, or do nothing? In one place, from the lines of metrics.jsonl and from how far the weights moved.

Everything here is a pure function of these. So it says the same after a resume, while a run is alive, and from outside.
docs/watching.md has what the thresholds were taken from.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

Line = Mapping[str, Any]  # a line of metrics.jsonl

# A loss or gradient norm is that of so many images at least, and of so many steps: fewer jitter by more than they tell.
IMAGES, STEPS = 32, 3
# What it is measured by, the level of the first images, is that of up to so many: one level serves a whole run.
FIRST_IMAGES = 256
# What is out of all range. Loss: the mean of such a window, in means of the first. Gradient norm: the medians.
LOSS_TIMES, GRAD_TIMES = 4.0, 20.0
# ||dW|| / ||W|| of the layer that moved most: above the first, what it had learnt is drowned; below the second, a picture
# differs by no more than by the rounding of its computation. What a DoRA's magnitudes do is in it, as much as it does.
TOO_FAR, TOO_LITTLE = 1.0, 5e-4
# A fall of the held-out loss is learning, a rise from its lowest value is memorising: shares. Draws are fixed, so neither is
# noise. Of the losses of steps, which jitter: standard errors of their ranks, for a fall, and for a rise after an alarm.
FALLEN, RISEN, ERRORS, ABOVE = 0.01, 0.05, 3.5, 2.0

# The field that tells on which photos, captions and draws a held-out loss was measured: of others it is another curve.
PHOTOS = "measured_photos"

TOLD = 10  # losses of steps: of fewer nothing can be said

# What an update's size depends on, as a user knows it. Groups may have other rates than the first: see `rates`.
LR = "optimizer.lr"
HIGHEST = "the highest rate of a group (optimizer.lr times lora_plus, magnitude_lr, text_encoder_lr or a rule's lr)"

Kind = Literal["learned", "memorising", "worse", "diverged", "recovered", "nothing", "unclear"]
BAD: tuple[Kind, ...] = ("worse", "diverged", "nothing")


@dataclass(frozen=True)
class Verdict:
    """kind: in a word. sentence: for people, with the remedy. step: where it diverged, or the best one; None: neither.
    sound: of one that has diverged the last step that surely has no part in it."""

    kind: Kind
    sentence: str
    step: int | None = None
    sound: int = 0

    @property
    def bad(self) -> bool:
        return self.kind in BAD


# What a line must have, and what it may have: numbers; of those that it may have, null is one, too.
NEEDED = ("images", "lr")
OPTIONAL = ("loss", "grad_norm", "d", "weight_change", "held_out_loss", "trained_loss")


def is_line(found: object) -> bool:
    """Whether something from a metrics.jsonl, which anybody may have changed, can be judged."""
    if not isinstance(found, dict) or not isinstance(found.get("step"), int) or isinstance(found["step"], bool):
        return False
    start = found.get("at_start", {})
    return (
        isinstance(start, dict)
        and all(is_number(found.get(name)) for name in NEEDED)
        and is_number(found.get("highest_lr", 0))
        and all(fields.get(name) is None or is_number(fields[name]) for fields in (found, start) for name in OPTIONAL)
        and all(isinstance(fields.get(PHOTOS, ""), str) for fields in (found, start))
    )


def is_number(value: object) -> bool:
    """Of those that JSON has, one that a float can hold."""
    return isinstance(value, float) or (
        isinstance(value, int) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    )


class Course:
    """The lines of a run, one after another. diverged: the first step at which something left its range; what: what did.

    The log of a branch begins in mid-run. Then nobody knows how many images its first line is of, nor the first rate.
    levers: the keys that make the optimizer's updates larger or smaller.
    """

    def __init__(self, rows: Iterable[Line] = (), levers: str = LR) -> None:
        self.levers, self.rate_of = levers, LR
        self.rate, self.rate_step, self.scaled = 0.0, 0, False
        self.first_rate: float | None = None
        self.step, self.updates, self.images = 0, 0, 0
        self.first: tuple[float, float] | None = None  # loss and gradient norm of the first images
        self.now: tuple[float, float] | None = None
        self.diverged: int | None = None
        self.what, self.before = "", 0  # before: the last step that has no part in it
        self.sound = 0  # as of Verdict: weights are measured seldom, and may have left their range long before
        self._window: deque[tuple[int, float, float]] = deque()  # the last ones, of _within images
        self._within = 0
        self._before: list[tuple[int, float, float]] = []  # the first ones that have left the window, of _told images
        self._told = 0
        for row in rows:
            self.add(row)

    def add(self, row: Line) -> str | None:
        """A sentence where this line is the first that is out of all range."""
        step, images = row["step"], row["images"] - self.images if row["step"] == self.step + 1 else 0
        self.step, self.images = step, row["images"]
        self.updates += not row.get("skipped", False)
        self.scaled = self.scaled or "loss_scale" in row
        rate = row.get("highest_lr", row["lr"]) * (row.get("d") or 1.0)
        if rate > self.rate:
            self.rate, self.rate_step = rate, step
            self.rate_of = "the rate it found" if "d" in row else HIGHEST if "highest_lr" in row else LR
        if step == 1:
            self.first_rate = rate
        if said := self.measured(step, row):
            return said
        if said := self._said(step, self._out_of_range(row, images)):
            self.sound = self.before
        return said

    def measured(self, step: int, fields: Line) -> str | None:
        """As `add`, of what was measured after a step whose line was there already."""
        if "weight_change" not in fields:
            return None
        change = fields["weight_change"]
        if change is None:
            return self._said(step, "layers changed to no finite number")
        if change > TOO_FAR:
            return self._said(step, f"layers changed by up to {change:.0%} of their own weights")
        self.sound = step if self.diverged is None else self.sound
        return None

    def _said(self, step: int, what: str) -> str | None:
        if not what or self.diverged is not None:
            return None
        self.diverged, self.what, self.before = step, what, step - len(self._window)
        return f"step {step}: the run is diverging: {what}; {self.remedy()}"

    def _out_of_range(self, row: Line, images: int) -> str:
        loss, norm = row.get("loss"), row.get("grad_norm")
        if loss is None or norm is None:
            return ""  # the step is skipped: by the loss scaler, or told by the policy
        self._window.append((images, loss, norm))
        self._within += images
        while len(self._window) > STEPS and self._within - self._window[0][0] >= IMAGES:
            left = self._window.popleft()
            self._within -= left[0]
            if self._told < FIRST_IMAGES:
                self._before.append(left)
                self._told += left[0]
                if self._told >= IMAGES and len(self._before) >= STEPS:
                    self.first = _level(self._before)
        if len(self._window) < STEPS or self._within < IMAGES:
            return ""
        self.now = _level(self._window)
        self.first = self.first or self.now
        named = zip(("loss", "gradient norm"), self.now, self.first, (LOSS_TIMES, GRAD_TIMES), strict=True)
        for name, now, first, times in named:
            if now > times * first > 0:
                grown, steps = f"{now / first:.3g} times", len(self._window)
                return f"the {name} of the last {steps} steps, {now:.3g}, is {grown} that of the first ones"
        return ""

    def remedy(self) -> str:
        """The likely cause, in plain words, and what to do."""
        more = []
        if self.first_rate == self.rate:
            more.append("a warm-up (schedule.warmup = 0.05)")
        if self.scaled:
            more.append("precision.compute = 'bf16' in place of fp16")
        beside = f"; {' and '.join(more)} may help, too" if more else ""
        return (
            f"most often the learning rate is too high ({self._rate()}); start a new run with {self._lower()}, a tenth for a "
            f"start{beside}"
        )

    def _rate(self) -> str:
        return f"{self.rate_of} was {self.rate:.3g} at step {self.rate_step}"

    def _lower(self) -> str:
        return "a lower one" if self.levers == LR else f"a lower {self.levers}"

    def blame(self) -> str:
        """For a value that is not finite: what the steps before say of its cause; "" where there were none."""
        if self.diverged is not None:
            return f"the run has diverged since step {self.diverged}: {self.remedy()}"
        if self.updates and self.rate:
            before = "one update before it was" if self.updates == 1 else f"{self.updates} updates before it were"
            return (
                f"{before} finite: if these samples are sound, the learning rate may be too "
                f"high ({self._rate()}); start a new run with {self._lower()}"
            )
        return ""


def rates(lr: Sequence[float]) -> dict[str, float]:
    """For a step's line, of the rates of all groups: the first, and the highest where that is another."""
    return {"lr": lr[0]} | ({"highest_lr": max(lr)} if max(lr) > lr[0] else {})


def judge(
    rows: Sequence[Line], blocks: Mapping[str, float] | None = None, levers: str = LR, kept: Iterable[int] | None = None
) -> Verdict:
    """Of a run so far, or at its end.

    rows: of metrics.jsonl, in order. blocks: by name, the largest ||dW|| / ||W|| of the adapter's blocks, from where the run
    started; None: not measured, then the last `weight_change` of the rows counts. levers: as of Course. kept: steps whose
    adapter can be taken; None: nobody knows.
    """
    course = Course(rows, levers)

    def diverged(said: str) -> Verdict:
        return Verdict("diverged", f"{said}; {course.remedy()}", course.diverged, course.sound)

    changes = [row["weight_change"] for row in rows if "weight_change" in row]
    change = _largest(blocks.values()) if blocks else _number(changes[-1]) if changes else None
    if change is not None and not change <= TOO_FAR:
        beyond = {name: moved for name, moved in (blocks or {}).items() if not moved <= TOO_FAR}
        worst = max(beyond, key=lambda name: math.inf if math.isnan(beyond[name]) else beyond[name], default="")
        if not math.isfinite(change):
            said = f"the training has diverged: {f'in {worst} ' if worst else ''}a layer changed to no finite number"
            return diverged(said)
        said = f"a layer changed by {change:.0%} of its own weights"
        if blocks:
            many = f"in {len(beyond)} of {len(blocks)} blocks a layer"
            said = f"{many} changed by more than {TOO_FAR:.0%} of its own weights, in {worst} by {change:.0%}"
        return diverged(f"the training has probably diverged: {said}")
    for kind, field in (("held-out", "held_out_loss"), ("trained", "trained_loss")):
        if (told := _series(rows, field)) and told[-1][1] is None:
            said = f"at step {told[-1][0]} the loss of the {kind} photos is not finite"
            return diverged(f"the training has diverged: {said}")
    known = [(step, loss) for step, loss in _series(rows, "held_out_loss") if loss is not None]
    if len(known) > 1 and known[-1][1] > LOSS_TIMES * known[0][1]:
        said = f"the held-out loss rose from {known[0][1]:.4g} to {known[-1][1]:.4g}"
        return diverged(f"the training has diverged: {said}")
    if course.diverged is not None:
        since = f"at step {course.diverged} {course.what}"
        if above := _still_above(rows, known, course):
            return diverged(f"the training has diverged: {since}; {above}")
        said = f"the training came back: {since}; look at the samples; {course.remedy()}"
        return Verdict("recovered", said, course.diverged)
    if change is not None and change < TOO_LITTLE:
        it = "it" if course.rate_of == levers else course.rate_of
        said = (
            f"nothing was learned: no layer changed by more than {max(change, 1e-5):.3%} of its own weights, less than a "
            f"picture can show; train longer or raise {levers} ({it} was at most {course.rate:.3g})"
        )
        return Verdict("nothing", said)
    changed = f" (layers changed by up to {change:.2%} of their own weights)" if change is not None else ""
    return _by_held_out(rows, known, changed, levers, kept) if len(known) > 1 else _by_steps(rows, changed)


def _still_above(rows: Sequence[Line], known: Sequence[tuple[int, float]], course: Course) -> str:
    """After an alarm, in words, what tells that the run has not come back; "" where it has.

    By the held-out loss, where it was measured after the alarm. Else by the ranks of the last third of the losses over those
    before the alarm; by the means where these are too few. One window alone may be low, or high, by chance.
    """
    if len(known) > 1 and known[-1][0] > (course.diverged or 0):
        (_, start), (last, now) = known[0], known[-1]
        return f"the held-out loss of step {last} is {now:.4g}, that of the start {start:.4g}" if now > start else ""
    losses = [(row["step"], row["loss"]) for row in rows if row.get("loss") is not None]
    early = [loss for step, loss in losses if step <= course.before][: max(TOLD, len(losses) // 5)]
    late = [loss for step, loss in losses[-max(TOLD, len(losses) // 3) :] if step > (course.diverged or 0)]
    if not late:
        return "and then the log ends"
    if min(len(early), len(late)) >= TOLD:
        above = _fall(early, late) < -ABOVE
    else:
        above = course.first is not None and fmean(late) > course.first[0]
    return f"the loss since is {fmean(late):.4g}, above that of the first steps" if above else ""


def _by_held_out(
    rows: Sequence[Line], known: Sequence[tuple[int, float]], changed: str, levers: str, kept: Iterable[int] | None
) -> Verdict:
    """Of a run that has not diverged, and changed something or may have."""
    trained = {step: value for step, value in _series(rows, "trained_loss") if value is not None}
    (first, start), (last, now), (best, lowest) = known[0], known[-1], min(known, key=lambda pair: pair[1])
    fell = lowest < start * (1 - FALLEN)
    best = best if fell else first
    was = f"the held-out loss fell from {start:.4g} to {lowest:.4g} at step {best}"
    by_heart = "the loss of the trained photos falls on: the adapter learns the photos by heart"
    if now > lowest * (1 + RISEN) and trained.get(last, math.inf) < trained.get(best, -math.inf):
        if not fell:
            said = f"the held-out loss rose from {start:.4g} to {now:.4g} and never fell, while {by_heart}"
            return Verdict("memorising", f"{said}; train with more photos or a lower {levers}")
        said = f"{was}, and rose to {now:.4g} since, while {by_heart}; {_take(best, last, kept)}"
        return Verdict("memorising", f"{said}; or train with more photos or a lower {levers}", best)
    if now < start * (1 - FALLEN):
        ended = "" if now == lowest else f", and is {now:.4g} at the end"
        return Verdict("learned", f"{was}{ended}{changed}", best)
    if fell:
        said = f"{was}, and has got worse since: {now:.4g} at step {last}{changed}; {_take(best, last, kept)}"
        return Verdict("worse", f"{said}; or start a new run with a lower {levers}", best)
    if now > start * (1 + FALLEN):
        said = f"the held-out loss rose from {start:.4g} to {now:.4g} and never fell: the adapter makes the model worse"
        return Verdict("worse", f"{said}{changed}; start a new run with a lower {levers}, a tenth for a start")
    said = f"the held-out loss did not fall: it went from {start:.4g} to {now:.4g}{changed}; train longer or raise {levers}"
    return Verdict("unclear", said)


def _take(best: int, last: int, kept: Iterable[int] | None) -> str:
    """The step to take, of those that are kept."""
    if kept is None:
        return f"take step {best}"
    nearest = min((step for step in kept if step != last), key=lambda step: (abs(step - best), step), default=None)
    if nearest is None:
        return "no earlier step is kept: set export.every_steps in a new run"
    return f"take step {nearest}" + ("" if nearest == best else ", the nearest that is kept")


def _by_steps(rows: Sequence[Line], changed: str) -> Verdict:
    """As `_by_held_out`, where that was not measured."""
    losses = [row["loss"] for row in rows if row.get("loss") is not None]
    early, late = losses[: max(TOLD, len(losses) // 5)], losses[-max(TOLD, len(losses) // 3) :]
    if len(losses) >= 2 * TOLD and _fall(early, late) > ERRORS:
        said = f"the loss of the steps fell from {fmean(early):.4g} to {fmean(late):.4g}{changed}"
        return Verdict("learned", f"{said}; only held-out photos can tell whether it is more than memorising")
    return Verdict(
        "unclear",
        f"the loss of the steps jitters more than it fell{changed}; look at the samples, or set validation.loss_every_steps",
    )


def _fall(early: Sequence[float], late: Sequence[float]) -> float:
    """In standard errors, how far the late losses rank below the early ones (Mann and Whitney 1947, On a Test of Whether one
    of Two Random Variables is Stochastically Larger than the Other). Whatever their distribution: it is a skewed one."""
    ordered, n, m = sorted(late), len(early), len(late)
    above = sum((bisect_left(ordered, loss) + bisect_right(ordered, loss)) / 2 for loss in early)
    return (above - n * m / 2) / math.sqrt(n * m * (n + m + 1) / 12)


def _series(rows: Sequence[Line], field: str) -> list[tuple[int, float | None]]:
    """(step, value), of the photos that were measured last."""
    every = [(step, found) for step, found in _measured(rows) if field in found]
    return [(step, found[field]) for step, found in every if found.get(PHOTOS) == every[-1][1].get(PHOTOS)]


def mark_of(rows: Sequence[Line]) -> str | None:
    """On which photos was measured last (the field PHOTOS); None where nothing was."""
    return next((found[PHOTOS] for _, found in reversed(list(_measured(rows))) if PHOTOS in found), None)


def _measured(rows: Sequence[Line]) -> Iterator[tuple[int, Line]]:
    """(step, what was measured after it); what a line has "at_start" is of the step before it."""
    for row in rows:
        yield row["step"] - 1, row.get("at_start", {})
        yield row["step"], row


def _level(window: Collection[tuple[int, float, float]]) -> tuple[float, float]:
    """Mean loss and median gradient norm of (images, loss, norm)."""
    return fmean(loss for _, loss, _ in window), median(norm for *_, norm in window)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _largest(numbers: Iterable[float]) -> float:
    """NaN where one of them is that; `max` would depend on their order."""
    numbers = list(numbers)
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)
