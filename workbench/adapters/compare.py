"""Compares two adapters: the distance of their changes block by block, ranks, layers of only one. A LoRA changes a layer by
s B A, compared without forming it; a DoRA by g (W + s B A) - W, which takes W."""

from collections import Counter
from dataclasses import dataclass, field

import torch

from trainer.adapters.portable import Factors, Portable
from trainer.base.console import shortlist
from trainer.base.errors import UserError
from trainer.monitoring.weight_change import block_of
from workbench.adapters.convert import WeightOf, change_of
from workbench.adapters.ranks import Residual, matrices, product_norm

SHOWN = 12  # lines of a list


@dataclass
class Comparison:
    """Two adapters A and B. whole, blocks: ||dA - dB|| and ||dA||, in all and by block in the order of A. ranks: by block,
    the count of layers by (A's rank, B's). bits: whether all tensors, scales and meanings are equal, whatever the formats."""

    only_a: list[str]
    only_b: list[str]
    bits: bool
    whole: Residual = field(default_factory=Residual)
    blocks: dict[str, Residual] = field(default_factory=dict)
    ranks: dict[str, Counter[tuple[int, int]]] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """The comparison as text."""
        lines = ["every tensor and scale is equal, bit for bit"] if self.bits else []
        if self.blocks:
            lines.append(f"||dA - dB|| / ||dA|| of the layers that both have: {self.whole.share:.4%}")
            lines += [
                f"  {block}: {loss.share:.4%}; rank {', '.join(map(_rank, self.ranks[block]))}"
                for block, loss in self.blocks.items()
            ]
        else:
            lines.append("they have no layer in common")
        for which, names in (("A", self.only_a), ("B", self.only_b)):
            if names:
                lines.append(f"only {which} has {len(names)} layers: {shortlist(names, SHOWN)}")
        return lines


def _rank(ranks: tuple[int, int]) -> str:
    return " and ".join(map(str, dict.fromkeys(ranks)))


def compare(a: Portable, b: Portable, weight: WeightOf | None = None) -> Comparison:
    """Compare A with B, layer by layer. weight: of the base model, for a DoRA. Raises UserError if it is missing, or if the
    layers' shapes differ."""
    shared = [name for name in a.layers if name in b.layers]
    bits = a.layers.keys() == b.layers.keys() and (a.meaning == b.meaning or not a.kind.magnitudes)
    bits = bits and all(_equal_bits(a.layers[name], b.layers[name]) for name in shared)
    only_a, only_b = ([name for name in x.layers if name not in y.layers] for x, y in ((a, b), (b, a)))
    comparison = Comparison(only_a, only_b, bits)
    for name in shared:
        one, other = a.layers[name], b.layers[name]
        if one.weight_shape != other.weight_shape:
            shapes = f"a weight {list(one.weight_shape)} in A and {list(other.weight_shape)} in B"
            raise UserError(f"{name} is for {shapes}: they are for models of different sizes")
        change, difference = _norms(name, a, b, weight)
        for loss in (comparison.whole, comparison.blocks.setdefault(block := block_of(name), Residual())):
            loss.add(name, difference, change)
        comparison.ranks.setdefault(block, Counter())[one.rank, other.rank] += 1
    return comparison


def _norms(name: str, a: Portable, b: Portable, weight: WeightOf | None) -> tuple[float, float]:
    """(||dA||, ||dA - dB||) of one layer."""
    one, other = a.layers[name], b.layers[name]
    if one.magnitude is None and other.magnitude is None:
        (a_1, b_1), (a_2, b_2) = matrices(one), matrices(other)
        b_1, b_2 = one.scaling * b_1, other.scaling * b_2
        return product_norm(b_1, a_1), product_norm(torch.cat([b_1, -b_2], 1), torch.cat([a_1, a_2]))
    if weight is None:
        raise UserError("what a DoRA changes depends on the model that it was trained over: give it with --base")
    w = weight(name)
    change_a, change_b = (change_of(w, portable.layers[name], portable.meaning) for portable in (a, b))
    return float(change_a.norm()), float((change_a - change_b).norm())


def _equal_bits(one: Factors, other: Factors) -> bool:
    mine, theirs = one.tensors(), other.tensors()
    if mine.keys() != theirs.keys() or (one.scaling, one.axis) != (other.scaling, other.axis):
        return False
    return all(_equal(mine[kind].make(), theirs[kind].make()) for kind in mine)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(tensor.contiguous().view(torch.uint8) for tensor in (one, other)))
