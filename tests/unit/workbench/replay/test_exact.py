"""After a step in fp64 model and adapter are what they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import Workbench, built
from trainer.run.run import Run
from workbench.replay import judged
from workbench.replay.exact import computing_exactly
from workbench.replay.judged import Judge, RepeatedStep, recording


def state_of(run: Run) -> dict[tuple[str, ...], Any]:
    """What a step computes with: classes, ways to compute, tensors where they lie, their bits and their gradients."""
    found: dict[tuple[str, ...], Any] = {("compute",): dict(run.components.model.compute)}
    for component, module in run.components.model.modules.items():
        for name, layer in module.named_modules():
            hooks = [getattr(hook, "compute", None) for hook in layer._forward_hooks.values()]
            found[component, name] = type(layer), layer.__dict__.get("forward"), hooks
            for key, tensor in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)):
                lies = [each if each is None else (each.data_ptr(), each.dtype) for each in (tensor, tensor.grad)]
                found[component, name, key] = lies
                found[component, name, key, "bits"] = tensor.detach().reshape(-1).clone().view(torch.uint8)
    return found


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("flux", {"adapter__type": "dora", "memory__offload": "blocks"}),
        ("sdxl", {"step__attention": "math", "adapter__rules": [{"component": "text_encoder", "match": "*layers.0*"}]}),
    ],
)
def test_a_step_in_fp64_leaves_the_run_as_it_was(bench: Workbench, monkeypatch, family: str, more: dict[str, Any]) -> None:
    monkeypatch.setattr(judged, "REPETITIONS", 1)
    with built(bench.config(family, precision__compute="bf16", **more)) as run:
        step = recording(run.step, run.adapter)
        update = next(run.updates())
        occurrences = [occurrence for micro_batch in update for occurrence in micro_batch]
        batches = [run.reader[micro_batch] for micro_batch in update]
        start = {name: tensor.clone() for name, tensor in run.adapter.state_dict().items()}
        made = RepeatedStep(1, step.run(1, batches, occurrences), start, batches, occurrences, dict(step.gradients))
        before = state_of(run)
        with computing_exactly(run.components):
            within = state_of(run)
            Judge(step.losses, run.adapter, step.training, torch.bfloat16).judge(
                made, (made.result.loss, made.result.grad_norm)
            )
        after = state_of(run)
    assert before.keys() == after.keys() and within["compute",] != before["compute",]
    for place, was in before.items():
        now = after[place]
        assert torch.equal(was, now) if isinstance(was, torch.Tensor) else was == now, place
