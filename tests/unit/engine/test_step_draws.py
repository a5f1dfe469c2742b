"""What a step draws of times and noise: by sample, stratified over the global batch, and which of it the target sees."""

from __future__ import annotations

import math
from dataclasses import astuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.objectives.test_diffusion import diffusion
from trainer.base import draws
from trainer.base.types import Batch, Conditioning, Occurrence
from trainer.engine.step import Losses, draw_time_and_noise
from trainer.objectives import Flow, Noise, Times, stratified

SEED = 7


def occurrences(count: int, epoch: int = 0) -> tuple[Occurrence, ...]:
    return tuple(Occurrence(epoch, f"0/{i}.jpg", i % 3) for i in range(count))


def batch(of: tuple[Occurrence, ...]) -> Batch:
    size = torch.tensor([[64, 64]] * len(of))
    latents = torch.randn(len(of), 2, 4, 4, generator=torch.Generator().manual_seed(len(of)))
    return Batch(of, latents, ("",) * len(of), Conditioning(torch.zeros(len(of), 1, 1)), size, size, size)


def strata_of(u: torch.Tensor, of: tuple[Occurrence, ...], update: tuple[Occurrence, ...]) -> torch.Tensor:
    return stratified(u, [astuple(each) for each in of], [astuple(each) for each in update], SEED)


def uniform_of(of: tuple[Occurrence, ...]) -> torch.Tensor:
    return torch.tensor([draws.uniform(SEED, "timestep", *astuple(each)) for each in of], dtype=torch.float64)


@given(st.integers(1, 12), st.lists(st.integers(0, 12), max_size=4), st.integers(0, 99))
def test_one_time_in_each_stratum_however_the_update_is_cut(count: int, cuts: list[int], epoch: int) -> None:
    """Into micro-batches, and these among processes: the update's occurrences alone decide."""
    update = occurrences(count, epoch)
    whole = strata_of(uniform_of(update), update, update)
    assert sorted((whole * count).long().tolist()) == list(range(count))
    assert bool((whole > 0).all()) and bool((whole < 1).all())
    edges = [0, *sorted(min(cut, count) for cut in cuts), count]
    parts = [update[low:high] for low, high in zip(edges, edges[1:], strict=False) if low < high]
    torch.testing.assert_close(torch.cat([strata_of(uniform_of(p), p, update) for p in parts]), whole, rtol=0, atol=0)
    assert torch.equal(strata_of(uniform_of(update), update, update[::-1]), whole), "the order of the update is nothing to it"
    # The formula: (stratum + u) / N, the stratum the number of samples with a lower draw
    dealt = [draws.uniform(SEED, "stratum", *astuple(each)) for each in update]
    for draw, ours, u in zip(dealt, whole.tolist(), uniform_of(update).tolist(), strict=True):
        assert ours == pytest.approx((sum(other < draw for other in dealt) + u) / count, rel=1e-15)


def test_one_sample_is_drawn_as_ever() -> None:
    (alone,) = update = occurrences(1)
    assert torch.equal(strata_of(uniform_of(update), update, update), uniform_of((alone,)))


def test_the_largest_u_stays_below_one() -> None:
    """(N - 1 + u) / N is 1 in fp64 for the u next to 1, whose logit is infinite."""
    update = occurrences(3)
    assert strata_of(torch.full((3,), 1 - 2.0**-53, dtype=torch.float64), update, update).max() < 1


@pytest.mark.slow
def test_every_place_is_uniform_and_the_mean_of_a_batch_varies_less() -> None:
    """Over many updates of 8. Kolmogorov and Smirnov's bound at a false alarm of one in a million for each of the 8 places.

    The variance of the batch's mean of t^2 is at most that of 8 free draws: by far less, as t^2 is smooth.
    """
    count, updates = 8, 1500
    drawn = torch.stack(
        [strata_of(uniform_of(update), update, update) for update in (occurrences(count, epoch) for epoch in range(updates))]
    )
    free = torch.stack([uniform_of(occurrences(count, epoch)) for epoch in range(updates)])
    bound = math.sqrt(math.log(2 / 1e-6) / 2 / updates)
    steps = torch.arange(updates, dtype=torch.float64) / updates
    for place in range(count):
        at = drawn[:, place].sort().values
        assert max((at - steps).abs().max(), (at - steps - 1 / updates).abs().max()) < bound
    means, free_means = drawn.square().mean(1), free.square().mean(1)
    # The mean of t^2 is 1/3, its variance 4/45: five standard errors of the free means' mean
    assert abs(means.mean() - 1 / 3) < 5 * math.sqrt(4 / 45 / count / updates)
    assert means.var() < free_means.var() / 20


