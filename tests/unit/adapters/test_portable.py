"""An adapter in another number format: its matrices are rounded, its magnitudes are not, and what that takes is counted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.adapters import lokr
from trainer.adapters.portable import Factors, Portable, made_of, recipe
from trainer.base.errors import UserError


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]), st.integers(1, 5), st.integers(0, 2**31), st.booleans()
)
def test_what_the_rounding_takes_is_that_of_the_dense_product(dtype: torch.dtype, rank: int, seed: int, conv: bool) -> None:
    """In fp64, of the worst layer. One whose B is zero loses nothing."""
    a, b, m = drawn(seed, rank, 6, *([3, 3] if conv else [])), drawn(seed + 1, 8, rank), drawn(seed + 2, 8)
    layers = {
        "unet.a": Factors(recipe(a), recipe(b.view(8, rank, *([1, 1] if conv else []))), 2.0, magnitude=recipe(m)),
        "unet.b": Factors(recipe(a), recipe(torch.zeros(8, rank)), 2.0),
    }
    whole = Portable(layers)
    rounded = whole.rounded(dtype)
    exact = b.double() @ a.double().flatten(1)
    lost = (exact - b.to(dtype).double() @ a.to(dtype).double().flatten(1)).norm() / exact.norm()
    loss, name = whole.distance(rounded)
    assert loss == pytest.approx(float(lost), rel=1e-4, abs=1e-7) and name in ("unet.a", "")
    made = rounded.layers["unet.a"]
    assert torch.equal(made.a.make(), a.to(dtype)) and made.a.dtype == made.b.make().dtype == dtype
    assert made.magnitude is not None and torch.equal(made.magnitude.make(), m) and made.alpha == 2.0


@pytest.mark.parametrize("shape", [(6, 8), (6, 8, 3, 3)])
@pytest.mark.parametrize("decompose", ["none", "w2", "both"])
def test_what_the_rounding_takes_of_a_lokr_is_that_of_the_dense_product(shape: tuple[int, ...], decompose: str) -> None:
    sizes = lokr.shapes(shape, 1, decompose=decompose)
    values = {end: drawn(place, *size) for place, (end, size) in enumerate(sizes.items())}
    whole = Portable({"unet.a": made_of({end: recipe(value) for end, value in values.items()}, 0.5)})
    exact = lokr.product(values)
    lost = (exact - lokr.product({end: value.bfloat16() for end, value in values.items()})).norm() / exact.norm()
    assert whole.distance(whole.rounded(torch.bfloat16)) == (pytest.approx(float(lost), rel=1e-12), "unet.a")
    assert whole.distance(whole) == (0.0, "unet.a")


def test_a_lokr_is_rounded_in_its_own_matrices() -> None:
    held = {lokr.W1: recipe(drawn(0, 2, 2)), lokr.W2: recipe(drawn(1, 4, 3))}
    whole = Portable({"unet.a": made_of(held, 0.5)})
    made = whole.rounded(torch.float16).layers["unet.a"]
    assert {end: torch.equal(each.make(), held[end].make().half()) for end, each in made.matrices.items()} == dict.fromkeys(
        held, True
    )
    assert made.scaling == 0.5 and 0 < whole.distance(whole.rounded(torch.float16))[0] < 2e-3


def test_a_number_that_a_format_does_not_hold_is_named() -> None:
    whole = Portable({"unet.a": Factors(recipe(torch.full((1, 2), 7e4)), recipe(torch.ones(3, 1)), 1.0)})
    with pytest.raises(UserError, match="unet.a has numbers up to 70000, and torch.float16 goes to 65504; take bf16 or fp32"):
        whole.rounded(torch.float16).check_finite()
    whole.rounded(torch.bfloat16).check_finite()
