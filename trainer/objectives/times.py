"""How times are drawn: from u, uniform in (0, 1), by the inverse of a distribution function. t = 0 is the photo, 1 is noise.

  uniform: t = u.
  logit_normal (Esser et al. 2024, arXiv 2403.03206, 3.1): t = sigmoid(mean + std z), z standard normal.
  sigmoid: the same, under the name that other trainers have for it without a shift.
  mode (the same): f(u') = 1 - u' - s (cos^2(pi u' / 2) - 1 + u'), s = mode_scale; u' = 1 - u, so that t rises with u.
  cosmap (the same): t = 1 - 1 / (tan(pi u / 2) + 1), of density 2 / (pi - 2 pi t + 2 pi t^2).
  power: t = u^(1 / power), of density power * t^(power - 1), which is Beta(power, 1): above 1 noise is drawn more often.

A range narrows a distribution to the times in it, and keeps their proportions: u becomes F(low) + u (F(high) - F(low)).

Stratified draws are spread evenly over an update, as by the low-discrepancy sampler of Kingma et al. 2021, arXiv 2107.00630,
but with each sample's own draw inside its stratum, and with the strata dealt out at random: neighbours in the update have
neither neighbouring nor opposite times.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from trainer.base import draws
from trainer.base.errors import UserError
from trainer.objectives.noise import Key

# The least share of a distribution's times that a range may contain: a smaller one is a mistake.
LEAST = 1e-6
# The middle half of the times must be this far from the photo and from noise. Beyond it fp32 cannot tell many of them apart.
MARGIN = 1e-4
QUARTILES = torch.tensor([0.25, 0.75], dtype=torch.float64)


def stratified(u: Tensor, keys: Sequence[Key], update: Sequence[Key], seed: int) -> Tensor:
    """Uniform draws u [B] of samples with these keys, moved into N equal strata of (0, 1), one for each of the update's
    samples.

    update: the keys of its N samples, in any order. A sample's stratum is the rank of its draw "stratum" among theirs: every
    assignment is equally likely, so each result is uniform. u is the place inside the stratum.
    """
    count = len(update)
    ordered = sorted(map(tuple, update), key=lambda key: (draws.uniform(seed, "stratum", *key), key))
    ranks = {key: rank for rank, key in enumerate(ordered)}
    strata = torch.tensor([ranks[tuple(key)] for key in keys], dtype=torch.float64)
    # Below 1 also if the sum is rounded up.
    return ((strata + u) / count).clamp_max(1 - 2.0**-53)


@dataclass(frozen=True)
class Times:
    """A distribution of times by the config's fields. t_range: shares of the way to noise, as the model sees times."""

    timesteps: str = "uniform"
    logit_mean: float = 0.0
    logit_std: float = 1.0
    mode_scale: float = 1.29
    power: float = 1.0
    t_range: tuple[float, float] = (0.0, 1.0)

    @property
    def is_whole(self) -> bool:
        """Whether all times may be drawn."""
        return tuple(self.t_range) == (0.0, 1.0)

    def draw(self, u: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Times float64 [B] within [low, high], rising with u."""
        u = u.double()
        if (low, high) != (0.0, 1.0):
            first, last = self.share_below(low), self.share_below(high)
            u = first + (last - first) * u
        return DISTRIBUTIONS[self.timesteps].quantile(self, u)

    def share_below(self, t: float) -> float:
        """The share of the whole distribution's times that are below t."""
        return t if t in (0.0, 1.0) else DISTRIBUTIONS[self.timesteps].share_below(self, t)

    def check(self, low: float, high: float, transform: Callable[[Tensor], Tensor] = lambda t: t, **settings: float) -> None:
        """Raises UserError if the range leaves next to no times, or nearly all are those of photos or of plain noise.

        low, high: `draw`'s. transform: from drawn times to those that the model sees; it rises. settings: its arguments by
        config key; 1 changes nothing.
        """
        share = self.share_below(high) - self.share_below(low)
        if share < LEAST:
            raise UserError(
                f"objective.t_range = {list(self.t_range)} leaves no timestep: of a million that {self.timesteps} times "
                f"draw, {1e6 * share:.2g} are in it; widen it, or choose another objective.timesteps"
            )
        first, last = transform(self.draw(QUARTILES, low, high)).tolist()
        if first < MARGIN or last > 1 - MARGIN:
            values = {key: getattr(self, key) for key in DISTRIBUTIONS[self.timesteps].reads} | settings
            defaults = {key: getattr(Times, key, 1.0) for key in values}
            remedies = {
                f"objective.{key} = {value:g}": f"bring objective.{key} nearer to {defaults[key]:g}"
                for key, value in values.items()
                if value != defaults[key]
            }
            if not self.is_whole:
                remedies[f"objective.t_range = {list(self.t_range)}"] = "widen objective.t_range"
            raise UserError(
                f"{', '.join(remedies)}: the middle half of the {self.timesteps} times is from {first:.3g} to {last:.6g}; it "
                f"must be within {MARGIN:g} and {1 - MARGIN:g}, or the model sees little but photos or plain noise; "
                + " or ".join(remedies.values())
            )

    def describe(self) -> str:
        """The distribution in words."""
        values = ", ".join(f"{getattr(self, key):g}" for key in DISTRIBUTIONS[self.timesteps].reads)
        within = "" if self.is_whole else " from {:g} to {:g}".format(*self.t_range)
        return self.timesteps + (f"({values})" if values else "") + f" timesteps{within}"


def _mode(times: Times, u: Tensor) -> Tensor:
    return u - times.mode_scale * (torch.sin(math.pi / 2 * u).square() - u)


def _share_below_mode(times: Times, t: float) -> float:
    """The inverse of `_mode`, by bisection: it has no closed form."""
    low, high = torch.tensor([0.0, 1.0], dtype=torch.float64)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _mode(times, middle) < t else (low, middle)
    return float(low)


def _logit_normal(times: Times, u: Tensor) -> Tensor:
    return torch.sigmoid(times.logit_mean + times.logit_std * torch.special.ndtri(u))


def _share_below_logit_normal(times: Times, t: float) -> float:
    return NormalDist(times.logit_mean, times.logit_std).cdf(math.log(t) - math.log1p(-t))


@dataclass(frozen=True)
class Distribution:
    """A distribution of times. quantile: u -> t. share_below: t -> u, its inverse. reads: the fields of Times for both."""

    quantile: Callable[[Times, Tensor], Tensor]
    share_below: Callable[[Times, float], float]
    reads: tuple[str, ...] = ()


_LOGIT_NORMAL = Distribution(_logit_normal, _share_below_logit_normal, ("logit_mean", "logit_std"))
DISTRIBUTIONS = {
    "uniform": Distribution(lambda times, u: u, lambda times, t: t),
    "logit_normal": _LOGIT_NORMAL,
    "sigmoid": _LOGIT_NORMAL,
    "mode": Distribution(_mode, _share_below_mode, ("mode_scale",)),
    "cosmap": Distribution(
        lambda times, u: 1 - 1 / (torch.tan(math.pi / 2 * u) + 1), lambda times, t: 2 / math.pi * math.atan(t / (1 - t))
    ),
    "power": Distribution(lambda times, u: u ** (1 / times.power), lambda times, t: t**times.power, ("power",)),
}
