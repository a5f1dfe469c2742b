"""Forward and input gradient of frozen float8 layers as products in float8 (FrozenLinear.scaled_matmul).

Errors. Rounding Gaussian numbers to e4m3's 3 bits of mantissa moves them by 2.64 % (relative L2, measured, whatever the scale
of the row). A product of independently rounded operands adds the squares: 3.73 % against the weight before it was quantised,
2.64 % against the weight as it is stored. Tolerances are a twentieth above, what samples of these sizes vary by; results must
also lie above 2 %, else no float8 was in it. Where data is not Gaussian the bound is the worst case: 2^-4 of every term.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.numerics.test_adapted_layers import LargestAllocation
from tests.numerics.test_dora import NAMES, adapted, every_way, factors, frozen_linear, norm_of, oracle
from trainer import kernels
from trainer.adapters import Method, Target, inject
from trainer.adapters.dora import Part
from trainer.adapters.dora import adapted as adapted_layers
from trainer.adapters.kinds import KINDS
from trainer.base.types import StoredWeight
from trainer.kernels import decode, dora_torch
from trainer.quantization import FORMATS, FrozenConv2d, FrozenLinear

ONE, BOTH, ANY = 1.05 * 0.0264, 1.05 * 0.0373, 0.02


@pytest.fixture(autouse=True)
def any_shape_pays(monkeypatch) -> None:
    monkeypatch.setattr(kernels, "FP8_MIN_WEIGHTS", 1)
    monkeypatch.setattr(kernels, "FP8_MIN_ROWS", 1)


def on_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scaled_linear(n: int, k: int, compute=torch.bfloat16, bias: bool = False, seed: int = 0) -> FrozenLinear:
    layer = frozen_linear(n, k, bias, "fp8_e4m3", compute, generator(seed))
    layer.scaled_matmul = True
    return layer


def exact_weight(layer: FrozenLinear) -> torch.Tensor:
    return layer.payload_weight.double() * layer.payload_scale[:, None].double()


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    assert torch.isfinite(got).all()
    return float((got.detach().double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16, torch.float32])
def test_against_fp64(compute: torch.dtype) -> None:
    n, k, m = 320, 256, 300
    layer = FrozenLinear(k, n, bias=False, format=FORMATS["fp8_e4m3"], compute_dtype=compute, kernels=dora_torch)
    layer.scaled_matmul = True
    w = torch.randn(n, k, generator=generator(1)) * torch.rand(n, 1, generator=generator(2)).exp() / k**0.5
    layer.load_weight(w)
    x = torch.randn(m, k, generator=generator(3)).to(compute).requires_grad_()
    dy = torch.randn(m, n, generator=generator(4)).to(compute)
    y = layer(x)
    y.backward(dy)
    assert y.dtype == x.grad.dtype == compute
    x64, dy64 = x.detach().double(), dy.double()
    stored = exact_weight(layer)
    assert ANY < error(y, x64 @ stored.t()) < ONE
    assert ANY < error(x.grad, dy64 @ stored) < ONE
    assert error(y, x64 @ w.double().t()) < BOTH
    assert error(x.grad, dy64 @ w.double()) < BOTH


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32])
def test_products_of_codes_are_exact_and_rounded_once(compute: torch.dtype) -> None:
    layer = scaled_linear(192, 160, compute)
    weight, w = layer.stored(), exact_weight(layer)
    for k, product, other in (
        (160, dora_torch.scaled_product, w.t()),
        (192, dora_torch.scaled_input_grad, layer.payload_weight.double()),
    ):
        codes, scale = dora_torch.quantize_rows(torch.randn(33, k, generator=generator(5)))
        x = codes.double() * scale[:, None].double()
        result, exact = product(codes, scale, weight, compute), x @ other
        # One rounding to the result's dtype, sums and two scales in fp32.
        unit = 2.0**-8 if compute == torch.bfloat16 else 0.0
        tolerance = 1.01 * unit * exact.abs() + (k**0.5 + 4) * 2.0**-24 * (x.abs() @ other.abs())
        assert ((result.double() - exact).abs() <= tolerance).all()


def test_gradients_are_added_in_place() -> None:
    layer = scaled_linear(64, 48)
    dy, earlier = torch.randn(2, 5, 64).bfloat16(), torch.randn(2, 5, 48).bfloat16()
    alone = layer.input_grad(dy, earlier.shape)
    added = earlier.clone()
    assert layer.input_grad(dy, earlier.shape, add_to=added) is added
    assert torch.equal(added, earlier + alone) and alone.shape == earlier.shape


def test_rows_of_zeros() -> None:
    """Of x, of the gradient and of the weight: no NaN, zero where zero is due, and the others as exact as without."""
    layer = scaled_linear(64, 320, torch.float32)
    w = torch.randn(64, 320, generator=generator(1)) / 320**0.5
    w[5] = 0
    layer.load_weight(w)
    x, dy = torch.randn(200, 320, generator=generator(2)), torch.randn(200, 64, generator=generator(3))
    x[7], dy[9] = 0, 0
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    assert not y[7].any() and not y[:, 5].any() and not x.grad[9].any()
    stored = exact_weight(layer)
    assert error(y, x.detach().double() @ stored.t()) < ONE
    assert error(x.grad, dy.double() @ stored) < ONE
    zeros = torch.zeros(3, 320, requires_grad=True)
    layer(zeros).backward(torch.zeros(3, 64))
    assert not zeros.grad.any()


def test_an_outlier_channel_leaves_the_others_their_digits() -> None:
    """e4m3 is a float: a column a hundred times larger sets the row's scale, yet the rest stays within its normal range."""
    layer = scaled_linear(128, 256, torch.float32)
    w = torch.randn(128, 256, generator=generator(1)) / 16
    w[:, 3], w[5] = 0, 0  # what meets the outliers: they count in no result
    layer.load_weight(w)
    x, dy = torch.randn(200, 256, generator=generator(2)), torch.randn(200, 128, generator=generator(3))
    x[:, 3] *= 100
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    stored = exact_weight(layer)
    assert ANY < error(y, x.detach().double() @ stored.t()) < ONE
    g = torch.ones(128)
    by_N = layer.payload_scale
    g[5] = 100 * by_N.median() / by_N[5]
    assert (by_N * g)[5] == pytest.approx(100 * float(by_N.median())), "an outlier channel of the gradient"
    assert ANY < error(layer.input_grad(dy, x.shape, g), (dy * g).double() @ stored) < ONE


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 9), n=st.sampled_from([16, 48]), k=st.sampled_from([16, 80]), power=st.integers(-37, 33),
    spread=st.sampled_from([0.0, 1.0, 5.0]), gained=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_any_magnitude_stays_within_the_worst_case(m, n, k, power, spread, gained, seed) -> None:
    rng = generator(seed)

    def wild(rows: int, columns: int) -> torch.Tensor:
        x = torch.randn(rows, columns, generator=rng) * (spread * torch.randn(rows, columns, generator=rng)).exp()
        return (x * 10.0**power).clamp(-1e36, 1e36)

    layer = scaled_linear(n, k, torch.float32, seed=seed)
    g = (torch.randn(n, generator=rng) * 2).exp().copysign(torch.randn(n, generator=rng)) if gained else None
    x, dy = wild(m, k), wild(m, n)
    by_N = layer.payload_scale.double() * (1 if g is None else g.double())
    for result, quantised, others in (
        (layer(x), x.double(), exact_weight(layer).t()),
        (layer.input_grad(dy, x.shape, g), dy.double() * by_N, layer.payload_weight.double()),
    ):
        # Half a step of a mantissa of 3 bits, or half of the smallest code's step where that is more; fp32's underflow.
        scale = (quantised.abs().amax(1, keepdim=True) / 448).clamp_min(2.0**-126)
        step = 1.001 * (2.0**-4 * quantised.abs() + 2.0**-10 * scale) + 2.0**-126
        assert torch.isfinite(result).all()
        assert ((result.double() - quantised @ others).abs() <= step @ others.abs()).all()


