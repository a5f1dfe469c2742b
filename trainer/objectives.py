"""The training objectives, pure: same inputs, same loss. No model, no random state, no config.

DDPM (Ho et al. 2020, arXiv 2006.11239): x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) noise, integer t in [0, T).
  epsilon: target = noise.   v (Salimans and Ho 2022, arXiv 2202.00512): target = sqrt(abar_t) noise - sqrt(1 - abar_t) x_0.
  min-SNR-gamma (Hang et al. 2023, arXiv 2303.09556): weight min(SNR, gamma) / SNR for epsilon, / (SNR + 1) for v.
  Zero terminal SNR (Lin et al. 2023, arXiv 2305.08891): sqrt(abar) shifted and scaled so that abar_{T-1} = 0.
Rectified flow (Liu et al. 2022, arXiv 2209.03003; Esser et al. 2024, arXiv 2403.03206): x_t = (1 - t) x_0 + t noise,
  target = noise - x_0, t in (0, 1); logit-normal t = sigmoid(mean + std z); shift t' = s t / (1 + (s - 1) t).

Shapes: latents fp32 [B, C, H, W], time [B], u [B] uniform in (0, 1). Times, and what they weigh, stay on the CPU: to read
them from a device would make the host wait for it. What is made of latents is where these are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from trainer.errors import UserError

# What makes the noise schedule of a diffusers scheduler config.
BETAS = ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule")


class Objective(Protocol):
    """What the step asks of an objective. `tokens` is the number of image tokens, for shifts that depend on it."""

    def time(self, u: Tensor, tokens: int) -> Tensor: ...
    def noised(self, latents: Tensor, noise: Tensor, time: Tensor) -> Tensor: ...
    def target(self, latents: Tensor, noise: Tensor, time: Tensor) -> Tensor: ...
    def weight(self, time: Tensor) -> Tensor: ...
    def describe(self) -> str: ...


def sample_losses(prediction: Tensor, target: Tensor, weight: Tensor, loss_weights: Tensor | None = None) -> Tensor:
    """fp32 [B]: the weighted mean squared error of each sample.

    weight [B]: by the time. loss_weights [B, H, W]: of each latent, for all its channels. The mean is over all latents,
    whatever their weights: half a photo masked away halves its loss.
    """
    squares = (prediction.float() - target).square()
    if loss_weights is not None:
        squares = squares * loss_weights.unsqueeze(1)
    return squares.flatten(1).mean(1) * weight


@dataclass(frozen=True)
class Diffusion:
    """DDPM with integer timesteps. alphas_cumprod: float64 [T]."""

    alphas_cumprod: Tensor
    prediction: Literal["epsilon", "v"]
    min_snr_gamma: float | None = None
    zero_terminal_snr: bool = field(init=False)  # the last timestep holds no signal

    def __post_init__(self) -> None:
        object.__setattr__(self, "zero_terminal_snr", bool(self.alphas_cumprod[-1] == 0))

    @staticmethod
    def from_scheduler(
        scheduler: Mapping[str, Any],
        *,
        prediction: Literal["epsilon", "v"],
        zero_terminal_snr: bool,
        min_snr_gamma: float | None,
        published: Mapping[str, Any],
    ) -> Diffusion:
        """From a diffusers scheduler config (beta_schedule "scaled_linear" or "linear").

        published: what the published model's config has of BETAS, for a message.
        """
        if zero_terminal_snr and prediction == "epsilon":
            raise UserError(
                "model.prediction = 'epsilon' is undefined at zero terminal SNR (the last step holds no signal); "
                "set model.prediction = 'v' or model.zero_terminal_snr = false"
            )
        # A default would not be the one that the model was trained with, nor the one that another program samples with:
        # diffusers' classes disagree with models, and with one another.
        absent = [key for key in BETAS if scheduler.get(key) is None]
        if absent or scheduler.get("trained_betas") is not None:
            what = f"has no {' and no '.join(absent)}" if absent else "has trained_betas, which are not supported"
            raise UserError(
                f"the model's scheduler_config.json {what}: give {', '.join(BETAS)}; the published model's are "
                + ", ".join(repr(published[key]) for key in BETAS)
            )
        steps, start, end, schedule = (scheduler[key] for key in BETAS)
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
        return Diffusion(alphas_cumprod, prediction, min_snr_gamma)

    def time(self, u: Tensor, tokens: int) -> Tensor:
        """int64 [B], uniform over the T steps."""
        return (u.double() * len(self.alphas_cumprod)).long().clamp_max(len(self.alphas_cumprod) - 1)

    def _roots(self, time: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        abar = self.alphas_cumprod[time].view(-1, 1, 1, 1)
        return abar.sqrt().to(like), (1 - abar).sqrt().to(like)

    def noised(self, latents, noise, time):
        signal, sigma = self._roots(time, latents)
        return signal * latents + sigma * noise

    def target(self, latents, noise, time):
        if self.prediction == "epsilon":
            return noise
        signal, sigma = self._roots(time, latents)
        return signal * noise - sigma * latents

    def weight(self, time):
        """fp32 [B]. At zero SNR: 0 for v under min-SNR, as its limit."""
        if self.min_snr_gamma is None:
            return torch.ones(len(time), dtype=torch.float32)
        abar = self.alphas_cumprod[time]
        snr = abar / (1 - abar)
        capped = snr.clamp_max(self.min_snr_gamma)
        weight = capped / snr if self.prediction == "epsilon" else capped / (snr + 1)
        return weight.float()

    def describe(self) -> str:
        terminal = ", zero terminal SNR" if self.zero_terminal_snr else ""
        gamma = f", min-SNR gamma {self.min_snr_gamma:g}" if self.min_snr_gamma is not None else ""
        return f"{self.prediction}-prediction, uniform timesteps{terminal}{gamma}"


@dataclass(frozen=True)
class Flow:
    """Rectified flow. shift: a number, or a function of the number of image tokens, which is the family's."""

    timesteps: Literal["uniform", "logit_normal"] = "logit_normal"
    shift: float | Callable[[int], float] = 1.0
    logit_mean: float = 0.0
    logit_std: float = 1.0

    def time(self, u, tokens):
        """float32 [B] in (0, 1)."""
        t = u.double()
        if self.timesteps == "logit_normal":
            t = torch.sigmoid(self.logit_mean + self.logit_std * torch.special.ndtri(t))
        s = self.shift(tokens) if callable(self.shift) else self.shift
        return (s * t / (1 + (s - 1) * t)).float()

    def noised(self, latents, noise, time):
        t = time.view(-1, 1, 1, 1).to(latents)
        return (1 - t) * latents + t * noise

    def target(self, latents, noise, time):
        return noise - latents

    def weight(self, time):
        return torch.ones(len(time), dtype=torch.float32)

    def describe(self) -> str:
        shift = "resolution shift" if callable(self.shift) else f"shift {self.shift:g}"
        how = "" if self.timesteps == "uniform" else f"({self.logit_mean:g}, {self.logit_std:g})"
        return f"rectified flow, {self.timesteps}{how} timesteps, {shift}"
