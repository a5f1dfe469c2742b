"""An average of three numbers, against sums over all weights that there were."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer.base.errors import UserError
from trainer.ema import Average


def averaged(changed=lambda: None, decay: float = 0.9) -> tuple[Average, nn.Parameter]:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
    return Average({"a": parameter}, decay, changed), parameter


def walk(kept: Average, parameter: nn.Parameter, count: int) -> list[torch.Tensor]:
    seen = []
    for n in range(count):
        with torch.no_grad():
            parameter.copy_(torch.tensor([float(n), float(n * n), -1.0]))
        kept.update()
        seen.append(parameter.detach().double().clone())
    return seen


@pytest.mark.parametrize("decay", [0.3, 0.9])
def test_a_constant_average_is_the_sum_of_the_weights_by_its_shares(decay: float) -> None:
    """The share of update n is 1 - min(decay, (1 + n) / (10 + n)), and (1 - it) of what was before stays."""
    kept, parameter = averaged(decay=decay)
    start = parameter.detach().double().clone()
    seen = walk(kept, parameter, 30)
    shares = [1 - min(decay, (1 + n) / (10 + n)) for n in range(1, 31)]
    left, total = 1.0, torch.zeros(3, dtype=torch.float64)
    for share, weights in zip(reversed(shares), reversed(seen), strict=True):
        total += left * share * weights
        left *= 1 - share
    assert torch.allclose(kept.weights["a"].double(), total + left * start, rtol=1e-6)


def test_inside_it_is_in_use_and_afterwards_the_weights_are_back() -> None:
    stale: list[torch.Tensor] = []
    kept, parameter = averaged(lambda: stale.append(parameter.detach().clone()))
    walk(kept, parameter, 5)
    trained, average = parameter.detach().clone(), kept.weights["a"].clone()
    with pytest.raises(RuntimeError, match="no memory"), kept.used():
        assert torch.equal(parameter, average) and len(stale) == 1
        raise RuntimeError("no memory")
    assert torch.equal(parameter, trained) and not torch.equal(trained, average)
    # What follows from the parameters is marked stale after each change of them.
    assert len(stale) == 2 and torch.equal(stale[0], average) and torch.equal(stale[1], trained)


def test_what_is_restored_goes_on_as_if_it_had_not_stopped() -> None:
    whole, parameter = averaged()
    walk(whole, parameter, 8)
    first, parameter = averaged()
    walk(first, parameter, 3)
    second, parameter = averaged()
    second.load_state_dict(first.state_dict())
    for n in range(3, 8):
        with torch.no_grad():
            parameter.copy_(torch.tensor([float(n), float(n * n), -1.0]))
        second.update()
    assert torch.equal(second.weights["a"], whole.weights["a"]) and second.updates == 8


def test_what_does_not_fit_is_refused() -> None:
    kept, _ = averaged()
    sound = kept.state_dict()
    for odd, said in (
        (sound | {"constant|a": torch.zeros(4)}, r"here torch.float32 \(3,\)"),
        (sound | {"constant|a": torch.zeros(3, dtype=torch.float64)}, "is torch.float64"),
        (sound | {"constant|b": torch.zeros(3)}, "here nothing"),
        ({"updates": 0}, "is nothing"),
    ):
        with pytest.raises(UserError, match=said):
            kept.load_state_dict(odd)
    for count in (-1, 1.5, True, 2**53):
        with pytest.raises(ValueError, match="updates"):
            kept.load_state_dict(sound | {"updates": count})
