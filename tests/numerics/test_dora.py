"""The adapter arithmetic against dense fp64 autograd, and the float8 fault that others shipped."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainer.adapters.dora import LARGE_BIAS, SMALL_MAGNITUDE, Part, is_drowned, is_lost, scale_rows
from trainer.adapters.dora import adapted as adapted_layers
from trainer.kernels import dora_torch
from trainer.quantization import FORMATS, FrozenConv2d, FrozenLayer, FrozenLinear, Geometry
from trainer.quantization.formats import Dense

# Unit roundoff: half the distance from 1 to the next number.
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
NAMES = ("x", "a", "b", "m")


def adapted(x, base, a, b, scaling, m=None, c=None, z_rows=None) -> torch.Tensor:
    (y,) = adapted_layers(x, [Part(base, a, b, scaling, m, c, z_rows)])
    return y


def drowned_rows(layer: FrozenLayer) -> torch.Tensor | None:
    """The rows that the layer's adapter would save z0 of; None: no row."""
    drowned = is_drowned(layer.row_norms().square(), layer.bias_N)
    return drowned.nonzero().flatten() if drowned.any() else None


def every_way(layer: FrozenLayer, dora: bool) -> list[torch.Tensor | None]:
    """Choices of rows that save z0: as the rule has it, all, every second."""
    rows = torch.arange(layer.weight_shape[0])
    return [drowned_rows(layer), rows, rows[::2]] if dora else [None]


def frozen_linear(n, k, bias, storage, compute, g: torch.Generator) -> FrozenLinear:
    layer = FrozenLinear(k, n, bias=bias, format=FORMATS[storage], compute_dtype=compute, kernels=dora_torch)
    return fill(layer, torch.randn(n, k, generator=g) / k**0.5, g)


def frozen_conv(n, k, kernel, stride, padding, bias, storage, compute, g: torch.Generator) -> FrozenConv2d:
    layer = FrozenConv2d((n, k, *kernel), Geometry(stride, padding, (1, 1), 1), bias=bias, format=FORMATS[storage],
        compute_dtype=compute, kernels=dora_torch,
    )  # fmt: skip
    return fill(layer, torch.randn(layer.weight_shape, generator=g) / layer.weight_shape[1:].numel() ** 0.5, g)


def fill(layer: FrozenLayer, weight: torch.Tensor, g: torch.Generator):
    layer.load_weight(weight)
    if layer.bias is not None:
        layer.bias.data.copy_(torch.randn(layer.weight_shape[0], generator=g))
    return layer