def test_what_is_not_finite_is_not_hidden() -> None:
    """A NaN or an infinity reaches the result of its row, and of no other, so that the loss scaler and the step see it."""
    layer = scaled_linear(64, 48)
    for bad in (torch.nan, torch.inf):
        x, dy = torch.randn(3, 48).bfloat16(), torch.randn(3, 64).bfloat16()
        x[1, 7], dy[1, 7] = bad, bad
        for result in (layer(x), layer.input_grad(dy, x.shape)):
            assert result[1].isnan().any() and torch.isfinite(result[[0, 2]]).all()


def test_g_on_the_way_equals_g_before() -> None:
    layer = scaled_linear(256, 192, torch.float32)
    dy = torch.randn(150, 256, generator=generator(1))
    g = torch.randn(256, generator=generator(2)).exp().copysign(torch.randn(256, generator=generator(3)))
    exact = (dy.double() * g) @ exact_weight(layer)
    folded, before = layer.input_grad(dy, (150, 192), g), layer.input_grad(dy * g, (150, 192))
    assert ANY < error(folded, exact) < ONE and ANY < error(before, exact) < ONE
    # Their fp32 products round apart, which moves a code now and then.
    assert error(folded, before.double()) < 2e-3


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_adapted_layer_against_fp64(dora: bool, bias: bool) -> None:
    """y and dx carry the float8 error of the base's term; dA and dB none of it; dm what is left of z0's after its sum."""
    layer = scaled_linear(192, 256, bias=bias)
    g = generator(1)
    a, b = factors(layer, 8, g)
    leaves = [torch.randn(300, 256, generator=g).bfloat16().requires_grad_(), a, b]
    c = None
    if dora:
        c = norm_of(layer, a, b, 0.7)
        leaves.append((c * (0.5 + torch.rand(192, generator=g))).requires_grad_())
    if bias:
        layer.bias.data.copy_(layer.bias.bfloat16())
    dy = torch.randn(300, 192, generator=g).bfloat16()
    expected = oracle(layer, leaves, 0.7, dy)
    for z_rows in every_way(layer, dora):
        for leaf in leaves:
            leaf.grad = None
        y = adapted(leaves[0], layer, *leaves[1:3], 0.7, *leaves[3:], *([c] if dora else []), z_rows=z_rows)
        y.backward(dy)
        results = [y.detach(), *(leaf.grad for leaf in leaves)]
        for name, got, exact in zip(("y", *NAMES), results, expected, strict=False):
            # 5e-3: bf16's envelope, as without float8 (test_dora.py).
            assert error(got, exact) < (5e-3 if name in "ab" else ONE), name
    assert error(results[0], expected[0]) > 0.5 * ANY and error(results[1], expected[1]) > 0.5 * ANY


