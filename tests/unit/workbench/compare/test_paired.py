"""Paired differences: Student's t against published values and its density, false alarms, and what is said."""

from __future__ import annotations

import math
import random

import pytest

from workbench.compare.paired import Difference, Pair, before_the_runs, corrected, detectable
from workbench.pages.student import critical, within


# Two-sided 95 %: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2.
@pytest.mark.parametrize(
    ("freedom", "value"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (10, 2.228), (14, 2.145), (100, 1.984)]
)
def test_critical_values_are_those_of_the_tables(freedom: int, value: float) -> None:
    assert critical(freedom) == pytest.approx(value, abs=6e-4)


@pytest.mark.parametrize("freedom", [1, 2, 3, 6, 7, 30])
def test_the_probability_is_the_integral_of_the_density(freedom: int) -> None:
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    count, end = 20_000, 2.5

    def density(t: float) -> float:
        return scale * (1 + t * t / freedom) ** (-(freedom + 1) / 2)

    middles = (end * (place + 0.5) / count for place in range(count))
    assert within(end, freedom) == pytest.approx(2 * sum(map(density, middles)) * end / count, rel=1e-6)


def losses(seed: int, count: int, *, shift: float, spread: float = 0.02, own: float = 0.002) -> tuple[dict, dict]:
    """Held-out losses of two settings: what a seed does is in both, and each has a little of its own."""
    draw = random.Random(seed)
    first, second = {}, {}
    for number in range(count):
        common = 0.5 + draw.gauss(0, spread)
        for found, moved in ((first, 0.0), (second, shift)):
            found[number] = [(0, 0.9), (40, common + moved + draw.gauss(0, own))]
    return first, second


def judged(seed: int, count: int, shift: float) -> Pair:
    pair = Pair.of("a", "b", *losses(seed, count, shift=shift))
    assert pair is not None and pair.seeds == count
    return pair


def test_equal_settings_are_seldom_told_apart_and_a_difference_is() -> None:
    """A hundred comparisons of three seeds. The difference is ten times what each run has of its own, and as large as what
    the seed does: without the pairs it would be lost."""
    alarms = sum(judged(seed, 3, 0.0).told_apart for seed in range(100))
    assert 1 <= alarms <= 10
    found = [judged(seed, 3, 0.02) for seed in range(100)]
    assert sum(each.told_apart for each in found) >= 90
    assert all(each.last.error < each.last.unpaired_error / 3 for each in found if each.last.unpaired_error > 0.01)


def test_the_interval_of_an_example_by_hand() -> None:
    """Differences of 1, 2 and 3: a mean of 2, a standard deviation of 1, so 2 +- 4.3027 / sqrt(3)."""
    at = Difference(40, [1.0, 2.0, 3.0], [0.0, 0.0, 0.0])
    assert (at.mean, at.error) == (2, pytest.approx(1 / math.sqrt(3)))
    assert at.interval() == (pytest.approx(-0.4841, abs=1e-4), pytest.approx(4.4841, abs=1e-4))
    assert 1 - within(2 * math.sqrt(3), 2) == pytest.approx(at.chance)
    assert Difference(40, [1.0, 2.0, 3.0], [3.0, 2.0, 1.0]).unpaired_error == pytest.approx(math.sqrt(2 / 3))


@pytest.mark.parametrize(("seeds", "pairs"), [(2, 1), (3, 1), (5, 1), (10, 1), (3, 6)])
def test_a_difference_that_is_said_to_be_seen_is_seen_in_four_of_five(seeds: int, pairs: int) -> None:
    """By 4,000 draws of normal differences; twice the standard error of that share is 1.3 %."""
    draw, size, found = random.Random(seeds), detectable(seeds, pairs), 0
    for _ in range(4000):
        each = [draw.gauss(size, 1) for _ in range(seeds)]
        found += Pair("a", "b", [Difference(1, each, [0.0] * seeds)], seeds, pairs).told_apart
    assert found / 4000 == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize("count", [2, 5])
