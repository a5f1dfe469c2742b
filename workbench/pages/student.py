"""Student's t, and the interval of a mean of paired differences by it."""

import math
from collections.abc import Sequence
from functools import cache
from statistics import fmean, variance

LEVEL = 0.95


def within(t: float, freedom: int) -> float:
    """The probability that Student's t lies within -t and t. freedom: its degrees, at least 1. The finite sums of Abramowitz
    and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


@cache
def critical(freedom: int, level: float = LEVEL) -> float:
    """The t within which Student's t lies with that probability. freedom: its degrees, at least 1."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(math.sqrt(freedom) * math.tan(middle), freedom) < level else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def interval(differences: Sequence[float], looks: int = 1) -> tuple[float, float]:
    """The bounds of the mean of two or more independent differences, with probability LEVEL. looks: of how many such
    intervals all hold at once with that probability: each misses with (1 - LEVEL) / looks (Bonferroni's inequality; Dunn
    1961, Multiple Comparisons Among Means)."""
    count, mean = len(differences), fmean(differences)
    half = critical(count - 1, 1 - (1 - LEVEL) / looks) * math.sqrt(variance(differences) / count)
    return mean - half, mean + half