def test_a_new_adapter_is_the_base_bit_for_bit() -> None:
    layer = scaled_linear(64, 48, bias=True)
    a, b = torch.randn(4, 48), torch.zeros(64, 4)
    c = norm_of(layer, a, b, 1.0)
    x = torch.randn(2, 7, 48).bfloat16()
    assert torch.equal(adapted(x, layer, a, b, 1.0, c.clone(), c), layer(x))


@pytest.mark.parametrize("adapted_too", [False, True])
def test_outputs_may_be_changed_in_place(adapted_too: bool) -> None:
    """As the bias is added to a layer without an adapter, and as models do: the gradient is that of the product."""
    layer = scaled_linear(64, 48, bias=True)
    x = torch.randn(2, 7, 48, generator=generator(1)).bfloat16().requires_grad_()
    y = adapted(x, layer, torch.zeros(4, 48), torch.zeros(64, 4), 1.0) if adapted_too else layer(x)
    y.mul_(2)
    y.sum().backward()
    expected = layer.input_grad(torch.full((2, 7, 64), 2.0).bfloat16(), x.shape)
    assert torch.equal(x.grad, expected)


class Counted:
    """The plain kernels, recording which products ran."""

    name = "torch"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name):
        function = getattr(dora_torch, name)

        def counted(*args, **kwargs):
            self.calls.append(name)
            return function(*args, **kwargs)

        return counted


SCALED = ["quantize_rows", "scaled_product", "quantize_rows", "scaled_input_grad"]


def products(layer: FrozenLinear, rows: int) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """(operations of a forward and backward, y, dx) of fixed inputs."""
    layer.kernels = Counted()
    x = torch.randn(rows, layer.in_features, generator=generator(9)).to(layer.compute_dtype).requires_grad_()
    y = layer(x)
    y.backward(torch.randn(y.shape, generator=generator(10)).to(y.dtype))
    return layer.kernels.calls, y.detach(), x.grad