@pytest.mark.slow
def test_the_variance_where_samples_differ_is_that_of_the_formula() -> None:
    """Of the sum of f_j(u_j) over N: by how alike the f_j are; at most N / (N - 1) times that of free draws.

    With c_j(k) the mean of f_j in stratum k less its mean over all strata, and | | the root mean square over strata, it is
    sum Var f_j + (sum |c_j|^2 - |sum c_j|^2) / (N - 1), as no two samples have the same stratum.
    Here f_j is 1 in some strata and 0 elsewhere, so all is exact. The bound is five standard errors of a variance.
    """
    updates = 2000
    cases = {
        # N = 2, each f_j in its own half: the two are 1 together or not at all, twice the variance of free draws
        "opposite": ([[1, 0], [0, 1]], 2.0),
        "alike": ([[1, 0], [1, 0]], 0.0),
        # Turned by one place each: with strata dealt in the order of places all N were alike, and the ratio N
        "turned": ([[float(k == j) for k in range(4)] for j in range(4)], 4 / 3),
        "halves": ([[1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 0]], None),
    }
    for name, (chosen, ratio) in cases.items():
        f = torch.tensor(chosen, dtype=torch.float64)
        count = len(f)
        own = f.var(1, correction=0).sum()  # of free draws: f is constant within a stratum
        c = f - f.mean(1, keepdim=True)
        expected = own + (c.square().mean(1).sum() - c.sum(0).square().mean()) / (count - 1)
        if ratio is not None:
            assert float(expected / own) == pytest.approx(ratio, abs=1e-12), name
        assert expected <= own * count / (count - 1) + 1e-12
        sums = []
        for epoch in range(updates):
            update = occurrences(count, epoch)
            at = (strata_of(uniform_of(update), update, update) * count).long()
            sums.append(f[torch.arange(count), at].sum())
        centred = torch.stack(sums) - f.mean(1).sum()
        squares = centred.square()
        assert abs(squares.mean() - expected) <= 5 * squares.std() / math.sqrt(updates) + 1e-12, name


@pytest.mark.parametrize("objective", [diffusion(stratified=True), Flow(stratified=True)], ids=["diffusion", "flow"])
def test_times_of_a_step_are_stratified_over_the_update(objective) -> None:
    update = occurrences(6)
    time, noise = draw_time_and_noise(batch(update[2:4]), objective=objective, tokens=64, seed=SEED, update=update)
    u = strata_of(uniform_of(update), update, update)[2:4]
    assert torch.equal(time, objective.time(u, 64))
    assert torch.equal(noise[1], draws.normal((2, 4, 4), SEED, "noise", *astuple(update[3])))
    alone, _ = draw_time_and_noise(batch(update[2:4]), objective=objective, tokens=64, seed=SEED)
    assert torch.equal(alone, objective.time(strata_of(uniform_of(update[2:4]), update[2:4], update[2:4]), 64))


@pytest.mark.parametrize("objective", [diffusion(), Flow()], ids=["diffusion", "flow"])
def test_without_a_choice_times_are_each_samples_own(objective) -> None:
    update = occurrences(6)
    time, _ = draw_time_and_noise(batch(update[2:4]), objective=objective, tokens=64, seed=SEED, update=update)
    assert torch.equal(time, objective.time(uniform_of(update[2:4]), 64))


@pytest.mark.parametrize("kind", ["epsilon", "v", "flow"])
@pytest.mark.parametrize(
    "noise", [Noise(noise_offset=0.3), Noise(multires_noise_iterations=3), Noise(input_perturbation=0.5)]
)
def test_the_target_has_the_shaped_noise_and_not_the_perturbation(kind: str, noise: Noise) -> None:
    """A model that says what it should: its loss is zero only if the step has the same target."""
    objective = (
        Flow(noise=noise) if kind == "flow" else diffusion(kind, noise=noise, times=Times("uniform", t_range=(0.1, 0.9)))
    )
    ours, asked = batch(occurrences(3)), {}

    def predict(seen, time, conditioning, of):
        asked["seen"], asked["time"] = seen, time
        drawn = torch.stack([noise.draw((2, 4, 4), SEED, astuple(o)) for o in ours.occurrences])
        asked["noise"] = drawn
        return objective.target(of.latents, drawn, objective.at(time))

    losses = Losses(
        objective=objective, predict=predict, tokens=lambda texts: {}, encode=lambda tokens: None,
        image_tokens=lambda height, width: 16, seed=SEED, device=torch.device("cpu"),
    )  # fmt: skip
    assert losses(ours).tolist() == [0, 0, 0]
    keys = [astuple(o) for o in ours.occurrences]
    z = torch.stack([draws.normal((2, 4, 4), SEED, "input_perturbation", *key) for key in keys])
    seen = objective.noised(ours.latents, asked["noise"] + noise.input_perturbation * z, objective.at(asked["time"]))
    torch.testing.assert_close(asked["seen"], seen)
    plain = torch.stack([draws.normal((2, 4, 4), SEED, "noise", *key) for key in keys])
    assert torch.equal(asked["noise"], plain) == bool(noise.input_perturbation)


def test_a_share_of_the_range_is_a_time_whatever_is_drawn() -> None:
    shares = torch.tensor([2.0**-53, 0.25, 0.9999, 1 - 2.0**-53], dtype=torch.float64)
    times = Times("power", power=3.0, t_range=(0.4, 0.6))
    assert diffusion(times=times, stratified=True).time_at(shares).tolist() == [0, 250, 999, 999]
    assert Flow(times=times, shift=3.0).time_at(shares).tolist() == pytest.approx([0, 0.25, 0.9999, 1])
