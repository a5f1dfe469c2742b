"""LoKr's arithmetic agrees with dense fp64 autograd, whatever order its products are made in."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.numerics.test_dora import ROUNDOFF, frozen_conv, frozen_linear
from trainer.adapters import lokr
from trainer.adapters.dora import Part
from trainer.kernels import dora_torch
from trainer.quantization import FrozenLayer, FrozenLinear

# Shapes of W, and ranks: both matrices whole, one or both a pair, and sides that no matrix shares.
CASES = {
    "w2": (1, "w2"), "both": (1, "both"), "whole": (50, "w2"), "none": (1, "none"), "wide rank": (2, "w2"),
}  # fmt: skip


def layer_of(kind: str, compute: torch.dtype, g: torch.Generator) -> FrozenLayer:
    if kind == "linear":
        return frozen_linear(12, 35, True, "fp32", compute, g)
    kernel, stride = {"conv": ((3, 3), (1, 1)), "strided": ((3, 2), (2, 1)), "1x1": ((1, 1), (1, 1))}[kind]
    return frozen_conv(10, 12, kernel, stride, (1, 1), True, "fp32", compute, g)


def trained(layer: FrozenLayer, rank: int, decompose: str, g: torch.Generator) -> dict[str, torch.Tensor]:
    sizes = lokr.shapes(layer.weight_shape, rank, decompose=decompose)
    return {end: (0.5 * torch.randn(size, generator=g)).requires_grad_() for end, size in sizes.items()}


def part_of(layer: FrozenLayer, values: dict[str, torch.Tensor], scaling: float) -> lokr.KronPart:
    scales = dict.fromkeys(values, 1.0) | {next(iter(values)): scaling}
    cast = {end: (scales[end] * value.detach()).to(layer.compute_dtype) for end, value in values.items()}
    return lokr.KronPart(layer, values, cast, scaling)


def oracle(layer: FrozenLayer, x, values, scaling: float, dy, mask=None, of=lambda t: t) -> list[torch.Tensor]:
    """[y, dx, the parameters' gradients] of the dense weight, by autograd in fp64. of: torch.abs: of absolute values."""
    x = of(x.detach().double()).requires_grad_()
    leaves = {end: of(value.detach().double()).requires_grad_() for end, value in values.items()}
    w1, w2 = (
        leaves[whole] if whole in leaves else (leaves[f"{whole}_a"] @ leaves[f"{whole}_b"].flatten(1))
        for whole in ("lokr_w1", "lokr_w2")
    )
    # kron(w1, w2)[o P + p, i Q + q, ...] = w1[o, i] w2[p, q, ...]
    taps = layer.weight_shape[2:]
    w2 = w2.reshape(len(w2), -1, *taps)
    change = torch.einsum("oi,pq...->opiq...", w1, w2).reshape(layer.weight_shape) * scaling
    weight, bias = of(layer.dequantize(torch.float32).double()), of(layer.bias.double())
    dropped = x if mask is None else x * mask
    if len(layer.weight_shape) == 2:
        y = F.linear(x, weight, bias) + F.linear(dropped, change)
    else:
        how = layer.stride, layer.padding, layer.dilation
        y = F.conv2d(x, weight, bias, *how) + F.conv2d(dropped, change, None, *how)
    y.backward(of(dy.double()))
    return [y.detach(), x.grad, *(leaf.grad for leaf in leaves.values())]


def inputs(layer: FrozenLayer, g: torch.Generator) -> torch.Tensor:
    shape = (2, 7, 35) if len(layer.weight_shape) == 2 else (2, 12, 6, 5)
    return torch.randn(shape, generator=g)


def check(layer: FrozenLayer, x, values, scaling: float, dy, y, mask=None) -> None:
    """Output and gradients within the rounding of a chain of at most six sums of products, against the sum of the terms'
    absolute values, as test_dora.py has it: of n terms a random walk."""
    got = [y.detach(), x.grad, *(value.grad for value in values.values())]
    expected, sizes = (oracle(layer, x, values, scaling, dy, mask, of) for of in (lambda t: t, torch.abs))
    unit, terms = ROUNDOFF[layer.compute_dtype], max(*layer.weight_shape, dy.numel() // layer.weight_shape[0])
    tolerance = 6 * unit * (terms**0.5 + 4) if unit == ROUNDOFF[torch.float32] else 4 * unit
    for one, other, size in zip(got, expected, sizes, strict=True):
        assert torch.isfinite(one).all() and one.shape == other.shape
        assert (one.double() - other).norm() <= tolerance * size.norm()


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["linear", "conv", "strided", "1x1"])
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_those_of_the_dense_product(kind: str, case: str, compute: torch.dtype) -> None:
    g = torch.Generator().manual_seed(3)
    layer = layer_of(kind, compute, g)
    values, scaling = trained(layer, *CASES[case], g), 0.75
    x = inputs(layer, g).requires_grad_()
    y = part_of(layer, values, scaling).output(x, None)
    assert y.dtype == compute
    dy = torch.randn(y.shape, generator=g).to(compute)
    y.backward(dy)
    check(layer, x, values, scaling, dy, y)


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_a_dropped_input_is_dropped_of_the_product_alone(kind: str) -> None:
    g = torch.Generator().manual_seed(4)
    layer = layer_of(kind, torch.float32, g)
    values, x = trained(layer, 1, "w2", g), inputs(layer, g).requires_grad_()
    mask = (torch.rand(x.shape, generator=g) > 0.5).float() * 2
    y = part_of(layer, values, 1.0).output(x, mask)
    dy = torch.randn(y.shape, generator=g)
    y.backward(dy)
    check(layer, x, values, 1.0, dy, y, mask)


@pytest.mark.parametrize("kind", ["linear", "strided"])
def test_every_order_of_the_products_gives_the_same(kind: str, monkeypatch) -> None:
    """All of them, those that no number of tokens asks for, too."""
    g = torch.Generator().manual_seed(5)
    layer = layer_of(kind, torch.float32, g)
    values, x = trained(layer, 1, "both", g), inputs(layer, g).requires_grad_()
    paths = list(lokr._paths({end: tuple(value.shape) for end, value in values.items()}))
    assert len(set(paths)) == len(paths) == 6 + 3 + 3 + 2
    for path in paths:
        monkeypatch.setattr(lokr, "order", lambda sizes, tokens, path=path: path)
        for leaf in (x, *values.values()):
            leaf.grad = None
        y = part_of(layer, values, 0.5).output(x, None)
        dy = torch.linspace(-1, 1, y.numel()).view(y.shape)
        y.backward(dy)
        check(layer, x, values, 0.5, dy, y)


def multiplications(sizes: dict[str, tuple[int, ...]], path: tuple[str, ...], tokens: int) -> int:
    """Counted as a step does them: of the present rows and columns of x[m]."""
    count, rows, columns = 0, None, None
    o_i = sizes.get("lokr_w1") or (sizes["lokr_w1_a"][0], sizes["lokr_w1_b"][1])
    p_q = sizes.get("lokr_w2") or (sizes["lokr_w2_a"][0], *sizes["lokr_w2_b"][1:])
    rows, columns = o_i[1], p_q[1]
    for name in path:
        size = sizes.get(name)
        if size is None:  # the pair, multiplied first
            size = o_i if name == "lokr_w1" else p_q
            count += torch.Size(size).numel() * sizes[f"{name}_a"][1]
        count += tokens * torch.Size(size).numel() * (columns if name.startswith("lokr_w1") else rows)
        rows, columns = (size[0], columns) if name.startswith("lokr_w1") else (rows, size[0])
    return count


@pytest.mark.parametrize("shape", [(3072, 3072), (3072, 12288), (640, 320, 3, 3), (64, 8)])
@pytest.mark.parametrize("rank", [1, 16, 400])
@pytest.mark.parametrize("decompose", ["w2", "both", "none"])
def test_the_order_taken_has_the_fewest_multiplications(shape, rank: int, decompose: str) -> None:
    for factor, tokens in itertools.product((-1, 4), (1, 77, 4096)):
        sizes = lokr.shapes(shape, rank, factor, decompose)
        taken = lokr.order(tuple(sizes.items()), tokens)
        counts = [multiplications(sizes, path, tokens) for path in lokr._paths(sizes)]
        assert multiplications(sizes, taken, tokens) == min(counts)


def test_a_pair_of_high_rank_is_multiplied_first_where_there_are_many_tokens() -> None:
    sizes = tuple(lokr.shapes((1024, 1024), 511, 1).items())
    assert "lokr_w2" not in dict(sizes) and "lokr_w2" not in lokr.order(sizes, 1)
    sizes = tuple(lokr.shapes((64, 2048), 100, 2).items())  # w2 [32, 1024] of rank 100, above its own
    assert "lokr_w2" not in dict(sizes) and "lokr_w2" in lokr.order(sizes, 4096)


def test_a_fresh_adapter_leaves_every_bit_of_the_base(monkeypatch) -> None:
    for compute in (torch.float32, torch.bfloat16):
        g = torch.Generator().manual_seed(6)
        for kind in ("linear", "conv"):
            layer = layer_of(kind, compute, g)
            values = trained(layer, 1, "w2", g)
            with torch.no_grad():
                values["lokr_w2_b"].zero_()
            x = inputs(layer, g).to(compute)
            assert torch.equal(part_of(layer, values, 2.0).output(x, None), layer(x))


def test_nothing_of_the_weights_size_is_made() -> None:
    """W has 4 million numbers, and the batch one token: each tensor that a step makes is far smaller."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            views = func.is_view or not isinstance(made, torch.Tensor) or "t.default" in str(func)
            self.size = max(self.size, 0 if views else made.numel())
            return made

    layer = FrozenLinear(2048, 2048, bias=False, format=frozen_linear(1, 1, False, "fp32", torch.float32,
        torch.Generator()).format, compute_dtype=torch.float32, kernels=dora_torch)  # fmt: skip
    layer.load_weight(torch.zeros(2048, 2048))
    values = trained(layer, 8, "w2", torch.Generator().manual_seed(7))
    part, x = part_of(layer, values, 1.0), torch.randn(1, 2048, requires_grad=True)
    with Largest() as seen:
        part.output(x, None).sum().backward()
    assert seen.size <= 2048


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("case", CASES)
def test_its_a_and_b_make_the_product(kind: str, case: str) -> None:
    """By the LoRA that they are, for which files, merging and measures take them."""
    g = torch.Generator().manual_seed(8)
    layer = layer_of(kind, torch.float32, g)
    values, x = trained(layer, *CASES[case], g), inputs(layer, g)
    a, b = lokr.factors({end: value.detach() for end, value in values.items()})
    as_lora, as_lokr = Part(layer, a, b, 0.5), part_of(layer, values, 0.5)
    with torch.no_grad():
        one, other = as_lora.output(x, None), as_lokr.output(x, None)
    assert (one - other).norm() <= 8 * ROUNDOFF[torch.float32] * one.norm()
    exact = float((b.flatten(1).double() @ a.flatten(1).double()).norm())
    assert lokr.norm({end: value.detach() for end, value in values.items()}) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rank", [1, 3, 999])
def test_the_nearest_of_a_rank_is_that_of_the_dense_product(kind: str, case: str, rank: int) -> None:
    g = torch.Generator().manual_seed(9)
    values = {end: value.detach() for end, value in trained(layer_of(kind, torch.float32, g), *CASES[case], g).items()}
    dense = lokr.product(values).flatten(1)
    a, b = (factor.double() for factor in lokr.factors(values))
    assert (b.flatten(1) @ a.flatten(1) - dense).norm() <= 2**-20 * dense.norm()
    near_a, near_b, lost = lokr.nearest(values, rank)
    sizes = torch.linalg.svdvals(dense)
    left = dense - near_b @ near_a.flatten(1)
    assert near_a.shape[1:] == lokr.product(values).shape[1:] and len(near_a) <= rank
    assert abs(float(left.norm() - sizes[rank:].norm())) <= 1e-9 * float(sizes.norm())
    assert abs(lost - float(left.norm() / dense.norm())) <= 1e-9
