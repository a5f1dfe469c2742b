"""What a step of DoRA asks of an accelerator at full size, beside LoRA's and beside PEFT's (scripts/bench/trace.py)."""

from __future__ import annotations

import pytest
import torch

from scripts.bench import trace
from trainer.trace import Trace


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_a_dora_asks_little_more_than_a_lora(family: str) -> None:
    """Launches at most 1.1 times, bytes 1.15, FLOPs 1.02; the norms of all layers are made in few launches."""
    lora, dora = (trace.traced(family, "ours", adapter, "fp8_e4m3", recomputed=False) for adapter in ("lora", "dora"))
    assert dora.cost.launches <= 1.1 * lora.cost.launches
    assert dora.moved <= 1.15 * lora.moved
    assert lora.cost.flops < dora.cost.flops <= 1.02 * lora.cost.flops
    assert dora.operators["trainer::adapter_gradients"] > 400 and dora.operators["trainer::adapted_norms"] <= 25
    assert "trainer::adapted_norms" not in lora.operators


@pytest.mark.slow
@pytest.mark.parametrize(("adapter", "most"), [("lora", 1.0), ("dora", 0.6)])
def test_ours_asks_less_than_pefts(adapter: str, most: float) -> None:
    """Over the same bf16 base: launches and bytes."""
    ours, peft = (trace.traced("sdxl", who, adapter, "bf16", recomputed=False) for who in ("ours", "peft"))
    assert ours.cost.launches <= most * peft.cost.launches and ours.moved <= most * peft.moved
    assert ours.cost.flops <= peft.cost.flops


def test_a_trace_counts_launches_bytes_and_flops() -> None:
    a, b = torch.randn(8, 16), torch.randn(16, 4)
    with Trace() as counted:
        c = (a @ b).view(4, 8)  # a view is no launch
        c.add_(1)
    assert counted.by_name == {"aten::mm": 1, "aten::add_": 1}
    assert (counted.cost.launches, counted.cost.flops) == (2, 2 * 8 * 16 * 4)
    assert counted.cost.read == 4 * (8 * 16 + 16 * 4 + 32) and counted.cost.written == 4 * (32 + 32)
