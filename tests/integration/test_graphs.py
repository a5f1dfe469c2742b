"""step.graphs leaves the bytes of eager steps, shown of tapes (tests/tape.py), which replay as a CUDA graph does; and records
compiled blocks once their programs are there."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from tests.harness import PHOTOS, Workbench, built, take_step
from tests.integration.test_compiled import traced_only
from tests.numerics.test_compiled_blocks import AOT
from tests.tape import Running, Taping
from trainer import config as configs
from trainer.base.errors import UserError
from trainer.engine.graphs import WARM_UP, Graphs
from trainer.run.run import close
from trainer.runtime import precision
from trainer.runtime.device import without_graphs

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
            "flux", {"adapter__type": "dora", "memory__offload": "blocks", "memory__resident_blocks": 0},
            id="flux-dora-streamed", marks=pytest.mark.slow,
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


# What a program leaves out of an eager micro-batch: in a double block, of which the tiny Flux has two, both norms have the
# same silu, forward and recomputed.
DEAD = {"flux": Counter(silu=4), "sdxl": Counter()}


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param("flux", "dora", marks=pytest.mark.slow), pytest.param("flux", "lora", marks=pytest.mark.proof),
        pytest.param("sdxl", "dora", marks=pytest.mark.proof),
    ],
)  # fmt: skip
def test_compiled_blocks_are_recorded_once_their_programs_are_made(
    bench: Workbench, monkeypatch, family: str, kind: str
) -> None:
    """Traced alone, they have the bytes of eager blocks; they run what these do, but for what is dead; and neither a
    recording nor what follows makes a program."""
    seen = dict[str, Any]()
    traced_only(monkeypatch, AOT)
    (bench.tmp / "photo").mkdir()
    Image.new("RGB", (64, 64), "red").save(bench.tmp / "photo" / "1.png")
    (bench.tmp / "photo" / "1.txt").write_text("a bear")
    for compiled in ("none", "blocks"):
        tree = bench.tree(
            family, run__max_steps=4, optimizer__lr=1e-2, data__sources=[{"path": str(bench.tmp / "photo"), "repeats": 2}],
            data__batch_size=1, data__caption_dropout=0.0, step__accumulation=2, step__compile=compiled, adapter__type=kind,
            adapter__targets="attention+mlp", memory__gradient_checkpointing=True,
        )  # fmt: skip
        with built(configs.parse(tree)) as run:
            parameters, begin = list(run.adapter.named_parameters().values()), run.step.begin
            running = Running(parameters)
            graphs = run.step.graphs = Graphs(
                run.step.losses, parameters, run.adapter, recorder=lambda running=running: running, say=lambda line: None,
            )  # fmt: skip
            run.step.begin = lambda begin=begin, graphs=graphs: (begin(), graphs.begin())
            done = [take_step(run, step, update) for step, update in zip(range(1, 5), run.updates(), strict=False)]
            assert running.replayed and len(running.ran) == 2 and len(graphs.recorded) == 1
            weights = {name: tensor.clone() for name, tensor in run.adapter.state_dict().items()}
            made = [result.log_fields.get("compiled", 0) for result in done]
            seen[compiled] = [replace(result, log_fields={}) for result in done], weights, running.ran[1]
    (eager, before, ran), (compiled, after, program) = seen.values()
    assert compiled == eager and all(torch.equal(after[name], before[name]) for name in before)
    assert made[0] > 0 and not any(made[1:]), "in the first micro-batch, which warms up"
    assert ran - program == DEAD[family] and program <= ran and ran["mm"] > 50


def test_a_run_on_a_card_records_its_compiled_blocks(bench: Workbench) -> None:
    config = configs.parse(bench.tree("flux", step__graphs=True, step__compile="blocks"))
    assert without_graphs(config, torch.device("cuda")) == ""


@pytest.mark.parametrize("finished", [True, False])
def test_the_last_pictures_get_the_memory_of_the_graphs(finished: bool) -> None:
    """A step and its jobs still hold on to what recorded them."""
    done: list[str] = []
    artifacts = SimpleNamespace(
        finish=lambda: done.append("pictures"), leave_files=lambda: done.append("files"), leave_report=lambda: None
    )
    step = SimpleNamespace(graphs=SimpleNamespace(clear=lambda: done.append("let go")))
    close(SimpleNamespace(step=step, artifacts=lambda: artifacts), SimpleNamespace(), finished=finished)  # type: ignore[arg-type]
    assert done == ["let go", "pictures" if finished else "files"]
