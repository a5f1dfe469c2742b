"""Did it learn, diverge, or do nothing? A pure function of the lines of metrics.jsonl and of how far the weights moved.
The thresholds come from docs/benchmarks/verdicts.md."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from trainer.monitoring.course import (
    BY_PHOTO,
    CHANGED,
    COPIES,
    COUNT,
    FIXED,
    LOSS_TIMES,
    LR,
    PHOTOS,
    TOO_FAR,
    TOO_LITTLE,
    Alarm,
    Course,
    Line,
    is_finite,
    moved_by,
)
from trainer.monitoring.metrics import mark_of, measured
from trainer.monitoring.weight_change import largest
from workbench.pages.student import interval

# MOVED: a held-out loss that changed by this share shows that weights moved, however little; an interval (student.py) judges
# the direction. Losses of steps jitter: ERRORS and ABOVE are standard errors of ranks, for a fall, and a rise after an alarm.
MOVED, ERRORS, ABOVE = 0.01, 3.5, 2.0

LOOK = "look at the samples, which no number replaces"

ENOUGH = 10  # losses of steps for a judgement

Points = Sequence[tuple[int, float]]  # (step, loss)
Changes = Sequence[Sequence[float]]  # by measurement and photo

Kind = Literal["learned", "memorising", "worse", "diverged", "recovered", "nothing", "unclear"]
BAD: tuple[Kind, ...] = ("worse", "diverged", "nothing")


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run. kind: in a word. sentence: for people, with the remedy. step: where it diverged, or the best
    one; None: neither. sound: after a divergence, the last step known to be good. measured: after learning, the opening
    clause of the sentence, which names the metric. doubt: whether something speaks against it."""

    kind: Kind
    sentence: str
    step: int | None = None
    sound: int = 0
    measured: str = ""
    doubt: bool = False

    @property
    def bad(self) -> bool:
        """Whether the verdict is a warning."""
        return self.kind in BAD


def judge(
    rows: Sequence[Line], blocks: Mapping[str, float] | None = None, levers: str = LR, saved: Iterable[int] | None = None
) -> Verdict:
    """The verdict on a run, so far or at its end.

    rows: of metrics.jsonl, in order. blocks: by name, the largest ||dW|| / ||W|| of the adapter's blocks, from where the run
    started; None: not measured, then the last `weight_change` of the rows counts. levers: the keys that set the rate.
    saved: steps whose adapter can be taken; None: unknown.
    """
    course = Course(rows, levers)
    alarm = course.alarm

    def diverged(text: str) -> Verdict:
        step, sound = (alarm.step, alarm.sound) if alarm else (None, course.sound)
        return Verdict("diverged", f"{text}; {course.remedy()}", step, sound)

    if text := _not_finite(rows, blocks, course):
        return diverged(f"the training has diverged: {text}")
    moves = [row["weight_change"] for row in rows if "weight_change" in row]
    change = largest(blocks.values()) if blocks else moves[-1] if moves else None
    far = change is not None and change > TOO_FAR
    useless = [field for field in FIXED if (mark_of(rows), field) in course.unusable]
    held_out = [] if "held_out_loss" in useless else _finite(series(rows, "held_out_loss"))
    changes = _changes(rows, held_out, "held_out_loss")
    few = _too_few(rows, held_out) if held_out and not changes else ""
    doubtful = f"; too few to tell by the held-out loss: {few}" if few else ""
    surely = interval(changes[0])[0] > 0 if changes else _newest(rows, COUNT) != 1
    first, last = (held_out[0][1], held_out[-1][1]) if held_out else (0.0, 0.0)
    if last > LOSS_TIMES * first and surely:
        return diverged(f"the training has diverged: the held-out loss rose from {first:.4g} to {last:.4g}")
    if far and course.weights_tell():
        return diverged(f"the training has probably diverged: {_beyond(change or 0, blocks)}{doubtful}")
    if alarm:
        since = f"at step {alarm.step} {alarm.text}"
        if above := _still_above(rows, held_out, course, alarm):
            return diverged(f"the training has diverged: {since}; {above}")
        text = f"the training came back: {since}; look at the samples; {course.remedy()}"
        return Verdict("recovered", text, alarm.step)
    moved = bool(changes) and max(abs(loss / first - 1) if first else 0 for _, loss in held_out) > MOVED
    if change is not None and change < TOO_LITTLE and not moved:
        it = "it" if course.rate_of == levers else course.rate_of
        text = (
            f"nothing was learned: no layer changed by more than {max(change, 1e-5):.3%} of its own weights, less than a "
            f"picture can show; train longer or raise {levers} ({it} was at most {course.rate:.3g}){doubtful}"
        )
        return Verdict("nothing", text)
    changed = f" (layers changed by {moved_by(change)} of their own weights)" if change is not None else ""
    if not held_out:
        verdict = _by_steps(rows, changed, bool(useless))
    elif few:
        verdict = Verdict("unclear", f"too few to tell: {few}{changed}; {LOOK}")
    else:
        trained = [] if "trained_loss" in useless else _changes(rows, held_out, "trained_loss")
        verdict = _by_held_out(held_out, changes, trained, changed, levers, saved)
    doubts = _leak(rows) + _useless(useless)
    return replace(verdict, sentence=verdict.sentence + doubts, doubt=verdict.doubt or far or bool(doubts))


