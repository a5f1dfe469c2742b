"""Did it take? How far an adapter moves each layer, against the dense weights in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.harness import Workbench
from tests.numerics.test_adapted_layers import LargestAllocation, network, with_adapter
from trainer.adapters import ADAPTER_NAME, Method, Target, inject
from trainer.adapters.change import LayerChange, change
from trainer.adapters.kinds import KINDS, MAGNITUDE, LayerState
from trainer.base.progress import QUIET
from trainer.kernels import decode, dora_torch
from trainer.monitoring import weight_change
from trainer.monitoring.course import LOST, Course
from trainer.monitoring.measurements import change_fields
from trainer.quantization import ALL_FORMATS, FORMATS, FrozenConv2d, FrozenLinear
from workbench.commands import main as cli
from workbench.pages.diagnosis import judge
from workbench.summary.outcome import change_table

TOLERANCE = 1e-6  # of ||W||


@torch.no_grad()
def dense(layer, start: LayerState | None = None) -> LayerChange:
    """From whole weights in fp64, with the very norms that the forward divides by."""
    base, s = layer.get_base_layer(), layer.scaling[ADAPTER_NAME]
    weight = base.dequantize(torch.float32).flatten(1).double()

    def adapted(a, b, m) -> torch.Tensor:
        rows = weight + s * (b.flatten(1).double() @ a.flatten(1).double())
        if m is None:
            return rows
        norm = layer.norm_with(a.flatten(1), b.flatten(1), s)
        return (m / norm.clamp_min(1e-30)).double()[:, None] * rows

    a, b = (factors[ADAPTER_NAME].weight for factors in (layer.lora_A, layer.lora_B))
    m = layer.lora_magnitude_vector[ADAPTER_NAME].weight if layer.use_dora[ADAPTER_NAME] else None
    now, then = adapted(a, b, m), weight if start is None else adapted(*layer.kinds[ADAPTER_NAME].effective(start))
    drift = 0.0
    if m is not None:
        first = start[MAGNITUDE] if start else base.dequantize(torch.float32).flatten(1).double().norm(dim=1)
        drift = max(abs(float(one) / float(other) - 1) for one, other in zip(m, first, strict=True) if other != 0)
    return LayerChange(float((now - then).norm()), float(then.norm()), drift)


@torch.no_grad()
def drawn(adapter, size: float, drift: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapter.named_parameters().items():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("lora_B.weight"):
            parameter.copy_(size * noise)
        elif name.endswith("magnitude_vector"):
            parameter.mul_(1 + drift * noise)
        else:
            parameter.add_(0.1 * noise)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("format", ALL_FORMATS, ids=lambda format: format.name)
@settings(max_examples=8, deadline=None)
@given(
    sizes=st.tuples(st.floats(1e-6, 30), st.floats(1e-6, 30)), drifts=st.tuples(st.floats(0, 2), st.floats(0, 2)),
    seed=st.integers(0, 2**16), started=st.booleans(),
)  # fmt: skip
def test_the_change_is_that_of_the_dense_weights(format, dora: bool, sizes, drifts, seed: int, started: bool) -> None:
    """From the model's weights, and from those of another adapter."""
    adapter = with_adapter(network(format), dora=dora)
    starts = dict.fromkeys(adapter.layers)
    if started:
        drawn(adapter, sizes[0], drifts[0], seed)
        state = {name: tensor.clone() for name, tensor in adapter.state_dict().items()}
        kind = adapter.kind
        starts = {name: kind.values(state, name) for name in adapter.layers}
    drawn(adapter, sizes[1], drifts[1], seed + 1)
    for name, layer in adapter.layers.items():
        right, ours = dense(layer, starts[name]), change(layer, starts[name])
        assert abs(ours.moved - right.moved) <= TOLERANCE * right.size + 1e-12 * right.moved
        assert ours.size == pytest.approx(right.size, rel=1e-9)
        assert ours.drift == pytest.approx(right.drift, rel=1e-6, abs=1e-6), "rows' norms are fp32"
        if dora:
            m = layer.lora_magnitude_vector[ADAPTER_NAME].weight.detach()
            first = starts[name][MAGNITUDE] if started else layer.base_norm_sq.sqrt()
            assert ours.moved >= float((m.abs() - first.abs()).norm()) * (1 - 1e-5), "what magnitudes do is in it"


@pytest.mark.parametrize("dora", [False, True])
def test_where_it_started_nothing_has_changed(dora: bool) -> None:
    adapter = with_adapter(network(FORMATS["fp8_e4m3"]), dora=dora)
    state = {name: tensor.clone() for name, tensor in adapter.state_dict().items()}
    for found in weight_change.weight_change(adapter, state).values():
        assert found.largest < TOLERANCE and found.drift == 0
    assert max(found.largest for found in weight_change.weight_change(adapter).values()) > 0.01


