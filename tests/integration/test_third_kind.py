"""A kind of adapter that the program does not know trains, resumes, is exported, merged and replayed like its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import adapter as script
from tests.harness import Workbench, assert_merged_alike, built, metrics_of, take_step
from trainer import config as configs
from trainer.adapters import kinds
from trainer.adapters.kinds import A, AdapterKind, B, LayerState, low_rank
from trainer.base.errors import UserError
from trainer.base.files import write_atomic
from trainer.base.tensorfile import TensorFile
from trainer.plan.requirements import check_kind
from workbench.adapter_files.opening import open_checkpoint
from workbench.commands import main as cli

SCALE = "lora_scale"


def factors(state: LayerState) -> tuple[torch.Tensor, torch.Tensor]:
    return state[A], state[B] * state[SCALE]


# A LoRA with one more number for each layer, which multiplies B.
SCALED = AdapterKind(
    name="scaled",
    word="scaled LoRA",
    shapes=lambda shape, rank: low_rank(shape, rank) | {SCALE: (1,)},
    first=lambda layer, adapter: {SCALE: torch.full((1,), 2.0)},
    factors=factors,
    refuses={"adapter.dropout": "this is a test"},
)
# The same, and with magnitudes.
LENGTHS = replace(
    SCALED,
    name="lengths",
    shapes=lambda shape, rank: kinds.KINDS["dora"].shapes(shape, rank) | {SCALE: (1,)},
    first=lambda layer, adapter: SCALED.first(layer, adapter) | kinds.first_lengths(layer, adapter),
)


@pytest.fixture(autouse=True)
def third(monkeypatch) -> None:
    for kind in (SCALED, LENGTHS):
        monkeypatch.setitem(kinds.KINDS, kind.name, kind)


def tree(bench: Workbench, out: str, kind: str = "scaled", **more: Any) -> dict[str, Any]:
    settings = {
        "adapter__type": kind, "adapter__targets": ["*attn1.to_q", "*attn1.to_k", "conv_in"], "run__max_steps": 4,
        "run__output_dir": str(bench.tmp / out), "checkpoint__every_steps": 2, "optimizer__lr": 1e-2, "step__accumulation": 2,
    }  # fmt: skip
    return bench.tree(**(settings | more))


def run(bench: Workbench, tree: dict, *arguments: str) -> int:
    return cli.main(["--config", str(bench.write(tree)), *arguments])


def state_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return TensorFile(checkpoint / "adapter.safetensors").read_all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["scaled", "lengths"])
def test_a_third_kind_trains_resumes_and_is_exported(bench: Workbench, kind: str, capsys) -> None:
    out = bench.tmp / "out"
    last = out / "checkpoints/step-00000004"
    assert run(bench, tree(bench, "out", kind)) == 0
    assert f"adapter {kind} on unet" in capsys.readouterr().out
    state = state_of(last)
    layers = {name.removesuffix(f".{A}") for name in state if name.endswith(A)}
    assert all(f"{layer}.{end}" in state for layer in layers for end in kinds.KINDS[kind].ends)
    assert all(float(state[f"{layer}.{SCALE}"]) != 2 for layer in layers)
    # Resumed from the middle it ends in the same bytes.
    before = {file: (last / f"{file}.safetensors").read_bytes() for file in ("adapter", "optimizer")}
    rows = metrics_of(out)
    assert run(bench, tree(bench, "out", kind), "--resume_from", str(out / "checkpoints/step-00000002")) == 0
    assert before == {file: (last / f"{file}.safetensors").read_bytes() for file in before} and rows == metrics_of(out)
    # Its files are of a kind that readers know, and a checkpoint gives the run's own.
    file = TensorFile(out / "adapters/bear.safetensors")
    for layer in layers:
        assert torch.equal(file.read(f"{layer}.lora_B.weight"), factors({A: state[f"{layer}.{A}"],
            B: state[f"{layer}.{B}"], SCALE: state[f"{layer}.{SCALE}"]})[1])  # fmt: skip
    assert not any(SCALE in name for name in file.entries)
    assert any("magnitude" in name for name in file.entries) == (kind == "lengths")
    for path in open_checkpoint(last).export(bench.tmp / "again", write_atomic).values():
        assert path.read_bytes() == (out / "adapters" / path.name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["scaled", "lengths"])
def test_its_layers_compute_what_their_merged_weights_do(bench: Workbench, kind: str) -> None:
    """After a step, and again after another: what it makes of its parameters is never stale."""
    with built(configs.parse(tree(bench, "out", kind, adapter__targets=["conv_in"], precision__compute="fp32"))) as training:
        (layer,) = training.state.adapter.layers.values()
        updates = training.updates()
        for step in (1, 2):
            take_step(training, step, next(updates))
            assert_merged_alike(layer)


@pytest.mark.slow
def test_a_gradient_reaches_what_it_makes_b_of(bench: Workbench) -> None:
    """dL/ds = <dL/dB', B> where B' = s B: against the gradient of a LoRA whose B is B'."""
    grads = {}
    for kind in ("scaled", "lora"):
        config = configs.parse(tree(bench, kind, kind, adapter__targets=["conv_in"], precision__compute="fp32"))
        with built(config) as training:
            (layer,) = training.state.adapter.layers.values()
            held = layer.trained("default")
            with torch.no_grad():
                held[A].weight.copy_(torch.linspace(-1, 1, held[A].weight.numel()).view_as(held[A].weight))
                b = torch.linspace(-0.1, 0.2, held[B].weight.numel()).view_as(held[B].weight)
                held[B].weight.copy_(b if kind == "scaled" else 2 * b)
            training.state.adapter.mark_stale()
            x = torch.linspace(-1, 1, 4 * 64).view(1, 4, 8, 8)
            layer(x).square().sum().backward()
            grads[kind] = {end: part.weight.grad for end, part in held.items()}
    torch.testing.assert_close(grads["scaled"][A], grads["lora"][A])
    torch.testing.assert_close(grads["scaled"][B], 2 * grads["lora"][B])
    torch.testing.assert_close(grads["scaled"][SCALE], (grads["lora"][B] * b).sum().view(1))


