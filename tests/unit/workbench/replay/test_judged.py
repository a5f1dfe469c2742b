"""What a judgement takes for rounding: a step's numbers within their bounds, and nothing that is wrong by a factor."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.harness import Workbench, built
from workbench.replay.exact import computing_exactly
from workbench.replay.judged import Judge, JudgedStep, LayerGradient, Number, RepeatedStep, _norm_in_fp32, recording


def number(logged: float | None, exact: float = 1.0, bound: float = 0.1, *, overflows: bool = False) -> Number:
    return Number(logged, logged, exact, bound, overflows)


def test_a_number_is_held_against_its_bound() -> None:
    assert number(1.05).share == pytest.approx(0.5) and number(0.7).share == pytest.approx(3.0)
    assert number(1.0, bound=0.0).share == 0 and number(1.1, bound=0.0).share == math.inf
    assert number(None).share == math.inf and number(None, overflows=True).share == 0


@pytest.mark.parametrize(
    ("loss", "norm", "error", "along", "explained"),
    [(1.05, 1.0, 0.5, 0.05, True), (1.2, 1.0, 0.5, 0.05, False), (1.0, 1.2, 0.5, 0.05, False), (1.0, 1.0, 1.5, 0.05, False),
     (1.0, 1.0, 0.5, -0.2, False)],
)  # fmt: skip
def test_a_step_is_explained_where_all_of_it_is(
    loss: float, norm: float, error: float, along: float, explained: bool
) -> None:
    layers = (LayerGradient("a", "A", 1.0, error, along, (1.0, 0.1)), LayerGradient("b", "B", 1.0, 0.0, 0.0, (1.0, 0.1)))
    assert JudgedStep(1, number(loss), number(norm), layers).explained is explained


@pytest.mark.parametrize(
    ("storage", "compute"),
    [pytest.param("nf4", "bf16", marks=pytest.mark.slow), pytest.param("fp16", "fp16", marks=pytest.mark.proof)],
)
def test_a_wrong_gradient_of_one_layer_is_named(bench: Workbench, storage: str, compute: str) -> None:
    """Of a step that is right and of the same with one layer's gradient turned, in the judgement of the same repetitions."""
    stored = {"transformer": {"dtype": storage}}
    config = bench.config("flux", adapter__type="dora", precision__compute=compute, model__components=stored)
    with built(config) as run:
        step = recording(run.step, run.adapter)
        update = next(run.updates())
        occurrences = [occurrence for micro_batch in update for occurrence in micro_batch]
        batches = [run.reader[micro_batch] for micro_batch in update]
        before = {name: tensor.clone() for name, tensor in run.adapter.state_dict().items()}
        result = step.run(1, batches, occurrences)
        made = RepeatedStep(1, result, before, batches, occurrences, dict(step.gradients))
        judge = Judge(step.losses, run.adapter, step.training, run.components.plan.storage["transformer"].compute)
        logged = result.loss, result.grad_norm
        with computing_exactly(run.components):
            judged = judge.judge(made, logged)
            wrong = next(layer.name for layer in judged.layers if layer.size)
            turned = {name: -seen if name.startswith(f"{wrong}.") else seen for name, seen in made.gradients.items()}
            other = judge.judge(replace(made, gradients=turned), logged)
            loss = judge.judge(made, (logged[0] * 1.5, logged[1])).loss
        assert judged.explained and all(0 < layer.bounds[0] < 1 for layer in judged.layers if layer.size)
        assert {layer.name for layer in other.layers if layer.share > 1} == {wrong}
        assert loss.share > 1 and math.isfinite(judged.loss.bound)


def test_the_norm_of_a_repetition_is_short_where_that_of_a_run_is() -> None:
    """Of many numbers: a run sums their squares in fp32."""
    flat = torch.randn(4_000_000, generator=torch.Generator().manual_seed(0))
    exact = float(flat.double().norm())
    run, repetition = float(torch.nn.utils.get_total_norm([flat])), _norm_in_fp32([flat[:9].double(), flat[9:].double()])
    assert run == repetition != pytest.approx(exact, rel=1e-6)
