"""Weights of the loss by the signal-to-noise ratio, for diffusion: SNR = abar / (1 - abar).

A weight W(SNR) of the squared error of x_0 is W / SNR for that of epsilon, and W / (SNR + 1) for that of v: with
x_t = sqrt(abar) x_0 + sqrt(1 - abar) epsilon, the squared error of epsilon is SNR times that of x_0, and that of v
(SNR + 1) times (Salimans and Ho 2022, arXiv 2202.00512, appendix D).

  min_snr (Hang et al. 2023, arXiv 2303.09556): W = min(SNR, gamma).
  soft_min_snr (Crowson et al. 2024, arXiv 2401.11605): W = SNR gamma / (SNR + gamma), the same without a corner.
  debiased (Yu et al. 2023, arXiv 2310.08442): 1 / sqrt(SNR) on epsilon, so W = sqrt(SNR).
  p2 (Choi et al. 2022, arXiv 2204.00227): 1 / (k + SNR)^gamma on epsilon, so W = SNR / (k + SNR)^gamma.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

# The papers' gammas, where none is given.
GAMMA = {"min_snr": 5.0, "soft_min_snr": 4.0}


@dataclass(frozen=True)
class Weighting:
    """Fields as in the config. min_snr_gamma alone means min_snr."""

    weighting: Literal["none", "min_snr", "soft_min_snr", "debiased", "p2"] | None = None
    min_snr_gamma: float | None = None
    p2_gamma: float = 1.0
    p2_k: float = 1.0

    @property
    def name(self) -> str:
        """The weighting's name, "none" included."""
        return self.weighting or ("none" if self.min_snr_gamma is None else "min_snr")

    @property
    def gamma(self) -> float:
        """gamma of the two weightings that have one beside p2."""
        return GAMMA[self.name] if self.min_snr_gamma is None else self.min_snr_gamma

    def weight(self, snr: Tensor, prediction: Literal["epsilon", "v"]) -> Tensor:
        """fp32 [B], of float64 [B], by any name but "none". At zero SNR, where only v is defined, 0: the limit."""
        of_photo = _OF_PHOTO[self.name](self, snr)
        return (of_photo / (snr if prediction == "epsilon" else snr + 1)).float()

    def describe(self) -> str:
        """The weighting in words; begins with a comma, "" for none."""
        says = {
            "none": "",
            "min_snr": ", min-SNR gamma {0.gamma:g}",
            "soft_min_snr": ", soft min-SNR gamma {0.gamma:g}",
            "debiased": ", debiased weights",
            "p2": ", P2 weights (gamma {0.p2_gamma:g}, k {0.p2_k:g})",
        }
        return says[self.name].format(self)


# W, by name.
_OF_PHOTO: dict[str, Callable[[Weighting, Tensor], Tensor]] = {
    "min_snr": lambda chosen, snr: snr.clamp_max(chosen.gamma),
    "soft_min_snr": lambda chosen, snr: snr * chosen.gamma / (snr + chosen.gamma),
    "debiased": lambda chosen, snr: snr.sqrt(),
    "p2": lambda chosen, snr: snr / (chosen.p2_k + snr) ** chosen.p2_gamma,
}
