"""What the step asks of an objective, and what all objectives have in common."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self, TypeVar

from torch import Tensor

from trainer.objectives.losses import Loss, sample_losses
from trainer.objectives.noise import Noise

Settings = TypeVar("Settings")


def from_choices(part: type[Settings], choices: Mapping[str, Any], **instead: Any) -> Settings:
    """A dataclass of what was chosen: its fields have the names of config keys. Of a key that is not there, the default."""
    given = {field.name: choices[field.name] for field in fields(part) if field.name in choices}
    return part(**given | instead)


class AtTime(NamedTuple):
    """All that an objective takes of the times of a micro-batch: fp32 [B] each, made on the CPU and moved from there.

    signal, sigma: x_t = signal x_0 + sigma noise. weight: what the loss of each sample is multiplied by. threshold: the
    loss's; None where it has none.
    """

    signal: Tensor
    sigma: Tensor
    weight: Tensor
    threshold: Tensor | None


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

    def path(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """(signal, sigma) of each time, fp32 [B]: what photo and noise are multiplied by."""
        raise NotImplementedError

    def target(self, latents: Tensor, noise: Tensor, at: AtTime) -> Tensor:
        """What the model should say."""
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
        """The choices that work against another, for warnings."""
        return []

    def plain(self) -> Self:
        """The same path and times, with the mean squared error of plain noise: to compare runs by."""
        return replace(self, loss=Loss(), noise=Noise(), stratified=False)

    def at(self, time: Tensor) -> AtTime:
        """What follows from the times, which stand on the CPU."""
        threshold = None
        if self.loss.needs_threshold:
            threshold = self.loss.threshold(self.progress(time), self.noise_to_signal(time))
        return AtTime(*self.path(time), self.weight(time), threshold)

    def noised(self, latents: Tensor, noise: Tensor, at: AtTime) -> Tensor:
        """What the model sees."""
        return by_sample(at.signal) * latents + by_sample(at.sigma) * noise

    def losses(
        self, prediction: Tensor, latents: Tensor, noise: Tensor, at: AtTime, loss_weights: Tensor | None = None
    ) -> Tensor:
        """fp32 [B]; all on one device. loss_weights: fp32 [B, H, W], or None."""
        target = self.target(latents, noise, at)
        return sample_losses(prediction, target, at.weight, loss_weights, loss=self.loss, threshold=at.threshold)

    def drift(self, prediction: Tensor, frozen: Tensor, at: AtTime) -> Tensor:
        """fp32 [B]: how far a prediction is from the frozen model's, counted as `losses` counts an error, without a mask."""
        return sample_losses(prediction, frozen.float(), at.weight, None, loss=self.loss, threshold=at.threshold)

    def extras(self) -> str:
        """The part of `describe` that is the same for all: what is not the default."""
        return self.loss.describe() + self.noise.describe() + (", stratified" if self.stratified else "")


def by_sample(values: Tensor) -> Tensor:
    """[B], which broadcasts over latents."""
    return values.view(-1, 1, 1, 1)
