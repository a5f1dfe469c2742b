"""The noise schedule of a diffusion model: abar_t, from its scheduler's config.

Zero terminal SNR (Lin et al. 2023, arXiv 2305.08891): sqrt(abar) shifted and scaled so that abar_{T-1} = 0.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.base.errors import UserError

# What makes the noise schedule of a diffusers scheduler config.
BETAS = ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule")
MOST_STEPS = 1_000_000  # a thousand times those of every model that we know


def noise_schedule(scheduler: Mapping[str, Any], *, published: Mapping[str, Any], zero_terminal_snr: bool) -> Tensor:
    """float64 [T], of a diffusers scheduler config (beta_schedule "scaled_linear" or "linear").

    published: what the published model's config has of BETAS, for a message. Raises UserError for another schedule.
    """
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
    if not (type(steps) is int and 1 <= steps <= MOST_STEPS):
        raise _refused("num_train_timesteps", steps, f"a whole number from 1 to {MOST_STEPS:,} is needed", published)
    for key, beta in (("beta_start", start), ("beta_end", end)):
        if not (type(beta) in (int, float) and 0 < beta < 1):
            raise _refused(key, beta, "a number between 0 and 1 is needed", published)
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


def _refused(key: str, value: Any, needed: str, published: Mapping[str, Any]) -> UserError:
    return UserError(
        f"the model's scheduler_config.json has {key} = {value!r:.80}: {needed}; the published model has {published[key]}"
    )
