"""What the table says of an optimizer, against the optimizer itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from trainer.optim import OPTIMIZERS, build_optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_an_update_takes_for_a_moment_on_a_cpu(name: str) -> None:
    """Counted where memory is given out, also below the operators of a library."""
    elements = 2**18
    groups = [{"params": [nn.Parameter(torch.zeros(elements))], "lr": 1e-3, "weight_decay": 0.01, "magnitudes": False}]
    optimizer = build_optimizer(name, groups, betas=(0.9, 0.999), eps=1e-8, min_8bit_size=4096)
    optimizer.step()  # makes the state
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        optimizer.step()
    there = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            there += event.nbytes()
            peak = max(peak, there)
    assert there == 0 and peak == pytest.approx(OPTIMIZERS[name].cpu_scratch * elements, abs=1024)
