"""The training objectives, pure: same inputs, same loss. No model, no random state, no config. See docs/objectives.md.

Shapes: latents fp32 [B, C, H, W], time [B], u [B] uniform in (0, 1). Times and their coefficients (AtTime) are made on the
CPU: to read them from a device would make the host wait for it. Tensors made from latents stay on the latents' device.
"""

from trainer.objectives.base import AtTime, Objective, from_choices
from trainer.objectives.diffusion import Diffusion
from trainer.objectives.flow import Flow
from trainer.objectives.losses import CustomLoss, Loss, sample_losses
from trainer.objectives.noise import Noise
from trainer.objectives.times import DISTRIBUTIONS, Times, stratified
from trainer.objectives.weighting import Weighting

# The config keys of every objective here; each has further keys of its own.
KEYS = tuple(
    f"objective.{name}"
    for name in (
        "timesteps", "logit_mean", "logit_std", "power", "t_range", "stratified", "loss", "huber_c", "huber_schedule",
        "input_perturbation",
    )
)  # fmt: skip

__all__ = [
    "DISTRIBUTIONS", "KEYS", "AtTime", "CustomLoss", "Diffusion", "Flow", "Loss", "Noise", "Objective", "Times", "Weighting",
    "from_choices", "sample_losses", "stratified",
]  # fmt: skip
