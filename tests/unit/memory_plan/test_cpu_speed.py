"""How long a CPU takes for a step, estimated."""

from __future__ import annotations

import pytest
import torch

from trainer.memory_plan import cpu_speed
from trainer.memory_plan.op_trace import Cost


def test_an_estimate_adds_launches_products_and_bytes() -> None:
    """A smaller share of the tensors makes no launch cheaper."""
    speed = cpu_speed.Speed(flops=1e9, moved=1e8, launch=1e-3)
    cost = Cost(launches=500, read=10**8, written=10**8, flops=4 * 10**9)
    assert speed.seconds(cost) == pytest.approx(0.5 + 4 + 2)
    assert speed.seconds(cost, share=0.5) == pytest.approx(0.5 + 2 + 1)


@pytest.mark.parametrize(("ratio", "slow"), [(0.1, True), (0.49, True), (0.51, False), (1.0, False), (4.0, False)])
def test_a_cpu_is_slow_in_a_format_below_half_of_its_rate_in_fp32(monkeypatch, ratio: float, slow: bool) -> None:
    rates = {torch.bfloat16: ratio * 1e11, torch.float32: 1e11}
    monkeypatch.setattr(cpu_speed, "speed_of", lambda dtype: cpu_speed.Speed(rates[dtype], 1e10, 1e-5))
    assert cpu_speed.slow_in(torch.bfloat16) == slow and not cpu_speed.slow_in(torch.float32)


def test_a_speed_is_measured_once(monkeypatch) -> None:
    measured: list[object] = []
    monkeypatch.setattr(cpu_speed, "_fastest", lambda work: measured.append(work) or 1e-3)
    cpu_speed.speed_of.cache_clear()
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        cpu_speed.slow_in(dtype)
    assert len(measured) == 2 * 3, "products, copies and launches, of two formats"
    cpu_speed.speed_of.cache_clear()


def test_the_fastest_of_all_within_a_span_counts(monkeypatch) -> None:
    """Three steps of 4, 1 and 3 s fill a span of 8; of one step longer than the span there are two all the same."""
    for steps, least in (([4.0, 1.0, 3.0], 1.0), ([9.0, 2.0], 2.0)):
        left, clock = iter(steps), [0.0]
        monkeypatch.setattr("time.thread_time", lambda clock=clock: clock[0])
        assert cpu_speed._fastest(lambda left=left, clock=clock: clock.append(clock.pop() + next(left)), span=8) == least
        assert next(left, None) is None