def norm_of(layer: FrozenLayer, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    stored, kernels = layer.stored(), layer.kernels
    given = stored, kernels.row_squares(stored), a.detach().flatten(1), b.detach().flatten(1), scaling
    return kernels.adapted_norms(*([each] for each in given))[0]


def factors(layer: FrozenLayer, rank: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A as the trainer draws it, B so that the adapter moves the weight by a good part of itself."""
    n, *rest = layer.weight_shape
    a = (2 * torch.rand(rank, *rest, generator=g) - 1) / math.prod(rest) ** 0.5
    b = 0.3 * torch.randn(n, rank, *([1] * (len(rest) - 1)), generator=g)
    return a.requires_grad_(), b.requires_grad_()


def oracle(layer: FrozenLayer, leaves: list[torch.Tensor], scaling: float, dy: torch.Tensor) -> list[torch.Tensor]:
    """[y, dx, dA, dB(, dm)] in fp64: the dense weight g * (W + s B A), by autograd; leaves [x, A, B(, m)]."""
    x, a, b, *m = [leaf.detach().double().requires_grad_() for leaf in leaves]
    v = layer.dequantize(torch.float32).double()
    v = v + scaling * (b.flatten(1) @ a.flatten(1)).view_as(v)
    if m:
        v = v * (m[0] / v.detach().flatten(1).norm(dim=1).clamp_min(1e-30)).view(-1, *([1] * (v.dim() - 1)))
    bias = None if layer.bias is None else layer.bias.double()
    y = F.linear(x, v, bias) if v.dim() == 2 else F.conv2d(x, v, bias, layer.stride, layer.padding, layer.dilation)
    y.backward(dy.double())
    return [y.detach(), x.grad, a.grad, b.grad, *(leaf.grad for leaf in m)]


def ours(layer, leaves, scaling, dy, c, z_rows=None) -> list[torch.Tensor]:
    x, a, b, *m = leaves
    y = adapted(x, layer, a, b, scaling, *m, *([c] if m else []), z_rows=z_rows)
    y.backward(dy.to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def check(layer, leaves, scaling, dy, z_rows=None) -> None:
    """Output and every gradient within the rounding of the compute dtype.

    Each result is a chain of sums of products. Rounding a sum of n terms behaves like a random walk, sqrt(n) ulps, and a
    chain has at most six links (t, z0, their sum, g, the gradient of the factor, its scaling); the bound is against the
    sum of the terms' absolute values, which a second oracle over absolute values gives, so that a result which cancels
    is not held against the arithmetic. A norm that comes from cancelling parts adds its own error. So does the rounding of
    y to dm, in the rows that save no z0: half an ulp of y, bias included, to each term.
    """
    x, a, b, *m = leaves
    c = norm_of(layer, a, b, scaling) if m else None
    expected = oracle(layer, leaves, scaling, dy)
    got = ours(layer, leaves, scaling, dy, c, z_rows)
    assert [t.dtype for t in got[1:]] == [leaf.dtype for leaf in leaves]

    if m:
        amplified = assert_norm_is_exact(layer, a, b, scaling, c)
    terms = max(*layer.weight_shape, dy.numel() // layer.weight_shape[0], a.shape[0], a[0].numel())
    unit = ROUNDOFF[layer.compute_dtype]
    # Inputs are rounded to a 16-bit compute dtype as well; sums within a product stay fp32.
    links = 6 * unit * (terms**0.5 + 4) if unit == ROUNDOFF[torch.float32] else 4 * unit
    tolerance = links + (16 * 2.0**-24 * amplified if m else 0)
    sizes = absolute_sizes(layer, leaves, scaling, dy, c)
    for name, one, other, size in zip(("y", "x", "a", "b"), got, expected, sizes, strict=False):
        assert torch.isfinite(one).all(), name
        error = float((one.double() - other).norm())
        assert error <= tolerance * float(size), f"{name}: {error / float(size):.2e} > {tolerance:.2e}"
    if m:
        error_N, (of_z_N, of_y_N) = (got[4].double() - expected[4]).abs(), sizes[4:]
        by_z = torch.zeros(len(error_N), dtype=torch.bool)
        by_z[slice(0) if z_rows is None else z_rows] = True
        # Apart, so that no row's large bias hides another's error.
        for rows, bound_N in ((by_z, tolerance * of_z_N), (~by_z, tolerance * of_z_N + unit * of_y_N)):
            error, bound = float(error_N[rows].norm()), float(bound_N[rows].norm())
            assert error <= bound, f"m: {error:.2e} > {bound:.2e}"


def assert_norm_is_exact(layer, a, b, scaling, c) -> float:
    """c against the dense fp64 norm, relative to what the factored sum adds up; returns the largest such ratio.

    c^2 is a sum of three terms that can cancel: where W + s B A is small beside W or s B A, and where B lies in A's null
    space (more ranks than inputs). The ratio of the terms' absolute values to c^2 is the condition number of that sum.
    """
    w, a, b = layer.dequantize(torch.float32).double().flatten(1), a.detach().flatten(1), b.detach().flatten(1)
    a, b = a.double(), b.double()
    exact = (w + scaling * b @ a).norm(dim=1)
    absolute = w.square().sum(1) + 2 * scaling * (b.abs() * (w.abs() @ a.abs().t())).sum(1)
    absolute += scaling**2 * ((b.abs() @ (a.abs() @ a.abs().t())) * b.abs()).sum(1)
    condition = absolute / exact.square().clamp_min(1e-60)
    assert ((c.double() - exact).abs() <= 8 * 2.0**-24 * condition * exact).all()
    return float(condition.max())


def absolute_sizes(layer, leaves, scaling, dy, c) -> list[torch.Tensor]:
    """Norms of the results when every factor is replaced by its absolute value: the scale of what was summed. dm has two
    of each row: of z and of y."""
    x, a, b, *m = [leaf.detach().double().abs() for leaf in leaves]
    w = layer.dequantize(torch.float32).double().abs()
    g = (m[0] / c.double().clamp_min(1e-30)).view(-1, *([1] * (w.dim() - 1))) if m else 1
    x, a, b = (t.requires_grad_() for t in (x, a, b))
    v = g * (w + scaling * (b.flatten(1) @ a.flatten(1)).view_as(w))
    bias = None if layer.bias is None else layer.bias.double().abs()
    y = F.linear(x, v, bias) if w.dim() == 2 else F.conv2d(x, v, bias, layer.stride, layer.padding, layer.dilation)
    y.backward(dy.double().abs())
    sizes = [y.detach().norm(), x.grad.norm(), a.grad.norm(), b.grad.norm()]
    if m:
        z = y.detach() if bias is None else y.detach() - bias.view(-1, *([1] * (w.dim() - 2)))
        for terms in (z, y.detach()):
            per_row = (dy.double().abs() * terms).movedim(1 if w.dim() == 4 else -1, 0).flatten(1).sum(1)
            sizes.append(per_row / m[0].clamp_min(1e-30))
    return sizes


# Of a row's norm; None: no bias.
BIASES = st.sampled_from([None, 0.0, 1.0, 8.0, 60.0])


def set_bias(layer: FrozenLayer, times: float, g: torch.Generator) -> None:
    """Every other bias that many times its row's norm, the others as often 1, either sign; as the compute dtype holds them:
    their rounding is the checkpoint's, not the adapter's."""
    factor = torch.randint(0, 2, (layer.weight_shape[0],), generator=g) * 2 - 1.0
    factor[::2] *= times
    layer.bias.data.copy_((factor * layer.row_norms()).to(layer.compute_dtype))


RANKS = st.one_of(st.integers(1, 16), st.sampled_from([32, 64, 128]))
# s = alpha / r and, for rsLoRA, alpha / sqrt(r).
ALPHAS = st.sampled_from([0.5, 1.0, 4.0, 16.0])


@settings(max_examples=100, deadline=None)
@example(  # W + s B A cancels to 1e-4 of W: the factored sum cannot tell its square from zero
    m=1, n=1, k=1, rank=32, alpha=16.0, rslora=False, bias=None, dora=True, far=0.0, tiny_rows=False, storage="fp32",
    compute=torch.float32, seed=1,
)  # fmt: skip
@given(
    m=st.integers(1, 40), n=st.integers(1, 70), k=st.integers(1, 70), rank=RANKS, alpha=ALPHAS, rslora=st.booleans(),
    bias=BIASES, dora=st.booleans(), far=st.sampled_from([0.0, 0.1, 3.0, -2.0]), tiny_rows=st.booleans(),
    storage=st.sampled_from(["fp32", "bf16", "fp8_e4m3", "int8", "int4", "nf4"]),
    compute=st.sampled_from([torch.float32, torch.bfloat16]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_linear_against_dense_fp64(m, n, k, rank, alpha, rslora, bias, dora, far, tiny_rows, storage, compute, seed) -> None:
    g = torch.Generator().manual_seed(seed)
    layer = FrozenLinear(k, n, bias=bias is not None, format=FORMATS[storage], compute_dtype=compute, kernels=dora_torch)
    weight = torch.randn(n, k, generator=g) / k**0.5
    if tiny_rows:
        weight[::3] *= 1e-12
    fill(layer, weight, g)
    if bias is not None:
        set_bias(layer, bias, g)
    scaling = alpha / (rank**0.5 if rslora else rank)
    a, b = factors(layer, rank, g)
    leaves = [torch.randn(m, k, generator=g, requires_grad=True), a, b]
    if dora:
        c = norm_of(layer, a, b, scaling)
        leaves.append((c * (1 + far * torch.rand(n, generator=g))).requires_grad_())
    dy = torch.randn(m, n, generator=g).to(compute)
    for z_rows in every_way(layer, dora):
        for leaf in leaves:
            leaf.grad = None
        check(layer, leaves, scaling, dy, z_rows)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 3), n=st.integers(1, 12), k=st.integers(1, 9), height=st.integers(3, 8), width=st.integers(3, 8),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)), stride=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.tuples(st.integers(0, 1), st.integers(0, 1)), rank=RANKS, bias=BIASES, dora=st.booleans(),
    channels_last=st.booleans(), far=st.sampled_from([0.0, 3.0]),
    storage=st.sampled_from(["fp32", "fp8_e4m3", "int8"]), seed=st.integers(0, 2**31),
)  # fmt: skip
@example(
    batch=2, n=1, k=1, height=3, width=3, kernel=(1, 2), stride=(1, 2), padding=(0, 0), rank=32, bias=None, dora=False,
    channels_last=True, far=0.0, storage="fp32", seed=0,
)  # fmt: skip
def test_conv_against_dense_fp64(
    batch, n, k, height, width, kernel, stride, padding, rank, bias, dora, channels_last, far, storage, seed
) -> None:
    g = torch.Generator().manual_seed(seed)
    layer = frozen_conv(n, k, kernel, stride, padding, bias is not None, storage, torch.float32, g)
    if bias is not None:
        set_bias(layer, bias, g)
    a, b = factors(layer, rank, g)
    x = torch.randn(batch, k, height, width, generator=g)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    leaves = [x.requires_grad_(), a, b]
    if dora:
        leaves.append((norm_of(layer, a, b, 0.5) * (1 + far * torch.rand(n, generator=g))).requires_grad_())
    dy = torch.randn(layer(x.detach()).shape, generator=g)
    for z_rows in every_way(layer, dora):
        for leaf in leaves:
            leaf.grad = None
        check(layer, leaves, 0.5, dy, z_rows)


@pytest.mark.parametrize("stride", [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_small_kernel_with_a_stride_reads_its_own_pixels_alone(k: int, stride: tuple[int, int]) -> None:
    """Channels-last pixels with NaN behind them: torch 2.13 alone reads on into these, on a CPU, and writes there, too."""
    g = torch.Generator().manual_seed(0)
    layer = frozen_conv(4, k, (1, 1), stride, (0, 0), False, "fp32", torch.float32, g)
    size = 3 * 8 * 6 * k
    memory = torch.full((64 * size,), float("nan"))
    memory[:size] = torch.randn(size, generator=g)
    x = memory[:size].view(3, 8, 6, k).permute(0, 3, 1, 2)
    rows, columns = stride
    seen = x[:, :, ::rows, ::columns].double()
    p = torch.randn(3, 4, *seen.shape[2:], generator=g)
    exact = torch.einsum("brhw,bkhw->rk", p.double(), seen)
    torch.testing.assert_close(layer.product_weight_grad(p, x, (4, k, 1, 1)).flatten(1).double(), exact, rtol=1e-5, atol=1e-5)
    assert memory[size:].isnan().all()


@pytest.mark.parametrize("conv", [False, True])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_gradcheck(conv: bool, dora: bool, bias: bool) -> None:
    """The written-out backward is the derivative of the forward, c held constant, by finite differences in fp64."""
    g = torch.Generator().manual_seed(0)
    format = Dense("fp64", torch.float64)
    if conv:
        layer = FrozenConv2d((5, 3, 3, 2), Geometry((2, 1), (1, 0), (1, 1), 1), bias=bias, format=format,
            compute_dtype=torch.float64, kernels=dora_torch,
        )  # fmt: skip
        x = torch.randn(2, 3, 5, 4, generator=g)
    else:
        layer = FrozenLinear(6, 5, bias=bias, format=format, compute_dtype=torch.float64, kernels=dora_torch)
        x = torch.randn(2, 3, 6, generator=g)
    fill(layer, torch.randn(layer.weight_shape, generator=g), g)
    a, b = factors(layer, 2, g)
    leaves = [t.detach().double().requires_grad_() for t in (x, a, b)]
    c = None
    if dora:
        c = norm_of(layer, leaves[1], leaves[2], 0.7)
        leaves.append((c * 1.3).requires_grad_())
    for z_rows in every_way(layer, dora):

        def function(*leaves, z_rows=z_rows):
            return adapted(*leaves[:1], layer, *leaves[1:3], 0.7, *leaves[3:], *([c] if dora else []), z_rows=z_rows)

        assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("storage", ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "int2", "nf4", "fp4"])
def test_16_bit_error_stays_within_the_envelope(storage: str, compute: torch.dtype) -> None:
    """Relative L2 against fp64 <= 5e-3 for output and gradients: 1.3 bf16 roundoffs; fp16's are eight times smaller."""
    g = torch.Generator().manual_seed(0)
    layer = frozen_linear(96, 128, True, storage, compute, g)
    a, b = factors(layer, 8, g)
    m = (norm_of(layer, a, b, 1.0) * 1.2).requires_grad_()
    leaves = [torch.randn(64, 128, generator=g).to(compute).requires_grad_(), a, b, m]
    layer.bias.data.copy_(layer.bias.to(compute))
    dy = torch.randn(64, 96, generator=g).to(compute)
    results = zip(ours(layer, leaves, 1.0, dy, norm_of(layer, a, b, 1.0)), oracle(layer, leaves, 1.0, dy), strict=True)
    for name, (got, expected) in zip(("y", *NAMES), results, strict=True):
        error = float((got.double() - expected).norm() / expected.norm())
        assert error <= 5e-3 * ROUNDOFF[compute] / ROUNDOFF[torch.bfloat16], f"{name}: {error:.2e}"


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("conv", [False, True])
@pytest.mark.parametrize("times", [0.0, 1.0, 0.97 * LARGE_BIAS, 8.0, 60.0, 1e4])
def test_no_bias_drowns_the_gradient_of_m(times: float, conv: bool, compute: torch.dtype) -> None:
    """dm of rows whose bias is that many times their norm, the inputs' rms 1: relative L2 against fp64, in roundoffs.

    Each of a term's three roundings (G's is in the oracle) has an rms of 0.43 roundoffs of what is rounded: that of z0, of t
    and B beside it, and of y, which is sqrt(1 + times^2) times |g z|. Rows beyond the limit have no third one. The norm of 96
    such sums strays by 1 / sqrt(2 * 96) = 7 %, here up to three times that.
    """
    g = torch.Generator().manual_seed(0)
    if conv:
        layer = frozen_conv(96, 16, (3, 3), (1, 1), (0, 0), True, "fp8_e4m3", compute, g)
        x = torch.randn(4, 16, 12, 12, generator=g)
    else:
        layer, x = frozen_linear(96, 128, True, "fp8_e4m3", compute, g), torch.randn(400, 128, generator=g)
    layer.bias.data.copy_((times * layer.row_norms() * (torch.arange(96) % 2 * 2 - 1)).to(compute))
    a, b = factors(layer, 4, g)
    m = (norm_of(layer, a, b, 1.0) * 1.2).requires_grad_()
    leaves = [x.to(compute).requires_grad_(), a, b, m]
    dy = torch.randn(layer(x.to(compute)).shape, generator=g).to(compute)
    z_rows = drowned_rows(layer)
    assert (z_rows is None) == (times < LARGE_BIAS)
    got, expected = ours(layer, leaves, 1.0, dy, norm_of(layer, a, b, 1.0), z_rows), oracle(layer, leaves, 1.0, dy)
    error = float((got[4].double() - expected[4]).norm() / expected[4].norm()) / ROUNDOFF[compute]
    of_y = 1 + times**2 if z_rows is None else 0
    assert error <= 1.2 * min(0.43 * (2 + of_y) ** 0.5, 1.7), "more than LARGE_BIAS promises"
    if times == 0.97 * LARGE_BIAS:
        assert error > 0.43, "that much there is"


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("times", [1.0, 2.0])
def test_a_magnitude_whose_gradient_is_lost_is_known(times: float, compute: torch.dtype) -> None:
    """Of rows whose bias is that many times their norm, m falls: dm against fp64 is wrong by a tenth once m is at the limit
    that `is_lost` has, and about 0 far below it. Rows that save z0 have the right one."""
    g = torch.Generator().manual_seed(0)
    layer, x = frozen_linear(96, 128, True, "bf16", compute, g), torch.randn(400, 128, generator=g)
    layer.bias.data.copy_((times * layer.row_norms() * (torch.arange(96) % 2 * 2 - 1)).to(compute))
    a, b = factors(layer, 4, g)
    c, dy = norm_of(layer, a, b, 1.0), torch.randn(400, 96, generator=g).to(compute)
    limit_N = SMALL_MAGNITUDE * ROUNDOFF[compute] * layer.bias_N.abs()

    def error(m_N: torch.Tensor, z_rows: torch.Tensor | None = None) -> tuple[float, set[bool]]:
        leaves = [x.to(compute).requires_grad_(), a, b, m_N.clone().requires_grad_()]
        got, expected = ours(layer, leaves, 1.0, dy, c, z_rows)[4].double(), oracle(layer, leaves, 1.0, dy)[4]
        return float((got - expected).norm() / expected.norm()), set(is_lost(m_N, layer.bias_N, z_rows, compute).tolist())

    (above, told_above), (at, told), (below, told_below) = (error(share * limit_N) for share in (2.0, 1.0, 0.02))
    assert 0.03 < above < 0.1 and told_above == {False}
    assert 0.07 < at < 0.15 and told == {True}, at
    assert below > 0.7 and told_below == {True}, below
    saved, told_saved = error(0.02 * limit_N, torch.arange(96))
    assert saved < 0.01 and told_saved == {False}


@pytest.mark.parametrize("bias", [None, 0.0, 8.0])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("conv", [False, True])
def test_a_dora_saves_what_a_lora_saves(conv: bool, compute: torch.dtype, bias: float | None) -> None:
    """Beside its output, which the next layer saves in most places, and vectors of N; and z0 of the rows that need it."""
    g = torch.Generator().manual_seed(0)
    if conv:
        layer = frozen_conv(24, 8, (3, 3), (1, 1), (1, 1), bias is not None, "fp8_e4m3", compute, g)
        x = torch.randn(2, 8, 9, 7)
    else:
        layer, x = frozen_linear(24, 16, bias is not None, "fp8_e4m3", compute, g), torch.randn(3, 50, 16)
    if bias is not None:
        layer.bias.data.copy_(torch.where(torch.arange(24) < 2, bias, 0.1) * layer.row_norms())
    a, b = factors(layer, 4, g)
    c = norm_of(layer, a, b, 1.0)
    m, z_rows = c.clone().requires_grad_(), drowned_rows(layer)

    def saved(*of_dora) -> int:
        storages = {}

        def pack(t: torch.Tensor) -> torch.Tensor:
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = adapted(x.to(compute).requires_grad_(), layer, a, b, 1.0, *of_dora)
        for there in (y, a, b):  # parameters are there anyway
            storages.pop(there.untyped_storage().data_ptr(), None)
        return sum(storages.values())

    tokens = layer(x.to(compute)).numel() // 24
    rows = 0 if z_rows is None else len(z_rows)
    assert rows == (2 if bias == 8 else 0)
    vectors = 4 * 24 * 4 + rows * 8  # m, c, g and the bias; the indices
    assert saved(m, c, z_rows) - saved() <= vectors + rows * tokens * compute.itemsize


def test_small_changes_of_the_magnitude_reach_a_bf16_output() -> None:
    """g = 1 + 1e-3 moves the mean output by that much, although bf16 cannot tell g from 1: g * z + b is rounded once."""
    g = torch.Generator().manual_seed(0)
    layer = frozen_linear(256, 64, True, "bf16", torch.bfloat16, g)
    a, b = factors(layer, 8, g)
    c = norm_of(layer, a, b, 1.0)
    x = torch.randn(512, 64, generator=g).bfloat16()
    y = [adapted(x, layer, a, b, 1.0, c * factor, c).detach().double() for factor in (1.0, 1.001)]
    z = y[0] - layer.bias_N
    moved = float(((y[1] - y[0]) * z).sum() / (z * z).sum())
    assert 0.8e-3 < moved < 1.2e-3


def test_rows_of_zeros_stay_finite() -> None:
    layer = frozen_linear(4, 6, False, "fp32", torch.float32, torch.Generator().manual_seed(0))
    layer.load_weight(torch.cat([torch.zeros(1, 6), torch.randn(3, 6)]))
    a, b = torch.randn(2, 6), torch.zeros(4, 2)
    c = norm_of(layer, a, b, 1.0)
    assert drowned_rows(layer).tolist() == [0]
    for z_rows in every_way(layer, True):
        m = c.clone().requires_grad_()
        y = adapted(torch.randn(3, 6, requires_grad=True), layer, a, b, 1.0, m, c, z_rows=z_rows)
        assert torch.equal(y[:, 0], torch.zeros(3))
        y.sum().backward()
        assert torch.isfinite(m.grad).all() and torch.equal(scale_rows(m, c)[1:], torch.ones(3))


def test_onetrainer_442_promotion_for_float8_types_is_not_supported() -> None:
    """fp8 base + DoRA: arithmetic on a raw float8 tensor raises; ours upcasts before it touches one."""
    raw = torch.randn(4, 4).to(torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match="Promotion for Float8 Types"):
        _ = raw + torch.ones(4, 4)
    for storage in ("fp8_e4m3", "fp8_e5m2"):
        layer = frozen_linear(4, 4, True, storage, torch.bfloat16, torch.Generator().manual_seed(0))
        assert layer.payload_weight.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        a, b = factors(layer, 2, torch.Generator().manual_seed(0))
        c = norm_of(layer, a, b, 1.0)
        m = c.clone().requires_grad_()
        adapted(torch.randn(3, 4), layer, a, b, 1.0, m, c).float().sum().backward()
        assert all(torch.isfinite(t.grad).all() and t.grad.abs().sum() > 0 for t in (a, b, m))


@pytest.mark.parametrize("conv", [False, True])
def test_dropout_masks_the_low_rank_path_only(conv: bool) -> None:
    """LoRA: y = x W^T + s ((x * mask) A^T) B^T + b, against fp64 autograd."""
    g = torch.Generator().manual_seed(0)
    if conv:
        layer, x = (
            frozen_conv(6, 5, (3, 3), (1, 1), (1, 1), True, "int8", torch.float32, g),
            torch.randn(2, 5, 6, 7, generator=g),
        )
    else:
        layer, x = frozen_linear(6, 5, True, "int8", torch.float32, g), torch.randn(4, 5, generator=g)
    mask = (torch.rand(x.shape, generator=g) > 0.5) * 2.0
    leaves = [x.requires_grad_(), *factors(layer, 3, g)]
    (y,) = adapted_layers(x, [Part(layer, leaves[1], leaves[2], 0.7)], mask)
    dy = torch.randn(y.shape, generator=g)
    y.backward(dy)
    x64, a64, b64 = (leaf.detach().double().requires_grad_() for leaf in leaves)
    w, bias = layer.dequantize(torch.float32).double(), layer.bias.double()
    ba = 0.7 * (b64.flatten(1) @ a64.flatten(1)).view_as(w)
    if conv:
        expected = F.conv2d(x64, w, bias, padding=1) + F.conv2d(x64 * mask, ba, padding=1)
    else:
        expected = F.linear(x64, w, bias) + F.linear(x64 * mask, ba)
    expected.backward(dy.double())
    for ours_, exact in zip((y, *(leaf.grad for leaf in leaves)), (expected, x64.grad, a64.grad, b64.grad), strict=True):
        assert (ours_ - exact).norm() <= 32 * ROUNDOFF[torch.float32] * exact.norm()


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_16_bit_dilated_convolution_stays_within_the_envelope(compute: torch.dtype, channels_last: bool) -> None:
    g = torch.Generator().manual_seed(0)
    layer = FrozenConv2d((24, 16, 3, 3), Geometry((1, 2), (2, 1), (2, 1), 1), bias=True, format=FORMATS["fp8_e4m3"],
        compute_dtype=compute, kernels=dora_torch,
    )  # fmt: skip
    fill(layer, torch.randn(layer.weight_shape, generator=g) / 12, g)
    layer.bias.data.copy_(layer.bias.to(compute))
    a, b = factors(layer, 4, g)
    x = torch.randn(2, 16, 9, 8, generator=g).to(compute)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    m = (norm_of(layer, a, b, 1.0) * 1.2).requires_grad_()
    leaves = [x.requires_grad_(), a, b, m]
    dy = torch.randn(layer(x.detach()).shape, generator=g).to(compute)
    (y,) = adapted_layers(x, [Part(layer, a, b, 1.0, m, norm_of(layer, a, b, 1.0))])
    y.backward(dy)
    v = layer.dequantize(torch.float32).double()
    x64, a64, b64, m64 = (leaf.detach().double().requires_grad_() for leaf in leaves)
    v = v + (b64.flatten(1) @ a64.flatten(1)).view_as(v)
    v = v * (m64 / v.detach().flatten(1).norm(dim=1)).view(-1, 1, 1, 1)
    y64 = F.conv2d(x64, v, layer.bias.double(), (1, 2), (2, 1), (2, 1))
    y64.backward(dy.double())
    exact = (y64, x64.grad, a64.grad, b64.grad, m64.grad)
    for name, one, other in zip(("y", *NAMES), (y, *(leaf.grad for leaf in leaves)), exact, strict=True):
        error = float((one.detach().double() - other.detach()).norm() / other.detach().norm())
        assert error <= 5e-3 * ROUNDOFF[compute] / ROUNDOFF[torch.bfloat16], f"{name}: {error:.2e}"


SHAPES = st.tuples(st.integers(1, 400), st.sampled_from([3, 50, 230, 320]), st.sampled_from([1, 5, 6, 7, 16]))


@pytest.mark.slow
@given(st.lists(SHAPES, min_size=2, max_size=5), st.data())
@settings(max_examples=40)
def test_a_norm_is_the_same_beside_any_others(shapes: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """Bit for bit: a run that saves at another step refreshes its layers in other company."""
    g = torch.Generator().manual_seed(len(shapes))
    layers = []
    for n, k, rank in shapes:
        storage = data.draw(st.sampled_from(["fp32", "bf16", "fp8_e4m3", "nf4"]))
        layer = frozen_linear(n, k, False, storage, torch.float32, g)
        a, b = torch.randn(rank, k, generator=g), torch.randn(n, rank, generator=g)
        layers.append((layer.stored(), dora_torch.row_squares(layer.stored()), a, b, 0.7))
    together = dora_torch.adapted_norms(*zip(*layers, strict=True))
    for layer, norm in zip(layers, together, strict=True):
        assert torch.equal(dora_torch.adapted_norms(*([each] for each in layer))[0], norm)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_factors_that_change_before_the_backward_pass_are_seen(dora: bool, compute: torch.dtype) -> None:
    """A LoRA's s B may be B itself, and the gradient of x would be another one, without a word."""
    g = torch.Generator().manual_seed(4)
    layer = frozen_linear(6, 5, True, "bf16", compute, g)
    a, b = (tensor.requires_grad_() for tensor in factors(layer, 2, g))
    norm = norm_of(layer, a.detach(), b.detach(), 1.0) if dora else None
    m = None if norm is None else norm.clone().requires_grad_()
    x = torch.randn(3, 5, generator=g).to(compute).requires_grad_()
    y = adapted(x, layer, a, b, 1.0, m, norm)
    with torch.no_grad():
        b.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
