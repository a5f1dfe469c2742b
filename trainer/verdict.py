"""Did it learn, diverge, or do nothing? In one place, from the lines of metrics.jsonl and from how far the weights moved.

Everything here is a pure function of these. So it says the same after a resume, while a run is alive, and from outside.
docs/watching.md has what the thresholds were taken from.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

Line = Mapping[str, Any]  # a line of metrics.jsonl

# A loss or gradient norm is that of so many images at least, and of so many steps: fewer jitter by more than they tell.
IMAGES, STEPS = 32, 3
# What is out of all range. Loss: the mean of such a window, in means of the first. Gradient norm: the medians.
LOSS_TIMES, GRAD_TIMES = 4.0, 20.0
# ||dW|| / ||W|| of a block, or its magnitudes' drift: above the first, what the layer had learnt is drowned; below the
# second, a picture differs by no more than by the rounding of its computation.
TOO_FAR, TOO_LITTLE = 1.0, 5e-4
# A fall of the held-out loss is learning, a rise from its lowest value is memorising: shares. Draws are fixed, so neither is
# noise. Of the losses of steps, which jitter: standard errors of their ranks.
FALLEN, RISEN, ERRORS = 0.01, 0.05, 3.5

TOLD = 10  # losses of steps: of fewer nothing can be said

# What an update's size depends on, as a user knows it. Groups may have other rates than the first: see `rates`.
LR = "optimizer.lr"
HIGHEST = "the highest rate of a group (optimizer.lr times lora_plus, magnitude_lr, text_encoder_lr or a rule's lr)"

Kind = Literal["learned", "memorising", "diverged", "recovered", "nothing", "unclear"]
BAD: tuple[Kind, ...] = ("diverged", "nothing")


@dataclass(frozen=True)
class Verdict:
    """kind: in a word. sentence: for people, with the remedy. step: where it diverged, or the best one; None: neither."""

    kind: Kind
    sentence: str
    step: int | None = None

    @property
    def bad(self) -> bool:
        return self.kind in BAD


class Course:
    """The lines of a run, one after another. diverged: the first step at which something left its range.

    levers: the keys that make the optimizer's updates larger or smaller.
    """

    def __init__(self, rows: Iterable[Line] = (), levers: str = LR) -> None:
        self.levers, self.rate_of = levers, LR
        self.rate, self.first_rate, self.rate_step, self.scaled = 0.0, 0.0, 0, False
        self.updates, self.images = 0, 0
        self.first: tuple[float, float] | None = None  # loss and gradient norm of the first window
        self.now: tuple[float, float] | None = None
        self.diverged: int | None = None
        self._window: deque[tuple[int, float, float]] = deque()
        for row in rows:
            self.add(row)

    def add(self, row: Line) -> str | None:
        """A sentence where this line is the first that is out of all range."""
        step, images = row["step"], row["images"] - self.images
        self.images = row["images"]
        self.updates += not row.get("skipped", False)
        self.scaled = self.scaled or "loss_scale" in row
        rate = row.get("highest_lr", row["lr"]) * (row.get("d") or 1.0)
        if rate > self.rate:
            self.rate, self.rate_step = rate, step
            self.rate_of = "the rate it found" if "d" in row else HIGHEST if "highest_lr" in row else LR
        if step == 1:
            self.first_rate = rate
        what = self._out_of_range(row, images)
        if what is None or self.diverged is not None:
            return None
        self.diverged = step
        return f"step {step}: the run is diverging: {what}; {self.remedy()}"

    def _out_of_range(self, row: Line, images: int) -> str | None:
        change = row.get("weight_change", 0.0)
        if change is None or change > TOO_FAR:
            far = "to no finite number" if change is None else f"by up to {change:.0%} of their own weights"
            return f"layers changed {far}"
        loss, norm = row.get("loss"), row.get("grad_norm")
        if loss is None or norm is None:
            return None  # the step is skipped: by the loss scaler, or told by the policy
        self._window.append((images, loss, norm))
        while len(self._window) > STEPS and sum(n for n, *_ in list(self._window)[1:]) >= IMAGES:
            self._window.popleft()
        if len(self._window) < STEPS or sum(n for n, *_ in self._window) < IMAGES:
            return None
        _, losses, norms = zip(*self._window, strict=True)
        self.now = fmean(losses), median(norms)
        self.first = self.first or self.now
        named = zip(("loss", "gradient norm"), self.now, self.first, (LOSS_TIMES, GRAD_TIMES), strict=True)
        for name, now, first, times in named:
            if now > times * first > 0:
                grown, steps = f"{now / first:.3g} times", len(self._window)
                return f"the {name} of the last {steps} steps, {now:.3g}, is {grown} that of the first {steps}"
        return None

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
            return (
                f"{self.updates} updates before it were finite: if these samples are sound, the learning rate may be too "
                f"high ({self._rate()}); start a new run with {self._lower()}"
            )
        return ""


def rates(lr: Sequence[float]) -> dict[str, float]:
    """For a step's line, of the rates of all groups: the first, and the highest where that is another."""
    return {"lr": lr[0]} | ({"highest_lr": max(lr)} if max(lr) > lr[0] else {})


