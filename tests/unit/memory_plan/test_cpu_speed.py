"""How long a CPU takes for a step, estimated."""

from __future__ import annotations

import pytest

from trainer.memory_plan import cpu_speed
from trainer.memory_plan.op_trace import Cost


def test_an_estimate_adds_launches_products_and_bytes() -> None:
    """A smaller share of the tensors makes no launch cheaper."""
    speed = cpu_speed.Speed(flops=1e9, moved=1e8, launch=1e-3)
    cost = Cost(launches=500, read=10**8, written=10**8, flops=4 * 10**9)
    assert speed.seconds(cost) == pytest.approx(0.5 + 4 + 2)
    assert speed.seconds(cost, share=0.5) == pytest.approx(0.5 + 2 + 1)
