"""What a step decides together with the other processes, of which one is played here."""

from __future__ import annotations

import contextlib

import pytest
import torch

from trainer import optim
from trainer.base.errors import OutOfMemory
from trainer.base.types import Batch, Occurrence
from trainer.engine.step import Step, backward

OURS, THEIRS = (tuple(Occurrence(0, f"{process}/{i}.jpg", 0) for i in range(2)) for process in (0, 1))


def batch(occurrences: tuple[Occurrence, ...]) -> Batch:
    sizes = torch.tensor([[64, 96]] * len(occurrences))
    latents = torch.ones(len(occurrences), 1, 2, 2)
    return Batch(occurrences, latents, ("",) * len(occurrences), None, sizes, sizes, sizes)


class Peer:
    """The other process: `told` is what it says beside its gradient; `reductions` counts what both take part in."""

    def __init__(self, told: list[float]) -> None:
        self.told, self.reductions = torch.tensor(told), 0

    def sum(self, *tensors: torch.Tensor) -> None:
        self.reductions += len(tensors)
        assert tensors[0].shape == self.told.shape
        tensors[0].add_(self.told)


def step_with(peer: Peer, losses=lambda batch: batch.latents.mean((1, 2, 3))) -> tuple[Step, torch.nn.Parameter]:
    parameter = torch.nn.Parameter(torch.ones(4))
    group = {"params": [parameter], "lr": 0.1, "weight_decay": 0.0, "magnitudes": False}
    optimizer = optim.build_optimizer("adamw", [group])
    step = Step(
        losses=lambda batch, update: losses(batch) * parameter.sum(),
        optimizer=optimizer,
        schedule=optim.build_schedule("constant", optimizer, total_steps=9, warmup=0),
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        max_grad_norm=1.0,
        after_update=lambda step: {},
        sum=peer.sum,
        training=lambda step, index: contextlib.nullcontext(),
    )
    return step, parameter


def run(peer: Peer, **more):
    step, parameter = step_with(peer, **more)
    before = parameter.detach().clone()
    try:
        return step.run(1, [batch(OURS)], [*OURS, *THEIRS]), torch.equal(parameter, before)
    except OutOfMemory:
        assert torch.equal(parameter, before) and not any(step.optimizer.state.values())
        raise


def test_both_go_on() -> None:
    peer = Peer([3.0, 0, 0, 0, 0, 0])
    result, same = run(peer)
    assert result.updated and not same and peer.reductions == 2
    assert result.loss == pytest.approx(4 * 2 / 4 + 3), "our samples' losses over the global batch, and theirs"
    assert result.grad_norm == pytest.approx((4 * (2 / 4) ** 2) ** 0.5), "so are their gradients"


@pytest.mark.parametrize(("flag", "what"), [(1, "the latents of 1/1.jpg are"), (2, "the loss of 1/1.jpg is")])
def test_what_is_not_finite_in_the_other_process_is_named_and_stops_this_one(flag: int, what: str) -> None:
    peer = Peer([0.0, 0, 0, 0, 0, flag])
    result, same = run(peer)
    assert result.refused == f"{what} not finite" and not result.updated and same
    assert result.bad_latents == (flag == 1)
    assert result.loss is None and result.grad_norm is None
    assert peer.reductions == 2, "every process reduces the same, whatever it met"


def test_latents_are_the_cause_only_where_no_loss_is_another() -> None:
    result, _ = run(Peer([0.0, 0, 0, 0, 1, 2]))
    assert result.refused == "the latents of 1/0.jpg are not finite; the loss of 1/1.jpg is not finite"
    assert not result.bad_latents, "a loss over sound latents may be the rate's doing"


def test_what_is_not_finite_here_changes_nothing() -> None:
    peer = Peer([0.0] * 6)
    result, same = run(peer, losses=lambda batch: torch.tensor([1.0, torch.inf]))
    assert result.refused == "the loss of 0/1.jpg is not finite" and same and peer.reductions == 2


@pytest.mark.parametrize("here", [True, False])
def test_want_of_memory_in_one_process_ends_the_step_of_both(here: bool) -> None:
    def grow(batch):
        if here:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.ones(2)

    peer = Peer([0.0, 0.0 if here else 1.0, 0, 0, 0, 0])
    with pytest.raises(OutOfMemory, match="step 1: out of memory in ") as raised:
        run(peer, losses=grow)
    message = str(raised.value)
    assert ("micro-batch 1 of 1: 2 photo(s) of 96x64 (0/0.jpg, 0/1.jpg)" in message) == here
    assert ("in another process" in message) == (not here) and peer.reductions == 2


