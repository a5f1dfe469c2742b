"""Keyed draws: pure, distinct for distinct keys, of the right distribution, and fixed for good."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.harness import ROOT
from trainer.base import draws

keys = st.lists(st.one_of(st.integers(-(2**40), 2**40), st.text(max_size=8)), max_size=4)


@given(st.integers(0, 2**63), st.text(max_size=8), keys)
def test_a_draw_is_a_function_of_its_key_alone(seed, purpose, key):
    first = (draws.uniform(seed, purpose, *key), draws.normal((3,), seed, purpose, *key))
    torch.rand(3)  # neither the global generator nor other draws matter
    draws.normal((5,), seed, purpose, *key)
    second = (draws.uniform(seed, purpose, *key), draws.normal((3,), seed, purpose, *key))
    assert first[0] == second[0] and torch.equal(first[1], second[1])
    assert 0.0 < first[0] < 1.0


def test_draws_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    draws.normal((100,), 1, "noise", 0, "0/a.jpg", 0)
    draws.uniform(1, "timestep", 0, "0/a.jpg", 0)
    assert torch.equal(before, torch.get_rng_state())


@given(st.tuples(st.integers(0, 9), st.text(max_size=3), keys), st.tuples(st.integers(0, 9), st.text(max_size=3), keys))
def test_distinct_keys_give_distinct_draws(one, other):
    same = (one[0], one[1], *one[2]) == (other[0], other[1], *other[2])
    assert (draws.uniform(one[0], one[1], *one[2]) == draws.uniform(other[0], other[1], *other[2])) == same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, "a", 1), (1, "a", "1")),
        ((1, "flip", 0), (1, "noise", 0)),
        ((1, "flip", 0), (2, "flip", 0)),
        ((1, "a", "b", "c"), (1, "a", "b,c")),
        ((1, "a", "b"), (1, "ab")),
        ((1, "a", 1, 2), (1, "a", 12)),
    ],
)
def test_the_key_is_encoded_unambiguously(one, other):
    assert draws.uniform(*one) != draws.uniform(*other)


def test_a_key_of_another_type_is_refused():
    with pytest.raises(AssertionError):
        draws.uniform(1, "flip", True)
    with pytest.raises(AssertionError):
        draws.uniform(1, "flip", 0.5)


def test_values_never_change():
    """Old runs resume under new versions of this code: these numbers are part of the checkpoint format."""
    assert draws.uniform(7, "timestep", 0, "0/00.jpg", 0) == 0.9788988674744888
    assert draws.generator(7, "noise", 0, "0/00.jpg", 0).initial_seed() == 1713633343232676154


def test_uniform_is_open_at_both_ends(monkeypatch):
    for bits, expected in ((0, 2.0**-53), (2**64 - 1, 1 - 2.0**-53)):
        monkeypatch.setattr(draws, "_bits", lambda *_, bits=bits: bits)
        assert draws.uniform(0, "timestep") == expected
        assert math.isfinite(math.log(expected / (1 - expected)))


def test_uniform_and_normal_have_their_moments():
    values = torch.tensor([draws.uniform(3, "timestep", 0, f"{i}.jpg", 0) for i in range(4000)], dtype=torch.float64)
    # Five standard errors: of the mean 1/sqrt(12 n), of each tenth's count sqrt(n * 0.09).
    assert abs(values.mean() - 0.5) < 5 / math.sqrt(12 * 4000)
    assert (torch.histc(values, 10, 0, 1) - 400).abs().max() < 5 * math.sqrt(4000 * 0.09)
    noise = draws.normal((4, 64, 64), 3, "noise", 0, "0/a.jpg", 0)
    assert noise.dtype == torch.float32 and noise.shape == (4, 64, 64)
    assert abs(noise.mean()) < 5 / math.sqrt(noise.numel()) and abs(noise.std() - 1) < 5 / math.sqrt(2 * noise.numel())


@given(st.integers(0, 2**63), st.integers(0, 40), st.integers(0, 40))
def test_several_draws_of_one_key_are_uniform_and_stay_when_more_are_asked(seed, count, more):
    some = draws.uniforms(count, seed, "order", "a")
    assert len(some) == count and draws.uniforms(count + more, seed, "order", "a")[:count] == some
    assert all(0.0 < value < 1.0 for value in some)


def test_several_draws_are_uniform_and_independent():
    values = torch.tensor([draws.uniforms(4, 3, "order", key) for key in range(20_000)], dtype=torch.float64)
    counts = torch.histc(values.float(), 10, 0, 1)
    assert bool(((counts - 8000).abs() <= 5 * (80_000 * 0.09) ** 0.5).all())
    assert bool((torch.corrcoef(values.T) - torch.eye(4)).abs().max() < 5 / 20_000**0.5)
    assert draws.uniforms(2, 7, "tag_order", "0/a.jpg", 0) == [0.18238019046022058, 0.9271614346445357]


def test_the_list_of_purposes_is_whole():
    used = set()
    for path in (*ROOT.glob("trainer/**/*.py"), *ROOT.glob("workbench/**/*.py")):
        used |= set(re.findall(r'(?:draws\.(?:uniforms?|normal|generator)|\bwithin)[(,][^"\n]*"(\w+)"', path.read_text()))
    listed = draws.__doc__.partition("Purposes in use")[2]
    assert used == set(re.findall(r'"(\w+)"', listed)) and len(used) >= 13
