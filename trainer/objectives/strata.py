"""Draws of an update, spread evenly: the low-discrepancy sampler of Kingma et al. 2021, arXiv 2107.00630, jittered."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer import draws
from trainer.objectives.noise import Key


def stratified(u: Tensor, keys: Sequence[Key], update: Sequence[Key], seed: int) -> Tensor:
    """float64 [B], of u [B], the draws of samples with these keys: one for each of the N equal strata of (0, 1).

    update: the keys of the N samples of the update, in their order. The one at place j takes stratum (j + turn) mod N, with
    its own u inside it. turn is drawn for the update, by its first key, so that each draw is uniform whatever its place.
    """
    count, places = len(update), {tuple(key): place for place, key in enumerate(update)}
    turn = int(draws.uniform(seed, "stratum", *update[0]) * count)
    strata = torch.tensor([(places[tuple(key)] + turn) % count for key in keys], dtype=torch.float64)
    # Below 1 also where the sum is rounded.
    return ((strata + u) / count).clamp_max(1 - 2.0**-53)
