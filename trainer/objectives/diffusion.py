"""Diffusion over discrete steps: DDPM (Ho et al. 2020, arXiv 2006.11239).

x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) noise, integer t in [0, T).
  epsilon: target = noise.   v (Salimans and Ho 2022, arXiv 2202.00512): target = sqrt(abar_t) noise - sqrt(1 - abar_t) x_0.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from trainer.base.errors import UserError
from trainer.objectives.base import AtTime, Objective, by_sample
from trainer.objectives.noise import noise_schedule
from trainer.objectives.times import Times
from trainer.objectives.weighting import Weighting


@dataclass(frozen=True)
class Diffusion(Objective):
    """DDPM with integer timesteps. alphas_cumprod: float64 [T]."""

    alphas_cumprod: Tensor
    prediction: Literal["epsilon", "v"]
    weighting: Weighting = Weighting()
    times: Times = Times("uniform")
    zero_terminal_snr: bool = field(init=False)  # the last timestep holds no signal

    def __post_init__(self) -> None:
        object.__setattr__(self, "zero_terminal_snr", bool(self.alphas_cumprod[-1] == 0))
        first, last = self._range
        if last < first:
            raise UserError(
                f"objective.t_range = {list(self.times.t_range)} leaves no timestep: none of the {len(self.alphas_cumprod)} "
                "is in it; widen it"
            )
        self.times.check(*self._shares)

    @property
    def _range(self) -> tuple[int, int]:
        """The first and the last timestep with t / T in [low, high)."""
        # 0.07 * 100 is a little more than 7.
        low, high = (math.ceil(round(share * len(self.alphas_cumprod), 6)) for share in self.times.t_range)
        return low, high - 1

    @property
    def _shares(self) -> tuple[float, float]:
        first, last = self._range
        return first / len(self.alphas_cumprod), (last + 1) / len(self.alphas_cumprod)

    @classmethod
    def from_scheduler(
        cls,
        scheduler: Mapping[str, Any],
        *,
        prediction: Literal["epsilon", "v"],
        zero_terminal_snr: bool,
        published: Mapping[str, Any],
        **others: Any,
    ) -> Self:
        """The objective for the noise schedule of a diffusers scheduler config. others: further fields of this class."""
        if zero_terminal_snr and prediction == "epsilon":
            raise UserError(
                "model.prediction = 'epsilon' is undefined at zero terminal SNR (the last step holds no signal); "
                "set model.prediction = 'v' or model.zero_terminal_snr = false"
            )
        alphas_cumprod = noise_schedule(scheduler, published=published, zero_terminal_snr=zero_terminal_snr)
        return cls(alphas_cumprod, prediction, **others)

    def time(self, u: Tensor, tokens: int) -> Tensor:
        """int64 [B]."""
        share = self.times.draw(u, *self._shares)
        return (share * len(self.alphas_cumprod)).long().clamp(*self._range)

    def time_at(self, share: Tensor) -> Tensor:
        return (share.double() * len(self.alphas_cumprod)).long().clamp_max(len(self.alphas_cumprod) - 1)

    def path(self, time: Tensor) -> tuple[Tensor, Tensor]:
        abar = self.alphas_cumprod[time]
        return abar.sqrt().float(), (1 - abar).sqrt().float()

    def target(self, latents: Tensor, noise: Tensor, at: AtTime) -> Tensor:
        return noise if self.prediction == "epsilon" else by_sample(at.signal) * noise - by_sample(at.sigma) * latents

    def weight(self, time: Tensor) -> Tensor:
        if self.weighting.name == "none":
            return torch.ones(len(time), dtype=torch.float32)
        abar = self.alphas_cumprod[time]
        return self.weighting.weight(abar / (1 - abar), self.prediction)

    def progress(self, time: Tensor) -> Tensor:
        return time.double() / len(self.alphas_cumprod)

    def noise_to_signal(self, time: Tensor) -> Tensor:
        abar = self.alphas_cumprod[time]
        return ((1 - abar) / abar).sqrt()

    def plain(self) -> Self:
        return replace(super().plain(), weighting=Weighting())

    def doubts(self) -> list[str]:
        if not self.zero_terminal_snr:
            return []
        doubts, name = [], self.weighting.name
        if name != "none":
            doubts.append(
                f"objective.weighting = {name!r} gives the last timestep, which has no signal, a weight of 0: what zero "
                "terminal SNR is for is not trained; set objective.weighting = 'none' and leave min_snr_gamma out"
            )
        for key in ("noise_offset", "multires_noise_iterations"):
            if getattr(self.noise, key):
                doubts.append(
                    f"objective.{key} beside zero terminal SNR: both are for images darker and lighter than the mean, and "
                    "samples begin at plain noise, which the last timestep is then not trained on; leave one of them out"
                )
        return doubts

    def describe(self) -> str:
        terminal = ", zero terminal SNR" if self.zero_terminal_snr else ""
        return f"{self.prediction}-prediction, {self.times.describe()}{terminal}{self.weighting.describe()}{self.extras()}"
