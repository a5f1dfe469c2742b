"""Weights of the loss by the signal-to-noise ratio, for diffusion: SNR = abar / (1 - abar).

A weight W(SNR) of the squared error of x_0 is W / SNR for that of epsilon, and W / (SNR + 1) for that of v: with x_t =
sqrt(abar) x_0 + sqrt(1 - abar) epsilon, the squared error of epsilon is SNR times that of x_0, and that of v (SNR + 1) times
(Salimans and Ho 2022, arXiv 2202.00512, appendix D).

  min_snr (Hang et al. 2023, arXiv 2303.09556): W = min(SNR, gamma).
  soft_min_snr (Crowson et al. 2024, arXiv 2401.11605): W = SNR gamma / (SNR + gamma), the same without a corner.
  debiased (Yu et al. 2023, arXiv 2310.08442): 1 / sqrt(SNR) on epsilon, so W = sqrt(SNR).
  p2 (Choi et al. 2022, arXiv 2204.00227): 1 / (k + SNR)^gamma on epsilon, so W = SNR / (k + SNR)^gamma.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True)
class Formula:
    """A weighting's formula. photo_weight: (weighting, SNR float64 [B]) -> W. words: describe it. gamma: the default."""

    photo_weight: Callable[["Weighting", Tensor], Tensor]
    words: str
    gamma: float | None = None


# By name; "none" has no formula. A new weighting is one entry, and its word in the config's table.
FORMULAS = {
    "min_snr": Formula(lambda by, snr: snr.clamp_max(by.gamma), "min-SNR gamma {0.gamma:g}", 5.0),
    "soft_min_snr": Formula(lambda by, snr: snr * by.gamma / (snr + by.gamma), "soft min-SNR gamma {0.gamma:g}", 4.0),
    "debiased": Formula(lambda by, snr: snr.sqrt(), "debiased weights"),
    "p2": Formula(lambda by, snr: snr / (by.p2_k + snr) ** by.p2_gamma, "P2 weights (gamma {0.p2_gamma:g}, k {0.p2_k:g})"),
}


@dataclass(frozen=True)
class Weighting:
    """A weighting by the config's fields. min_snr_gamma alone means min_snr."""

    weighting: str | None = None
    min_snr_gamma: float | None = None
    p2_gamma: float = 1.0
    p2_k: float = 1.0

    @property
    def name(self) -> str:
        """The weighting's name, "none" included."""
        return self.weighting or ("none" if self.min_snr_gamma is None else "min_snr")

    @property
    def gamma(self) -> float:
        """The gamma of the weighting, for the two that have one besides p2."""
        return (FORMULAS[self.name].gamma or 1.0) if self.min_snr_gamma is None else self.min_snr_gamma

    def weight(self, snr: Tensor, prediction: Literal["epsilon", "v"]) -> Tensor:
        """The weights, fp32 [B], of SNR float64 [B], for any name but "none". At zero SNR, which only v has, the limit: 0."""
        photo_weight = FORMULAS[self.name].photo_weight(self, snr)
        return (photo_weight / (snr if prediction == "epsilon" else snr + 1)).float()

    def describe(self) -> str:
        """The weighting in words, after a comma; "" for none."""
        return "" if self.name == "none" else f", {FORMULAS[self.name].words.format(self)}"
