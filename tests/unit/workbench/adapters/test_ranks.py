"""Adapters of another rank, against the singular values of the dense product."""

from __future__ import annotations

import pytest
import torch

from trainer.adapters.portable import Factors, recipe, shrunk
from workbench.adapters import ranks


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(9, 5), (5, 9)], ids=["tall", "wide"])
@pytest.mark.parametrize("rank", [1, 3, 7])
def test_the_nearest_loses_what_the_smaller_singular_values_hold(shape: tuple[int, int], rank: int) -> None:
    change = drawn(*shape)
    a, b = ranks.nearest(change, rank)
    values = torch.linalg.svdvals(change)
    assert len(a) == b.shape[1] == min(rank, *shape)
    lost = values[rank:].square().sum().sqrt()
    assert torch.allclose((change - b @ a).norm(), lost, atol=1e-6)
    assert torch.allclose(a.norm(dim=1), b.norm(dim=0), rtol=1e-6)  # neither of the two carries all of it


@pytest.mark.parametrize("scaling", [1.0, 0.25])
def test_the_error_is_that_of_what_is_stored(monkeypatch, scaling: float) -> None:
    monkeypatch.setattr(ranks, "ROWS", 4)  # in pieces
    change, a, b = drawn(9, 5), drawn(2, 5, seed=1).bfloat16(), drawn(9, 2, seed=2).bfloat16()
    left, whole = ranks.relative_error(change, a, b, scaling)
    assert left == pytest.approx(float((change - scaling * b.double() @ a.double()).norm()), rel=1e-12)
    assert whole == pytest.approx(float(change.norm()), rel=1e-12)


def test_a_shrunk_adapter_keeps_its_scale_and_tells_what_it_lost() -> None:
    a, b = drawn(4, 6, seed=1).float(), drawn(8, 4, seed=2).float()
    factors = Factors(recipe(a), recipe(b), alpha=2.0)
    made, lost = shrunk(factors, 2)
    values = torch.linalg.svdvals(b.double() @ a.double())
    assert made.rank == 2 and made.scaling == factors.scaling == 0.5
    assert lost == pytest.approx(float(values[2:].norm() / values.norm()), rel=1e-6)
    rest = b.double() @ a.double() - made.b.make().double() @ made.a.make().double()
    assert torch.allclose(rest.norm(), values[2:].norm(), rtol=1e-5)
    assert ranks.product_norm(b.double(), a.double()) == pytest.approx(float(values.norm()), rel=1e-12)


@pytest.mark.parametrize("sides", [(3, 6), (6, 3)])
def test_a_layer_that_is_narrower_than_the_rank_loses_nothing(sides: tuple[int, int]) -> None:
    """A file may hold a rank that its narrowest layer has no room for."""
    a, b = drawn(8, sides[1], seed=1), drawn(sides[0], 8, seed=2)
    made, lost = shrunk(Factors(recipe(a), recipe(b), alpha=4.0), 5)
    assert made.rank == 3 and made.scaling == 0.5 and lost == pytest.approx(0, abs=1e-12)
    assert torch.allclose(made.b.make() @ made.a.make(), b @ a)
