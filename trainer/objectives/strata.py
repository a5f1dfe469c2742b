"""Draws of an update, spread evenly: stratified sampling, with a stratum for each sample.

As the low-discrepancy sampler of Kingma et al. 2021, arXiv 2107.00630, but with each sample's own draw inside its stratum,
and with the strata dealt out by chance: neighbours in the update have neither neighbouring nor opposite times.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.base import draws
from trainer.objectives.noise import Key


def stratified(u: Tensor, keys: Sequence[Key], update: Sequence[Key], seed: int) -> Tensor:
    """float64 [B], of u [B], the draws of samples with these keys: one for each of the N equal strata of (0, 1).

    update: the keys of the N samples of the update, in any order. A sample's stratum is the rank of its draw "stratum" among
    theirs, which makes every way of dealing them out equally likely, so each draw is uniform; u is its place inside.
    """
    count = len(update)
    dealt = sorted(map(tuple, update), key=lambda key: (draws.uniform(seed, "stratum", *key), key))
    ranks = {key: rank for rank, key in enumerate(dealt)}
    strata = torch.tensor([ranks[tuple(key)] for key in keys], dtype=torch.float64)
    # Below 1 also where the sum is rounded.
    return ((strata + u) / count).clamp_max(1 - 2.0**-53)
