"""Diffusion against diffusers' scheduler and the closed forms of its papers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from trainer.base.errors import UserError
from trainer.models.sdxl import BETAS
from trainer.objectives import Diffusion, Loss, Noise, Times, Weighting
from trainer.objectives.noise import noise_schedule

T = 1000


def diffusion(prediction: str = "epsilon", ztsnr: bool = False, **others: Any) -> Diffusion:
    return Diffusion.from_scheduler(BETAS, prediction=prediction, zero_terminal_snr=ztsnr, published=BETAS, **others)


def abar(ztsnr: bool = False) -> list[float]:
    """In plain Python, from the betas; Lin et al. 2023, arXiv 2305.08891, algorithm 1."""
    product, products = 1.0, []
    for i in range(T):
        beta = (math.sqrt(0.00085) + (math.sqrt(0.012) - math.sqrt(0.00085)) * i / (T - 1)) ** 2
        product *= 1 - beta
        products.append(product)
    if ztsnr:
        first, last = math.sqrt(products[0]), math.sqrt(products[-1])
        products = [((math.sqrt(p) - last) * first / (first - last)) ** 2 for p in products]
    return products


@pytest.mark.parametrize(
    ("key", "value"),
    [("beta_start", -5), ("beta_start", "x"), ("beta_end", 1), ("beta_end", float("nan")), ("beta_end", [0.1]),
     ("num_train_timesteps", 10**12), ("num_train_timesteps", 0), ("num_train_timesteps", 10.5),
     ("num_train_timesteps", True)],
)  # fmt: skip
def test_a_schedule_of_no_numbers_is_refused(key: str, value: Any) -> None:
    """10^12 steps ended as too little memory, with advice on the batch size."""
    with pytest.raises(
        UserError, match=rf"scheduler_config\.json has {key} = .*{value if value != [0.1] else '0.1'}.* needed"
    ):
        Diffusion.from_scheduler({**BETAS, key: value}, prediction="v", zero_terminal_snr=False, published=BETAS)


@pytest.mark.parametrize("ztsnr", [False, True])
def test_the_noise_schedule_is_the_papers(ztsnr: bool) -> None:
    ours = diffusion("v", ztsnr).alphas_cumprod
    assert ours.dtype == torch.float64 and ours.tolist() == pytest.approx(abar(ztsnr), rel=1e-9, abs=1e-15)
    assert bool(ours[-1] == 0) == ztsnr


@pytest.mark.parametrize("ztsnr", [False, True])
def test_noise_and_velocity_as_diffusers_ddpm(ztsnr: bool) -> None:
    from diffusers import DDPMScheduler

    reference = DDPMScheduler.from_config(BETAS, rescale_betas_zero_snr=ztsnr, prediction_type="v_prediction")
    ours = diffusion("v", ztsnr)
    g = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(6, 4, 8, 8, generator=g) for _ in range(2))
    t = torch.tensor([0, 1, 250, 500, 998, 999])
    # diffusers accumulates its products in fp32
    at = ours.at(t)
    torch.testing.assert_close(ours.noised(x, noise, at), reference.add_noise(x, noise, t), rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(ours.target(x, noise, at), reference.get_velocity(x, noise, t), rtol=2e-4, atol=2e-4)


def test_epsilon_is_undefined_at_zero_terminal_snr() -> None:
    with pytest.raises(UserError, match="zero terminal SNR"):
        diffusion("epsilon", True)


def test_timesteps_are_uniform_over_all_steps() -> None:
    u = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    assert torch.equal(torch.bincount(diffusion().time(u, 0)), torch.full((T,), 4))


@pytest.mark.parametrize(
    ("t_range", "first", "last"),
    [((0.0, 1.0), 0, 999), ((0.2, 0.8), 200, 799), ((0.035, 1.0), 35, 999), ((0.57, 0.58), 570, 579), ((0.9995, 1.0), 0, 0),
     ((0.999, 1.0), 999, 999), ((0.0, 0.001), 0, 0), ((0.0004, 0.0016), 1, 1)],
)  # fmt: skip
@pytest.mark.parametrize("timesteps", [Times("uniform"), Times("logit_normal", 0.5, 1.5), Times("power", power=2.0)])
def test_a_range_has_its_timesteps_and_no_others(timesteps: Times, t_range, first: int, last: int) -> None:
    """Those with low <= t / T < high."""
    times = Times(timesteps.timesteps, timesteps.logit_mean, timesteps.logit_std, power=timesteps.power, t_range=t_range)
    if first == last == 0 and t_range[0] > 0:
        with pytest.raises(UserError, match=r"^objective\.t_range = \[0\.9995, 1\.0\] leaves no timestep"):
            diffusion(times=times)
        return
    ends = torch.tensor([2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    if timesteps.timesteps == "logit_normal" and first == last == 0:
        with pytest.raises(UserError, match="leaves no timestep: of a million"):
            diffusion(times=times)
        return
    chosen = diffusion(times=times)
    assert chosen.time(ends, 0).tolist() == [first, last]
    u = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    t = chosen.time(u, 0)
    assert t.dtype == torch.int64 and bool((t.diff() >= 0).all())
    if timesteps.timesteps == "uniform":
        counts = torch.bincount(t, minlength=T)[first : last + 1]
        assert counts.sum() == 20000 and counts.max() - counts.min() <= 1


@pytest.mark.parametrize("first", [7, 14, 28, 55, 56])
def test_a_share_that_is_a_whole_timestep_begins_with_it(first: int) -> None:
    """Of 100: 0.07 * 100 is a little more than 7 in fp64."""
    alphas = torch.linspace(0.99, 0.01, 100, dtype=torch.float64)
    chosen = Diffusion(alphas, "epsilon", times=Times("uniform", t_range=(first / 100, 1.0)))
    assert chosen.time(torch.tensor([2.0**-53], dtype=torch.float64), 0).tolist() == [first]


# Epsilon says nothing of a timestep without signal, and is refused there.
@pytest.mark.parametrize(("prediction", "ztsnr"), [("epsilon", False), ("v", False), ("v", True)])
@pytest.mark.parametrize(
    "weighting",
    [Weighting(), Weighting("min_snr"), Weighting("soft_min_snr"), Weighting("debiased"), Weighting("p2")],
    ids=lambda weighting: weighting.name,
)
@pytest.mark.parametrize("loss", ["mse", "huber", "smooth_l1"])
@pytest.mark.parametrize("schedule", ["constant", "exponential", "snr"])
def test_losses_and_gradients_are_finite_at_the_ends_of_time(prediction, ztsnr, weighting, loss, schedule) -> None:
    chosen = diffusion(prediction, ztsnr, weighting=weighting, loss=Loss(loss, 0.1, schedule))
    at = chosen.at(torch.tensor([0, 0, T - 1, T - 1]))
    latents, noise = torch.randn(2, 4, 4, 3, 3, generator=torch.Generator().manual_seed(1))
    guess = chosen.target(latents, noise, at).clone()
    guess[1::2] += 3.0  # right, and wrong
    guess.requires_grad_()
    losses = chosen.losses(guess, latents, noise, at, torch.ones(4, 3, 3))
    losses.sum().backward()
    assert bool(torch.isfinite(losses).all()) and bool(torch.isfinite(guess.grad).all())
    assert losses[0] == losses[2] == 0 < losses[1]
    # Any weight of x_0 leaves v nothing where there is no signal; no weighting leaves all.
    assert bool(losses[3] > 0) == (weighting.name == "none" or not ztsnr)


def test_plain_is_the_mean_squared_error_over_the_same_times() -> None:
    times = Times("power", power=2.0, t_range=(0.1, 0.9))
    parts = dict(loss=Loss("huber"), noise=Noise(noise_offset=0.1), stratified=True)
    plain = diffusion("v", weighting=Weighting("p2"), times=times, **parts).plain()
    assert plain.describe() == diffusion("v", times=times).describe() and plain.times == times


def test_the_start_says_what_is_in_force() -> None:
    assert diffusion().describe() == "epsilon-prediction, uniform timesteps"
    everything = diffusion(
        "v", True, weighting=Weighting(min_snr_gamma=5.0), times=Times("logit_normal", 0.5, 1.0, t_range=(0.1, 0.9)),
        loss=Loss("huber", 0.2, "constant"), noise=Noise(0.05, 0, 0.3, 0.1), stratified=True,
    )  # fmt: skip
    assert everything.describe() == (
        "v-prediction, logit_normal(0.5, 1) timesteps from 0.1 to 0.9, zero terminal SNR, min-SNR gamma 5, "
        "huber loss (c 0.2, constant), noise offset 0.05, input perturbation 0.1, stratified"
    )
    about = [doubt.partition(" ")[0] for doubt in everything.doubts()]
    assert about == ["objective.weighting", "objective.noise_offset"]
    assert not diffusion("v", True).doubts() and not diffusion(weighting=Weighting("min_snr")).doubts()
    assert len(diffusion("v", True, noise=Noise(multires_noise_iterations=6)).doubts()) == 1


def test_a_noise_schedule_that_is_not_said_or_not_of_its_kind_is_refused() -> None:
    """A default would not be the one that the model was trained with."""
    known = {"num_train_timesteps": 10, "beta_start": 0.001, "beta_end": 0.02, "beta_schedule": "linear"}
    alphas = noise_schedule(known, published=known, zero_terminal_snr=False)
    assert torch.allclose(alphas, (1 - torch.linspace(0.001, 0.02, 10, dtype=torch.float64)).cumprod(0))
    for odd, said in (
        ({"beta_start": None}, "has no beta_start"), ({"trained_betas": [0.1] * 10}, "has trained_betas"),
        ({"beta_schedule": "squaredcos_cap_v2"}, "beta_schedule = 'squaredcos_cap_v2' is not supported"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            noise_schedule(known | odd, published=known, zero_terminal_snr=False)
