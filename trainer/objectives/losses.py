"""The loss of each latent, and of a sample.

With d = prediction - target, for each latent and channel:
  mse: d^2.
  huber: 2 c (sqrt(d^2 + c^2) - c), the pseudo-Huber loss (Khrapov et al. 2024, arXiv 2403.16728): about d^2 where |d| is far
    below the threshold c, about 2 c |d| far above it.
  smooth_l1: the same divided by c: about d^2 / c below the threshold, about 2 |d| above it.
The threshold depends on the time, with c the value at pure noise: constant: c; exponential: c^s, s the share of the way to
  noise; snr: (1 - c) / (1 + sigma)^2 + c, sigma = 1 / sqrt(SNR). The last two begin at 1, at the photo.
Formulas and names are those of sd-scripts. torch's huber_loss and smooth_l1_loss differ: they are made of two pieces.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Loss:
    """A loss by the config's fields."""

    loss: Literal["mse", "huber", "smooth_l1"] = "mse"
    huber_c: float = 0.1
    huber_schedule: Literal["constant", "exponential", "snr"] = "snr"

    @property
    def needs_threshold(self) -> bool:
        """Whether the loss has a threshold c; mse has none."""
        return self.loss != "mse"

    def threshold(self, progress: Tensor, noise_to_signal: Tensor) -> Tensor:
        """The threshold, fp32 [B], from float64 [B]."""
        c = self.huber_c
        if self.huber_schedule == "exponential":
            return (c**progress).float()
        if self.huber_schedule == "snr":
            return ((1 - c) / (1 + noise_to_signal).square() + c).float()
        return torch.full_like(progress, c).float()

    def errors(self, prediction: Tensor, target: Tensor, threshold: Tensor | None) -> Tensor:
        """Each latent's loss, like prediction and target [B, C, H, W]. threshold: [B], or None."""
        squares = (prediction - target).square()
        if threshold is None:
            return squares
        c = threshold.view(-1, 1, 1, 1)
        # sqrt(d^2 + c^2) - c = d^2 / (sqrt(d^2 + c^2) + c), which cancels nothing where d is small.
        steep = 2 * squares / (torch.sqrt(squares + c.square()) + c)
        return steep * c if self.loss == "huber" else steep

    def describe(self) -> str:
        """The loss in words, after a comma; "" for mse."""
        return f", {self.loss} loss (c {self.huber_c:g}, {self.huber_schedule})" if self.needs_threshold else ""


@dataclass(frozen=True, kw_only=True)
class CustomLoss(Loss):
    """A caller's loss. function: (prediction, target), fp32 [B, C, H, W], -> the loss of each latent."""

    function: Callable[[Tensor, Tensor], Tensor]

    def errors(self, prediction: Tensor, target: Tensor, threshold: Tensor | None) -> Tensor:
        return self.function(prediction, target)


def sample_losses(
    prediction: Tensor,
    target: Tensor,
    weight: Tensor,
    loss_weights: Tensor | None = None,
    *,
    loss: Loss = Loss(),
    threshold: Tensor | None = None,
) -> Tensor:
    """The weighted mean loss of each sample, fp32 [B].

    weight: [B], by the time. loss_weights: [B, H, W], of each latent, for all its channels. The mean is over all latents,
    whatever their weights: half a photo masked away halves its loss. threshold: [B], for losses that have one.
    """
    errors = loss.errors(prediction.float(), target, threshold)
    if loss_weights is not None:
        errors = errors * loss_weights.unsqueeze(1)
    return errors.flatten(1).mean(1) * weight