def judge(rows: Sequence[Line], blocks: Mapping[str, float] | None = None, levers: str = LR) -> Verdict:
    """Of a run so far, or at its end.

    rows: of metrics.jsonl, in order. blocks: by name, the largest ||dW|| / ||W|| or magnitude drift of the adapter's blocks;
    None: not measured, then the last `weight_change` of the rows counts. levers: as of Course.
    """
    course = Course(rows, levers)
    changes = [row["weight_change"] for row in rows if "weight_change" in row]
    change = _largest(blocks.values()) if blocks else _number(changes[-1]) if changes else None
    if change is not None and not change <= TOO_FAR:
        where = ""
        if blocks:
            beyond = {name: moved for name, moved in blocks.items() if not moved <= TOO_FAR}
            worst = max(beyond, key=lambda name: math.inf if math.isnan(beyond[name]) else beyond[name])
            where = f"{len(beyond)} of {len(blocks)} blocks changed by more than {TOO_FAR:.0%} of their own weights, {worst} "
        said = f"{where or 'the weights changed '}by {change:.0%}"
        return Verdict("diverged", f"the training has probably diverged: {said}; {course.remedy()}", course.diverged)
    if course.diverged is not None and course.now is not None and course.first is not None:
        since = f"at step {course.diverged} its loss or gradient norm left every sensible range"
        if course.now[0] > course.first[0]:
            grown = f"the loss is {course.now[0] / course.first[0]:.3g} times that of the first steps"
            return Verdict("diverged", f"the training has diverged: {since}; {grown}; {course.remedy()}", course.diverged)
        said = f"the training came back: {since}; look at the samples; {course.remedy()}"
        return Verdict("recovered", said, course.diverged)
    if change is not None and change < TOO_LITTLE:
        it = "it" if course.rate_of == levers else course.rate_of
        said = (
            f"nothing was learned: no block changed by more than {change:.2g} of its own weights, less than a picture can "
            f"show; train longer or raise {levers} ({it} was at most {course.rate:.3g})"
        )
        return Verdict("nothing", said)
    return _by_loss(rows, f" (weights changed by up to {change:.2%})" if change is not None else "", levers)


def _by_loss(rows: Sequence[Line], changed: str, levers: str) -> Verdict:
    """Of a run that has not diverged, and changed something or may have."""
    told = _series(rows, "held_out_loss")
    if len(told) > 1:
        trained = dict(_series(rows, "trained_loss"))
        (_, start), (last, now), (best, lowest) = told[0], told[-1], min(told, key=lambda pair: pair[1])
        fell = f"the held-out loss fell from {start:.4g} to {lowest:.4g}"
        if now > lowest * (1 + RISEN) and trained.get(last, math.inf) < trained.get(best, -math.inf):
            said = (
                f"{fell} at step {best}, and rose to {now:.4g} since, while the loss of the trained photos falls on: the "
                f"adapter learns the photos by heart; take step {best}, or train with more photos or a lower {levers}"
            )
            return Verdict("memorising", said, best)
        if lowest < start * (1 - FALLEN):
            return Verdict("learned", f"{fell} at step {best}{changed}", best)
        said = f"the held-out loss did not fall (from {start:.4g} to {now:.4g}){changed}; train longer or raise {levers}"
        return Verdict("unclear", said)
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


def _series(rows: Sequence[Line], field: str) -> list[tuple[int, float]]:
    """(step, value), from before the first step on; where it is a number."""
    every = [(0, rows[0].get("at_start", {}))] if rows else []
    return [(step, found[field]) for step, found in (*every, *((row["step"], row) for row in rows)) if _known(found, field)]


def _known(fields: Mapping[str, Any], name: str) -> bool:
    return isinstance(fields.get(name), (int, float))


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _largest(numbers: Iterable[float]) -> float:
    """NaN where one of them is that; `max` would depend on their order."""
    numbers = list(numbers)
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)
