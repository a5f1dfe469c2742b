"""The adapter arithmetic against dense fp64 autograd, and the float8 fault that others shipped."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.adapters.dora import adapted_conv2d, adapted_linear, scale_rows, weight_norm
from trainer.quantization import FORMATS, FrozenConv2d, FrozenLinear

EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def frozen_linear(n: int, k: int, bias: bool, storage: str, compute: torch.dtype, g: torch.Generator) -> FrozenLinear:
    layer = FrozenLinear(k, n, bias=bias, format=FORMATS[storage], compute_dtype=compute)
    layer.load_weight(torch.randn(n, k, generator=g) / k**0.5)
    if layer.bias is not None:
        layer.bias.data.copy_(torch.randn(n, generator=g))
    return layer


def norm_of(layer, a, b, scaling):
    return weight_norm(layer.row_norms() ** 2, layer.skinny(a.flatten(1)), a.flatten(1), b.flatten(1), scaling).detach()


def relative(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.double() - y).norm() / y.norm().clamp_min(1e-30))


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 9), n=st.integers(1, 40), k=st.integers(1, 40), rank=st.integers(1, 16), bias=st.booleans(),
    dora=st.booleans(), scaling=st.sampled_from([0.25, 1.0, 2.0]), far=st.sampled_from([0.0, 0.1, 3.0]),
    storage=st.sampled_from(["fp32", "fp8_e4m3"]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_linear_against_dense_fp64(m, n, k, rank, bias, dora, scaling, far, storage, seed) -> None:
    g = torch.Generator().manual_seed(seed)
    layer = frozen_linear(n, k, bias, storage, torch.float32, g)
    x = torch.randn(m, k, generator=g, requires_grad=True)
    a = (torch.randn(rank, k, generator=g) / k**0.5).requires_grad_()
    b = (0.3 * torch.randn(n, rank, generator=g)).requires_grad_()
    c = norm_of(layer, a, b, scaling) if dora else None
    mag = (c * (1 + far * torch.rand(n, generator=g))).requires_grad_() if dora else None
    y = adapted_linear(x, layer, a, b, scaling, mag, c)
    dy = torch.randn(m, n, generator=g)
    y.backward(dy)

    leaves = [t.detach().double().requires_grad_() for t in (x, a, b)]
    x64, a64, b64 = leaves
    v = layer.dequantize(torch.float32).double() + scaling * b64 @ a64
    if dora:
        m64 = mag.detach().double().requires_grad_()
        leaves.append(m64)
        v = v * (m64 / v.detach().norm(dim=1))[:, None]
    y64 = F.linear(x64, v, None if layer.bias is None else layer.bias.double())
    y64.backward(dy.double())
    # Sums of up to max(k, n, m) terms, each exact to half an ulp, through at most four products; norms of near-cancelling
    # rows amplify by ||W|| ||sBA|| / ||V||^2, which the bound takes from the data.
    amplification = 1.0
    if dora:
        w = layer.dequantize(torch.float32).double()
        parts = w.norm(dim=1) + (scaling * b64 @ a64).norm(dim=1)
        amplification = float((parts / v.detach().div((m64 / c.double())[:, None]).norm(dim=1)).max() ** 2)
    tolerance = 16 * EPS[torch.float32] * (max(m, n, k, rank) ** 0.5 + 4) * amplification
    # Relative to the size of what was summed, so that cancellation in one output is not held against the arithmetic.
    scale = x64.detach().norm() * v.detach().norm() + (0 if layer.bias is None else layer.bias.detach().norm() * m**0.5)
    assert float((y.detach().double() - y64.detach()).norm()) <= tolerance * float(scale)
    sizes = [dy.norm() * v.detach().norm()]
    gv = float((v.detach().norm() / (layer.dequantize(torch.float32).norm() + 1e-12)).clamp_min(1)) * (1 + far)
    sizes.append(scaling * gv * dy.norm() * b.norm() * x.norm())
    sizes.append(scaling * gv * dy.norm() * a.norm() * x.norm())
    if dora:
        sizes.append(dy.norm() * (x.norm() * v.detach().norm()) / c.min().clamp_min(1e-12))
    for ours, leaf, size in zip((x, a, b, mag), leaves, sizes, strict=False):
        assert float((ours.grad.double() - leaf.grad).norm()) <= tolerance * float(size)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(1, 1, 0), (3, 1, 1), (3, 2, 1), ((3, 1), (2, 1), (0, 1))])
def test_conv_against_dense_fp64(kernel, stride, padding, dora) -> None:
    g = torch.Generator().manual_seed(0)
    pair = lambda v: v if isinstance(v, tuple) else (v, v)  # noqa: E731
    layer = FrozenConv2d(
        5, 7, pair(kernel), stride=pair(stride), padding=pair(padding), dilation=(1, 1), groups=1, bias=True,
        format=FORMATS["fp8_e4m3"], compute_dtype=torch.float32,
    )  # fmt: skip
    layer.load_weight(torch.randn(layer.weight_shape, generator=g))
    layer.bias.data.copy_(torch.randn(7, generator=g))
    x = torch.randn(2, 5, 9, 8, generator=g, requires_grad=True)
    a = torch.randn(3, 5, *pair(kernel), generator=g, requires_grad=True)
    b = torch.randn(7, 3, 1, 1, generator=g, requires_grad=True)
    c = norm_of(layer, a, b, 0.5) if dora else None
    mag = (c * 1.3).requires_grad_() if dora else None
    y = adapted_conv2d(x, layer, a, b, 0.5, mag, c)
    dy = torch.randn(y.shape, generator=g)
    y.backward(dy)
    leaves = [t.detach().double().requires_grad_() for t in (x, a, b)]
    v = layer.dequantize(torch.float32).double()
    v = v + 0.5 * (leaves[2].flatten(1) @ leaves[1].flatten(1)).view_as(v)
    if dora:
        leaves.append(mag.detach().double().requires_grad_())
        v = v * (leaves[3] / v.detach().flatten(1).norm(dim=1)).view(-1, 1, 1, 1)
    y64 = F.conv2d(leaves[0], v, layer.bias.double(), stride, padding)
    y64.backward(dy.double())
    tolerance = 64 * EPS[torch.float32]
    assert relative(y, y64.detach()) < tolerance
    for ours, leaf in zip((x, a, b, mag), leaves, strict=False):
        assert relative(ours.grad, leaf.grad) < tolerance


def test_bf16_is_within_the_dtypes_rounding_of_fp64() -> None:
    g = torch.Generator().manual_seed(0)
    layer = frozen_linear(96, 64, True, "bf16", torch.bfloat16, g)
    x = torch.randn(50, 64, generator=g)
    a, b = torch.randn(8, 64, generator=g) / 8, 0.1 * torch.randn(96, 8, generator=g)
    c = norm_of(layer, a, b, 1.0)
    m = c * 1.2
    y = adapted_linear(x, layer, a, b, 1.0, m, c)
    v = layer.dequantize(torch.float32).double() + b.double() @ a.double()
    expected = F.linear(x.double(), v * (m.double() / v.norm(dim=1))[:, None], layer.bias.double())
    assert y.dtype == torch.bfloat16
    assert relative(y, expected) < 5e-3


def test_rows_of_zeros_stay_finite() -> None:
    layer = frozen_linear(4, 6, False, "fp32", torch.float32, torch.Generator().manual_seed(0))
    layer.load_weight(torch.cat([torch.zeros(1, 6), torch.randn(3, 6)]))
    a, b = torch.randn(2, 6), torch.zeros(4, 2)
    c = norm_of(layer, a, b, 1.0)
    m = c.clone().requires_grad_()
    y = adapted_linear(torch.randn(3, 6, requires_grad=True), layer, a, b, 1.0, m, c)
    assert torch.equal(y[:, 0], torch.zeros(3))
    y.sum().backward()
    assert torch.isfinite(m.grad).all() and torch.equal(scale_rows(m, c)[1:], torch.ones(3))


def test_onetrainer_442_promotion_for_float8_types_is_not_supported() -> None:
    """fp8 base + DoRA: arithmetic on a raw float8 tensor raises; ours upcasts before it touches one."""
    raw = torch.randn(4, 4).to(torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match="Promotion for Float8 Types"):
        _ = raw + torch.ones(4, 4)
    layer = frozen_linear(4, 4, True, "fp8_e4m3", torch.bfloat16, torch.Generator().manual_seed(0))
    assert layer.payload_weight.dtype == torch.float8_e4m3fn
    a, b = torch.randn(2, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    c = norm_of(layer, a, b, 1.0)
    m = c.clone().requires_grad_()
    adapted_linear(torch.randn(3, 4), layer, a, b, 1.0, m, c).float().sum().backward()
    assert all(torch.isfinite(t.grad).all() and t.grad.abs().sum() > 0 for t in (a, b, m))


@pytest.mark.parametrize("std", [0.02, 0.005])
def test_scaled_float8_error(std: float) -> None:
    """2.65 % of a Gaussian weight whatever its size; a raw cast loses 11.3 % at std 0.005."""
    w = std * torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    payload = FORMATS["fp8_e4m3"].empty_payload(w.shape, "cpu")
    FORMATS["fp8_e4m3"].quantize_into(w, payload)
    error = relative(FORMATS["fp8_e4m3"].dequantize(payload, torch.float32), w.double())
    assert 0.024 < error < 0.028


@given(
    exponent=st.integers(-140, 120), rows=st.integers(1, 5), zero=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_scaled_float8_is_finite_and_close_at_any_magnitude(exponent, rows, zero, seed) -> None:
    w = torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    w = w.clamp(-3e38, 3e38)
    if zero:
        w[0] = 0
    payload = FORMATS["fp8_e4m3"].empty_payload(w.shape, "cpu")
    FORMATS["fp8_e4m3"].quantize_into(w, payload)
    back = FORMATS["fp8_e4m3"].dequantize(payload, torch.float32)
    assert torch.isfinite(back).all()
    # e4m3 keeps 3 bits: half an ulp is 2^-4 of a value, or 2^-10 / 448 of the row's largest where it is subnormal.
    largest = w.abs().amax(dim=1, keepdim=True)
    tiny = 2.0**-126  # fp32's own subnormals lose precision in the scale
    bound = torch.maximum(w.abs() * 2.0**-4, largest * 2.0**-10 / 448) * (1 + 1e-5) + tiny
    assert ((back - w).abs() <= bound).all()
