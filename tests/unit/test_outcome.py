"""Did it take? How far an adapter moves each layer, against the dense weights in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.harness import Workbench
from tests.numerics.test_adapted_layers import LargestAllocation, network, with_adapter
from trainer import cli, outcome
from trainer.adapters import ADAPTER_NAME
from trainer.kernels import decode, dora_torch
from trainer.quantization import ALL_FORMATS, FORMATS, FrozenLinear

TOLERANCE = 1e-6  # of ||W||


@torch.no_grad()
def dense(layer) -> tuple[float, float]:
    """(||dW||, ||W||) from the whole weights in fp64, with the very g that the forward uses."""
    base, s = layer.get_base_layer(), layer.scaling[ADAPTER_NAME]
    weight = base.dequantize(torch.float32).flatten(1).double()
    a, b = (factor.double() for factor in layer.factors(ADAPTER_NAME))
    g = torch.ones(len(weight), dtype=torch.float64)
    if layer.use_dora[ADAPTER_NAME]:
        m = layer.lora_magnitude_vector[ADAPTER_NAME].weight
        g = (m / layer.current_norm(ADAPTER_NAME).clamp_min(1e-30)).double()
    moved = g[:, None] * (weight + s * (b @ a)) - weight
    return float(moved.norm()), float(weight.norm())


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("format", ALL_FORMATS, ids=lambda format: format.name)
@settings(max_examples=8, deadline=None)
@given(size=st.floats(1e-6, 30), drift=st.floats(0, 2), seed=st.integers(0, 2**16))
def test_the_change_is_that_of_the_dense_weights(format, dora: bool, size: float, drift: float, seed: int) -> None:
    adapter = with_adapter(network(format), dora=dora)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapter.named_parameters().items():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("lora_B.weight"):
                parameter.copy_(size * noise)
            elif name.endswith("magnitude_vector"):
                parameter.mul_(1 + drift * noise)
    for layer in adapter.layers.values():
        moved, weight = dense(layer)
        ours = layer.change(ADAPTER_NAME)
        assert abs(ours[0] - moved) <= TOLERANCE * weight + 1e-12 * moved
        assert ours[1] == pytest.approx(weight, rel=1e-12)


def test_what_a_row_scale_undoes_is_no_change() -> None:
    """s B A = -0.3 W and g = 1 / 0.7: the terms are of the size of W and cancel, which sums in fp32 would not survive."""
    n, k = 64, 256
    layer = FrozenLinear(k, n, bias=True, format=FORMATS["fp32"], compute_dtype=torch.float32, kernels=dora_torch)
    g = torch.Generator().manual_seed(0)
    row, column = torch.randn(1, k, generator=g), torch.randn(n, 1, generator=g)
    layer.load_weight(column @ row)
    adapter = with_adapter(nn.Sequential(layer), names=("0",), rank=1)
    (adapted,) = adapter.layers.values()
    with torch.no_grad():
        adapted.lora_A[ADAPTER_NAME].weight.copy_(row)
        adapted.lora_B[ADAPTER_NAME].weight.copy_(-0.3 / adapted.scaling[ADAPTER_NAME] * column)
        adapted.lora_magnitude_vector[ADAPTER_NAME].weight.copy_(layer.row_norms())
    moved, weight = adapted.change(ADAPTER_NAME)
    assert moved <= TOLERANCE * weight
    assert abs(moved - dense(adapted)[0]) <= TOLERANCE * weight


def test_nothing_dense_is_made() -> None:
    n, k = 2048, 1536
    layer = FrozenLinear(k, n, bias=True, format=FORMATS["fp8_e4m3"], compute_dtype=torch.bfloat16, kernels=dora_torch)
    layer.load_weight(torch.randn(n, k, generator=torch.Generator().manual_seed(0)))
    adapter = with_adapter(nn.Sequential(layer), names=("0",))
    with LargestAllocation() as allocations:
        changes = outcome.weight_change(adapter)
    assert n * k > 4 * decode.PIECE
    assert 0 < allocations.largest <= decode.PIECE
    (change,) = changes.values()
    (row,) = outcome.change_table(changes, dora=True)["rows"]
    assert row[1:] == [1, f"{change.largest:.3%}", f"{change.largest:.3%}", f"{change.drift:.3%}"]


def test_a_run_that_diverged_ends_with_a_warning(bench: Workbench, capsys) -> None:
    for rate, warned in ((1e-4, False), (100.0, True)):
        out = bench.tmp / str(rate)
        tree = bench.tree(run__output_dir=str(out), run__max_steps=2, optimizer__lr=rate, adapter__targets=["*attn1.to_q"])
        assert cli.main(["--config", str(bench.write(tree))]) == 0
        assert ("warning: the training has probably diverged: " in capsys.readouterr().out) == warned
        assert ("Warning: the training has probably diverged: " in (out / "report.html").read_text()) == warned
