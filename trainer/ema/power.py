"""Power-function averages, and averages of any length made from stored ones after the training.

Karras et al. 2024, Analyzing and Improving the Training Dynamics of Diffusion Models (EDM2), arXiv 2312.02696: section 3.1,
3.2 and appendix C. Of weights theta(1), ..., theta(t), the average is sum of w_k theta(k) with

    w_k = (k / t)^(gamma + 1) - ((k - 1) / t)^(gamma + 1),

exactly what the recursion average <- average + (1 - (1 - 1/n)^(gamma + 1)) (theta(n) - average) gives for n = 1, ..., t: it
telescopes. Its length sigma_rel is the standard deviation of the profile, as a share of t.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch

from trainer.base.errors import UserError
from trainer.ema.running import NewShare

LONGEST = 12**-0.5  # sigma_rel of gamma = 0, the plain mean
# Of gamma = 998. In a run of 10,000 updates it is over the last ten of them; what is shorter is the weights themselves.
SHORTEST = 0.001
ROWS = 2**14  # of updates that are looked at together


def gamma_of(length: float) -> float:
    """gamma for sigma_rel = sqrt((gamma + 1) / ((gamma + 2)^2 (gamma + 3))) (appendix C.1): the root of a cubic that is at
    least 0.

    Raises UserError for a length that no average has, or below SHORTEST.
    """
    if not SHORTEST <= length <= LONGEST:
        raise UserError(
            f"no power-function average is made of the length {length}: give one from {SHORTEST} to {LONGEST:.6f}, the plain "
            "mean; what is shorter is the weights themselves"
        )
    square = length**-2
    return float(np.roots([1, 7, 16 - square, 12 - square]).real.max())


def power_function(length: float) -> NewShare:
    """The share of the n-th update in an average of this length: 1 - (1 - 1 / n)^(gamma + 1)."""
    exponent = gamma_of(length) + 1
    return lambda n: 1 - (1 - 1 / n) ** exponent


@dataclass(frozen=True)
class Profile:
    """An average of that length of the weights after the updates 1 to `updates`."""

    length: float
    updates: int

    def weights(self, first: int, last: int) -> torch.Tensor:
        """The weights of the updates first to last, counted from 1: fp64 [last - first + 1]."""
        edges = torch.arange(first - 1, last + 1, dtype=torch.float64).clamp_max(self.updates) / self.updates
        return (edges ** (gamma_of(self.length) + 1)).diff()


@dataclass(frozen=True)
class Fit:
    """A combination of stored averages, and how near it is. shares: of each stored average in the one that was asked for;
    their sum is 1.

    error: || w - w' || / || w ||, w the weights that were asked for, w' those of the combination.
    reach: sum |w - w'| / 2. Both sums of weights are 1: so no element is off by more than `reach` of what it ranged over in
    the training, largest - smallest.
    rounding: no element is off by more, as a share of the largest size that it had, because the averages are kept in fp32.
    """

    shares: tuple[float, ...]
    error: float
    reach: float
    rounding: float


def fit(stored: Sequence[Profile], wanted: Profile) -> Fit:
    """The combination of stored averages whose weights are nearest to the wanted ones, by least squares over all updates.

    Appendix C has the inner products of continuous profiles; here they are sums over the updates, what the averages really
    have. And here the shares' sum is held at 1: the average of equal weights is that weight.
    """
    last = max(profile.updates for profile in (*stored, wanted))
    order = sorted(range(len(stored)), key=lambda place: (stored[place].updates, stored[place].length))
    *others, newest = (stored[place] for place in order)
    # || w - sum of x_i w_i || with x_newest = 1 - the others: the triangle of a QR decomposition says the same in few rows.
    triangle = torch.zeros(0, len(others) + 1, dtype=torch.float64)
    for rows in _rows(last):
        base = newest.weights(*rows)
        columns = [profile.weights(*rows) - base for profile in (*others, wanted)]
        triangle = torch.linalg.qr(torch.cat([triangle, torch.stack(columns, 1)]), mode="r").R
    # Stored averages are almost the same function where they are close: the driver with singular values keeps shares small.
    solved = torch.linalg.lstsq(triangle[:, :-1], triangle[:, -1:], rcond=1e-10, driver="gelsd").solution.flatten().tolist()
    # By their places: after a step that was skipped two of them may have one profile.
    shares = [0.0] * len(stored)
    for place, share in zip(order, [*solved, 1 - sum(solved)], strict=True):
        shares[place] = share
    assert abs(sum(shares) - 1) <= 1e-12 * sum(map(abs, shares))
    off = size = reach = 0.0
    for rows in _rows(last):
        right = wanted.weights(*rows)
        delta = right - sum(share * profile.weights(*rows) for profile, share in zip(stored, shares, strict=True))
        off, size, reach = (
            off + float(delta.square().sum()),
            size + float(right.square().sum()),
            reach + float(delta.abs().sum()),
        )
    # Each update rounds three times (a difference, a product, a sum), which fades as the average does: (k/t)^(gamma+1).
    unit = 2.0**-24
    rounding = sum(
        abs(share) * 3 * unit * (1 + profile.updates / (gamma_of(profile.length) + 2))
        for profile, share in zip(stored, shares, strict=True)
    )
    return Fit(tuple(shares), sqrt(off / size), reach / 2, rounding + unit)


def _rows(last: int) -> Iterator[tuple[int, int]]:
    for first in range(1, last + 1, ROWS):
        yield first, min(last, first + ROWS - 1)
