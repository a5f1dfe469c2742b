"""Two adapters side by side: how far apart they are, against dense changes in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.adapters.portable import Factors, Portable, recipe
from trainer.base.errors import UserError
from workbench.adapters.compare import compare


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def lora(seed: int, rank: int, alpha: float, shape: tuple[int, int] = (12, 10)) -> Factors:
    return Factors(recipe(drawn(seed, rank, shape[1])), recipe(drawn(seed + 1, shape[0], rank)), alpha)


def change(factors: Factors) -> torch.Tensor:
    return factors.alpha / factors.rank * factors.b.make().double() @ factors.a.make().double()


A1, A2, B1, B2 = "unet.mid_block.a", "unet.mid_block.b", "unet.up_blocks.0.a", "unet.up_blocks.0.b"


def test_how_far_apart_two_loras_are() -> None:
    """Block by block, of what the first one changes; layers of one alone are named and not counted."""
    a = Portable({A1: lora(0, 4, 2.0), A2: lora(2, 4, 2.0), B1: lora(4, 3, 3.0), B2: lora(6, 3, 3.0)})
    b = Portable({A1: lora(8, 2, 4.0), A2: a.layers[A2], B1: lora(10, 3, 3.0), "unet.conv_in": lora(12, 1, 1.0)})
    found = compare(a, b)
    changes, differences = ({}, {})
    for name in (A1, A2, B1):
        changes[name] = float(change(a.layers[name]).square().sum())
        differences[name] = float((change(a.layers[name]) - change(b.layers[name])).square().sum())
    of = {"unet.mid_block": (A1, A2), "unet.up_blocks.0": (B1,), "whole": (A1, A2, B1)}
    assert list(found.blocks) == ["unet.mid_block", "unet.up_blocks.0"]
    for block, names in of.items():
        own = found.whole if block == "whole" else found.blocks[block]
        expected = math.sqrt(sum(differences[name] for name in names) / sum(changes[name] for name in names))
        assert own.share == pytest.approx(expected, rel=1e-12), block
    assert found.ranks["unet.mid_block"] == {(4, 2): 1, (4, 4): 1}
    assert (found.only_a, found.only_b, found.bits) == ([B2], ["unet.conv_in"], False)


def test_equal_ones_are_zero_apart() -> None:
    """Also where the same change has another scale, which is no equal file."""
    one = lora(0, 4, 2.0)
    other = Factors(one.a, recipe(one.b.make() * 2), 1.0)
    same, scaled = (compare(Portable({A1: one}), Portable({A1: each})) for each in (one, other))
    assert same.bits and not scaled.bits
    assert not compare(Portable({A1: one}), Portable({A1: Factors(one.a, one.b, 4.0)})).bits
    assert same.whole.share <= 1e-7 and scaled.whole.share <= 1e-7, "the root of what rounding leaves"
    nothing = Factors(one.a, recipe(torch.zeros(12, 4)), 2.0)
    assert compare(Portable({A1: nothing}), Portable({A1: one})).whole.share == math.inf
    with pytest.raises(UserError, match="models of different sizes"):
        compare(Portable({A1: one}), Portable({A1: lora(0, 4, 2.0, (12, 11))}))
