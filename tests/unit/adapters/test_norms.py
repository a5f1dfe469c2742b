"""Exported magnitudes against dense weights in fp64, and norms that follow the adapter."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from tests.numerics.test_adapted_layers import network, with_adapter
from trainer.adapters import ADAPTER_NAME
from trainer.adapters.norms import Norms, RowNorms, magnitude, released_scale
from trainer.quantization import FORMATS


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def norms_of(original: torch.Tensor, stored: torch.Tensor, change: torch.Tensor) -> RowNorms:
    return RowNorms(*(tensor.norm(dim=1).float() for tensor in (stored, original, stored + change)))


def test_where_the_change_is_across_the_weights_the_magnitude_is_that_of_the_16_bit_model() -> None:
    """g ||W16 + s B A|| of rows to which s B A, and what the storage changed, are orthogonal."""
    original, a = drawn(6, 40, seed=0), drawn(2, 40, seed=1)
    stored = original * (1 + 0.05 * torch.arange(6)[:, None])
    a -= a @ torch.linalg.pinv(original) @ original
    b, m = drawn(6, 2, seed=2), drawn(6, seed=3).abs() + 1
    change = 0.5 * b @ a
    norms = norms_of(original, stored, change)
    g = m / (stored + change).norm(dim=1)
    found = magnitude(m.float(), a.float(), b.float(), 0.5, norms)
    assert torch.allclose(found.double(), g * (original + change).norm(dim=1), rtol=1e-4)
    assert torch.allclose(released_scale(m.float(), norms).double(), g * original.norm(dim=1), rtol=1e-5)
    same = RowNorms(norms.base, None, norms.adapted)
    assert torch.equal(magnitude(m.float(), a.float(), b.float(), 0.5, same), m.float())


def test_where_the_change_takes_most_of_a_row_away_none_is_zero_and_nothing_leaps() -> None:
    """The stored row is longer than the model's: what is left once s B A is taken away is less than the difference."""
    original = torch.ones(1, 16, dtype=torch.float64)
    stored, found = 1.2 * original, []
    for share in torch.linspace(0.0, 0.99, 200, dtype=torch.float64):
        a, b = original.clone(), -1.2 * share.view(1, 1)
        norms = norms_of(original, stored, b @ a)
        found.append(float(magnitude(torch.ones(1), a.float(), b.float(), 1.0, norms)) * float(norms.adapted))
    steps = torch.tensor(found).diff().abs()
    assert min(found) > 0 and steps.max() < 0.1 * max(found)


def test_norms_are_those_of_the_adapter_as_it_is_and_as_its_files_have_it() -> None:
    adapter = with_adapter(network(FORMATS["int8"]))
    norms = Norms(adapter, {}, {})
    before = norms.now()
    with torch.no_grad():
        for name, parameter in adapter.named_parameters().items():
            if "lora_B" in name:
                parameter.mul_(3)
    adapter.mark_stale()

    def exact() -> dict[str, torch.Tensor]:
        return {name: layer.current_norm(ADAPTER_NAME) for name, layer in adapter.layers.items()}

    now = norms.now()
    for name, wanted in exact().items():
        assert torch.equal(now[name].adapted, wanted) and not torch.equal(before[name].adapted, wanted)

    entered = []

    @contextmanager
    def used():
        entered.append(1)
        yield

    norms.used = used
    assert norms.state_dict()["held"] == {} and entered == [1]


@pytest.mark.parametrize("kind", ["base", "original"])
def test_norms_of_another_base_are_refused(kind: str) -> None:
    adapter = with_adapter(network(FORMATS["int8"]))
    norms = Norms(adapter, {}, {})
    state = norms.state_dict()
    norms.load_state_dict(state | {"net.2.adapted_norm": state["net.2.adapted_norm"] * 2})
    with pytest.raises(ValueError, match=f"net.2.{kind}_norm differs"):
        norms.load_state_dict(state | {f"net.2.{kind}_norm": state[f"net.2.{kind}_norm"] * 1.001})
    with pytest.raises(ValueError, match="the checkpoint's adapter is for"):
        norms.load_state_dict(state | {"held": {"unet": "nf4"}})
