"""The head of a page: the state of the run, a judgement of what it learned, the step to take, and figures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from trainer.base.progress import duration
from trainer.monitoring.course import is_finite, moved_by
from workbench.pages import curves
from workbench.pages.diagnosis import BAD, LOOK, Kind, Verdict, judge, series
from workbench.pages.history import History
from workbench.pages.tables import size

# Title of a verdict: during the run, and afterwards. The title of "learned" is what was measured.
TITLES: Mapping[Kind, tuple[str, str]] = {
    "memorising": ("It is learning the photos by heart", "It learned the photos by heart"),
    "worse": ("It is getting worse", "It got worse"),
    "diverged": ("It has diverged", "It has diverged"),
    "recovered": ("It left its range, and came back", "It left its range, and came back"),
    "nothing": ("Nothing to see yet", "Nothing was learned"),
    "unclear": ("Too early to tell", "Not clear whether it learned"),
}
NOT_FINITE = "It met a value that is not finite"
# The clause of a verdict on the step to take, which has a sentence of its own here, with the reason (`_best`).
TAKE = re.compile(r"; (take step \d+(, the nearest that is kept)?|no earlier step is kept: [^;]*)(; or(?= ))?")
KINDS: Mapping[Kind, str] = {"learned": "good", "memorising": "care", "recovered": "care", "unclear": "open"}


@dataclass(frozen=True)
class State:
    """The state of a run. total: its length in steps. start_step: steps made before this start. reason: of the end after
    "ended", in a few words. message: its error message, or "". finite: False after an end by a value that is not finite."""

    kind: Literal["training", "stopped", "finished", "ended"]
    total: int
    start_step: int = 0
    reason: str = ""
    message: str = ""
    finite: bool = True

    @property
    def alive(self) -> bool:
        """Whether the run is training."""
        return self.kind == "training"

    def sentence(self, history: History) -> str:
        """The state in words, with the remaining time."""
        step = max(history.step, self.start_step)
        at = f"step {step:,} of {self.total:,}"
        if self.kind == "finished":
            seconds = sum(history.values("seconds"))
            return f"Finished: {at}{f', {duration(seconds)} in steps' if seconds else ''}."
        if self.kind == "stopped":
            return f"Stopped at {at}. Go on with --resume_from auto."
        if self.kind == "ended":
            return f"Ended at {at}: {self.reason.rstrip('.')}."
        if not history.rows:
            return f"Starting: {self.total:,} steps to make."
        pace = history.pace(self.start_step)
        remaining = f", about {duration(pace * (self.total - step))} left" if pace is not None and step < self.total else ""
        return f"Training: {at} ({step / self.total:.0%}){remaining}."

    def share(self, history: History) -> float:
        """The share of the finished steps, at most 1."""
        return min(1.0, max(history.step, self.start_step) / max(1, self.total))


@dataclass(frozen=True)
class Judgement:
    """The judgement of a run. tone: "good", "care", "bad" or "open". title, text, best (step): sentences, or ""."""

    tone: str
    title: str
    text: str
    best: str


def judgement_of(
    history: History, state: State, *, saved_steps: Iterable[int], levers: str, blocks: Mapping[str, float] | None = None
) -> Judgement:
    """The judgement of a run in plain words. saved_steps, levers, blocks: as for diagnosis.judge."""
    if not history.rows:
        if not state.alive:
            return Judgement("open", "No step was recorded.", "", "")
        return Judgement("open", "Too early to tell.", "No step had been made when this page was written.", "")
    saved = sorted(saved_steps)
    verdict = judge(history.rows, blocks, levers, saved)
    held_out = [(step, value) for step, value in series(history.rows, "held_out_loss") if value is not None]
    if verdict.kind == "learned":
        # The title names what was measured, no more: no number shows whether the result is good.
        title = _capital(verdict.measured)
        if verdict.step is not None and verdict.step == held_out[-1][0]:
            title += ", and still falls" if state.alive else ", and was still falling"
        elif verdict.step is not None:
            title += f", but was lowest at step {verdict.step:,}"
    else:
        title = TITLES[verdict.kind][not state.alive]
    text = _without_step(verdict.sentence.removeprefix(verdict.measured).removeprefix(", "))
    tone = KINDS.get(verdict.kind, "bad" if verdict.bad else "open")
    if verdict.kind == "learned" and verdict.doubt:
        tone = "care" if held_out else "open"
    if not state.finite and verdict.kind not in BAD:
        title, tone = NOT_FINITE, "bad"
        text = "" if verdict.kind == "unclear" else _without_step(verdict.sentence)
    elif state.alive and verdict.kind in ("nothing", "unclear"):
        text, tone = _not_yet(verdict, history), "open"
    best = _best(verdict, dict(held_out), saved, state, history)
    return Judgement(tone, f"{title}.", text and f"{text.rstrip('.')}.", best)


def _without_step(sentence: str) -> str:
    return _capital(TAKE.sub(lambda match: ";" if match[3] else "", sentence))


def _not_yet(verdict: Verdict, history: History) -> str:
    if verdict.kind == "nothing":
        step, change = history.newest("weight_change") or (0, None)
        limit = f": by step {step:,} no layer has changed by more than {max(change or 0, 1e-5):.3%} of its own weights"
        return f"The weights have hardly moved{'' if change is None else limit}"
    if (measured := len(history.values("held_out_loss"))) == 1:
        return "The held-out loss was measured once so far: too few to tell"
    if measured:
        return _capital(verdict.sentence.partition("; hold out more")[0].partition(f"; {LOOK}")[0])
    return "The loss of the steps jitters more than it has fallen so far. The samples may tell more"


def _best(verdict: Verdict, held_out: Mapping[float, float], saved: list[int], state: State, history: History) -> str:
    if verdict.kind == "diverged":
        sound = [step for step in saved if 0 < step <= verdict.sound]
        text = "No step is kept that is surely from before it diverged."
        return f"Before it diverged: step {sound[-1]:,} is kept." if sound else text
    start = "Best so far" if state.alive else "Best"
    if verdict.kind in ("memorising", "worse") and verdict.step is None:  # it never fell
        return f"{start}: the model without the adapter."
    if verdict.step is None or verdict.step not in held_out or verdict.kind == "recovered":
        if verdict.kind in ("learned", "recovered") and not held_out:
            return "Which step is best, only the samples can tell here: no photos are held out (data.held_out)."
        return ""
    best, newest = int(verdict.step), history.step
    reason = f"its held-out loss, {held_out[best]:.4g}, is the lowest of {len(held_out)} that were measured"
    if best in saved or (best == newest and state.kind == "finished"):
        return f"{start}: step {best:,}{' (the last)' if best == newest and not state.alive else ''}. There {reason}."
    nearest = min((step for step in saved if step > 0), key=lambda step: (abs(step - best), step), default=None)
    if nearest is None:
        return f"{start}: step {best:,}, where {reason}. Its adapter is not kept; export.every_steps keeps some in a new run."
    return f"{start}: step {best:,}. There {reason}. Its adapter is not kept; the nearest that is: step {nearest:,}."


def figures(history: History, blocks: Mapping[str, float | None]) -> dict[str, str]:
    """The figures at the head of a page, by name. blocks: ||dW|| / ||W|| of each block's layer that changed most."""
    rows: dict[str, str] = {}
    losses = series(history.rows, "loss")
    if values := [value for _, value in losses if value is not None]:
        window = curves.smoothing_window(len(losses))
        loss = curves.averaged(losses)[-1][1] if window else values[-1]
        rows["Loss, averaged" if window else "Loss"] = f"{loss:.4g}"
    if values := [value for _, value in series(history.rows, "held_out_loss") if value is not None]:
        rows["Held-out loss (lowest)"] = f"{values[-1]:.4g} ({min(values):.4g})"
    if (rate := history.last("lr")) is not None:
        rows["Learning rate"] = f"{rate:.3g}"
    if blocks:
        finite = list(filter(is_finite, blocks.values()))
        rows["Weights changed by"] = moved_by(max(finite)) if len(finite) == len(blocks) else "no finite number"
    if seconds := history.values("seconds"):
        last = sorted(seconds[-200:])
        rows["Time of a step"] = f"{last[len(last) // 2]:.3g} s"
    if (images := history.last("images")) is not None:
        epoch = history.last("epoch")
        rows["Images seen"] = f"{int(images):,}" + ("" if epoch is None else f" (epoch {epoch:g})")
    if peaks := history.values("peak_bytes"):
        rows["Peak memory"] = size(int(max(peaks)))
    if skipped := history.skipped():
        rows["Skipped updates"] = f"{len(skipped):,}"
    return rows


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
