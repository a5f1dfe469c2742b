"""Rectified flow: its path, its target, its shifted times."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.base.errors import UserError
from trainer.models import FAMILIES
from trainer.models.base import Markers
from trainer.models.flux import objective, pack
from trainer.models.shared.flow import resolution_shift
from trainer.objectives import Flow, Loss, Noise, Times

SCHEDULER = {"_class_name": "FlowMatchEulerDiscreteScheduler"}


@pytest.mark.parametrize(("tokens", "shift"), [(1024, 1.88), (4096, 3.16)])
def test_resolution_shift(tokens: int, shift: float) -> None:
    assert resolution_shift(tokens) == pytest.approx(shift, abs=0.005)


@pytest.mark.parametrize(("family", "side", "packed"), [("flux", 8, pack), ("flux2", 16, lambda x: x.flatten(2).mT)])
@pytest.mark.parametrize(("width", "height"), [(512, 512), (1024, 1024), (832, 1216), (2048, 1536)])
def test_the_shift_is_of_the_packed_tokens_and_the_stock_pipelines(family, side, packed, width: int, height: int) -> None:
    """OneTrainer #1698: of latents that lie in patches already, a quarter was counted. FLUX.2 is shifted as Flux is."""
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    tokens = packed(torch.zeros(1, 16, height // side, width // side)).shape[1]
    assert FAMILIES[family].images.image_tokens(height, width) == tokens == height // 16 * (width // 16)
    assert resolution_shift(tokens) == pytest.approx(math.exp(calculate_shift(tokens)), rel=1e-12)


@given(st.floats(0.001, 0.999), st.floats(0.5, 5), st.floats(-1, 1), st.floats(0.2, 2))
def test_times(u: float, shift: float, mean: float, std: float) -> None:
    plain = Flow(times=Times("uniform"), shift=shift).time(torch.tensor([u], dtype=torch.float64), 0).item()
    assert plain == pytest.approx(shift * u / (1 + (shift - 1) * u), rel=1e-6)
    t = 1 / (1 + math.exp(-(mean + std * NormalDist().inv_cdf(u))))
    logit = Flow(times=Times("logit_normal", mean, std)).time(torch.tensor([u], dtype=torch.float64), 0)
    assert logit.dtype == torch.float32 and logit.item() == pytest.approx(t, rel=1e-5)


def test_path_and_target_agree() -> None:
    """The target is the path's derivative: x_1 - x_0."""
    g = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(2, 16, 4, 4, generator=g) for _ in range(2))
    flow = Flow()
    ends = [flow.noised(x, noise, flow.at(torch.full((2,), t))) for t in (0.0, 1.0)]
    assert torch.equal(ends[0], x) and torch.equal(ends[1], noise)
    torch.testing.assert_close(flow.target(x, noise, flow.at(torch.rand(2))), ends[1] - ends[0])


@pytest.mark.parametrize("timesteps", ["uniform", "logit_normal", "mode", "cosmap", "power"])
@pytest.mark.parametrize("shift", [1.0, 3.16, resolution_shift])
@pytest.mark.parametrize("t_range", [(0.0, 0.4), (0.3, 0.7), (0.6, 1.0)])
def test_a_range_is_of_the_shifted_times_and_keeps_their_proportions(timesteps: str, shift, t_range) -> None:
    """What falls into it of the whole distribution, and what is drawn within it, have the same quantiles."""
    u = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    whole = Flow(times=Times(timesteps, power=2.0), shift=shift).time(u, 1024).double()
    inside = whole[(whole >= t_range[0]) & (whole <= t_range[1])]
    times = Flow(times=Times(timesteps, power=2.0, t_range=t_range), shift=shift).time(u, 1024).double()
    assert t_range[0] - 1e-6 <= times.min() and times.max() <= t_range[1] + 1e-6
    at = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=torch.float64)
    torch.testing.assert_close(times.quantile(at), inside.quantile(at), rtol=0, atol=2e-3)


def test_what_the_family_makes_of_the_keys() -> None:
    said = {
        name: objective(SCHEDULER, Markers(), timesteps=name).describe() for name in ("auto", "uniform", "sigmoid", "mode")
    }
    assert said == {
        "auto": "rectified flow, logit_normal(0, 1) timesteps, resolution shift",
        "uniform": "rectified flow, uniform timesteps, resolution shift",
        "sigmoid": "rectified flow, sigmoid(0, 1) timesteps, shift 1",
        "mode": "rectified flow, mode(1.29) timesteps, resolution shift",
    }
    given_all = objective(
        SCHEDULER, Markers(), timesteps="sigmoid", shift=3.0, logit_std=1.5, t_range=(0.1, 1.0), loss="smooth_l1",
        stratified=True, input_perturbation=0.1,
    )  # fmt: skip
    assert given_all.describe() == (
        "rectified flow, sigmoid(0, 1.5) timesteps from 0.1 to 1, shift 3, smooth_l1 loss (c 0.1, snr), "
        "input perturbation 0.1, stratified"
    )
    assert given_all.plain() == Flow(times=given_all.times, shift=3.0)
    assert given_all.loss == Loss("smooth_l1") and given_all.noise == Noise(input_perturbation=0.1) and not given_all.doubts()


def test_a_range_that_leaves_next_to_nothing_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"^objective\.t_range = \[0\.0, 0\.001\] leaves no timestep: of a million that logit"
    ):
        Flow(times=Times("logit_normal", t_range=(0.0, 0.001)), shift=3.16)