class Replayed:
    """Graphs that ran out of memory in the second micro-batch, half of whose gradient is there."""

    def __init__(self, step: Step) -> None:
        self.step, self.recorded, self.calls, self.reasons = step, {"a shape": None}, 0, []

    def __call__(self, batch: Batch, update, share: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        losses = backward(self.step.losses(batch, update), share, contextlib.nullcontext())
        if self.recorded and self.calls == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return losses

    def give_up(self, reason: str) -> None:
        self.reasons.append(reason)
        self.recorded = {}


@pytest.mark.parametrize("recorded", [True, False])
def test_an_update_that_runs_out_of_memory_beside_graphs_is_made_again_without(recorded: bool) -> None:
    """The whole of it: a micro-batch may have left a part of its gradient."""
    weights, results = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)], []
    begun: list[int] = []
    for weight in weights:
        step = alone(lambda weight=weight: weight.sum(), [weight], max_grad_norm=0.0, begin=lambda: begun.append(1))
        if weight is weights[0]:
            step.graphs = graphs = Replayed(step)
            graphs.recorded = {"a shape": None} if recorded else {}
            graphs.calls = 0 if recorded else 9
        results.append(step.run(1, [batch(OURS), batch(THEIRS)], [*OURS, *THEIRS]))
    assert results[0] == results[1] and torch.equal(*weights)
    assert graphs.reasons == ["memory ran out"] * recorded and len(begun) == 2 + recorded


def test_other_errors_pass() -> None:
    def broken(batch):
        raise RuntimeError("shapes")

    with pytest.raises(RuntimeError, match="shapes"):
        run(Peer([0.0] * 6), losses=broken)


def alone(losses, parameters: list[torch.nn.Parameter], **more) -> Step:
    """Of one process, by plain gradient descent, a group for each parameter. losses: of the parameters."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.SGD([{"params": [parameter], "lr": 0.5} for parameter in parameters])
    return Step(
        losses=lambda batch, update: batch.latents.mean((1, 2, 3)) * losses(),
        optimizer=optimizer,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n)),
        after_update=lambda step: {},
        sum=lambda *tensors: None,
        training=lambda step, index: contextlib.nullcontext(),
        **{"scaler": torch.amp.GradScaler("cpu", enabled=False), "max_grad_norm": 1.0} | more,
    )


def test_all_groups_are_clipped_by_one_norm_and_the_schedule_goes_on() -> None:
    one, other = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    step = alone(lambda: 3 * one.sum() + 4 * other.sum(), [one, other])
    for number, rate in ((1, 0.5), (2, 0.25)):
        before = torch.cat([one, other]).detach().clone()
        result = step.run(number, [batch(OURS)], OURS)
        assert result.grad_norm == 5 and result.lr == (rate, rate)
        assert torch.allclose(torch.cat([one, other]).detach(), before - rate * torch.tensor([0.6, 0.8]))


def test_every_sample_counts_alike_whatever_the_size_of_its_micro_batch() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    step = alone(lambda: weight.sum(), [weight], max_grad_norm=0.0)
    parts = [batch(OURS), Batch(THEIRS[:1], torch.full((1, 1, 2, 2), 4.0), ("",), None, *[torch.tensor([[64, 96]])] * 3)]
    step.run(1, parts, [*OURS, THEIRS[0]])
    assert torch.allclose(weight.detach(), torch.tensor([-0.5 * (1 + 1 + 4) / 3]))


def test_the_loss_scale_falls_to_1_and_no_lower() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=1.5, backoff_factor=0.5)
    step = alone(lambda: torch.sqrt(weight - 1).sum(), [weight], scaler=scaler)  # whose gradient is infinite there
    first = step.run(1, [batch(OURS)], OURS)
    assert not first.updated and not first.refused and scaler.get_scale() == 1.0
    second = step.run(2, [batch(OURS)], OURS)
    assert second.refused.startswith("the gradient is not finite") and scaler.get_scale() == 1.0 and weight == 1
