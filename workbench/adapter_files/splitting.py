"""One adapter of a fused module (Flux's qkv, linear1) as the adapters of its layers. Exact in every case.

The module's rows are its layers' rows, one layer after another. Two forms are told apart by the zeros of B [sum N, R]:

    block-diagonal   each column of B belongs to the rows of one layer: that layer gets these columns, and these rows of A.
                     So this program and other converters put separate adapters into one; the ranks add up.
    shared           any other B: each layer gets its rows of B, and all of A. Rank R each; so a fused layer is trained.

Layers of block-diagonal ones may have different ranks, or none at all. A column of zeros belongs to no rows: with as many
columns for each layer as it would take to be even, they go there; else to the layer before.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from trainer.adapters.portable import Factors, derived


def split(factors: Factors, rows: Sequence[int], *, swap: bool = False) -> tuple[list[Factors | None], str]:
    """(the adapter of each layer, None where it has none; which form it was: "block-diagonal", "shared" or ""). Reads B.
    rows: of each layer. swap: the two halves of the module's rows are the layer's in the other order."""
    if swap:
        factors = factors.swapped()
    if len(rows) == 1:
        return [factors], ""
    owners = _owners(factors.b.make(), rows)
    parts: list[Factors | None] = []
    for index, (start, count) in enumerate(zip(accumulate(rows, initial=0), rows, strict=False)):
        columns = range(factors.rank) if owners is None else [c for c, owner in enumerate(owners) if owner == index]
        parts.append(_part(factors, start, count, columns) if columns else None)
    return parts, "shared" if owners is None else "block-diagonal"


def _part(factors: Factors, start: int, count: int, columns: Sequence[int]) -> Factors:
    """columns: the layer's, which follow one another."""
    a, b, m = factors.a, factors.b, factors.magnitude
    if m is not None and factors.axis == "output":
        m = derived(m, (count,), lambda t: t[start : start + count])
    first, last, rank = columns[0], columns[-1] + 1, len(columns)
    b = derived(b, (count, rank, *b.shape[2:]), lambda t: t[start : start + count, first:last].contiguous())
    # The very same recipe where all have one A, which tells a writer that they can be one again.
    a = a if rank == factors.rank else derived(a, (rank, *a.shape[1:]), lambda t: t[first:last])
    # The scale stays. Of a power of two, alpha * rank / R / rank has no rounding; of others it may have one.
    return replace(factors, a=a, b=b, magnitude=m, alpha=factors.scaling * rank, rslora=False, matrices={})


def _owners(b: torch.Tensor, rows: Sequence[int]) -> list[int] | None:
    """Of each column of B, the index of the layer whose rows it is in; None where B is not block-diagonal."""
    rank, flat = b.shape[1], b.flatten(1)
    held = [(part != 0).any(0) if part.dtype.itemsize > 1 else (part.float() != 0).any(0) for part in flat.split(list(rows))]
    inside = torch.stack(held)  # [layers, R]
    counts = inside.sum(0)
    if bool((counts > 1).any()):
        return None
    owners = [int(inside[:, column].to(torch.uint8).argmax()) if counts[column] else -1 for column in range(rank)]
    if -1 in owners and rank % len(rows) == 0:
        even = [column * len(rows) // rank for column in range(rank)]
        if all(owner in (-1, wanted) for owner, wanted in zip(owners, even, strict=True)):
            return even
    for column in range(rank):  # a column of zeros goes with the one before, the first ones with the one behind
        if owners[column] == -1:
            owners[column] = owners[column - 1] if column else next((owner for owner in owners if owner >= 0), 0)
    return owners if owners == sorted(owners) else None
