"""Paired differences of two settings, each trained with the same seeds: the effects of photos, order, noise, times and crops
on the loss cancel in the difference. Its mean is judged by Student's t (docs/compare.md)."""

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

BySeed = Mapping[int, Series]  # seed -> held-out losses by step


@cache
def detectable(seeds: int, pairs: int = 1) -> float:
    """The true difference, in standard deviations of the paired differences, that this number of seeds (at least 2) detects
    with probability POWER if the differences are normally distributed. pairs: it is the first of so many (`corrected`).

    t then has the noncentral distribution: a normal variable over sqrt(chi squared / degrees), whose density is summed here.
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
    """A sentence on the detectable difference. deviation: standard deviation of an earlier comparison's differences."""
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
    """The difference of two settings at one step. first, second: their losses by seed, at least 2. seeds: those seeds."""

    step: float
    first: Sequence[float]
    second: Sequence[float]
    seeds: Sequence[int] = ()

    @cached_property
    def each(self) -> list[float]:
        """First less second, for each seed."""
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
        """The standard error of the mean difference without pairing, as for independent seeds."""
        return math.sqrt((variance(self.first) + variance(self.second)) / len(self.each))

    def interval(self, looks: int = 1) -> tuple[float, float]:
        """The bounds of the difference with probability LEVEL, corrected for this number of looks."""
        return interval(self.each, looks)

    @property
    def chance(self) -> float:
        """Student's p: the probability of a mean at least as far from 0 if nothing differs."""
        return 1 - within(abs(self.mean) / self.error, len(self.each) - 1) if self.error else float(not self.mean)


@dataclass(frozen=True)
class Pair:
    """Two settings of a comparison, by name. by_step: their difference at each step with two common seeds or more, in order.
    seeds: their number at the last step. divisor: of the probability of error that a page's pairs share (`corrected`)."""

    first: str
    second: str
    by_step: Sequence[Difference]
    seeds: int
    divisor: int = 1

    @staticmethod
    def of(first: str, second: str, losses: BySeed, others: BySeed) -> Pair | None:
        """The pair; None if no step was measured with two common seeds."""
        common = sorted(losses.keys() & others.keys())
        mine, theirs = ([dict(by_step[seed]) for seed in common] for by_step in (losses, others))
        by_step = []
        for step in sorted({step for series in mine for step in series if step > 0}):  # at step 0 nothing differs
            values = [(a.get(step), b.get(step), seed) for a, b, seed in zip(mine, theirs, common, strict=True)]
            complete = [(a, b, seed) for a, b, seed in values if a is not None and b is not None]
            if len(complete) > 1:
                by_step.append(Difference(step, *zip(*complete, strict=True)))
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
        """Whether the interval excludes 0."""
        low, high = self.interval
        return low > 0 or high < 0

    def sentence(self) -> str:
        """A sentence on which of the two is better at the last step, with the interval."""
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
        """A sentence on the standard error with and without pairing."""
        paired, unpaired = self.last.error, self.last.unpaired_error
        share = f", {paired / unpaired:.2f} of it" if unpaired else ""
        return f"Standard error: {paired:.3g} in pairs; {unpaired:.3g} if the seeds had nothing in common{share}."

    def chart(self) -> str:
        """The HTML of a chart: the difference by step, in the band of its interval."""
        band = [[(at.step, at.interval()[side]) for at in self.by_step] for side in (0, 1)]
        line = Curve(f"{self.first} - {self.second}", [(at.step, at.mean) for at in self.by_step], "line0", band)
        about = "Below 0 the first is better. The band is the 95 % interval of each step by itself."
        return draw(f"{self.first} less {self.second}", "held-out loss", [line], about=about)


def corrected(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs with Holm's divisors (1979, Scandinavian Journal of Statistics 6, 65-70): of pages without any difference
    95 % tell no pair apart."""
    divisor, by_names = len(pairs), {}
    for pair in sorted(pairs, key=lambda pair: pair.last.chance):
        by_names[pair.first, pair.second] = judged = replace(pair, divisor=divisor)
        divisor -= judged.told_apart  # after the first pair that is not, the divisor stays, and no later pair is
    return [by_names[pair.first, pair.second] for pair in pairs]
