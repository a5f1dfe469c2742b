"""What the step asks of an objective, and what all objectives have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar

from torch import Tensor

from trainer.objectives.losses import Loss, sample_losses
from trainer.objectives.noise import Noise

Settings = TypeVar("Settings")


def from_choices(part: type[Settings], choices: Mapping[str, Any], **instead: Any) -> Settings:
    """A dataclass of what was chosen: its fields have the names of config keys. Of a key that is not there, the default."""
    given = {field.name: choices[field.name] for field in fields(part) if field.name in choices}
    return part(**given | instead)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What is noised how, what the model should predict of it, and the loss. Each kind of model has its own.

    stratified: whether the times of a global batch are spread over its strata (strata.py).
    """

    loss: Loss = Loss()
    noise: Noise = Noise()
    stratified: bool = False

    def time(self, u: Tensor, tokens: int) -> Tensor:
        """[B]: the times that u stands for. tokens: the number of image tokens, for shifts that depend on it."""
        raise NotImplementedError

    def time_at(self, share: Tensor) -> Tensor:
        """[B]: the time at each share, in (0, 1), of the whole range, whatever `time` draws."""
        raise NotImplementedError

    def noised(self, latents: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """What the model sees."""
        raise NotImplementedError

    def target(self, latents: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """What it should say."""
        raise NotImplementedError

    def weight(self, time: Tensor) -> Tensor:
        """fp32 [B]: what the loss of each sample is multiplied by."""
        raise NotImplementedError

    def describe(self) -> str:
        """The objective in words, for the start of a run."""
        raise NotImplementedError

    def progress(self, time: Tensor) -> Tensor:
        """float64 [B]: the share of the way to noise, 0 at the photo."""
        raise NotImplementedError

    def noise_to_signal(self, time: Tensor) -> Tensor:
        """float64 [B]: sigma = 1 / sqrt(SNR), infinite where there is no signal."""
        raise NotImplementedError

    def doubts(self) -> list[str]:
        """What of the choices works against another, for warnings."""
        return []

    def plain(self) -> Self:
        """The same path and times, with the mean squared error of plain noise: to compare runs by."""
        return replace(self, loss=Loss(), noise=Noise(), stratified=False)

    def losses(
        self, prediction: Tensor, latents: Tensor, noise: Tensor, time: Tensor, loss_weights: Tensor | None = None
    ) -> Tensor:
        """fp32 [B], on the prediction's device. loss_weights: fp32 [B, H, W], or None."""
        scheduled = self.loss.needs_threshold
        threshold = self.loss.threshold(self.progress(time), self.noise_to_signal(time)) if scheduled else None
        device = prediction.device
        return sample_losses(
            prediction,
            self.target(latents, noise, time),
            self.weight(time).to(device),
            loss_weights,
            loss=self.loss,
            threshold=None if threshold is None else threshold.to(device),
        )

    def extras(self) -> str:
        """The part of `describe` that is the same for all: what is not the default."""
        return self.loss.describe() + self.noise.describe() + (", stratified" if self.stratified else "")
