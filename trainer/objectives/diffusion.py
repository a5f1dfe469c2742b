"""Diffusion over discrete steps: DDPM (Ho et al. 2020, arXiv 2006.11239).

x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) noise, integer t in [0, T).
  epsilon: target = noise.   v (Salimans and Ho 2022, arXiv 2202.00512): target = sqrt(abar_t) noise - sqrt(1 - abar_t) x_0.
Zero terminal SNR (Lin et al. 2023, arXiv 2305.08891): sqrt(abar) shifted and scaled so that abar_{T-1} = 0.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from trainer.base.errors import UserError
from trainer.objectives.base import AtTime, Objective, by_sample
from trainer.objectives.times import Times
from trainer.objectives.weighting import Weighting

# The keys of a diffusers scheduler config that determine its noise schedule.
BETAS = ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule")
MOST_STEPS = 1_000_000  # a thousand times those of every known model


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


def noise_schedule(scheduler: Mapping[str, Any], *, published: Mapping[str, Any], zero_terminal_snr: bool) -> Tensor:
    """abar, float64 [T], of a diffusers scheduler config (beta_schedule "scaled_linear" or "linear"). published: the
    published model's values of BETAS, for messages. Raises UserError for another schedule."""
    # No defaults: diffusers' classes disagree with models, and with one another, so a default would be neither what the model
    # was trained with nor what another program samples with.
    absent = [key for key in BETAS if scheduler.get(key) is None]
    if absent or scheduler.get("trained_betas") is not None:
        problem = f"has no {' and no '.join(absent)}" if absent else "has trained_betas, which are not supported"
        raise UserError(
            f"the model's scheduler_config.json {problem}: give {', '.join(BETAS)}; the published model's are "
            + ", ".join(repr(published[key]) for key in BETAS)
        )
    steps, start, end, schedule = (scheduler[key] for key in BETAS)
    if not (type(steps) is int and 1 <= steps <= MOST_STEPS):
        raise _refusal("num_train_timesteps", steps, f"a whole number from 1 to {MOST_STEPS:,} is needed", published)
    for key, beta in (("beta_start", start), ("beta_end", end)):
        if not (type(beta) in (int, float) and 0 < beta < 1):
            raise _refusal(key, beta, "a number between 0 and 1 is needed", published)
    if schedule == "scaled_linear":
        betas = torch.linspace(start**0.5, end**0.5, steps, dtype=torch.float64).square()
    elif schedule == "linear":
        betas = torch.linspace(start, end, steps, dtype=torch.float64)
    else:
        raise UserError(f"the scheduler's beta_schedule = {schedule!r} is not supported; use scaled_linear or linear")
    alphas_cumprod = (1 - betas).cumprod(0)
    if zero_terminal_snr:
        root = alphas_cumprod.sqrt()
        alphas_cumprod = ((root - root[-1]) * root[0] / (root[0] - root[-1])).square()
    return alphas_cumprod


def _refusal(key: str, value: Any, rule: str, published: Mapping[str, Any]) -> UserError:
    return UserError(
        f"the model's scheduler_config.json has {key} = {value!r:.80}: {rule}; the published model has {published[key]}"
    )
