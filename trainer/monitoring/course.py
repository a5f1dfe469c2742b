"""How a run goes, line by line: the first step at which a loss, a gradient norm or the weights left their range, and why."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, TypeGuard

# What a block of metrics.jsonl has of each block of the adapter.
BLOCKS = "weight_change_blocks"
# How many layers have a row whose magnitude is too small beside its bias for its gradient (adapters/dora.py, is_lost).
LOST = "layers_with_lost_magnitudes"

Line = Mapping[str, Any]  # a line of metrics.jsonl

# A loss or gradient norm is taken over so many images and steps at least: fewer jitter by more than they tell.
IMAGES, STEPS = 32, 3
# The baseline: the level of so many first images. It stays until the loss measures something else (CHANGED).
FIRST_IMAGES = 256
# What is out of all range. Loss: the mean of such a window, in means of the first. Gradient norm: the medians.
LOSS_TIMES, GRAD_TIMES = 4.0, 20.0
# ||dW|| / ||W|| of the layer that moved most (weight_change.weight_change): above the first, what it had learnt is drowned;
# below the second, pictures differ by too little to be seen. Where a held-out loss can decide, or will, this is a note.
TOO_FAR, TOO_LITTLE = 1.0, 5e-4
# The field that identifies the photos, captions and draws of a held-out loss: another value starts a new curve.
PHOTOS = "measured_photos"
# The field of the first step whose loss measures something else than before, by what was changed: its level begins anew.
CHANGED = "loss_changed"
# How many photos are held out and measured, and how many of them have a near duplicate among those that are trained on.
COUNT, COPIES = "held_out_photos", "held_out_copies"
# Each held-out photo's mean, by what its SHA-256 begins with: the draws are the same each time, so the changes are paired.
BY_PHOTO = {"held_out_loss": "held_out_by_photo", "trained_loss": "trained_by_photo"}
# Losses at fixed draws: the field, and whose it is.
FIXED = {"held_out_loss": "held-out", "trained_loss": "trained"}

# What an update's size depends on, as a user knows it. Groups may have other rates than the first: see `rates`.
LR = "optimizer.lr"
HIGHEST = "the highest rate of a group (optimizer.lr times lora_plus, magnitude_lr, text_encoder_lr or a rule's lr)"


@dataclass(frozen=True)
class Alarm:
    """What left its range, and at which step. before: the last step whose loss has no part in it. sound: the last step known
    to be good."""

    step: int
    what: str
    before: int
    sound: int


class Course:
    """The lines of a run, one after another. spoilt: the alarm of a loss or gradient; far: the alarm of the weights. levers:
    the keys that make the optimizer's updates larger or smaller.

    The log of a branch begins in mid-run. Then nobody knows how many images its first line is of, nor the first rate.
    """

    def __init__(self, rows: Iterable[Line] = (), levers: str = LR) -> None:
        self.levers, self.rate_of = levers, LR
        self.rate, self.rate_step, self.scaled = 0.0, 0, False
        self.first_rate: float | None = None
        self.step, self.updates, self.images = 0, 0, 0
        self.first: tuple[float, float] | None = None  # loss and gradient norm of the first images
        self.now: tuple[float, float] | None = None
        self.spoilt: Alarm | None = None
        self.far: Alarm | None = None
        self.not_finite: tuple[int, str] | None = None  # the first step with a value that is none, and which it was
        self.unusable: set[tuple[object, str]] = set()  # (which photos, field) that was none before any step changed it
        self._held_out: list[tuple[object, float]] = []  # (which photos, loss)
        self._mark: object = None  # which photos were measured last
        self._photos: float | None = None  # and how many
        self.lost = 0  # layers whose magnitudes were too small when it was said
        self.sound = 0  # the last step whose weights were seen in range; they are measured seldom
        self._window: deque[tuple[int, float, float]] = deque()  # the last ones, of _within images
        self._within = 0
        self._before: list[tuple[int, float, float]] = []  # the first ones that have left the window, of _told images
        self._told = 0
        for row in rows:
            self.add(row)

    def add(self, row: Line) -> str | None:
        """A warning or a note where this line is the first out of all range."""
        step, images = row["step"], row["images"] - self.images if row["step"] == self.step + 1 else 0
        self.step, self.images = step, row["images"]
        self.updates += not row.get("skipped", False)
        self.scaled = self.scaled or "loss_scale" in row
        if CHANGED in row:
            self._begin_level()
        rate = row.get("highest_lr", row["lr"]) * (row.get("d") or 1.0)
        if rate > self.rate:
            self.rate, self.rate_step = rate, step
            self.rate_of = "the rate it found" if "d" in row else HIGHEST if "highest_lr" in row else LR
        if step == 1:
            self.first_rate = rate
        self._hear_start(row.get("at_start", {}))
        warning = self.measured(step, row)
        # A step that is left out has no loss: the loss scaler looks for its scale, or the policy left it out.
        if "loss" in row and not row.get("skipped", False) and not is_finite(row["loss"]):
            return self._met(step, "the loss of the step is not finite") or warning
        if what := self._out_of_range(row, images):
            return self._spoils(step, what, step - len(self._window)) or warning
        return warning

    def _begin_level(self) -> None:
        """Losses and gradient norms before are of another kind: neither a level, nor an alarm that another one could end."""
        self.first = self.now = None
        self._window.clear()
        self._before.clear()
        self._within = self._told = 0
        if self.not_finite is None:
            self.spoilt = None

    def measured(self, step: int, fields: Line) -> str | None:
        """Take what was measured after a step whose line was there already; returns what `add` returns."""
        for field, whose in FIXED.items():
            if field in fields and (fields.get(PHOTOS), field) not in self.unusable and not is_finite(fields[field]):
                return self._met(step, f"the loss of the {whose} photos is not finite")
        self._hear_held_out(fields)
        if "weight_change" not in fields:
            return None
        if not is_finite(change := fields["weight_change"]):
            return self._met(step, "layers changed to no finite number")
        if change > TOO_FAR:
            return self._moves_far(step, change)
        self.sound = step
        if not (lost := fields.get(LOST)) or self.lost:
            return None
        self.lost = lost
        layers = "1 layer has" if lost == 1 else f"{lost} layers have"
        return (
            f"warning: step {step}: {layers} magnitudes that are tiny beside their biases: their gradients err by a tenth "
            "or more, or 0 (docs/dora.md); a lower optimizer.magnitude_lr or precision.compute = 'fp32' avoids it"
        )

    def _hear_start(self, fields: Line) -> None:
        """What is not finite before a step is no step's doing, but a photo's or the model's. Later it tells nothing."""
        self.unusable |= {(fields.get(PHOTOS), field) for field in FIXED if field in fields and not is_finite(fields[field])}
        self._hear_held_out(fields)

    def _hear_held_out(self, fields: Line) -> None:
        if "held_out_loss" not in fields:
            return
        self._mark, loss = fields.get(PHOTOS), fields["held_out_loss"]
        if fields.get(COUNT) is not None:
            self._photos = fields[COUNT]
        if is_finite(loss) and (self._mark, "held_out_loss") not in self.unusable:
            self._held_out.append((self._mark, loss))

    def _met(self, step: int, what: str) -> str | None:
        """As `_spoils`, of a value that is not finite."""
        self.not_finite = self.not_finite or (step, what)
        return self._spoils(step, what, self.sound)

    def _spoils(self, step: int, what: str, sound: int) -> str | None:
        if self.spoilt is not None:
            return None
        self.spoilt = Alarm(step, what, step - len(self._window), sound)
        return self._warning(self.spoilt)

    def _moves_far(self, step: int, change: float) -> str | None:
        """As `_spoils`, of weights. Where a held-out loss tells whether that is too far, a note, and none once it falls."""
        if self.far is not None or (self._held_out_times() or 1) < 1:
            return None
        what = f"layers changed by up to {change:.0%} of their own weights"
        self.far = Alarm(step, what, step - len(self._window), self.sound)
        if self.spoilt is not None:
            return None
        if self.weights_tell():
            return self._warning(self.far)
        return f"note: step {step}: {what}; whether that is too far, the held-out loss tells"

    def _warning(self, alarm: Alarm) -> str:
        return f"warning: step {alarm.step}: the run is diverging: {alarm.what}; {self.remedy()}"

    def _held_out_times(self) -> float | None:
        """The newest held-out loss, in that of the first measurement on these photos; None where there is none that tells."""
        losses = [loss for mark, loss in self._held_out if mark == self._mark]
        return None if not losses else losses[-1] / losses[0] if losses[0] else math.inf

    def weights_tell(self) -> bool:
        """Whether a run has diverged whose weights moved too far. Not where a held-out loss decides, or will, unless that
        rose out of all range, too. Nor where that of one photo, which decides nothing, fell."""
        if (times := self._held_out_times()) is None:
            return True
        return times > LOSS_TIMES or (self._photos == 1 and times >= 1)

    @property
    def alarm(self) -> Alarm | None:
        """The first of those that tell that the run has diverged, or had."""
        alarms = [self.spoilt, self.far if self.weights_tell() else None]
        return min((alarm for alarm in alarms if alarm), key=lambda alarm: alarm.step, default=None)

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
        return f"most often the learning rate is {self._too_high()}, a tenth for a start{beside}"

    def _too_high(self) -> str:
        lower = "a lower one" if self.levers == LR else f"a lower {self.levers}"
        return f"too high ({self.rate_of} was {self.rate:.3g} at step {self.rate_step}); start a new run with {lower}"

    def blame(self) -> str:
        """What the steps before say of the cause of a value that is not finite; "" where there were none."""
        if self.alarm:
            return f"the run has diverged since step {self.alarm.step}: {self.remedy()}"
        if self.updates and self.rate:
            before = "one update before it was" if self.updates == 1 else f"{self.updates} updates before it were"
            return f"{before} finite: if these samples are sound, the learning rate may be {self._too_high()}"
        return ""


def rates(lr: Sequence[float]) -> dict[str, float]:
    """Fields of a step's line, of the rates of all groups: the first, and the highest where that is another."""
    return {"lr": lr[0]} | ({"highest_lr": max(lr)} if max(lr) > lr[0] else {})


def _level(window: Collection[tuple[int, float, float]]) -> tuple[float, float]:
    """Mean loss and median gradient norm of (images, loss, norm)."""
    return fmean(loss for _, loss, _ in window), median(norm for *_, norm in window)


def is_finite(value: float | None) -> TypeGuard[float]:
    """Whether there is a value, and it is finite."""
    return value is not None and math.isfinite(value)


def moved_by(change: float) -> str:
    """||dW|| / ||W|| of the layer that moved most, in words that no rounding makes untrue."""
    return "0%" if change == 0 else f"up to {change:.2%}" if change >= 1e-4 else "less than 0.01%"