@pytest.mark.slow
def test_its_file_is_merged_and_shown_and_its_run_takes_none(bench: Workbench, capsys) -> None:
    assert run(bench, tree(bench, "out", run__max_steps=2)) == 0
    file = bench.tmp / "out/adapters/bear.safetensors"
    assert script.main(["show", str(file), "--base", str(bench.models / "sdxl")]) == 0
    assert "LoRA for sdxl" in capsys.readouterr().out
    assert script.main(["merge", str(bench.models / "sdxl"), f"{file}:1", str(bench.tmp / "merged")]) == 0
    assert run(bench, tree(bench, "next", adapter__init_from=str(file))) == 2
    said = capsys.readouterr().err
    assert "is a LoRA and adapter.type = 'scaled'; set adapter.type = 'lora' or adapter.type = 'dora'" in said
    assert not (bench.tmp / "next").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"adapter__type": "loha"}, "adapter.type = 'loha' is not known; there is none: a LoHa needs W + dW made"),
        ({"adapter__type": "lor"}, "adapter.type = 'lor' is not known; did you mean 'lora'?"),
        ({"adapter__dropout": 0.1}, "adapter.dropout = 0.1 cannot be combined with adapter.type = 'scaled': this is a test"),
        ({"step__compile": "blocks"}, "step.compile = 'blocks' cannot be combined with adapter.type = 'scaled'"),
        ({"adapter__max_norm": 1.0}, "adapter.max_norm = 1.0 cannot be combined with adapter.type = 'scaled'"),
        ({"optimizer__magnitude_lr": 1e-3}, "optimizer.magnitude_lr = 0.001 has no effect with adapter.type = 'scaled'"),
    ],
)  # fmt: skip
def test_a_kind_that_no_table_has_is_refused_and_what_a_kind_refuses(bench: Workbench, capsys, more, said: str) -> None:
    assert run(bench, tree(bench, "out", **more)) == 2
    assert said in capsys.readouterr().err and not (bench.tmp / "out").exists()


@pytest.mark.slow
def test_a_kind_with_magnitudes_reads_the_keys_of_magnitudes(bench: Workbench) -> None:
    config = configs.parse(tree(bench, "out", "lengths", optimizer__magnitude_lr=1e-3, export__dora_scale="magnitude"))
    with built(config) as training:
        rates = {
            group["magnitudes"]: (group["lr"], group["weight_decay"])
            for group in training.state.optimizer.optimizer.param_groups
        }
    assert rates[True] == (1e-3, 0.0) and rates[False][1] > 0
    with pytest.raises(UserError, match="max_norm"):
        check_kind(configs.parse(tree(bench, "out", "lengths", adapter__max_norm=1.0)))