def test_the_gate(monkeypatch) -> None:
    monkeypatch.undo()
    pays = kernels.scaled_matmul_pays
    side, rows = math.isqrt(kernels.FP8_MIN_WEIGHTS), kernels.FP8_MIN_ROWS
    assert pays(rows, side, side) and pays(4608, 3072, 15360) and pays(4096, 1280, 10240)
    assert not pays(rows - 1, side, side) and not pays(1, 18432, 3072) and not pays(rows, side - 16, side)
    assert (
        not pays(4096, 1280, 1280) and not pays(16384, 640, 640) and not pays(16384, 5120, 640) and not pays(16384, 640, 2560)
    )
    assert not pays(4096, 3072, 3080) and not pays(4096, 3080, 3072)


@pytest.mark.parametrize("rows, n, k, scaled", [
    (32, 64, 48, True), (31, 64, 48, False), (32, 32, 48, False), (32, 48, 32, False), (32, 72, 48, False),
    (32, 22473, 48, False),  # musubi-tuner #1059: a width that no float8 product takes
])  # fmt: skip
def test_a_layer_outside_of_the_gate_is_multiplied_as_before(monkeypatch, rows, n, k, scaled) -> None:
    """By rows, weights and alignment; forward and backward alike."""
    monkeypatch.setattr(kernels, "FP8_MIN_WEIGHTS", 48 * 48)
    monkeypatch.setattr(kernels, "FP8_MIN_ROWS", 32)
    layer = scaled_linear(n, k)
    plain = copy.copy(layer)
    plain.scaled_matmul = False
    calls, y, dx = products(layer, rows)
    assert calls == (SCALED if scaled else ["upcast", "upcast"])
    _, plain_y, plain_dx = products(plain, rows)
    assert torch.equal(y, plain_y) != scaled and torch.equal(dx, plain_dx) != scaled


@pytest.mark.parametrize("name", ["bf16", "fp8_e5m2", "int8", "nf4"])
def test_other_formats_ignore_the_flag(name: str) -> None:
    layer = frozen_linear(64, 48, False, name, torch.bfloat16, generator())
    _, y, dx = products(layer, 32)
    layer.scaled_matmul = True
    calls, scaled_y, scaled_dx = products(layer, 32)
    assert torch.equal(y, scaled_y) and torch.equal(dx, scaled_dx) and "scaled_product" not in calls


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_merged_layer_computes_with_the_merged_weight(compute: torch.dtype) -> None:
    """Forward and input gradient, whether the merged weight, fp32, has to be converted or not."""
    layer = scaled_linear(64, 48, compute)
    calls, before, _ = products(layer, 32)
    assert calls == SCALED
    layer.merged_weight = torch.randn(64, 48, generator=generator(1))
    calls, y, dx = products(layer, 32)
    merged, x = layer.merged_weight.to(compute), torch.randn(32, 48, generator=generator(9)).to(compute)
    dy = torch.randn(32, 64, generator=generator(10)).to(compute)
    assert "scaled_product" not in calls and "scaled_input_grad" not in calls
    assert torch.equal(y, x @ merged.t()) and torch.equal(dx, dy @ merged)
    assert torch.equal(layer.input_grad(dy, x.shape), dx)
    layer.merged_weight = None
    assert torch.equal(products(layer, 32)[1], before)


def network(names: str, rank: int = 4):
    """Layers [64, 48] by name and their DoRA adapter, moved off its start."""
    model = nn.ModuleDict({name: scaled_linear(64, 48, bias=True, seed=i) for i, name in enumerate(names)})
    adapter = inject(
        {"net": model},
        [Target("net", name, rank, 2.0) for name in names],
        bases=(FrozenLinear, FrozenConv2d),
        method=Method(KINDS["dora"]),
        seed=0,
    )
    with torch.no_grad():
        for name, parameter in adapter.named_parameters().items():
            if name.endswith("lora_B.weight"):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator(3)))
    adapter.mark_stale()
    return model, adapter


