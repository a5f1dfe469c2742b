"""What two adapters change, side by side: how far apart block by block, ranks, and what only one of them has.

Of a LoRA the change of a layer is s B A, compared without making it. Of a DoRA it is g (W + s B A) - W: that takes W.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

import torch

from trainer.adapters.portable import Factors, Portable
from trainer.base.console import shortlist
from trainer.base.errors import UserError
from trainer.monitoring.weight_change import block_of
from workbench.adapters.convert import WeightOf, change_of
from workbench.adapters.ranks import product_norm

SHOWN = 12  # lines of a list


@dataclass
class Differences:
    """The differences of one block, or of all: sums of squares of what A changes, and of what both differ by; ranks by how
    many layers."""

    change_sq: float = 0.0
    difference_sq: float = 0.0
    ranks: Counter[tuple[int, int]] = field(default_factory=Counter)

    @property
    def relative(self) -> float:
        """||dA - dB|| / ||dA||; infinite where A changes nothing and B does."""
        if self.change_sq == 0:
            return math.inf if self.difference_sq else 0.0
        return math.sqrt(self.difference_sq / self.change_sq)


@dataclass
class Comparison:
    """Two adapters side by side. blocks: in the order of A. bits: whether all tensors, scales and meanings are equal,
    whatever the files are."""

    blocks: dict[str, Differences]
    only_a: list[str]
    only_b: list[str]
    bits: bool

    @property
    def whole(self) -> Differences:
        """The differences of all blocks together."""
        total = Differences()
        for block in self.blocks.values():
            total.change_sq += block.change_sq
            total.difference_sq += block.difference_sq
            total.ranks += block.ranks
        return total

    def lines(self) -> list[str]:
        """The comparison in lines, for people."""
        lines = ["every tensor and scale is equal, bit for bit"] if self.bits else []
        if self.blocks:
            lines.append(f"||dA - dB|| / ||dA|| of the layers that both have: {self.whole.relative:.4%}")
            lines += [
                f"  {block}: {errors.relative:.4%}; rank {', '.join(_rank(ranks) for ranks in errors.ranks)}"
                for block, errors in self.blocks.items()
            ]
        else:
            lines.append("they have no layer in common")
        for which, names in (("A", self.only_a), ("B", self.only_b)):
            if names:
                lines.append(f"only {which} has {len(names)} layers: {shortlist(names, SHOWN)}")
        return lines


def _rank(ranks: tuple[int, int]) -> str:
    return str(ranks[0]) if ranks[0] == ranks[1] else f"{ranks[0]} and {ranks[1]}"


def compare(a: Portable, b: Portable, weight: WeightOf | None = None) -> Comparison:
    """A compared with B, layer by layer. weight: of the base model, for a DoRA. Raises UserError where it is needed, or
    the layers have other shapes."""
    both = [name for name in a.layers if name in b.layers]
    blocks: dict[str, Differences] = {}
    for name in both:
        one, other = a.layers[name], b.layers[name]
        if one.weight_shape != other.weight_shape:
            raise UserError(
                f"{name} is for a weight {list(one.weight_shape)} in A and {list(other.weight_shape)} in B: "
                "they are for models of different sizes"
            )
        block = blocks.setdefault(block_of(name), Differences())
        change, difference = _norms(name, a, b, weight)
        block.change_sq += change**2
        block.difference_sq += difference**2
        block.ranks[one.rank, other.rank] += 1
    only = [[name for name in x.layers if name not in y.layers] for x, y in ((a, b), (b, a))]
    same = a.layers.keys() == b.layers.keys() and (a.meaning == b.meaning or not a.kind.magnitudes)
    return Comparison(blocks, *only, same and all(_same(a.layers[name], b.layers[name]) for name in both))


def _norms(name: str, a: Portable, b: Portable, weight: WeightOf | None) -> tuple[float, float]:
    """(||dA||, ||dA - dB||) of one layer."""
    one, other = a.layers[name], b.layers[name]
    if one.magnitude is None and other.magnitude is None:
        (b_1, a_1), (b_2, a_2) = _factors(one), _factors(other)
        return product_norm(b_1, a_1), product_norm(torch.cat([b_1, -b_2], 1), torch.cat([a_1, a_2]))
    if weight is None:
        raise UserError("what a DoRA changes depends on the model that it was trained over: give it with --base")
    w = weight(name)
    change_a, change_b = (change_of(w, portable.layers[name], portable.meaning) for portable in (a, b))
    return float(change_a.norm()), float((change_a - change_b).norm())


def _factors(factors: Factors) -> tuple[torch.Tensor, torch.Tensor]:
    """(s B, A), fp64."""
    return factors.scaling * factors.b.make().double().flatten(1), factors.a.make().double().flatten(1)


def _same(one: Factors, other: Factors) -> bool:
    mine, theirs = one.tensors(), other.tensors()
    if mine.keys() != theirs.keys() or (one.scaling, one.axis) != (other.scaling, other.axis):
        return False
    return all(_equal(mine[kind].make(), theirs[kind].make()) for kind in mine)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(tensor.contiguous().view(torch.uint8) for tensor in (one, other)))
