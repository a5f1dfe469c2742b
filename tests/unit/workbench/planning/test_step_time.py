"""How long a step takes, estimated: a roofline over the operators of its trace."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import bfloat16, float32

from tests.harness import ROOT
from workbench.planning import describe, step_time
from workbench.planning.op_trace import Cost, Work
from workbench.planning.step_time import Machine, Probe, Speed, on_card, on_cpu

BEST = Speed({2: 1e12, 4: 1e11}, memory=1e10, launch=1e-6, host=2e-5)
WORST = Speed({2: 5e11, 4: 5e10}, memory=5e9, launch=3e-6, host=6e-5)
# Two products that their FLOPs bound at both ends, one that its bytes do, and an operator that only moves them.
TRACE = Cost(
    Counter({
        Work(10**6, 10**6, 10**9, 2): 2, Work(10**8, 10**8, 10**9, 2): 1, Work(10**6, 0, 10**9, 4): 1,
        Work(3 * 10**8, 10**8): 1,
    })
)  # fmt: skip


def test_a_trace_by_hand() -> None:
    """Each operator takes as long as what bounds it, and all of them follow one another."""
    device = 5e-6 + 2 * 1e9 / 1e12 + 2e8 / 1e10 + 1e9 / 1e11 + 4e8 / 1e10
    slow = 15e-6 + 2 * 1e9 / 5e11 + 2e8 / 5e9 + 1e9 / 5e10 + 4e8 / 5e9
    host, slow_host = 5 * 2e-5, 5 * 6e-5
    assert Machine(BEST, WORST, card=False).seconds(TRACE) == pytest.approx((device + host, slow + slow_host), rel=1e-12)
    assert Machine(BEST, WORST, card=True).seconds(TRACE) == pytest.approx((device, slow + slow_host), rel=1e-12)
    waiting = replace(BEST, host=1.0)
    assert Machine(waiting, WORST, card=True).seconds(TRACE)[0] == pytest.approx(5.0, rel=1e-12), "the card waits"


def test_streamed_blocks_go_over_the_bus_meanwhile() -> None:
    """A step takes at least as long as their copies; of a CPU they are among its operators."""
    machine = Machine(replace(BEST, bus=2e9), replace(WORST, bus=1e9), card=True)
    assert machine.seconds(TRACE, copied=10**6) == machine.seconds(TRACE)
    assert machine.seconds(TRACE, copied=10**10) == (5.0, 10.0)
    card = on_card("NVIDIA L4", 1e-6)
    assert card is not None and (card.best.bus, card.worst.bus) == step_time.BUS
    assert on_cpu(PROBE).seconds(TRACE, copied=10**15) == on_cpu(PROBE).seconds(TRACE)


def test_a_smaller_share_makes_no_launch_cheaper() -> None:
    (least, most), (whole, at_most) = (Machine(BEST, WORST, card=False).seconds(TRACE, share) for share in (0.0, 1.0))
    assert (least, most) == pytest.approx((5 * (1e-6 + 2e-5), 5 * (3e-6 + 6e-5)))
    half = Machine(BEST, WORST, card=False).seconds(TRACE, 0.5)
    assert half == pytest.approx(((least + whole) / 2, (most + at_most) / 2))


def test_numbers_without_a_rate_are_multiplied_as_fp32_is() -> None:
    work = Work(1, 1, 10**12, 1)
    assert BEST.device_seconds(Cost(Counter([work])), 1.0) == pytest.approx(10, rel=1e-3)


works = st.builds(
    Work, st.integers(0, 10**12), st.integers(0, 10**12), st.integers(0, 10**15), st.sampled_from([0, 1, 2, 4, 8])
)
costs = st.dictionaries(works, st.integers(1, 1000), max_size=5).map(lambda works: Cost(Counter(works)))
PROBE = Probe({2: 2e11, 4: 1e11}, 3e10, 1e-6)
machines = st.one_of(
    st.builds(on_card, st.sampled_from(sorted(step_time.CARDS)), st.floats(1e-7, 1e-5)), st.just(on_cpu(PROBE))
)


@given(machines, costs, works, st.integers(0, 10**12), st.integers(0, 10**15), st.floats(0.01, 1))
def test_more_is_never_less(machine: Machine, cost: Cost, work: Work, more: int, flops: int, share: float) -> None:
    """More launches, bytes or FLOPs, or a larger share of them; and the least is not above the most."""

    def seconds(*others: Work, share: float = share) -> tuple[float, float]:
        least, most = machine.seconds(Cost(cost.works + Counter(others)), share)
        assert 0 <= least <= most
        return least, most

    larger = [
        seconds(), seconds(work), seconds(work._replace(read=work.read + more)),
        seconds(work._replace(read=work.read + more, flops=work.flops + flops)),
        seconds(work._replace(read=work.read + more, flops=work.flops + flops), share=1.0),
    ]  # fmt: skip
    for before, after in zip(larger, larger[1:], strict=False):
        for one, other in zip(before, after, strict=True):
            assert one <= other * (1 + 1e-9)


def test_a_card_has_what_its_data_sheet_says() -> None:
    """No step is faster than the sheet, and a card with products in float8 has more of them than in 16 bits."""
    for name, sheet in step_time.CARDS.items():
        machine = on_card(name, 1e-6)
        assert machine is not None and machine.card
        for rates in (machine.best, machine.worst):
            assert rates.products[4] < rates.products[2] < sheet.bits16 * 1e12 and rates.memory <= sheet.memory * 1e9
            assert (rates.products.get(1, 0) > rates.products[2]) == (sheet.bits8 is not None)
    assert on_card("NVIDIA GeForce RTX 4090 Laptop GPU", 1e-6) is None, "another card than that of the desk"


def test_each_measured_layer_of_an_h100_lies_within_the_band() -> None:
    """A float8 weight is decoded and multiplied, in a graph: no host takes part (benchmarks/bench_float8.py)."""
    measured = json.loads((ROOT / "docs" / "benchmarks" / "GPU-2026-11-22.json").read_text())
    machine = on_card(measured["device"], 1e-6)
    assert machine is not None and len(measured["steps"]["layers"]) == 29
    for row in measured["steps"]["layers"]:
        m, n, k = row["shape"]
        decoding, product = Work(n * k, 2 * n * k), Work(2 * (m * k + n * k), 2 * m * n, 2 * m * n * k, 2)
        least, most = (
            rates.device_seconds(Cost(Counter([decoding, product])), 1.0) for rates in (machine.best, machine.worst)
        )
        for way in ("forward upcast", "input_grad upcast"):
            assert least < row["ms"][way] / 1000 < most, (row["model"], row["shape"], way)


@pytest.mark.parametrize(("ratio", "slow"), [(0.1, True), (0.49, True), (0.51, False), (1.0, False), (4.0, False)])
def test_a_cpu_is_slow_in_a_format_below_half_of_its_rate_in_fp32(monkeypatch, ratio: float, slow: bool) -> None:
    rates = {bfloat16: ratio * 1e11, float32: 1e11}
    monkeypatch.setattr(step_time, "_products", rates.__getitem__)
    assert step_time.slow_in(bfloat16) == slow and not step_time.slow_in(float32)


def test_a_cpu_is_probed_once(monkeypatch) -> None:
    measured: list[object] = []
    caches = step_time._products, step_time._memory, step_time.bare_operator
    monkeypatch.setattr(step_time, "_fastest", lambda work: measured.append(work) or 1e-3)
    for cache in caches:
        cache.cache_clear()
    for dtype in (bfloat16, float32, bfloat16):
        found = Probe.of(dtype)
        assert set(found.products) == {dtype.itemsize, 4} and not step_time.slow_in(dtype)
    assert len(measured) == 2 + 1 + 1, "products of two formats, copies, operators"
    for cache in caches:
        cache.cache_clear()


def test_the_fastest_of_all_within_a_span_counts(monkeypatch) -> None:
    """Three steps of 4, 1 and 3 s fill a span of 8; of one step longer than the span there are two all the same."""
    for steps, least in (([4.0, 1.0, 3.0], 1.0), ([9.0, 2.0], 2.0)):
        left, clock = iter(steps), [0.0]
        monkeypatch.setattr("time.thread_time", lambda clock=clock: clock[0])
        assert step_time._fastest(lambda left=left, clock=clock: clock.append(clock.pop() + next(left)), span=8) == least
        assert next(left, None) is None


@pytest.mark.parametrize(
    ("least", "most", "said"),
    [
        (0.0712, 0.1149, "0.071 to 0.11 s"), (0.7, 1.1, "0.7 to 1.1 s"), (9.96, 10.04, "10 s"), (42, 89.4, "42 to 89 s"),
        (42, 90, "0.7 to 1.5 min"),
        (25, 95, "25 s to 1.6 min"), (35 * 60, 55.4 * 60, "35 to 55 min"), (89 * 60, 91 * 60, "1.5 h"),
        (3600 * 48, 3600 * 123, "48 to 120 h"), (0, 0, "0 s"),
    ],
)  # fmt: skip
def test_a_band_has_two_figures_and_a_unit_that_can_be_read(least: float, most: float, said: str) -> None:
    assert describe.band(least, most) == said
