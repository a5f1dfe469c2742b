"""The loop that makes the pocket models: killed anywhere, it ends in the same bytes; its average is the one it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from examples.pocket import training
from trainer.base.errors import UserError

STEPS = 7


class Model(nn.Module):
    """Has a parameter that nobody reads, as a text encoder's last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.idle = nn.Linear(2, 2)


def build(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


def run(state: Path, *, seed: int = 0, killed_at: int | None = None) -> Model:
    module = build(seed)

    def loss(step: int) -> torch.Tensor:
        if step == killed_at:
            raise KeyboardInterrupt
        x = torch.randn(8, 3, generator=training.generator(seed, step))
        return (module.linear(x) - x[:, :2]).square().mean()

    training.train(module, loss, state, seed=seed, steps=STEPS, peak=1e-2, warmup=2)
    return module


@pytest.fixture(autouse=True)
def save_always(monkeypatch) -> None:
    monkeypatch.setattr(training, "SAVE_SECONDS", -1)


@pytest.mark.parametrize("step", range(1, STEPS))
def test_killed_and_gone_on_with_is_uninterrupted(tmp_path: Path, step: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut.safetensors", killed_at=step)
    run(tmp_path / "cut.safetensors")
    run(tmp_path / "whole.safetensors")
    assert (tmp_path / "cut.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_another_seed_gives_other_weights_and_the_same_one_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(tmp_path / f"{name}.safetensors", seed=seed)
    one, same, other = (tmp_path / f"{name}.safetensors" for name in "abc")
    assert one.read_bytes() == same.read_bytes()
    assert not torch.equal(read(one, "weights/linear.weight"), read(other, "weights/linear.weight"))


def test_another_seed_does_not_go_on_with_a_state(tmp_path: Path) -> None:
    state = tmp_path / "state.safetensors"
    run(state)
    before = state.read_bytes()
    with pytest.raises(UserError, match="is of seed 0, not of 1"):
        run(state, seed=1)
    with pytest.raises(UserError, match="is of seed 0, not of 1"):
        training.load_average(build(0), state, seed=1)
    assert state.read_bytes() == before


def test_an_unfinished_training_is_not_built_upon(tmp_path: Path) -> None:
    state = tmp_path / "state.safetensors"
    with pytest.raises(UserError, match="state.safetensors is missing: the part 'state' makes it"):
        training.load_average(build(0), state, seed=0)
    with pytest.raises(KeyboardInterrupt):
        run(state, killed_at=3)
    with pytest.raises(UserError, match="stands at step 3 of 7"):
        training.load_average(build(0), state, seed=0)


def test_the_average_is_of_all_steps(tmp_path: Path) -> None:
    """Against the recurrence in fp64, with the weights of every step read from the states."""
    state, weights = tmp_path / "state.safetensors", [build(0).linear.weight.double()]
    for step in range(1, STEPS):
        with pytest.raises(KeyboardInterrupt):
            run(state, killed_at=step)
        weights.append(read(state, "weights/linear.weight"))
    module = run(state)
    weights.append(read(state, "weights/linear.weight"))
    expected = weights[0]
    for step, weight in enumerate(weights[1:], 1):
        keep = min(0.999, (1 + step) / (10 + step))
        expected = keep * expected + (1 - keep) * weight
    torch.testing.assert_close(module.linear.weight.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        training.load_average(build(5), state, seed=0).linear.weight, module.linear.weight, rtol=0, atol=0
    )


def read(state: Path, name: str) -> torch.Tensor:
    with safe_open(state, "pt") as file:
        return file.get_tensor(name).double()


def test_every_sample_comes_once_an_epoch_in_an_order_of_its_own() -> None:
    order = training.epoch_order(3, 10, 0, 30)
    epochs = [order[start : start + 10].tolist() for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs) and len({tuple(epoch) for epoch in epochs}) == 3
    parts = torch.cat([training.epoch_order(3, 10, start, 6) for start in range(0, 30, 6)])
    assert parts.tolist() == order.tolist()


def test_the_log_says_how_far_it_is(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(training, "LOG_STEPS", 3)
    run(tmp_path / "state.safetensors")
    lines = [json.loads(line) for line in (tmp_path / "state.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 6, 7] and all(line["loss"] > 0 for line in lines)


def test_every_step_of_every_seed_draws_its_own_numbers() -> None:
    drawn = {torch.randn((), generator=training.generator(seed, step)).item() for seed in range(3) for step in range(20)}
    assert len(drawn) == 60
    orders = {tuple(training.epoch_order(seed, 10, 0, 10).tolist()) for seed in range(3)}
    assert len(orders) == 3