def test_compiled_and_checkpointed_equal_eager() -> None:
    model, adapter = network("q")
    (layer,) = adapter.layers.values()
    layer.part()
    x = torch.randn(5, 48, generator=generator(4)).bfloat16()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for function in (compiled, layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        leaf = x.clone().requires_grad_()
        for parameter in adapter.named_parameters().values():
            parameter.grad = None
        y = function(leaf)
        y.float().square().sum().backward()
        results.append([y.detach(), leaf.grad, *(p.grad for p in adapter.named_parameters().values())])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert torch.equal(one, two)


def test_layers_that_share_an_input() -> None:
    """q, k and v in one go: outputs as apart; dx is the sum of three products."""
    model, adapter = network("qkv")
    dys = [torch.randn(20, 64, generator=generator(i)).bfloat16() for i in (5, 6, 7)]
    results = []
    for shared in (False, True):
        if shared:
            adapter.share_inputs("net", [tuple("qkv")])
        x = torch.randn(20, 48, generator=generator(4)).bfloat16().requires_grad_()
        ys = [layer(x) for layer in model.values()]
        torch.autograd.backward(ys, dys)
        results.append((ys, x.grad))
    assert model["q"].shared is not None
    for one, two in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(one, two)
    # Three 16-bit tensors, and three low-rank parts, summed in another order.
    assert error(results[1][1], results[0][1].double()) < 4 * 2.0**-8


def test_no_fp32_copy_of_the_weight_is_made() -> None:
    layer = scaled_linear(2048, 1024)
    x = torch.randn(4, 1024).bfloat16().requires_grad_()
    with LargestAllocation() as seen:
        layer(x).backward(torch.ones(4, 2048, dtype=torch.bfloat16))
    assert 0 < seen.largest <= decode.PIECE < layer.weight_shape.numel()


def test_weights_of_files_with_one_scale_for_all_rows() -> None:
    """A scale spread over the rows, and one of 1 over raw codes, are formats as any."""
    layer = scaled_linear(64, 48, torch.float32)
    codes = torch.randn(64, 48, generator=generator(1)).to(torch.float8_e4m3fn)
    x = torch.randn(300, 48, generator=generator(2))
    for scale in (1.0, 3e-4):
        layer.payload_weight.copy_(codes)
        layer.payload_scale.fill_(scale)
        assert isinstance(layer.scaled_weight(300), StoredWeight)
        assert ANY < error(layer(x), x.double() @ exact_weight(layer).t()) < ONE


def test_who_multiplies_float8() -> None:
    assert not kernels.multiplies_float8(dora_torch, torch.device("cpu"))


# --- on a CUDA device -------------------------------------------------------------------------------------------------

# (M, N, K) of Flux and SDXL at 1024 px.
SHAPES = [
    (4608, 3072, 3072), (512, 12288, 3072), (4608, 3072, 15360), (4096, 1280, 1280), (1024, 10240, 1280), (1024, 1280, 5120),
]  # fmt: skip


@pytest.fixture
def fused():
    from trainer.kernels import dora_triton

    return dora_triton


def on_cuda(layer: FrozenLinear, fused) -> FrozenLinear:
    layer = layer.cuda()
    layer.kernels = fused
    return layer


@on_gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
def test_layers_on_cuda(fused, shape, compute) -> None:
    """Against fp64 within the bound, and against the plain twin within what float8 tensor cores lose in their sums."""
    m, n, k = shape
    layer = on_cuda(scaled_linear(n, k, compute), fused)
    assert kernels.multiplies_float8(fused, torch.device("cuda"))
    x = torch.randn(m, k, generator=generator(1)).to("cuda", compute).requires_grad_()
    dy = torch.randn(m, n, generator=generator(2)).to("cuda", compute)
    g = torch.randn(n, generator=generator(3)).exp().cuda()
    y = layer(x)
    dx, dx_g = layer.input_grad(dy, x.shape), layer.input_grad(dy, x.shape, g)
    w = exact_weight(layer)
    x64, dy64 = x.detach().double(), dy.double()
    assert ANY < error(y, x64 @ w.t()) < ONE
    assert ANY < error(dx, dy64 @ w) < ONE
    assert ANY < error(dx_g, (dy64 * g) @ w) < ONE
    layer.kernels = dora_torch
    # Codes are the same; sums keep 13 bits or more, results are rounded to 8 or 11.
    for ours, twin in ((y, layer(x)), (dx, layer.input_grad(dy, x.shape)), (dx_g, layer.input_grad(dy, x.shape, g))):
        assert error(ours, twin.double()) < 4e-3


@on_gpu
def test_buffers_do_not_overlap_on_cuda(fused) -> None:
    """Three layers of one shape add up their gradients of x: the scratch copy of one's W^T is overwritten by the next's."""
    layers = [on_cuda(scaled_linear(1280, 1280, seed=i), fused) for i in range(3)]
    parts = []
    for i, layer in enumerate(layers):
        a, b = (t.detach().cuda() for t in factors(layer.cpu(), 4, generator(i)))
        layer.cuda()
        c = norm_of(layer, a, b, 1.0)
        parts.append(Part(layer, a.requires_grad_(), b.requires_grad_(), 1.0, (1.2 * c).requires_grad_(), c))
    x = torch.randn(1024, 1280, generator=generator(8)).to("cuda", torch.bfloat16).requires_grad_()
    dys = [torch.randn(1024, 1280, generator=generator(i)).to("cuda", torch.bfloat16) for i in (5, 6, 7)]
    torch.autograd.backward(adapted_layers(x, parts), dys)
    exact = torch.zeros(1024, 1280, dtype=torch.float64, device="cuda")
    for part, dy in zip(parts, dys, strict=True):
        v = exact_weight(part.base) + part.b.double() @ part.a.double()
        exact += dy.double() @ (v * 1.2)
    assert error(x.grad, exact) < ONE


@on_gpu
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3]], ids=str)
def test_dora_layer_on_cuda(fused, shape) -> None:
    """y and every gradient of a DoRA layer against fp64, as test_adapted_layer_against_fp64 on the CPU."""
    m, n, k = shape
    layer = scaled_linear(n, k, bias=True)
    layer.bias.data.copy_(layer.bias.bfloat16())
    a, b = (t.detach() for t in factors(layer, 16, generator(1)))
    b *= 0.1
    layer = on_cuda(layer, fused)
    leaves = [torch.randn(m, k, generator=generator(2)).to("cuda", torch.bfloat16), a.cuda(), b.cuda()]
    c = norm_of(layer, *leaves[1:], 1.0)
    leaves = [leaf.requires_grad_() for leaf in (*leaves, c * 1.2)]
    dy = torch.randn(m, n, generator=generator(3)).to("cuda", torch.bfloat16)
    y = adapted(leaves[0], layer, *leaves[1:3], 1.0, leaves[3], c)
    y.backward(dy)
    results = [y.detach(), *(leaf.grad for leaf in leaves)]
    for name, got, exact in zip(("y", *NAMES), results, oracle(layer, leaves, 1.0, dy), strict=True):
        assert error(got, exact) < (5e-3 if name in "ab" else ONE), name