def _not_finite(rows: Sequence[Line], blocks: Mapping[str, float] | None, course: Course) -> str:
    """The weight at the end, or the loss at any step, that is not finite, in words; "" if there is none."""
    if infinite := [name for name, moved in (blocks or {}).items() if not math.isfinite(moved)]:
        return f"in {infinite[0]} a layer changed to no finite number"
    if course.not_finite is None:
        return ""
    step, text = course.not_finite
    later = [(at, loss) for at, loss in _finite(series(rows, "held_out_loss")) if at > step]
    since = f", though the held-out loss of step {later[-1][0]} is: {later[-1][1]:.4g}" if later else ""
    return f"at step {step} {text}{since}"


def _useless(fields: Sequence[str]) -> str:
    if not fields:
        return ""
    photos = " and ".join(FIXED[field] for field in fields)
    reason = "it was not finite before any step changed it (look at these photos, and at precision.compute)"
    return f"; the loss of the {photos} photos tells nothing: {reason}"


def _beyond(change: float, blocks: Mapping[str, float] | None) -> str:
    if not blocks:
        return f"a layer changed by {change:.0%} of its own weights"
    beyond = {name: moved for name, moved in blocks.items() if moved > TOO_FAR}
    worst = max(beyond, key=beyond.__getitem__)
    count = f"in {len(beyond)} of {len(blocks)} blocks a layer"
    return f"{count} changed by more than {TOO_FAR:.0%} of its own weights, in {worst} by {change:.0%}"


def _changes(rows: Sequence[Line], held_out: Points, field: str) -> list[list[float]]:
    """The change of each photo's loss from each measurement to the last; [] if the log lacks the losses of two photos."""
    by_photo = dict(series(rows, BY_PHOTO[field]))
    losses: list[Any] = [by_photo.get(step) or {} for step, _ in held_out]
    if any(len(one) < 2 or one.keys() != losses[-1].keys() or not all(map(is_finite, one.values())) for one in losses):
        return []
    return [[losses[-1][photo] - loss for photo, loss in one.items()] for one in losses[:-1]]


def _too_few(rows: Sequence[Line], held_out: Points) -> str:
    (_, first), (_, last) = held_out[0], held_out[-1]
    if len(held_out) == 1:
        return f"the held-out loss was measured once, {first:.4g}, so no change is known"
    reason = "this log, begun by an earlier version, has no losses by photo"
    if 1 in (_newest(rows, COUNT), len(_newest(rows, BY_PHOTO["held_out_loss"]) or ())):
        reason = "one photo never tells; hold out more (data.held_out, or a source's)"
    return f"the held-out loss went from {first:.4g} to {last:.4g}, and {reason}"


