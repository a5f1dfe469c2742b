"""Random roundings: as large as real ones, where a run rounds, and nowhere else."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from workbench.replay.rounding import InFp64, no_errors, rounded_to, with_error, with_row_errors


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def network(x, w, v):
    """What a transformer's layers are made of, with a cast to fp32 and back in it."""
    h = F.layer_norm(x @ w.t(), (w.shape[0],))
    q, k = F.silu(h), F.gelu(h)
    h = F.scaled_dot_product_attention(q[None], k[None], h[None])[0] + h
    return ((h @ v.t()).float().square().mean(-1)).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_and_gradients_err_as_those_of_the_dtype_do(dtype: torch.dtype) -> None:
    """Between a third and three times as much: the model is of the size of a rounding, not of its order of sums."""
    given = [drawn(96, 64), drawn(64, 64, seed=1) / 8, drawn(32, 64, seed=2) / 8]
    if dtype != torch.float32:  # the inputs are the same: what is compared is the rounding on the way
        given = [each.to(dtype).double() for each in given]

    def results(kind: torch.dtype):
        leaves = [each.to(kind).detach().requires_grad_() for each in given]
        loss = network(*leaves).double().sum()
        loss.backward()
        return [loss.detach()[None], *(leaf.grad for leaf in leaves)]

    with InFp64():
        exact = results(torch.float64)
    real = [off(one, other) for one, other in zip(results(dtype), exact, strict=True)]
    errors = []
    for seed in range(16):
        with rounded_to(dtype, generator(seed)):
            made = results(torch.float64)
        errors.append([off(one, other) for one, other in zip(made, exact, strict=True)])
    for place, own in enumerate(real[1:], 1):  # of single numbers, as the loss, one error says little
        rms = math.sqrt(sum(each[place] ** 2 for each in errors) / len(errors))
        assert own / 3 < rms < 3 * own, (place, own, rms)
    assert real[0] < 4 * math.sqrt(sum(each[0] ** 2 for each in errors) / len(errors))


def test_what_moves_numbers_or_is_quiet_does_not_err() -> None:
    x = drawn(4, 6)
    with rounded_to(torch.bfloat16, generator()):
        moved = torch.cat([x.t().reshape(4, 6), x[1:].clone()])
        with no_errors():
            product = x @ x.t()
    assert torch.equal(moved, torch.cat([x.t().reshape(4, 6), x[1:]])) and torch.equal(product, x @ x.t())


def test_what_errs_errs_by_half_a_step_at_most() -> None:
    """In place, too; a cast from fp32 is one, and a product with 0 stays 0."""
    x = drawn(40, 50)
    with rounded_to(torch.bfloat16, generator()):
        doubled, cast = x * 2, x.float().to(torch.float64)
        added = x.clone().add_(1)
        nothing = x * 0
    for found, exact in ((doubled, 2 * x), (cast, x.float().double()), (added, x + 1)):
        error = (found - exact).abs() / exact.abs()
        assert 2.0**-10 < float(error.max()) <= 2.0**-8
    assert not nothing.any()


def test_fp64_of_the_run_itself_is_left_alone() -> None:
    """Angles of positions, as Flux makes them: no activation went into them."""
    with rounded_to(torch.bfloat16, generator()):
        places = torch.arange(8, dtype=torch.float64)
        angles = torch.outer(places, 1 / 100 ** (torch.arange(0, 4, dtype=torch.float64) / 4)).cos()
    places = torch.arange(8, dtype=torch.float64)
    assert torch.equal(angles, torch.outer(places, 1 / 100 ** (torch.arange(0, 4, dtype=torch.float64) / 4)).cos())


def test_fp16_overflows_and_loses_what_is_too_small() -> None:
    large, small = torch.full((9,), 60000.0, dtype=torch.float64), torch.full((99,), 1e-8, dtype=torch.float64)
    with rounded_to(torch.float16, generator()):
        assert torch.isinf(large * 2).all() and torch.isfinite(large * 1).all()
        lost = small * 1
    error = (lost - small).abs().max()
    assert 1e-8 < error <= 2.0**-25, "half of its smallest step"


def test_float8_rows_err_by_their_scale() -> None:
    """As the codes of a row do: relative for large numbers, by a step of the row's scale for small ones. Forward, or only in
    the gradient."""
    codes = torch.float8_e4m3fn
    x = drawn(32, 256)
    x[:, 0] = 100.0

    def rounded(value: torch.Tensor) -> torch.Tensor:
        scale = value.abs().amax(-1, keepdim=True) / torch.finfo(codes).max
        return (value / scale).to(codes).double() * scale

    with rounded_to(torch.bfloat16, generator()):
        found = with_row_errors(x, codes, backward=False)
        leaf = x.clone().requires_grad_()
        out = with_row_errors(leaf, codes, backward=True)
        with no_errors():
            assert torch.equal(out, x)
            out.backward(x)
    real, errors = float((rounded(x) - x).norm()), found - x
    assert real / 2 < float(errors.norm()) < 2 * real and real / 2 < float((leaf.grad - x).norm()) < 2 * real
    assert torch.equal(with_row_errors(x, codes, backward=False), x), "nothing errs outside"


def test_the_same_numbers_come_of_the_same_seed() -> None:
    def made(seed: int) -> torch.Tensor:
        with rounded_to(torch.bfloat16, generator(seed)):
            return with_error(drawn(5)) @ drawn(5)

    assert torch.equal(made(1), made(1)) and not torch.equal(made(1), made(2))
    x = drawn(5)
    assert with_error(x) is x
