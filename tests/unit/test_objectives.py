"""The objectives against diffusers' schedulers and closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import UserError
from trainer.models.flux import resolution_shift
from trainer.objectives import Diffusion, Flow, sample_losses

SCHEDULER = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000}


def diffusion(prediction="epsilon", ztsnr=False, gamma=None) -> Diffusion:
    return Diffusion.from_scheduler(
        SCHEDULER, prediction=prediction, zero_terminal_snr=ztsnr, min_snr_gamma=gamma, published=SCHEDULER
    )  # fmt: skip


@pytest.mark.parametrize("ztsnr", [False, True])
def test_noise_and_velocity_as_diffusers_ddpm(ztsnr: bool) -> None:
    from diffusers import DDPMScheduler

    reference = DDPMScheduler.from_config(SCHEDULER, rescale_betas_zero_snr=ztsnr, prediction_type="v_prediction")
    ours = diffusion("v", ztsnr)
    g = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(6, 4, 8, 8, generator=g) for _ in range(2))
    t = torch.tensor([0, 1, 250, 500, 998, 999])
    # diffusers accumulates its products in fp32
    torch.testing.assert_close(ours.noised(x, noise, t), reference.add_noise(x, noise, t), rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(ours.target(x, noise, t), reference.get_velocity(x, noise, t), rtol=2e-4, atol=2e-4)


@given(st.integers(0, 999), st.floats(0.1, 20))
def test_min_snr_weights(t: int, gamma: float) -> None:
    abar = diffusion().alphas_cumprod[t].item()
    snr = abar / (1 - abar)
    time = torch.tensor([t])
    assert diffusion("epsilon", gamma=gamma).weight(time).item() == pytest.approx(min(snr, gamma) / snr, rel=1e-6)
    assert diffusion("v", gamma=gamma).weight(time).item() == pytest.approx(min(snr, gamma) / (snr + 1), rel=1e-6)


def test_zero_terminal_snr() -> None:
    v = diffusion("v", True, 5.0)
    assert v.alphas_cumprod[-1] == 0 and v.weight(torch.tensor([999])).item() == 0
    assert v.alphas_cumprod[0] == pytest.approx(diffusion().alphas_cumprod[0].item(), rel=1e-12)
    with pytest.raises(UserError, match="zero terminal SNR"):
        diffusion("epsilon", True)


def test_timesteps_are_uniform_over_all_steps() -> None:
    u = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    assert torch.equal(torch.bincount(diffusion().time(u, 0)), torch.full((1000,), 4))


@pytest.mark.parametrize(("tokens", "shift"), [(1024, 1.88), (4096, 3.16)])
def test_resolution_shift(tokens: int, shift: float) -> None:
    assert resolution_shift(tokens) == pytest.approx(shift, abs=0.005)


@given(st.floats(0.001, 0.999), st.floats(0.5, 5), st.floats(-1, 1), st.floats(0.2, 2))
def test_flow_times(u: float, shift: float, mean: float, std: float) -> None:
    from statistics import NormalDist

    plain = Flow("uniform", shift).time(torch.tensor([u], dtype=torch.float64), 0).item()
    assert plain == pytest.approx(shift * u / (1 + (shift - 1) * u), rel=1e-6)
    t = 1 / (1 + math.exp(-(mean + std * NormalDist().inv_cdf(u))))
    logit = Flow("logit_normal", 1.0, mean, std).time(torch.tensor([u], dtype=torch.float64), 0).item()
    assert logit == pytest.approx(t, rel=1e-5)


def test_flow_path_and_target_agree() -> None:
    """The target is the path's derivative: x_1 - x_0."""
    g = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(2, 16, 4, 4, generator=g) for _ in range(2))
    flow = Flow()
    ends = [flow.noised(x, noise, torch.full((2,), t)) for t in (0.0, 1.0)]
    assert torch.equal(ends[0], x) and torch.equal(ends[1], noise)
    torch.testing.assert_close(flow.target(x, noise, torch.rand(2)), ends[1] - ends[0])


def test_losses_are_per_sample_and_fp32() -> None:
    prediction = torch.zeros(2, 4, 3, 3, dtype=torch.bfloat16)
    target = torch.stack([torch.full((4, 3, 3), 2.0), torch.full((4, 3, 3), 3.0)])
    losses = sample_losses(prediction, target, torch.tensor([1.0, 0.5]))
    assert losses.dtype == torch.float32 and losses.tolist() == [4.0, 4.5]
