"""What a step of DoRA asks of an accelerator at full size, beside LoRA's and beside PEFT's (benchmarks/trace.py)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from benchmarks import trace
from workbench.planning.op_trace import Trace


@pytest.mark.parametrize(
    ("family", "short"),
    [pytest.param("sdxl", True, marks=pytest.mark.slow),
     *(pytest.param(family, False, marks=pytest.mark.proof) for family in ("sdxl", "flux"))],
)  # fmt: skip
def test_a_dora_asks_little_more_than_a_lora(family: str, short: bool, tmp_path: Path, monkeypatch) -> None:
    """Launches at most 1.1 times, bytes 1.15, FLOPs 1.02; the norms of all layers are made in few launches. short: the
    published widths and places, one transformer block in each place."""
    if short:
        published = shutil.copytree(trace.PUBLISHED, tmp_path / "published")
        path = published / trace.PUBLISHED_AS[family] / "unet" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"transformer_layers_per_block": [1, 1, 1]}))
        monkeypatch.setattr(trace, "PUBLISHED", published)
    lora, dora = (trace.traced(family, "ours", adapter, "fp8_e4m3", recomputed=False) for adapter in ("lora", "dora"))
    assert dora.cost.launches <= 1.1 * lora.cost.launches
    assert dora.moved <= 1.15 * lora.moved
    assert lora.cost.total("flops") < dora.cost.total("flops") <= 1.02 * lora.cost.total("flops")
    assert (
        dora.operators["trainer::adapter_gradients"] > (100 if short else 400)
        and dora.operators["trainer::adapted_norms"] <= 25
    )
    assert "trainer::adapted_norms" not in lora.operators


@pytest.mark.proof
@pytest.mark.parametrize(("adapter", "most"), [("lora", 1.0), ("dora", 0.6)])
def test_ours_asks_less_than_pefts(adapter: str, most: float) -> None:
    """Over the same bf16 base: launches and bytes."""
    ours, peft = (trace.traced("sdxl", who, adapter, "bf16", recomputed=False) for who in ("ours", "peft"))
    assert ours.cost.launches <= most * peft.cost.launches and ours.moved <= most * peft.moved
    assert ours.cost.total("flops") <= peft.cost.total("flops")


def test_a_trace_without_values_looks_results_up() -> None:
    """Forms, costs and peaks are those of a trace that asks torch each time: views, strides, several results, none, what is
    written in place, into a given tensor, or takes another form."""

    def work(trace: Trace) -> list:
        x = torch.randn(6, 8, 4, device="meta", requires_grad=True)
        layer = torch.nn.LayerNorm(4, device="meta")
        found = []
        with trace:
            for each in (x, x.transpose(0, 1), x[::2], x.bfloat16(), x):
                y = layer(each.float()) * 2 + each.sum(0, keepdim=True).mean()
                y = torch.nn.functional.gelu(y.to(torch.bfloat16)).transpose(1, 2).flatten(1) @ torch.ones(
                    y.shape[1] * 4, 3, dtype=torch.bfloat16, device="meta"
                )
                y.add_(1).float().sum().backward()
                out = torch.empty(2, 2, device="meta")
                assert torch.mm(torch.ones(2, 3, device="meta"), torch.ones(3, 2, device="meta"), out=out[:, :]).shape == (
                    2,
                    2,
                )
                assert out.addmm_(out, out) is out and out.mul_(2) is out and out.resize_(3, 5) is out
                found += [out, torch.add(out, 1, out=torch.empty(3, 5, device="meta").t().contiguous().t())]
                found += [y.detach(), torch.unbind(y)[0], torch.topk(y, 2)[0], torch.div(y, 2), torch.div(y, 2.0)]
                found += [torch.ones_like(y, dtype=torch.int64) * True, torch.ones_like(y, dtype=torch.int64) * 2.5]
        return [(each.shape, each.stride(), each.dtype) for each in found]

    asking, looking = Trace(), Trace()
    with patch.object(Trace, "_call", lambda self, func, args, kwargs: func(*args, **kwargs)):
        expected = work(asking)
    assert work(looking) == expected and looking._results
    assert (looking.peak, looking.cost, looking.by_name) == (asking.peak, asking.cost, asking.by_name)


def test_a_trace_counts_launches_bytes_and_flops() -> None:
    a, b = torch.randn(8, 16), torch.randn(16, 4)
    with Trace() as counted:
        c = (a @ b).view(4, 8)  # a view is no launch
        c.add_(1)
    assert counted.by_name == {"aten::mm": 1, "aten::add_": 1}
    assert (counted.cost.launches, counted.cost.total("flops")) == (2, 2 * 8 * 16 * 4)
    assert counted.cost.total("read") == 4 * (8 * 16 + 16 * 4 + 32) and counted.cost.total("written") == 4 * (32 + 32)
