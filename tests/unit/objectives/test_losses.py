"""Every loss against its formula in plain Python, with its gradient, its schedule, masks and weights."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.objectives.test_diffusion import T, abar, diffusion
from trainer.objectives import Flow, Loss, Objective, Weighting, sample_losses

SCHEDULE = abar()
LOSSES = ("mse", "huber", "smooth_l1")
SCHEDULES = ("constant", "exponential", "snr")


def error(loss: str, d: float, c: float) -> float:
    """Khrapov et al. 2024, arXiv 2403.16728, eq. 5 (pseudo-Huber), times 2 as sd-scripts has it: d^2 for small d."""
    pseudo_huber = 2 * (math.sqrt(d * d + c * c) - c)
    return {"mse": d * d, "huber": c * pseudo_huber, "smooth_l1": pseudo_huber}[loss]


def slope(loss: str, d: float, c: float) -> float:
    steep = 2 * d / math.sqrt(d * d + c * c)
    return {"mse": 2 * d, "huber": c * steep, "smooth_l1": steep}[loss]


def threshold(schedule: str, c: float, share: float, sigma: float) -> float:
    """sd-scripts: exponential: exp(-alpha t), alpha = -log(c) / T; snr: (1 - c) / (1 + sigma)^2 + c."""
    return {"constant": c, "exponential": math.exp(math.log(c) * share), "snr": (1 - c) / (1 + sigma) ** 2 + c}[schedule]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


OF: dict[str, Callable[[Loss], tuple[Objective, torch.Tensor]]] = {
    "epsilon": lambda loss: (diffusion("epsilon", loss=loss, weighting=Weighting("debiased")), torch.tensor([0, 123, 999])),
    "v": lambda loss: (diffusion("v", loss=loss), torch.tensor([1, 500, 998])),
    "flow": lambda loss: (Flow(loss=loss), torch.tensor([0.015625, 0.5, 0.984375])),
}


@pytest.mark.parametrize("kind", OF)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_masked_losses_and_their_gradients_are_the_formulas(kind: str, loss: str, schedule: str) -> None:
    objective, time = OF[kind](Loss(loss, 0.2, schedule))
    latents, noise, guess = (drawn(3, 2, 2, 3, seed=seed) for seed in range(3))
    guess = (2 * guess).requires_grad_()
    masks = torch.rand(3, 2, 3, generator=torch.Generator().manual_seed(4))
    masks[0, 0] = 0
    at = objective.at(time)
    losses = objective.losses(guess, latents, noise, at, masks)
    losses.sum().backward()
    target = objective.target(latents, noise, at)
    assert losses.dtype == torch.float32 and losses.shape == (3,)
    for i, t in enumerate(time.tolist()):
        a = None if kind == "flow" else SCHEDULE[t]
        share, sigma = (t, t / (1 - t)) if a is None else (t / T, math.sqrt((1 - a) / a))
        c, weight = threshold(schedule, 0.2, share, sigma), 1 / math.sqrt(a / (1 - a)) if kind == "epsilon" else 1.0
        total = 0.0
        for channel in range(2):
            for row in range(2):
                for column in range(3):
                    place = i, channel, row, column
                    d, mask = guess[place].item() - target[place].item(), masks[i, row, column].item()
                    total += mask * error(loss, d, c)
                    grad = weight * mask * slope(loss, d, c) / 12
                    assert guess.grad[place].item() == pytest.approx(grad, rel=1e-4, abs=1e-7)
        assert losses[i].item() == pytest.approx(weight * total / 12, rel=1e-5)


@given(st.sampled_from(["huber", "smooth_l1"]), st.floats(-60, 60), st.floats(1e-3, 1))
def test_of_one_latent(loss: str, d: float, c: float) -> None:
    """Also where d is so small that sqrt(d^2 + c^2) - c cancels in fp32: there it is d^2, or d^2 / c."""
    guess, thresholds = torch.tensor(d, dtype=torch.float32).view(1, 1, 1, 1), torch.tensor([c], dtype=torch.float32)
    ours = Loss(loss).errors(guess, torch.zeros_like(guess), thresholds).item()
    d, c = math.sqrt(guess.square().item()), thresholds.item()
    # The same in fp64, without the cancellation
    steep = 2 * d * d / (math.sqrt(d * d + c * c) + c)
    assert ours == pytest.approx(c * steep if loss == "huber" else steep, rel=1e-5, abs=1e-37)
    assert ours == pytest.approx(error(loss, d, c), rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("loss", LOSSES)
def test_weights_multiply_the_loss_of_every_kind(loss: str) -> None:
    objective, time = OF["v"](Loss(loss))
    latents, noise, guess = (drawn(3, 2, 2, 3, seed=seed) for seed in range(3))
    at = objective.at(time)
    full = objective.losses(guess, latents, noise, at)
    assert torch.equal(objective.losses(guess, latents, noise, at, torch.ones(3, 2, 3)), full)
    assert torch.equal(objective.losses(guess, latents, noise, at, torch.full((3, 2, 3), 0.5)), full * 0.5)


def test_losses_are_per_sample_and_fp32() -> None:
    prediction = torch.zeros(2, 4, 3, 3, dtype=torch.bfloat16)
    target = torch.stack([torch.full((4, 3, 3), 2.0), torch.full((4, 3, 3), 3.0)])
    losses = sample_losses(prediction, target, torch.tensor([1.0, 0.5]))
    assert losses.dtype == torch.float32 and losses.tolist() == [4.0, 4.5]


@pytest.mark.parametrize("loss", ["huber", "smooth_l1"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_gradient_is_finite_where_the_guess_is_right_and_at_t_one(loss: str, schedule: str) -> None:
    objective = Flow(loss=Loss(loss, 0.1, schedule))
    latents, noise = drawn(2, 2, 1, 2, 2)
    at = objective.at(torch.tensor([0.0, 1.0]))  # 1.0: what is next to it, rounded
    guess = objective.target(latents, noise, at).requires_grad_()
    losses = objective.losses(guess, latents, noise, at)
    losses.sum().backward()
    assert losses.tolist() == [0, 0] and guess.grad.abs().max() == 0
