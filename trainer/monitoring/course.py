"""Follows a run's log: the first step at which a loss, a gradient norm or the weights left their range, and why."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, TypeGuard

# The field of metrics.jsonl with each adapter block's change.
BLOCKS = "weight_change_blocks"
# How many layers have a row whose magnitude is too small beside its bias for its gradient (adapters/dora.py, is_lost).
LOST = "layers_with_lost_magnitudes"

Line = Mapping[str, Any]  # a line of metrics.jsonl

# The least images and steps of a window's mean loss and median gradient norm: fewer are noise.
IMAGES, STEPS = 32, 3
# The baseline: the level of so many first images. It stays until the loss measures something else (CHANGED).
FIRST_IMAGES = 256
# Out of range: a window's mean loss, and its median gradient norm, as multiples of the baseline's.
LOSS_TIMES, GRAD_TIMES = 4.0, 20.0
# ||dW|| / ||W|| of the layer that moved most (weight_change.weight_change): above the first, the change drowns the model;
# below the second, images differ invisibly. If a held-out loss can decide, or will, the first gives only a note.
TOO_FAR, TOO_LITTLE = 1.0, 5e-4
# The field that identifies the photos, captions and draws of a held-out loss: another value starts a new curve.
PHOTOS = "measured_photos"
# The field of the first step whose loss measures something else; its value says what was changed. It starts a new baseline.
CHANGED = "loss_changed"
# How many photos are held out and measured, and how many of them have a near duplicate among those that are trained on.
COUNT, COPIES = "held_out_photos", "held_out_copies"
# Each photo's mean, by the first digits of its SHA-256: the draws are the same each time, so changes are paired.
BY_PHOTO = {"held_out_loss": "held_out_by_photo", "trained_loss": "trained_by_photo"}
# Losses at fixed draws: the field -> the name of its photos.
FIXED = {"held_out_loss": "held-out", "trained_loss": "trained"}

# The key that sets the size of updates, and its name if another group's rate is higher than the first's (`rates`).
LR = "optimizer.lr"
HIGHEST = "the highest rate of a group (optimizer.lr times lora_plus, magnitude_lr, text_encoder_lr or a rule's lr)"


@dataclass(frozen=True)
class Alarm:
    """The step at which a value left its range. text: the value, in words. before: the last step whose loss is no part of it.
    sound: the last step known to be good."""

    step: int
    text: str
    before: int
    sound: int


class Course:
    """Follows the lines of a run in order. levers: the keys that make the optimizer's updates larger or smaller.

    The log of a fork begins in mid-run: then the images of its first line and the first rate are unknown.
    """

    def __init__(self, rows: Iterable[Line] = (), levers: str = LR) -> None:
        self.levers, self.rate_of = levers, LR
        self.rate, self.rate_step, self.scaled = 0.0, 0, False
        self.first_rate: float | None = None
        self.step, self.updates, self.images = 0, 0, 0
        self.first: tuple[float, float] | None = None  # the baseline: loss and gradient norm
        self.latest: tuple[float, float] | None = None  # of the latest window
        self.loss_alarm: Alarm | None = None  # of a loss or gradient
        self.weight_alarm: Alarm | None = None
        self.not_finite: tuple[int, str] | None = None  # the first step with a value that is not finite, and the value's name
        self.unusable: set[tuple[object, str]] = set()  # (PHOTOS, field) not finite before any step could change it
        self._held_out: list[tuple[object, float]] = []  # (PHOTOS, loss)
        self._mark: object = None  # PHOTOS of the last measurement
        self._photos: float | None = None  # their number
        self._lost_layers = 0  # LOST, as warned of
        self.sound = 0  # the last step whose weights were measured in range; they are measured rarely
        self._window: deque[tuple[int, float, float]] = deque()  # (images, loss, norm) of the last steps
        self._window_images = 0
        self._baseline: list[tuple[int, float, float]] = []  # of the first steps that have left the window
        self._baseline_images = 0
        for row in rows:
            self.add(row)

    def add(self, row: Line) -> str | None:
        """Take the next line. Returns a warning or a note if it is the first out of range, else None."""
        step, images = row["step"], row["images"] - self.images if row["step"] == self.step + 1 else 0
        self.step, self.images = step, row["images"]
        self.updates += not row.get("skipped", False)
        self.scaled = self.scaled or "loss_scale" in row
        if CHANGED in row:
            self._start_baseline()
        rate = row.get("highest_lr", row["lr"]) * (row.get("d") or 1.0)
        if rate > self.rate:
            self.rate, self.rate_step = rate, step
            self.rate_of = "the rate it found" if "d" in row else HIGHEST if "highest_lr" in row else LR
        if step == 1:
            self.first_rate = rate
        start = row.get("at_start", {})
        # A loss that is not finite before a step is the fault of a photo or the model, not of the training.
        self.unusable |= {(start.get(PHOTOS), field) for field in FIXED if field in start and not is_finite(start[field])}
        self._add_held_out(start)
        warning = self.measured(step, row)
        # A skipped step has no loss: the loss scaler searches for its scale, or the policy skipped it.
        if "loss" in row and not row.get("skipped", False) and not is_finite(row["loss"]):
            return self._add_non_finite(step, "the loss of the step is not finite") or warning
        if text := self._out_of_range(row, images):
            return self._raise_alarm(step, text, step - len(self._window)) or warning
        return warning

    def _start_baseline(self) -> None:
        """Forget earlier losses and gradient norms, which measure something else, and an alarm from them."""
        self.first = self.latest = None
        self._window.clear()
        self._baseline.clear()
        self._window_images = self._baseline_images = 0
        if self.not_finite is None:
            self.loss_alarm = None

    def measured(self, step: int, fields: Line) -> str | None:
        """Take measurements after a step whose line was added already. Returns the same as `add`."""
        for field, name in FIXED.items():
            if field in fields and (fields.get(PHOTOS), field) not in self.unusable and not is_finite(fields[field]):
                return self._add_non_finite(step, f"the loss of the {name} photos is not finite")
        self._add_held_out(fields)
        if "weight_change" not in fields:
            return None
        if not is_finite(change := fields["weight_change"]):
            return self._add_non_finite(step, "layers changed to no finite number")
        if change > TOO_FAR:
            return self._add_far_change(step, change)
        self.sound = step
        if not (count := fields.get(LOST)) or self._lost_layers:
            return None
        self._lost_layers = count
        layers = "1 layer has" if count == 1 else f"{count} layers have"
        return (
            f"warning: step {step}: {layers} magnitudes that are tiny beside their biases: their gradients err by a tenth "
            "or more, or 0 (docs/dora.md); a lower optimizer.magnitude_lr or precision.compute = 'fp32' avoids it"
        )

    def _add_held_out(self, fields: Line) -> None:
        if "held_out_loss" not in fields:
            return
        self._mark, loss = fields.get(PHOTOS), fields["held_out_loss"]
        if fields.get(COUNT) is not None:
            self._photos = fields[COUNT]
        if is_finite(loss) and (self._mark, "held_out_loss") not in self.unusable:
            self._held_out.append((self._mark, loss))

    def _add_non_finite(self, step: int, text: str) -> str | None:
        self.not_finite = self.not_finite or (step, text)
        return self._raise_alarm(step, text, self.sound)

    def _raise_alarm(self, step: int, text: str, sound: int) -> str | None:
        """The warning of a loss or gradient out of range; None after the first."""
        if self.loss_alarm is not None:
            return None
        self.loss_alarm = Alarm(step, text, step - len(self._window), sound)
        return self._warning(self.loss_alarm)

    def _add_far_change(self, step: int, change: float) -> str | None:
        """The warning of weights out of range; None after the first. If a held-out loss decides whether the change is too
        large: a note, or None once that loss has fallen."""
        if self.weight_alarm is not None or (self._held_out_times() or 1) < 1:
            return None
        text = f"layers changed by up to {change:.0%} of their own weights"
        self.weight_alarm = Alarm(step, text, step - len(self._window), self.sound)
        if self.loss_alarm is not None:
            return None
        if self.weights_tell():
            return self._warning(self.weight_alarm)
        return f"note: step {step}: {text}; whether that is too far, the held-out loss tells"

    def _warning(self, alarm: Alarm) -> str:
        return f"warning: step {alarm.step}: the run is diverging: {alarm.text}; {self.remedy()}"

    def _held_out_times(self) -> float | None:
        """The newest held-out loss as a multiple of the first on the same photos; None without a usable one."""
        losses = [loss for mark, loss in self._held_out if mark == self._mark]
        return None if not losses else losses[-1] / losses[0] if losses[0] else math.inf

    def weights_tell(self) -> bool:
        """Whether a run whose weights moved too far has diverged. If a held-out loss decides, or will: only if that is out of
        range, too, or, for a single photo, whose loss decides nothing, if it did not fall."""
        if (times := self._held_out_times()) is None:
            return True
        return times > LOSS_TIMES or (self._photos == 1 and times >= 1)

    @property
    def alarm(self) -> Alarm | None:
        """The first alarm that shows that the run has diverged, or had."""
        alarms = [self.loss_alarm, self.weight_alarm if self.weights_tell() else None]
        return min((alarm for alarm in alarms if alarm), key=lambda alarm: alarm.step, default=None)

    def _out_of_range(self, row: Line, images: int) -> str:
        loss, norm = row.get("loss"), row.get("grad_norm")
        if loss is None or norm is None:
            return ""  # the step was skipped, by the loss scaler or the policy
        self._window.append((images, loss, norm))
        self._window_images += images
        while len(self._window) > STEPS and self._window_images - self._window[0][0] >= IMAGES:
            oldest = self._window.popleft()
            self._window_images -= oldest[0]
            if self._baseline_images < FIRST_IMAGES:
                self._baseline.append(oldest)
                self._baseline_images += oldest[0]
                if self._baseline_images >= IMAGES and len(self._baseline) >= STEPS:
                    self.first = _level(self._baseline)
        if len(self._window) < STEPS or self._window_images < IMAGES:
            return ""
        self.latest = _level(self._window)
        self.first = self.first or self.latest
        values = zip(("loss", "gradient norm"), self.latest, self.first, (LOSS_TIMES, GRAD_TIMES), strict=True)
        for name, latest, first, times in values:
            if latest > times * first > 0:
                growth, steps = f"{latest / first:.3g} times", len(self._window)
                return f"the {name} of the last {steps} steps, {latest:.3g}, is {growth} that of the first ones"
        return ""

    def remedy(self) -> str:
        """The likely cause and its remedy, in words."""
        others = []
        if self.first_rate == self.rate:
            others.append("a warm-up (schedule.warmup = 0.05)")
        if self.scaled:
            others.append("precision.compute = 'bf16' in place of fp16")
        suffix = f"; {' and '.join(others)} may help, too" if others else ""
        return f"most often the learning rate is {self._too_high()}, a tenth for a start{suffix}"

    def _too_high(self) -> str:
        lower = "a lower one" if self.levers == LR else f"a lower {self.levers}"
        return f"too high ({self.rate_of} was {self.rate:.3g} at step {self.rate_step}); start a new run with {lower}"

    def blame(self) -> str:
        """The likely cause of a value that is not finite, by the steps before it; "" if there were none."""
        if self.alarm:
            return f"the run has diverged since step {self.alarm.step}: {self.remedy()}"
        if self.updates and self.rate:
            before = "one update before it was" if self.updates == 1 else f"{self.updates} updates before it were"
            return f"{before} finite: if these samples are sound, the learning rate may be {self._too_high()}"
        return ""


def rates(lr: Sequence[float]) -> dict[str, float]:
    """Fields of a step's line from the rates of all groups: the first group's, and the highest if that is higher."""
    return {"lr": lr[0]} | ({"highest_lr": max(lr)} if max(lr) > lr[0] else {})


def _level(window: Collection[tuple[int, float, float]]) -> tuple[float, float]:
    """Mean loss and median gradient norm of (images, loss, norm)."""
    return fmean(loss for _, loss, _ in window), median(norm for *_, norm in window)


def is_finite(value: float | None) -> TypeGuard[float]:
    """Whether a value exists and is finite."""
    return value is not None and math.isfinite(value)


def moved_by(change: float) -> str:
    """||dW|| / ||W|| of the layer that moved most, in words that stay true when rounded."""
    return "0%" if change == 0 else f"up to {change:.2%}" if change >= 1e-4 else "less than 0.01%"
