"""Every distribution of times against its papers' formula: exact draws, inverses, and a test of many draws."""

from __future__ import annotations

import math
import re
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.objectives.test_diffusion import diffusion
from trainer.base import draws
from trainer.base.errors import UserError
from trainer.objectives import Flow, Times

MEAN, STD, MODE, POWER = 0.3, 0.8, 1.1, 2.5
# Quantile functions in plain Python: Esser et al. 2024, arXiv 2403.03206, 3.1. The paper's mode falls with u: here at 1 - u.
QUANTILE = {
    "uniform": lambda u: u,
    "logit_normal": lambda u: 1 / (1 + math.exp(-(MEAN + STD * NormalDist().inv_cdf(u)))),
    "sigmoid": lambda u: 1 / (1 + math.exp(-(MEAN + STD * NormalDist().inv_cdf(u)))),
    "mode": lambda u: 1 - (1 - u) - MODE * (math.cos(math.pi / 2 * (1 - u)) ** 2 - 1 + (1 - u)),
    "cosmap": lambda u: 1 - 1 / (math.tan(math.pi / 2 * u) + 1),
    "power": lambda u: math.exp(math.log(u) / POWER),
}
# Densities, from the same pages.
DENSITY = {
    "uniform": lambda t: 1.0,
    "logit_normal": lambda t: (
        math.exp(-((math.log(t / (1 - t)) - MEAN) ** 2) / (2 * STD**2)) / (STD * math.sqrt(2 * math.pi) * t * (1 - t))
    ),
    "cosmap": lambda t: 2 / (math.pi - 2 * math.pi * t + 2 * math.pi * t * t),
    "power": lambda t: POWER * t ** (POWER - 1),
    "mode": lambda t: density_of_mode(t),
}
DENSITY["sigmoid"] = DENSITY["logit_normal"]


def density_of_mode(t: float) -> float:
    """1 / |f'(u)| at f(u) = t, f the paper's function, which falls from 1 to 0."""
    low, high = 0.0, 1.0
    for _ in range(50):
        u = (low + high) / 2
        low, high = (u, high) if 1 - u - MODE * (math.cos(math.pi * u / 2) ** 2 - 1 + u) > t else (low, u)
    return 1 / (1 + MODE - MODE * math.pi / 2 * math.sin(math.pi * u))


# Draws of one seed and sample, in fp64: old runs resume under new versions of this code.
EXACT = {
    "uniform": 0.9788988674744888,
    "logit_normal": 0.8727189640646432,
    "sigmoid": 0.8727189640646432,
    "mode": 0.9568956717268944,
    "cosmap": 0.9679064249011268,
    "power": 0.9915055063713843,
}


def times(name: str, t_range: tuple[float, float] = (0.0, 1.0)) -> Times:
    return Times(name, MEAN, STD, MODE, POWER, t_range)


def drawn(name: str, u: float, *bounds: float) -> float:
    return times(name).draw(torch.tensor([u], dtype=torch.float64), *bounds).item()


@given(st.sampled_from(sorted(QUANTILE)), st.floats(1e-6, 1 - 1e-6))
def test_the_formula_and_its_inverse(name: str, u: float) -> None:
    t = QUANTILE[name](u)
    assert drawn(name, u) == pytest.approx(t, rel=1e-9, abs=1e-12)
    assert times(name).share_below(drawn(name, u)) == pytest.approx(u, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", QUANTILE)
def test_exact_draws_of_a_seed(name: str) -> None:
    """To the last digits but two, which differ among libraries of mathematics."""
    assert drawn(name, draws.uniform(7, "timestep", 0, "0/00.jpg", 0)) == pytest.approx(EXACT[name], rel=1e-14)


@pytest.mark.parametrize("name", QUANTILE)
def test_times_rise_with_u_and_are_finite_at_both_ends(name: str) -> None:
    u = torch.cat([torch.tensor([2.0**-53]), (torch.arange(1, 1000) / 1000), torch.tensor([1.0])]).double()
    u[-1] = 1 - 2.0**-53
    t = times(name).draw(u)
    assert bool((t.diff() > 0).all()) and t[0] > 0 and t[-1] <= 1 and bool(torch.isfinite(t).all())


@pytest.mark.slow
@given(
    st.sampled_from(sorted(QUANTILE)), st.floats(-60, 60), st.floats(1e-3, 60), st.floats(-9, 9), st.sampled_from((0.0, 0.3)),
    st.sampled_from((0.6, 1.0)), st.floats(-12, 12),
)  # fmt: skip
def test_times_that_are_nearly_all_photo_or_noise_are_refused(
    name: str, mean: float, std: float, power: float, low: float, high: float, shift: float
) -> None:
    """Where a quarter of the times that are trained is below 1e-4 or above 1 - 1e-4: of sorted times, by counting.

    What is accepted gives Flow times whose middle half fp32 tells from 0 and 1.
    """
    chosen, s = Times(name, mean, std, MODE, math.exp(power), (low, high)), math.exp(shift)
    u = torch.linspace(0, 1, 4003, dtype=torch.float64)[1:-1]
    whole = chosen.draw(u)
    whole = s * whole / (1 + (s - 1) * whole)
    inside = whole[(whole >= low) & (whole <= high)]
    below, above = ((inside < 1e-4).double().mean(), (inside > 1 - 1e-4).double().mean()) if len(inside) else (1.0, 1.0)
    try:
        flow = Flow(times=chosen, shift=s)
    except UserError as refused:
        assert len(inside) < 2000 or max(below, above) > 0.24
        assert "objective." in str(refused) and ("nearer to" in str(refused) or "widen" in str(refused))
        return
    assert len(inside) < 2000 or max(below, above) < 0.26
    middle = flow.time(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64), 1024)
    assert bool((middle >= 1e-4 - 1e-8).all()) and bool((middle <= 1 - 1e-4 + 1e-7).all())