def _still_above(rows: Sequence[Line], held_out: Points, course: Course, alarm: Alarm) -> str:
    """The evidence that the run has not come back after an alarm, or "": the held-out loss, if it was measured since; else
    the ranks of the last third of the losses, or their mean if these are too few."""
    if len(held_out) > 1 and held_out[-1][0] > alarm.step:
        (_, first), (step, last) = held_out[0], held_out[-1]
        return f"the held-out loss of step {step} is {last:.4g}, that of the start {first:.4g}" if last > first else ""
    losses = [(step, loss) for step, loss in series(rows, "loss") if loss is not None]
    early = [loss for step, loss in losses if step <= alarm.before][: max(ENOUGH, len(losses) // 5)]
    late = [loss for step, loss in losses[-max(ENOUGH, len(losses) // 3) :] if step > alarm.step]
    if not late:
        return "and then the log ends"
    if min(len(early), len(late)) >= ENOUGH:
        above = _fall(early, late) < -ABOVE
    else:
        above = course.first is not None and fmean(late) > course.first[0]
    return f"the loss since is {fmean(late):.4g}, above that of the first steps" if above else ""


def _leak(rows: Sequence[Line]) -> str:
    copies, photos = _newest(rows, COPIES), _newest(rows, COUNT)
    if not copies:
        return ""
    total, verb = f" of the {photos:g}" if photos else "", "has" if copies == 1 else "have"
    fault = f"{verb} a near duplicate among those that are trained on"
    return f"; but {copies:g}{total} held-out photos {fault}: where their loss falls, that may be memorising"


def _by_held_out(
    held_out: Points, changes: Changes, trained: Changes, changed: str, levers: str, saved: Iterable[int] | None
) -> Verdict:
    """The verdict by the held-out loss, without divergence. changes, trained: of held-out and trained photos (`_changes`).

    A fall or rise since the start is one question, judged by one interval. The lowest of several measurements may be low by
    chance alone: a rise since then is judged by intervals since all of them that hold at once.
    """
    (first, start), (last, end), (best, lowest) = held_out[0], held_out[-1], min(held_out, key=lambda point: point[1])
    low, high = interval(changes[0])
    by = f" (95 % interval of the change {low:.3g} to {high:.3g}, {len(changes[0])} photos)"
    index = held_out.index((best, lowest))
    rise = interval(changes[index], len(changes)) if index < len(changes) else (0.0, 0.0)
    since = f" (95 % interval of the rise {rise[0]:.3g} to {rise[1]:.3g}, all {len(changes)} measurements before it at once)"
    fell = best != first
    was = f"the held-out loss fell from {start:.4g} to {lowest:.4g} at step {best}"
    by_heart = "the loss of the trained photos falls on: the adapter learns the photos by heart"
    overfits = rise[0] > 0 and bool(trained) and interval(trained[index])[1] < 0
    loss = "the loss on photos it never saw"
    if high < 0:
        measured = f"{loss} fell by {_share(1 - end / start)}"
        until = f" at step {last}" if end == lowest else f", and was {lowest:.4g} at step {best}"
        text = f"{measured}, from {start:.4g} to {end:.4g}{until}{by}{changed}"
        if overfits:
            text += f"; since step {best} it rose{since}, while {by_heart}; {_take(best, last, saved)}"
        return Verdict("learned", f"{text}; {LOOK}", best, measured=measured, doubt=overfits)
    if overfits and fell:
        text = f"{was}, and rose to {end:.4g} since{since}, while {by_heart}; {_take(best, last, saved)}"
        return Verdict("memorising", f"{text}; or train with more photos or a lower {levers}", best)
    if overfits:
        text = f"the held-out loss rose from {start:.4g} to {end:.4g} and never fell{since}, while {by_heart}"
        return Verdict("memorising", f"{text}; train with more photos or a lower {levers}")
    if fell and rise[0] > 0:
        text = f"{was}, and has got worse since: {end:.4g} at step {last}{since}{changed}; {_take(best, last, saved)}"
        return Verdict("worse", f"{text}; or start a new run with a lower {levers}", best)
    if low > 0:
        text = f"the held-out loss rose from {start:.4g} to {end:.4g}{'' if fell else ' and never fell'}{by}"
        text += f": the adapter makes the model worse{changed}; start a new run with a lower {levers}, a tenth for a start"
        return Verdict("worse", text)
    change = f"{'rose' if end > start else 'fell'} by {_share(abs(1 - end / start) if start else 0)}"
    text = f"too few photos to tell: {loss} {change}, from {start:.4g} to {end:.4g}{by}: that may be chance{changed}"
    return Verdict("unclear", f"{text}; hold out more photos" + ("" if end > start else f", train longer or raise {levers}"))


def _share(part: float) -> str:
    return f"{100 * part:.0f} %" if part >= 0.0995 else f"{100 * part:.2g} %"


def _take(best: int, last: int, saved: Iterable[int] | None) -> str:
    if saved is None:
        return f"take step {best}"
    nearest = min((step for step in saved if step != last), key=lambda step: (abs(step - best), step), default=None)
    if nearest is None:
        return "no earlier step is kept: set export.every_steps in a new run"
    return f"take step {nearest}" + ("" if nearest == best else ", the nearest that is kept")


def _by_steps(rows: Sequence[Line], changed: str, useless: bool) -> Verdict:
    """The verdict without a held-out loss. useless: one was measured, and was not finite before any step changed it."""
    losses = [loss for _, loss in series(rows, "loss") if loss is not None]
    if breaks := [row for row in rows if CHANGED in row]:
        changed += f"; before step {breaks[-1]['step']} the loss measured something else ({breaks[-1][CHANGED]})"
    early, late = losses[: max(ENOUGH, len(losses) // 5)], losses[-max(ENOUGH, len(losses) // 3) :]
    if len(losses) >= 2 * ENOUGH and _fall(early, late) > ERRORS:
        measured = f"the loss of the steps fell by {_share(1 - fmean(late) / fmean(early))}"
        text = f"{measured}, from {fmean(early):.4g} to {fmean(late):.4g}{changed}; {LOOK}"
        text += "; only held-out photos can tell whether it is more than memorising"
        return Verdict("learned", text, measured=measured, doubt=True)
    remedy = LOOK if useless else "look at the samples, or set validation.loss_every_steps"
    return Verdict("unclear", f"the loss of the steps jitters more than it fell{changed}; {remedy}")


def _fall(early: Sequence[float], late: Sequence[float]) -> float:
    """How far the late losses rank below the early ones, in standard errors (Mann and Whitney 1947, On a Test of Whether one
    of Two Random Variables is Stochastically Larger than the Other): valid for any distribution; theirs is skewed."""
    ordered, n, m = sorted(late), len(early), len(late)
    above = sum((bisect_left(ordered, loss) + bisect_right(ordered, loss)) / 2 for loss in early)
    return (above - n * m / 2) / math.sqrt(n * m * (n + m + 1) / 12)


def series(rows: Sequence[Line], field: str) -> list[tuple[int, float | None]]:
    """(step, value) of the rows whose value measures the same as the last one: the same photos, or the same kind of loss."""
    if field not in (*FIXED, *BY_PHOTO.values()):
        first = max((row["step"] for row in rows if CHANGED in row), default=0)
        return [(row["step"], row[field]) for row in rows if field in row and row["step"] >= first]
    points = [(step, fields) for step, fields in measured(rows) if field in fields]
    return [(step, fields[field]) for step, fields in points if fields.get(PHOTOS) == points[-1][1].get(PHOTOS)]


def _finite(series: Iterable[tuple[int, float | None]]) -> list[tuple[int, float]]:
    return [(step, value) for step, value in series if is_finite(value)]


def _newest(rows: Sequence[Line], field: str) -> Any:
    return next((fields[field] for _, fields in reversed(list(measured(rows))) if fields.get(field) is not None), None)