def test_a_small_row_or_one_of_zeros_does_not_speak_for_its_layer() -> None:
    """Adam moves every magnitude by the rate, however small the row. Its drift is said; the layer has hardly changed."""
    n, k = 64, 32
    layer = FrozenLinear(k, n, bias=True, format=FORMATS["fp32"], compute_dtype=torch.float32, kernels=dora_torch)
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(0))
    weight[0] *= 1e-3 / weight[0].norm()
    weight[1] = 0
    layer.load_weight(weight)
    adapter = inject(
        {"net": nn.Sequential(layer)},
        [Target("net", "0", 2, 2.0)],
        bases=(FrozenLinear, FrozenConv2d),
        method=Method(KINDS["dora"]),
        seed=0,
    )
    (adapted,) = adapter.layers.values()
    assert weight_change.weight_change(adapter)["net.0"].drift == 0
    with torch.no_grad():
        adapted.lora_magnitude_vector[ADAPTER_NAME].weight.add_(3e-3)
    found = weight_change.weight_change(adapter)["net.0"]
    assert found.drift == pytest.approx(3.0, rel=1e-5), "of the row of 0.001; that of zeros has none"
    right = dense(adapted)
    assert found.largest == pytest.approx(right.moved / right.size, rel=1e-6) and found.largest < 1e-3
    assert judge([], {"net.0": found.largest}).kind != "diverged"


def test_layers_whose_magnitudes_are_tiny_beside_their_biases_are_counted_and_said() -> None:
    """In one of two layers: in the log as a number where weights are logged, and once as a warning. In fp32 none are."""
    for compute, lost in ((torch.bfloat16, 1), (torch.float32, 0)):
        adapter = with_adapter(network(FORMATS["bf16"], compute), names=("0", "2"))
        course = Course()
        assert course.measured(16, change_fields(adapter, None, QUIET)) is None
        layer = adapter.layers["net.2"]
        norms, bias = layer.get_base_layer().row_norms()[:3], layer.get_base_layer().bias_N[:3].abs()
        with torch.no_grad():
            layer.lora_magnitude_vector[ADAPTER_NAME].weight[:3] = torch.minimum(0.01 * norms, 0.01 * bias)
        fields = change_fields(adapter, None, QUIET)
        assert fields.get(LOST, 0) == lost
        said = course.measured(32, fields)
        assert (said or "").startswith("warning: step 32: 1 layer has magnitudes that are tiny beside their biases") == bool(
            lost
        )
        assert course.measured(64, fields) is None


@pytest.mark.parametrize(("scale", "seen"), [(1.0, "its own"), (1e-5, "the floor"), (0.0, "left out")])
def test_a_layer_next_to_zero_does_not_speak_for_the_run(scale: float, seen: str) -> None:
    """It is measured against a tenth of the median layer's root mean square; one of zeros has no size."""
    n, k = 48, 32
    layers = nn.Sequential(*(FrozenLinear(k, n, bias=True, format=FORMATS["fp32"], compute_dtype=torch.float32,
                                          kernels=dora_torch) for _ in range(5)))  # fmt: skip
    for place, layer in enumerate(layers):
        weight = torch.randn(n, k, generator=torch.Generator().manual_seed(place))
        layer.load_weight(weight * (scale if place == 2 else 1.0))
    adapter = with_adapter(layers, names=tuple("01234"), rank=2)
    drawn(adapter, 1e-2, 0.0, 7)
    found = {name: block.largest for name, block in weight_change.weight_change(adapter).items()}
    odd = next(name for name in adapter.layers if "2" in name)
    assert (odd in found) == (scale > 0) and len(found) == 4 + (scale > 0)
    if scale:
        right = dense(adapter.layers[odd])
        sizes = sorted(dense(layer).size for layer in adapter.layers.values())
        size = right.size if seen == "its own" else 0.1 * sizes[2]
        assert found[odd] == pytest.approx(right.moved / size, rel=1e-5)
    with torch.no_grad():
        adapter.layers[odd].lora_B[ADAPTER_NAME].weight[0, 0] = math.nan
    assert math.isnan(weight_change.weight_change(adapter)[odd].largest), "a value that is not finite is always seen"


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
    found = change(adapted)
    assert found.moved <= TOLERANCE * found.size
    assert abs(found.moved - dense(adapted).moved) <= TOLERANCE * found.size


def test_nothing_dense_is_made() -> None:
    n, k = 2048, 1536
    layer = FrozenLinear(k, n, bias=True, format=FORMATS["fp8_e4m3"], compute_dtype=torch.bfloat16, kernels=dora_torch)
    layer.load_weight(torch.randn(n, k, generator=torch.Generator().manual_seed(0)))
    adapter = with_adapter(nn.Sequential(layer), names=("0",))
    with LargestAllocation() as allocations:
        changes = weight_change.weight_change(adapter)
    assert n * k > 4 * decode.PIECE
    assert 0 < allocations.largest <= decode.PIECE
    (found,) = changes.values()
    (row,) = change_table(changes, drifts=True)["rows"]
    assert row[1:] == [1, f"{found.largest:.3%}", f"{found.largest:.3%}", f"{found.drift:.3%}"]


@pytest.mark.slow
def test_a_run_that_diverged_ends_with_a_warning(bench: Workbench, capsys) -> None:
    for rate, warned in ((1e-4, False), (100.0, True)):
        out = bench.tmp / str(rate)
        tree = bench.tree(run__output_dir=str(out), run__max_steps=2, optimizer__lr=rate, adapter__targets=["*attn1.to_q"])
        assert cli.main(["--config", str(bench.write(tree))]) == 0
        assert ("warning: the training has probably diverged: " in capsys.readouterr().out) == warned
        assert ("Warning: the training has probably diverged: " in (out / "report.html").read_text()) == warned
