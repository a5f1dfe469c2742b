"""The base class of the objectives: the interface that the step calls, and their common part."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self, TypeVar

from torch import Tensor

from trainer.objectives.losses import Loss, sample_losses
from trainer.objectives.noise import Noise

Settings = TypeVar("Settings")


def from_choices(part: type[Settings], choices: Mapping[str, Any], **overrides: Any) -> Settings:
    """A dataclass whose fields are named as config keys, from the chosen values; a missing key has its default."""
    arguments = {field.name: choices[field.name] for field in fields(part) if field.name in choices}
    return part(**arguments | overrides)


class AtTime(NamedTuple):
    """An objective's coefficients at the times of a micro-batch: fp32 [B] each, made on the CPU and moved from there.

    signal, sigma: x_t = signal x_0 + sigma noise. weight: multiplies the loss of each sample. threshold: the loss's, or None.
    """

    signal: Tensor
    sigma: Tensor
    weight: Tensor
    threshold: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Objective:
    """How latents are noised, what the model should predict, and the loss. Each kind of model has its own objective.
    stratified: whether the times of a global batch are spread over strata (times.py)."""

    loss: Loss = Loss()
    noise: Noise = Noise()
    stratified: bool = False

    def time(self, u: Tensor, tokens: int) -> Tensor:
        """The times of u, [B]. tokens: the number of image tokens, for shifts that depend on it."""
        raise NotImplementedError

    def time_at(self, share: Tensor) -> Tensor:
        """The time at each share, in (0, 1), of the whole range [B], whatever `time` draws."""
        raise NotImplementedError

    def path(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """(signal, sigma) of each time, fp32 [B]: the factors of photo and noise."""
        raise NotImplementedError

    def target(self, latents: Tensor, noise: Tensor, at: AtTime) -> Tensor:
        """The value that the model should predict, like the latents."""
        raise NotImplementedError

    def weight(self, time: Tensor) -> Tensor:
        """The factor of each sample's loss, fp32 [B]."""
        raise NotImplementedError

    def describe(self) -> str:
        """The objective in words, for the start of a run."""
        raise NotImplementedError

    def progress(self, time: Tensor) -> Tensor:
        """The share of the way to noise, float64 [B]; 0 at the photo."""
        raise NotImplementedError

    def noise_to_signal(self, time: Tensor) -> Tensor:
        """1 / sqrt(SNR), float64 [B]; infinite without signal."""
        raise NotImplementedError

    def doubts(self) -> list[str]:
        """Warnings about choices that work against each other."""
        return []

    def plain(self) -> Self:
        """The same path and times with the mean squared error of plain noise, to compare runs."""
        return replace(self, loss=Loss(), noise=Noise(), stratified=False)

    def at(self, time: Tensor) -> AtTime:
        """The coefficients at these times, all on the CPU."""
        threshold = None
        if self.loss.needs_threshold:
            threshold = self.loss.threshold(self.progress(time), self.noise_to_signal(time))
        return AtTime(*self.path(time), self.weight(time), threshold)

    def noised(self, latents: Tensor, noise: Tensor, at: AtTime) -> Tensor:
        """The noised latents, which the model sees."""
        return by_sample(at.signal) * latents + by_sample(at.sigma) * noise

    def losses(
        self, prediction: Tensor, latents: Tensor, noise: Tensor, at: AtTime, loss_weights: Tensor | None = None
    ) -> Tensor:
        """Each sample's loss, fp32 [B]. All arguments are on one device. loss_weights: fp32 [B, H, W], or None."""
        target = self.target(latents, noise, at)
        return sample_losses(prediction, target, at.weight, loss_weights, loss=self.loss, threshold=at.threshold)

    def drift(self, prediction: Tensor, frozen: Tensor, at: AtTime) -> Tensor:
        """The loss of a prediction against the frozen model's, fp32 [B]; without a mask."""
        return sample_losses(prediction, frozen.float(), at.weight, None, loss=self.loss, threshold=at.threshold)

    def extras(self) -> str:
        """The common part of `describe`: all that is not the default."""
        return self.loss.describe() + self.noise.describe() + (", stratified" if self.stratified else "")


def by_sample(values: Tensor) -> Tensor:
    """[B] as [B, 1, 1, 1], which broadcasts over latents."""
    return values.view(-1, 1, 1, 1)