@on_gpu
def test_a_compiled_layer_equals_the_eager_one_on_cuda(fused) -> None:
    layer = on_cuda(scaled_linear(1280, 1280), fused)
    results = []
    for function in (layer, torch.compile(layer, fullgraph=True)):
        x = torch.randn(1024, 1280, generator=generator(1)).to("cuda", torch.bfloat16).requires_grad_()
        y = function(x)
        y.backward(torch.randn(y.shape, generator=generator(2)).to("cuda", torch.bfloat16))
        results.append((y.detach(), x.grad))
    for eager, compiled in zip(*results, strict=True):
        # Inductor may choose another float8 product; the codes are the same.
        assert error(compiled, eager.double()) < 4e-3


@pytest.mark.parametrize(("error", "product"), [(RuntimeError, 0.0), (ValueError, 0.0), (None, 4.0), (None, 16.0)])
def test_a_card_that_refuses_the_product_multiplies_no_float8(
    monkeypatch, error: type[Exception] | None, product: float
) -> None:
    """torch's own checks raise one, cuBLAS the other. A card that reads codes as fnuz, ROCm's, halves each of both."""

    class Kernels:
        name = "triton"

        @staticmethod
        def scaled_product(codes, ones, weight, dtype):
            if error is not None:
                raise error("no such product on this card")
            return torch.full((16, 16), product)

    monkeypatch.setattr(kernels, "_is_cuda", lambda device, capability: True)
    assert kernels.multiplies_float8(Kernels, torch.device("cpu")) == (product == 16.0)
