"""Splits the adapter of a fused module (Flux's qkv, linear1) into its layers' adapters. Exact in every case.

The module's rows are its layers' rows, one layer after another. The zeros of B [sum N, R] distinguish two forms:

    block-diagonal   each column of B belongs to the rows of one layer: that layer gets these columns, and these rows of A.
                     This program and other converters join separate adapters so; the ranks add up.
    shared           any other B: each layer gets its rows of B, and all of A. Rank R each; a trained fused layer is so.

In the block-diagonal form layers may have different ranks, or rank 0. A column of zeros belongs to no rows: if equal ranks
for all layers explain the other columns, it goes to its layer by that; else to the layer of the column before.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from trainer.adapters.portable import Factors, derived


def split(factors: Factors, rows: Sequence[int], *, swap: bool = False) -> tuple[list[Factors | None], str]:
    """(each layer's factors, None if it has none; the form: "block-diagonal", "shared" or "" for one layer). Reads B. rows:
    of each layer. swap: the two halves of the module's rows are in the other order in the layer."""
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
    """The layer's factors. columns: its columns of B, consecutive."""
    a, b, m = factors.a, factors.b, factors.magnitude
    if m is not None and factors.axis == "output":
        m = derived(m, (count,), lambda t: t[start : start + count])
    first, last, rank = columns[0], columns[-1] + 1, len(columns)
    b = derived(b, (count, rank, *b.shape[2:]), lambda t: t[start : start + count, first:last].contiguous())
    # The same recipe object if all layers share one A: a writer then knows that they can be fused again.
    a = a if rank == factors.rank else derived(a, (rank, *a.shape[1:]), lambda t: t[first:last])
    # The scale stays. alpha * rank / R / rank is exact for powers of two; otherwise it may round.
    return replace(factors, a=a, b=b, magnitude=m, alpha=factors.scaling * rank, rslora=False, matrices={})


def _owners(b: torch.Tensor, rows: Sequence[int]) -> list[int] | None:
    """The layer's index for each column of B; None if B is not block-diagonal."""
    rank, flat = b.shape[1], b.flatten(1)
    used = [(part != 0).any(0) if part.dtype.itemsize > 1 else (part.float() != 0).any(0) for part in flat.split(list(rows))]
    is_used = torch.stack(used)  # [layers, R]
    counts = is_used.sum(0)
    if bool((counts > 1).any()):
        return None
    owners = [int(is_used[:, column].to(torch.uint8).argmax()) if counts[column] else -1 for column in range(rank)]
    if -1 in owners and rank % len(rows) == 0:
        even = [column * len(rows) // rank for column in range(rank)]
        if all(owner in (-1, expected) for owner, expected in zip(owners, even, strict=True)):
            return even
    for column in range(rank):  # a column of zeros goes with the one before; the first ones with the next
        if owners[column] == -1:
            owners[column] = owners[column - 1] if column else next((owner for owner in owners if owner >= 0), 0)
    return owners if owners == sorted(owners) else None
