"""Every weighting against its paper's equation, in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.objectives.test_diffusion import abar, diffusion
from trainer.objectives import Weighting

SCHEDULE, TERMINAL = abar(), abar(ztsnr=True)


def of_epsilon(name: str, snr: float, gamma: float, k: float) -> float:
    """The weight of the squared error of epsilon.

    min_snr: Hang et al. 2023, arXiv 2303.09556, eq. 8 of epsilon. soft_min_snr: Crowson et al. 2024, arXiv 2401.11605, 3.4:
    1 / (sigma^2 + 1 / gamma) on x_0, sigma^2 = 1 / SNR. debiased: Yu et al. 2023, arXiv 2310.08442. p2: Choi et al. 2022,
    arXiv 2204.00227, eq. 8, where lambda_t of epsilon is 1.
    """
    return {
        "none": 1.0,
        "min_snr": min(snr, gamma) / snr,
        "soft_min_snr": 1 / (1 / snr + 1 / gamma) / snr,
        "debiased": 1 / math.sqrt(snr),
        "p2": 1 / (k + snr) ** gamma,
    }[name]


@given(
    st.sampled_from(["min_snr", "soft_min_snr", "debiased", "p2"]), st.integers(0, 999), st.floats(0.1, 20), st.floats(0.1, 5)
)
def test_weights_of_epsilon_and_of_v(name: str, t: int, gamma: float, k: float) -> None:
    chosen = Weighting(name, gamma, p2_gamma=gamma, p2_k=k)
    snr = SCHEDULE[t] / (1 - SCHEDULE[t])
    expected, time = of_epsilon(name, snr, gamma, k), torch.tensor([t])
    assert diffusion("epsilon", weighting=chosen).weight(time).item() == pytest.approx(expected, rel=1e-6)
    # (Salimans and Ho 2022, arXiv 2202.00512, appendix D) the squared error of v is (SNR + 1) / SNR of epsilon's
    assert diffusion("v", weighting=chosen).weight(time).item() == pytest.approx(expected * snr / (snr + 1), rel=1e-6)


@given(st.integers(0, 999), st.integers(0, 2**31))
def test_the_same_error_weighs_the_same_as_epsilon_and_as_v(t: int, seed: int) -> None:
    """One guess of the photo, said as epsilon and said as v: every weighting gives both the same loss."""
    g = torch.Generator().manual_seed(seed)
    photo, noise, guess = torch.randn(3, 1, 2, 2, 2, dtype=torch.float64, generator=g)
    photo, noise, guess = (each[None] for each in (photo[0], noise[0], guess[0]))
    time, a = torch.tensor([t]), torch.tensor(SCHEDULE[t], dtype=torch.float64)
    x = a.sqrt() * photo + (1 - a).sqrt() * noise
    epsilon = (x - a.sqrt() * guess) / (1 - a).sqrt()
    v = a.sqrt() * epsilon - (1 - a).sqrt() * guess
    for name in ("min_snr", "soft_min_snr", "debiased", "p2"):
        losses = []
        for prediction, said in (("epsilon", epsilon), ("v", v)):
            chosen = diffusion(prediction, weighting=Weighting(name))
            errors = (said - chosen.target(photo, noise, chosen.at(time))).square().mean()
            losses.append((errors * chosen.weight(time)).item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("name", ["min_snr", "soft_min_snr", "debiased", "p2"])
def test_zero_terminal_snr_gives_the_limit(name: str) -> None:
    chosen = diffusion("v", True, weighting=Weighting(name))
    *_, before, last = chosen.weight(torch.arange(1000)).tolist()
    assert last == 0 < before
    snr = TERMINAL[998] / (1 - TERMINAL[998])
    gamma = {"min_snr": 5.0, "soft_min_snr": 4.0}.get(name, 1.0)
    assert before == pytest.approx(of_epsilon(name, snr, gamma, 1.0) * snr / (snr + 1), rel=1e-5)


def test_a_gamma_alone_means_min_snr_and_the_papers_gammas_are_the_defaults() -> None:
    assert Weighting().name == "none" == Weighting("none").name
    assert Weighting(min_snr_gamma=5.0).name == "min_snr"
    assert (Weighting("min_snr").gamma, Weighting("soft_min_snr").gamma, Weighting("soft_min_snr", 2.0).gamma) == (5, 4, 2)
    time = torch.arange(1000)
    assert torch.equal(
        diffusion(weighting=Weighting(min_snr_gamma=5.0)).weight(time), diffusion(weighting=Weighting("min_snr")).weight(time)
    )
    assert diffusion().weight(time).tolist() == [1.0] * 1000
