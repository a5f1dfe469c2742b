"""An adapter of a lower rank: the layers above it alone, each the nearest, and what is lost is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainer.adapters.portable import Factors, Portable, recipe
from trainer.base.errors import UserError
from workbench.adapter_files.opening import OpenedAdapter, open_adapter, published
from workbench.adapter_files.reading import ReadAdapter
from workbench.adapters.resize import resize

BLOCK = "unet.mid_block.attentions.0.transformer_blocks.0.attn1"


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def opened(ranks: tuple[int, ...], alpha: float = 2.0) -> OpenedAdapter:
    layers = {
        f"{BLOCK}.to_{part}": Factors(recipe(drawn(n, rank, 1280)), recipe(drawn(n + 9, 1280, rank)), alpha)
        for n, (part, rank) in enumerate(zip("qkv", ranks, strict=True))
    }
    of = published("sdxl")[0]
    return OpenedAdapter(Path("a.safetensors"), of, (of.label,), ReadAdapter(Portable(layers)))


def change(factors: Factors) -> torch.Tensor:
    return factors.scaling * factors.b.make().double() @ factors.a.make().double()


def test_each_layer_above_the_rank_becomes_the_nearest_of_it(tmp_path: Path) -> None:
    before, out = opened((6, 3, 2)), tmp_path / "a.safetensors"
    done = resize(before, out, 3)
    after = open_adapter(out, family="sdxl").portable.layers
    assert [factors.rank for factors in after.values()] == [3, 3, 2]
    for name, factors in before.portable.layers.items():
        wanted = change(factors)
        if factors.rank > 3:
            q_b, r_b = torch.linalg.qr(factors.b.make().double())
            q_a, r_a = torch.linalg.qr(factors.a.make().double().t())
            u, s, vh = torch.linalg.svd(factors.scaling * r_b @ r_a.t())
            wanted = q_b @ u[:, :3] @ torch.diag(s[:3]) @ vh[:3] @ q_a.t()
            share = float(s[3:].norm() / s.norm())
        assert (change(after[name]) - wanted).norm() <= 1e-6 * wanted.norm(), name
    assert done.notes == [f"1 of 3 layers have rank 3 now; at most {share:.2%} of s B A is lost ({BLOCK}.to_q)"]


@pytest.mark.parametrize(("rank", "said"), [(6, "no layer has a rank above 6"), (9, "above 9"), (0, "a rank is at least 1")])
def test_a_rank_that_changes_nothing_is_refused(tmp_path: Path, rank: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        resize(opened((6, 3, 2)), tmp_path / "a.safetensors", rank)
    assert not list(tmp_path.iterdir())
