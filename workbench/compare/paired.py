"""Paired differences of two settings, each trained with the same seeds: what photos, order, noise, times and crops do to the
loss leaves with the difference. Its mean is judged by Student's t (docs/compare.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from statistics import fmean, variance

from workbench.pages.curves import Curve, draw
from workbench.pages.history import Series
from workbench.pages.student import LEVEL, critical, interval, within

POWER = 0.8

BySeed = Mapping[int, Series]  # held-out losses by step, of each seed


@cache
def detectable(seeds: int, pairs: int = 1) -> float:
    """The true difference, in standard deviations of the paired differences, that so many seeds, two at least, tell apart
    with probability POWER if the differences are normally distributed: the first of so many pairs (`corrected`).

    t is then the noncentral one: a normal variable over sqrt(chi squared / degrees), whose density is summed here.
    """
    freedom, count = seeds - 1, 4000
    limit, width = critical(freedom, 1 - (1 - LEVEL) / pairs), (1 + 12 / math.sqrt(2 * freedom)) / count
    log = math.log(2) + freedom / 2 * math.log(freedom / 2) - math.lgamma(freedom / 2)
    spreads = [(place + 0.5) * width for place in range(count)]
    weights = [math.exp(log + (freedom - 1) * math.log(s) - freedom * s * s / 2) * width for s in spreads]

    def told_apart(shift: float) -> float:
        tails = (
            math.erfc((limit * s - shift) / math.sqrt(2)) + math.erfc((limit * s + shift) / math.sqrt(2)) for s in spreads
        )
        return sum(weight * tail / 2 for weight, tail in zip(weights, tails, strict=True))

    low, high = 0.0, 100.0 * pairs
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if told_apart(middle) < POWER else (low, middle)
    return low / math.sqrt(seeds)


def before_the_runs(seeds: int, pairs: int, deviation: float | None = None) -> str:
    """What so many seeds can tell of so many pairs, in words. deviation: of an earlier comparison's differences."""
    size, in_loss = detectable(seeds, pairs), ""
    if deviation:
        in_loss = f" With the {deviation:.2g} of the earlier comparison that is {size * deviation:.2g} of loss."
    among = f", the first of {pairs} pairs," if pairs > 1 else ""
    return (
        f"{seeds} seeds tell two variants apart{among} in {POWER:.0%} of all cases where their true difference is "
        f"{size:.1f} standard deviations of the paired differences, if these are normally distributed.{in_loss}"
    )


@dataclass(frozen=True)
class Difference:
    """The difference of two settings at one step. first, second: the losses of each, by seed, two at least. seeds: these."""

    step: float
    first: Sequence[float]
    second: Sequence[float]
    seeds: Sequence[int] = ()

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

    def interval(self, looks: int = 1) -> tuple[float, float]:
        """The bounds of the difference with probability LEVEL, by these seeds, corrected for so many looks."""
        return interval(self.each, looks)

    @property
    def chance(self) -> float:
        """How often a mean as far from 0 comes up where nothing differs: Student's p."""
        return 1 - within(abs(self.mean) / self.error, len(self.each) - 1) if self.error else float(not self.mean)


@dataclass(frozen=True)
class Pair:
    """Two settings of a comparison. first, second: their names. by_step: their difference where both were measured with two
    common seeds or more, in order. seeds: their number at the last of these steps. divisor: of the error that all pairs of a
    page may have together (`corrected`)."""

    first: str
    second: str
    by_step: Sequence[Difference]
    seeds: int
    divisor: int = 1

    @staticmethod
    def of(first: str, second: str, losses: BySeed, others: BySeed) -> Pair | None:
        """The pair; None where no step was measured with two common seeds."""
        common = sorted(losses.keys() & others.keys())
        mine, theirs = ([dict(by_step[seed]) for seed in common] for by_step in (losses, others))
        by_step = []
        for step in sorted({step for series in mine for step in series if step > 0}):  # before, nothing differs
            both = [(a.get(step), b.get(step), seed) for a, b, seed in zip(mine, theirs, common, strict=True)]
            known = [(a, b, seed) for a, b, seed in both if a is not None and b is not None]
            if len(known) > 1:
                by_step.append(Difference(step, *zip(*known, strict=True)))
        return Pair(first, second, by_step, len(by_step[-1].each)) if by_step else None

    @property
    def last(self) -> Difference:
        """The difference at the last step."""
        return self.by_step[-1]

    @property
    def interval(self) -> tuple[float, float]:
        """The bounds of the difference at the last step, corrected for the other pairs."""
        return self.last.interval(self.divisor)

    @property
    def told_apart(self) -> bool:
        """Whether the interval leaves out 0."""
        low, high = self.interval
        return low > 0 or high < 0

    def sentence(self) -> str:
        """A sentence: which of the two is better at the last step, and how sure that is."""
        at, names = self.last, f"{self.first} and {self.second}"
        if not any(at.each):
            return f"{names} are equal: the same held-out loss at step {at.step:,.0f} in all {self.seeds} seeds."
        low, high = self.interval
        share = f", {abs(at.mean) / fmean(at.second):.2%} of it" if fmean(at.second) else ""
        several = f", corrected for {self.divisor} pairs" if self.divisor > 1 else ""
        measured = (
            f"on these held-out photos the loss of {self.first} is {'lower' if at.mean < 0 else 'higher'} by "
            f"{abs(at.mean):.4g}{share} (95 % interval of the difference {low:.4g} to {high:.4g}{several}, {self.seeds} seeds"
            f", step {at.step:,.0f})"
        )
        if self.told_apart:
            return f"{self.first} is {'better' if at.mean < 0 else 'worse'} than {self.second}: {measured}."
        return f"{names} are not told apart: {measured}."

    def errors(self) -> str:
        """What pairing gives, in words."""
        paired, unpaired = self.last.error, self.last.unpaired_error
        share = f", {paired / unpaired:.2f} of it" if unpaired else ""
        return f"Standard error: {paired:.3g} in pairs; {unpaired:.3g} if the seeds had nothing in common{share}."

    def chart(self) -> str:
        """The difference by step, in the band of its interval."""
        steps = [at.step for at in self.by_step]
        low, high = ([at.interval()[side] for at in self.by_step] for side in (0, 1))
        band = [list(zip(steps, side, strict=True)) for side in (low, high)]
        line = Curve(f"{self.first} - {self.second}", [(at.step, at.mean) for at in self.by_step], "line0", band)
        about = "Below 0 the first is better. The band is the 95 % interval of each step by itself."
        return draw(f"{self.first} less {self.second}", "held-out loss", [line], about=about)


def corrected(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs with the divisors of Holm (1979, Scandinavian Journal of Statistics 6, 65-70): in all but 5 % of pages on
    which nothing differs, none is told apart."""
    left, bounds = len(pairs), {}
    for pair in sorted(pairs, key=lambda pair: pair.last.chance):
        bounds[pair.first, pair.second] = judged = replace(pair, divisor=left)
        left -= judged.told_apart  # from the first that is not, the divisor stays, and no later one is
    return [bounds[pair.first, pair.second] for pair in pairs]
