"""What a step asks of the host, counted at a depth of one or two blocks; benchmarks/host_time.py has the time."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from benchmarks import host_time
from benchmarks.host_time import Side

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

SHORT = {
    "flux": {"num_layers": 1, "num_single_layers": 1},
    "sdxl": {"transformer_layers_per_block": [1, 1, 1], "layers_per_block": 1},
}
# By family, adapter and storage: operators and launches of a step, and Python's calls, which this torch decides with us: at
# most so many. At 5ba361e a step of Flux asked for 758 operators and 11,351 calls (LoRA over float8), 752 and 17,334 (DoRA),
# of SDXL for 1,627 and 54,728, 1,568 and 74,788. What went: torch's checkpoint met each saved tensor; each launch was
# described anew; each parameter's gradient was added by an operator of its own; products within an adapted layer went through
# autograd. Some 100 calls a micro-batch are new since: its tensors are made apart from what is computed of them. Of
# Flux, 96 operators became 6 launches that turn queries and keys.
ASKED = {
    ("flux", "LoRA", "fp8_e4m3"): (635, 77, 5_850),
    ("flux", "DoRA", "fp8_e4m3"): (612, 137, 7_200),
    ("flux", "LoRA", "bf16"): (635, 37, 4_350),
    ("flux", "DoRA", "bf16"): (623, 86, 5_900),
    ("sdxl", "LoRA", "fp8_e4m3"): (1559, 380, 29_300),
    ("sdxl", "DoRA", "fp8_e4m3"): (1430, 592, 33_500),
    ("sdxl", "LoRA", "bf16"): (1545, 133, 20_200),
    ("sdxl", "DoRA", "bf16"): (1469, 292, 24_500),
}


@pytest.mark.slow
@pytest.mark.parametrize("asked", ASKED, ids="-".join)
def test_a_step_asks_no_more_of_the_host(tmp_path: Path, asked: tuple[str, str, str]) -> None:
    family, adapter, storage = asked
    with host_time.no_launches():
        step = host_time.stepping(Side(family, "ours", adapter, storage), tmp_path, **SHORT[family])
        step(), step()
        found = host_time.counted(step)
    operators, launches, calls = ASKED[asked]
    assert found["launches"] == launches
    assert found["operators"] <= operators and found["calls"] <= calls


# Launches of a compiled step over float8. It turns queries and keys in loops of its own, decodes a weight for a recomputation
# and for its backward pass each, and makes nothing anew of a LoRA's layers whose output is only added (3 of Flux, 7 of SDXL).
COMPILED = {("flux", "LoRA"): 85 - 6, ("flux", "DoRA"): 131, ("sdxl", "LoRA"): 426, ("sdxl", "DoRA"): 592}


@pytest.mark.parametrize(
    ("family", "adapter"),
    [pytest.param(*cell, marks=pytest.mark.slow if cell == ("flux", "DoRA") else pytest.mark.proof) for cell in COMPILED],
)
def test_compiled_blocks_launch_what_eager_ones_do_but_for_what_nothing_reads(tmp_path, monkeypatch, family, adapter) -> None:
    """A program that lost a kernel would be quick, and wrong."""
    lookup = torch._dynamo.lookup_backend
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: lookup("aot_eager"))
    with host_time.no_launches():
        step = host_time.stepping(Side(family, "ours", adapter, "fp8_e4m3", compiled=True), tmp_path, **SHORT[family])
        step(), step()
        before = host_time.Launched.count
        step()
    assert host_time.Launched.count - before == COMPILED[family, adapter]
