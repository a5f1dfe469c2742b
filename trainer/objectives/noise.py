"""The noise of a sample, the noise that the model sees, and the noise schedule of diffusion.

Each draw is a pure function of (seed, purpose, key), on the CPU.
noise_offset (Guttenberg 2023, "Diffusion with Offset Noise"): noise + offset * z, one standard normal z for each channel.
multi-resolution noise (Whitaker 2023, "Multi-Resolution Noise for Diffusion Model Training", as sd-scripts has it):
  noise + sum over i of discount^i * (noise of size / r_i^i, scaled up bilinearly), r_i uniform in (2, 4), i = 0, 1, ...
  until a side has one latent; divided by its standard deviation, here each sample's own: a batch changes no sample.
Both change the noise itself, and so the target.
input_perturbation (Ning et al. 2023, arXiv 2301.11706): the model sees noise + gamma * z; the target keeps the noise alone.
The noise schedule of a diffusion model is abar_t, from its scheduler's config. Zero terminal SNR (Lin et al. 2023, arXiv
2305.08891): sqrt(abar) shifted and scaled so that abar_{T-1} = 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from trainer.base import draws
from trainer.base.errors import UserError

Key = Sequence[int | str]

# The keys of a diffusers scheduler config that determine its noise schedule.
BETAS = ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule")
MOST_STEPS = 1_000_000  # a thousand times those of every known model


@dataclass(frozen=True)
class Noise:
    """Noise by the config's fields; 0 is off."""

    noise_offset: float = 0.0
    multires_noise_iterations: int = 0
    multires_noise_discount: float = 0.3
    input_perturbation: float = 0.0

    def draw(self, shape: Sequence[int], seed: int, key: Key) -> Tensor:
        """The noise of one sample, fp32 [C, H, W]."""
        noise = draws.normal(tuple(shape), seed, "noise", *key)
        if self.multires_noise_iterations:
            noise = self._multires(noise, seed, key)
        if self.noise_offset:
            noise = noise + self.noise_offset * draws.normal((shape[0], 1, 1), seed, "noise_offset", *key)
        return noise

    def _multires(self, noise: Tensor, seed: int, key: Key) -> Tensor:
        channels, height, width = noise.shape
        ratios = draws.uniforms(self.multires_noise_iterations, seed, "noise_ratios", *key)
        for level, ratio in enumerate(ratios):
            shrunk = (2 + 2 * ratio) ** level
            size = max(1, int(height / shrunk)), max(1, int(width / shrunk))
            coarse = draws.normal((1, channels, *size), seed, "noise_level", *key, level)
            wide = interpolate(coarse, size=(height, width), mode="bilinear", align_corners=False)[0]
            noise = noise + self.multires_noise_discount**level * wide
            if 1 in size:
                break
        return noise / noise.std()

    def perturbation(self, shape: Sequence[int], seed: int, keys: Sequence[Key]) -> Tensor | None:
        """Added to the noise that the model sees, for samples with these keys: fp32 [B, C, H, W], or None for nothing."""
        if not self.input_perturbation:
            return None
        normal = [draws.normal(tuple(shape), seed, "input_perturbation", *key) for key in keys]
        return self.input_perturbation * torch.stack(normal)

    def describe(self) -> str:
        """The changes of the noise in words, after a comma; "" for none."""
        text = f", noise offset {self.noise_offset:g}" if self.noise_offset else ""
        if self.multires_noise_iterations:
            text += f", multi-resolution noise ({self.multires_noise_iterations} levels, {self.multires_noise_discount:g})"
        return text + (f", input perturbation {self.input_perturbation:g}" if self.input_perturbation else "")


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
