"""Paired differences: two settings, each trained with the same seeds.

Runs of one seed share photos, order, noise, times and crops. So what these do to the loss is in both, and leaves with the
difference. What is judged is the mean of the differences by Student's t; see docs/compare.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, variance

from trainer.monitoring.student import critical, interval
from trainer.report.curves import Curve, draw
from trainer.report.history import Series

MOST_SEEDS = 1000  # beyond which no number of seeds is named

BySeed = Mapping[int, Series]  # held-out losses by step, of each seed


@dataclass(frozen=True)
class Difference:
    """The difference of two settings at one step. first, second: the losses of each, by seed in the same order, two at
    least."""

    step: float
    first: Sequence[float]
    second: Sequence[float]

    @cached_property
    def each(self) -> list[float]:
        """First less second, of every seed."""
        return [a - b for a, b in zip(self.first, self.second, strict=True)]

    @property
    def mean(self) -> float:
        """The mean of the differences."""
        return fmean(self.each)

    @property
    def error(self) -> float:
        """The standard error of the mean difference."""
        return math.sqrt(variance(self.each) / len(self.each))

    @property
    def unpaired_error(self) -> float:
        """What it would be if the seeds of the two had nothing in common."""
        return math.sqrt((variance(self.first) + variance(self.second)) / len(self.each))

    @property
    def interval(self) -> tuple[float, float]:
        """The bounds between which the difference lies with probability LEVEL, by these seeds."""
        return interval(self.each)

    @property
    def told_apart(self) -> bool:
        """Whether the interval leaves out 0."""
        low, high = self.interval
        return low > 0 or high < 0

    @property
    def more_seeds(self) -> int | None:
        """How many more would tell the two apart, if mean and spread stay as they are; None: more than MOST_SEEDS."""
        count, spread = len(self.each), math.sqrt(variance(self.each))
        for more in range(1, MOST_SEEDS):
            if critical(count + more - 1) * spread < abs(self.mean) * math.sqrt(count + more):
                return more
        return None


@dataclass(frozen=True)
class Pair:
    """Two settings of a comparison. first, second: their names. by_step: their difference where both were measured with two
    common seeds or more, in order. seeds: those at the last of these steps."""

    first: str
    second: str
    by_step: Sequence[Difference]
    seeds: int

    @staticmethod
    def of(first: str, second: str, losses: BySeed, others: BySeed) -> Pair | None:
        """The pair; None where no step was measured with two common seeds."""
        common = sorted(losses.keys() & others.keys())
        mine, theirs = ([dict(found[seed]) for seed in common] for found in (losses, others))
        found = []
        for step in sorted({step for series in mine for step in series if step > 0}):  # before, nothing differs
            both = [(a[step], b[step]) for a, b in zip(mine, theirs, strict=True) if step in a and step in b]
            known = [(a, b) for a, b in both if a is not None and b is not None]
            if len(known) > 1:
                found.append(Difference(step, *zip(*known, strict=True)))
        return Pair(first, second, found, len(found[-1].each)) if found else None

    @property
    def last(self) -> Difference:
        """That of the last step."""
        return self.by_step[-1]

    def sentence(self) -> str:
        """A sentence: which of the two is better at the last step, and how sure that is."""
        at, names = self.last, f"{self.first} and {self.second}"
        if not any(at.each):
            return f"{names} are equal: the same held-out loss at step {at.step:,.0f} in all {self.seeds} seeds."
        low, high = at.interval
        share = f", {abs(at.mean) / fmean(at.second):.2%} of it" if fmean(at.second) else ""
        measured = (
            f"the held-out loss of {self.first} is {'lower' if at.mean < 0 else 'higher'} by {abs(at.mean):.4g}{share} "
            f"(95 % interval of the difference {low:.4g} to {high:.4g}, {self.seeds} seeds, step {at.step:,.0f})"
        )
        if at.told_apart:
            return f"{self.first} is {'better' if at.mean < 0 else 'worse'} than {self.second}: {measured}."
        more = at.more_seeds
        would = f"More than {MOST_SEEDS:,} more seeds" if more is None else f"{more} more {'seeds' if more > 1 else 'seed'}"
        return f"{names} are not told apart: {measured}. {would} would, if mean and spread stay as they are."

    def errors(self) -> str:
        """What pairing gives, in words."""
        paired, unpaired = self.last.error, self.last.unpaired_error
        share = f", {paired / unpaired:.2f} of it" if unpaired else ""
        return f"Standard error: {paired:.3g} in pairs; {unpaired:.3g} if the seeds had nothing in common{share}."

    def chart(self) -> str:
        """The difference by step, in the band of its interval."""
        steps = [at.step for at in self.by_step]
        low, high = ([at.interval[side] for at in self.by_step] for side in (0, 1))
        band = [list(zip(steps, side, strict=True)) for side in (low, high)]
        line = Curve(f"{self.first} - {self.second}", [(at.step, at.mean) for at in self.by_step], "line0", band)
        return draw(
            f"{self.first} less {self.second}",
            "held-out loss",
            [line],
            about="Below 0 the first is better. The band is the 95 % interval.",
        )