def test_equal_settings_are_told_apart_on_one_page_of_twenty(count: int) -> None:
    """However many pairs a page has; uncorrected it would be one of eleven, or of four."""
    draw, wrong = random.Random(count), 0
    for _ in range(1000):
        pairs = [
            Pair("a", f"{place}", [Difference(1, [draw.gauss(0, 1) for _ in range(3)], [0.0] * 3)], 3)
            for place in range(count)
        ]
        wrong += any(pair.told_apart for pair in corrected(pairs))
    assert wrong / 1000 <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 1000)


def test_the_divisors_are_holms_and_the_order_stays() -> None:
    """By hand: of p = 0.001, 0.02 and 0.04 the first is below 0.05 / 3, the second below 0.05 / 2, and the third below 0.05;
    of 0.03 in place of 0.02 the second is not, and so the third is not either."""

    def pair(name: str, chance: float) -> Pair:
        at = Difference(1, [critical(1, 1 - chance) + 1, critical(1, 1 - chance) - 1], [0.0, 0.0])
        assert at.chance == pytest.approx(chance)
        return Pair("a", name, [at], 2)

    for second, apart, divisors in ((0.02, [True] * 3, [1, 3, 2]), (0.03, [False, True, False], [2, 3, 2])):
        found = corrected([pair("third", 0.04), pair("first", 0.001), pair("second", second)])
        assert [each.second for each in found] == ["third", "first", "second"]
        assert ([each.told_apart for each in found], [each.divisor for each in found]) == (apart, divisors)


def test_what_is_said_of_a_pair() -> None:
    better = Pair.of("dora", "lora", *({s: [(5, 0.4 + s / 100 + m)] for s in range(3)} for m in (0.0, 0.1)))
    assert better is not None
    assert better.sentence().startswith(
        "dora is better than lora: on these held-out photos the loss of dora is lower by 0.1, 19.61% of it"
    )
    assert "(95 % interval of the difference -0.1 to -0.1, 3 seeds, step 5)" in better.sentence()
    same = Pair.of("a", "b", *({s: [(5, 0.4 + s)] for s in range(2)} for _ in "ab"))
    assert same is not None and same.sentence() == "a and b are equal: the same held-out loss at step 5 in all 2 seeds."
    unclear = Pair.of("a", "b", {0: [(5, 0.5)], 1: [(5, 0.6)]}, {0: [(5, 0.55)], 1: [(5, 0.56)]})
    assert unclear is not None and unclear.sentence().startswith(
        "a and b are not told apart: on these held-out photos the loss of a is lower"
    )


def test_the_size_that_is_seen_is_said_in_loss_where_a_deviation_is_known() -> None:
    assert "of loss" not in before_the_runs(3, 1)
    assert "With the 0.002 of the earlier comparison that is 0.0065 of loss." in before_the_runs(3, 1, 0.002)


def test_a_step_counts_where_both_were_measured_with_two_common_seeds() -> None:
    """A value that is not finite is none; a run that is shorter or missing leaves the steps that both have."""
    first = {0: [(0, 1.0), (5, 0.5), (10, 0.4)], 1: [(0, 1.0), (5, None), (10, 0.4)], 2: [(0, 1.0), (5, 0.6)]}
    second = {0: [(0, 1.0), (5, 0.5)], 1: [(0, 1.0), (5, 0.4)], 2: [(0, 1.0), (5, 0.3)], 3: [(0, 1.0)]}
    pair = Pair.of("a", "b", first, second)
    assert pair is not None and [(at.step, len(at.each)) for at in pair.by_step] == [(5, 2)]
    assert pair.last.first == (0.5, 0.6) and pair.last.second == (0.5, 0.3)
    assert Pair.of("a", "b", {0: [(5, 1.0)]}, {0: [(5, 1.0)]}) is None
    untrained = {0: [(0, 1.0)], 1: [(0, 1.0)]}
    assert Pair.of("a", "b", untrained, untrained) is None, "before training nothing differs"