def test_what_is_refused_names_the_values_and_the_remedy() -> None:
    half = "; it must be within 0.0001 and 0.9999, or the model sees little but photos or plain noise; bring objective."
    for make, value, span, remedy in (
        (lambda: Flow(times=Times("logit_normal", 40.0)), "logit_mean = 40", "logit_normal times is from 1 to 1", "0"),
        (lambda: Flow(times=Times("uniform"), shift=1e7), "shift = 1e+07", "uniform times is from 1 to 1", "1"),
        (lambda: diffusion(times=Times("power", power=1e-3)), "power = 0.001", "power times is from 0 to 1.1515e-125", "1"),
    ):
        said = f"objective.{value}: the middle half of the {span}{half}{value.split()[0]} nearer to {remedy}"
        with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
            make()


def kolmogorov(count: int, alarm: float) -> float:
    """The bound on sqrt(n) D that chance exceeds with the probability `alarm`: 2 exp(-2 x^2), of the limit distribution."""
    return math.sqrt(math.log(2 / alarm) / 2) / math.sqrt(count)


@pytest.mark.parametrize("t_range", [(0.0, 1.0), (0.15, 0.6)])
@pytest.mark.parametrize("name", DENSITY)
def test_keyed_draws_have_the_density(name: str, t_range: tuple[float, float]) -> None:
    """Kolmogorov and Smirnov's test against the integral of the density, by Simpson's rule. False alarm: one in a million."""
    count, (low, high) = 4000, t_range
    u = torch.tensor([draws.uniform(3, "timestep", 0, f"{i}.jpg", 0) for i in range(count)], dtype=torch.float64)
    t = times(name).draw(u, low, high).sort().values.tolist()
    grid = 4000
    edge = 1e-9  # where a logarithm is needed
    step = (high - low - 2 * edge) / grid
    values = [DENSITY[name](low + edge + step * i) for i in range(grid + 1)]
    below = [0.0]
    for i in range(0, grid, 2):
        below.append(below[-1] + step / 3 * (values[i] + 4 * values[i + 1] + values[i + 2]))
    if t_range == (0.0, 1.0):
        assert below[-1] == pytest.approx(1, abs=1e-4)

    def share(at: float) -> float:
        place = (at - low - edge) / (2 * step)
        i = min(max(int(place), 0), len(below) - 2)
        return (below[i] + (place - i) * (below[i + 1] - below[i])) / below[-1]

    distance = max(max(abs(share(at) - i / count), abs(share(at) - (i + 1) / count)) for i, at in enumerate(t))
    assert distance < kolmogorov(count, 1e-6)


@pytest.mark.parametrize("t_range", [(0.0, 1.0), (0.215, 0.7)])
def test_whole_timesteps_have_their_shares(t_range: tuple[float, float]) -> None:
    """Pearson's chi-square over ten bins of SDXL's timesteps, logit-normal. False alarm: one in a million."""
    count = 4000
    objective = diffusion(times=times("logit_normal", t_range))
    u = torch.tensor([draws.uniform(5, "timestep", 0, f"{i}.jpg", 0) for i in range(count)], dtype=torch.float64)
    drawn = objective.time(u, 0).tolist()
    first, last = round(1000 * t_range[0]), round(1000 * t_range[1])
    edges = [first + (last - first) * i // 10 for i in range(11)]

    def below(step: int) -> float:
        return step / 1000 if step in (0, 1000) else NormalDist(MEAN, STD).cdf(math.log(step / (1000 - step)))

    chi_square = 0.0
    for low, high in zip(edges, edges[1:], strict=False):
        expected = count * (below(high) - below(low)) / (below(last) - below(first))
        chi_square += (sum(low <= t < high for t in drawn) - expected) ** 2 / expected
    p = torch.special.gammaincc(torch.tensor(9 / 2, dtype=torch.float64), torch.tensor(chi_square / 2, dtype=torch.float64))
    assert p > 1e-6 and first <= min(drawn) and max(drawn) < last
