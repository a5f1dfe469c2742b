"""Rectified flow (Liu et al. 2022, arXiv 2209.03003; Esser et al. 2024, arXiv 2403.03206).

x_t = (1 - t) x_0 + t noise, target = noise - x_0, t in (0, 1). Shift: t' = s t / (1 + (s - 1) t).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from trainer.objectives.base import AtTime, Objective
from trainer.objectives.times import Times


def _shifted(t: Tensor, s: float) -> Tensor:
    return s * t / (1 + (s - 1) * t)


@dataclass(frozen=True)
class Flow(Objective):
    """Rectified flow: from (1 - t) latents + t noise the model predicts noise - latents. shift: a number, or the family's
    function of the number of image tokens."""

    times: Times = Times("logit_normal")
    shift: float | Callable[[int], float] = 1.0

    def __post_init__(self) -> None:
        settings = {} if callable(self.shift) else {"shift": self.shift}
        for tokens in (256, 4096):  # 256 and 1024 px: the shifts of all usual sizes lie between theirs
            s = self._shift(tokens)
            self.times.check(*self._range(s), partial(_shifted, s=s), **settings)

    def _shift(self, tokens: int) -> float:
        return self.shift(tokens) if callable(self.shift) else self.shift

    def _range(self, s: float) -> tuple[float, float]:
        low, high = self.times.t_range
        return (low, high) if self.times.is_whole else (low / (s - (s - 1) * low), min(1.0, high / (s - (s - 1) * high)))

    def time(self, u: Tensor, tokens: int) -> Tensor:
        """float32 [B] in (0, 1), or 1 if fp32 rounds to it: about one uniform time of 30 million."""
        s = self._shift(tokens)
        return _shifted(self.times.draw(u, *self._range(s)), s).float()

    def time_at(self, share: Tensor) -> Tensor:
        return share.float()

    def path(self, time: Tensor) -> tuple[Tensor, Tensor]:
        return 1 - time, time

    def target(self, latents: Tensor, noise: Tensor, at: AtTime) -> Tensor:
        return noise - latents

    def weight(self, time: Tensor) -> Tensor:
        return torch.ones(len(time), dtype=torch.float32)

    def progress(self, time: Tensor) -> Tensor:
        return time.double()

    def noise_to_signal(self, time: Tensor) -> Tensor:
        return time.double() / (1 - time.double())

    def describe(self) -> str:
        shift = "resolution shift" if callable(self.shift) else f"shift {self.shift:g}"
        return f"rectified flow, {self.times.describe()}, {shift}{self.extras()}"
