"""step.graphs leaves the bytes of eager steps, shown of tapes (tests/tape.py), which replay as a CUDA graph does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.harness import PHOTOS, Workbench, built, take_step
from tests.tape import Taping
from trainer import config as configs
from trainer.base.errors import UserError
from trainer.engine.graphs import WARM_UP, Graphs
from trainer.run.run import close
from trainer.runtime import precision

STEPS = 10
ENCODERS = [{"component": name, "match": "*0*.self_attn.q_proj"} for name in ("text_encoder", "text_encoder_2")]


def trained(bench: Workbench, family: str, *, taped: bool, **more: Any) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """(what each step did, the adapter after them)."""
    photos = [{"path": str(PHOTOS), "repeats": 2, "loss_weight": 0.7}]
    settings = {
        "run__max_steps": STEPS, "optimizer__lr": 1e-2, "data__sources": photos, "data__batch_size": 1,
        "step__accumulation": 2, "adapter__targets": "attention+mlp", "memory__gradient_checkpointing": True,
    }  # fmt: skip
    with built(configs.parse(bench.tree(family, **settings | more))) as run:
        parameters = list(run.adapter.named_parameters().values())
        taping = Taping(parameters)
        if taped:
            run.step.graphs = Graphs(
                run.step.losses, parameters, run.adapter, recorder=lambda: taping, say=lambda line: None,
            )  # fmt: skip
            begin, graphs = run.step.begin, run.step.graphs
            run.step.begin = lambda: (begin(), graphs.begin())
        done = [take_step(run, step, update) for step, update in zip(range(1, STEPS + 1), run.updates(), strict=False)]
        if taped:
            # What is frozen on the way is a new start.
            starts = 2 if "adapter__rules" in more and "stop_step" in more["adapter__rules"][0] else 1
            assert len(taping.tapes) >= starts and taping.replayed >= 2 * starts and taping.warmed >= WARM_UP * starts
        return done, {name: tensor.clone() for name, tensor in run.adapter.state_dict().items()}


@pytest.mark.parametrize(
    ("family", "more"),
    [
        pytest.param("flux", {"adapter__type": "dora"}, id="flux-dora"),
        pytest.param("flux", {"adapter__type": "lokr", "adapter__alpha": 3.0}, id="flux-lokr", marks=pytest.mark.slow),
        pytest.param(
            "flux",
            {"adapter__type": "lora", "adapter__rank_dropout": 0.3, "adapter__module_dropout": 0.2, "adapter__alpha": 3.0},
            id="flux-lora-dropped-rows", marks=pytest.mark.slow,
        ),
        pytest.param(
            "flux",
            {
                "adapter__type": "dora",
                "adapter__rules": [{"component": "transformer", "match": "*to_q", "stop_step": 5}],
                "model__components": {"transformer": {"dtype": "nf4"}}, "memory__gradient_checkpointing": "selective",
            },
            id="flux-dora-a-part-that-stops", marks=pytest.mark.slow,
        ),
        pytest.param(
            "sdxl",
            {
                "adapter__type": "dora", "adapter__targets": ["*attn1.to_*", "conv_in"], "adapter__rules": ENCODERS,
                "precision__compute": "fp16", "precision__loss_scale": 1024.0,
                "objective": {"loss": "huber", "min_snr_gamma": 5.0, "input_perturbation": 0.1, "stratified": True},
                "model__components": {"unet": {"dtype": "fp8_e4m3"}},
            },
            id="sdxl-dora-with-text-encoders", marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_replayed_micro_batches_leave_the_bytes_of_eager_ones(
    bench: Workbench, monkeypatch, family: str, more: dict[str, Any]
) -> None:
    monkeypatch.setattr(precision, "GROWTH_INTERVAL", 2)
    eager, before = trained(bench, family, taped=False, **more)
    replayed, after = trained(bench, family, taped=True, **more)
    assert replayed == eager and all(each.updated for each in eager[2:])
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_masks_that_are_drawn_within_a_recording_are_refused(bench: Workbench) -> None:
    tree = bench.tree("flux", step__graphs=True, adapter__type="lora", adapter__dropout=0.1)
    with pytest.raises(UserError, match=r"step\.graphs = true cannot be combined with adapter\.dropout = 0\.1.*rank_dropout"):
        configs.parse(tree)


def test_a_recording_is_of_eager_blocks(bench: Workbench) -> None:
    tree = bench.tree("flux", step__graphs=True, step__compile="blocks")
    with pytest.raises(
        UserError, match=r"step\.graphs = true cannot be combined with step\.compile = 'blocks'.*leave out one"
    ):
        configs.parse(tree)


@pytest.mark.parametrize("finished", [True, False])
def test_the_last_pictures_get_the_memory_of_the_graphs(finished: bool) -> None:
    """A step and its jobs still hold on to what recorded them."""
    done: list[str] = []
    artifacts = SimpleNamespace(
        finish=lambda: done.append("pictures"), leave_files=lambda: done.append("files"), leave_report=lambda: None
    )
    step = SimpleNamespace(graphs=SimpleNamespace(let_go=lambda: done.append("let go")))
    close(SimpleNamespace(step=step, artifacts=lambda: artifacts), SimpleNamespace(), finished=finished)  # type: ignore[arg-type]
    assert done == ["let go", "pictures" if finished else "files"]
