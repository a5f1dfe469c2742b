"""Optimizers of any kind train through the trainer, and resume: those of the table, and such as are entered by one line."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import Workbench, built, metrics_of, train_built
from tests.optimizers import ENTRIES, Averaging
from trainer import config as configs
from trainer.artifacts import sampling
from trainer.base.files import write_atomic
from trainer.base.tensorfile import TensorFile
from trainer.checkpoint.state import PIECES, Saved
from trainer.optim import OPTIMIZERS
from trainer.optim.libraries import Finds
from workbench.adapter_files.opening import open_checkpoint
from workbench.commands import launch

LENGTH = 4
TABLE = tuple(OPTIMIZERS)
WATCHED: dict[str, Any] = {
    "validation__every_steps": 2, "validation__prompts": ["a bear"], "validation__steps": 1, "export__every_steps": 2,
}  # fmt: skip


def train(bench: Workbench, name: str, out: str, resume_from: str | None = None, **more: Any) -> Path:
    """Of a DoRA, whose norms have to follow the weights whichever they are. Returns the last checkpoint."""
    tree = bench.tree(
        **{
            "run__output_dir": str(bench.tmp / out), "run__max_steps": LENGTH, "optimizer__name": name,
            "optimizer__lr": 1e-2, "adapter__type": "dora", "adapter__targets": ["*attn1.to_q", "conv_in"],
        } | more
    )  # fmt: skip
    launch.train(configs.parse(tree), resume_from=resume_from)
    return bench.tmp / out / "checkpoints" / f"step-{more.get('run__stop_after', LENGTH):08d}"


def same(one: Path, other: Path) -> None:
    for name in ("adapter.safetensors", "optimizer.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    for piece in ("optimizer", "schedule"):
        assert Saved(one, PIECES).pieces[piece] == Saved(other, PIECES).pieces[piece]


@pytest.mark.slow
@pytest.mark.parametrize("name", ENTRIES)
def test_stopped_and_resumed_equals_uninterrupted(bench: Workbench, monkeypatch, name: str) -> None:
    """Also where samples were drawn and files exported in between, or not."""
    monkeypatch.setitem(OPTIMIZERS, name, ENTRIES[name])
    whole = train(bench, name, "whole")
    train(bench, name, "parts", run__stop_after=1, **WATCHED)
    train(bench, name, "parts", "auto", run__stop_after=3, **WATCHED)
    parts = train(bench, name, "parts", "auto", **WATCHED)
    same(whole, parts)
    assert len(list((bench.tmp / "parts" / "samples").iterdir())) == 3
    for file in ("bear.safetensors", "bear_comfyui.safetensors"):
        one, other = (bench.tmp / out / "adapters" / file for out in ("whole", "parts"))
        assert one.read_bytes() == other.read_bytes(), file
    kept = {key.rpartition("|")[2] for key in Saved(whole, PIECES).pieces["optimizer"]["tensors"]}
    assert kept == {"growing": {"momentum"}, "averaging": {"z"}, "factored": {"rows", "columns", "v"}}[name]
    assert Saved(whole, PIECES).pieces["optimizer"]["state"].keys() == {
        f"param_groups.{group}|{key}" for group in (0, 1) for key in ENTRIES[name].group_keys
    }


# What a run needs beside the name: Prodigy's rate is a factor.
ASKED: dict[str, dict[str, Any]] = {"prodigy": {"optimizer__lr": 1.0, "optimizer__options": {"d0": 1e-3}}}


# In --all one that finds its rate and one with modes; the state of every one goes out and in again in
# unit/optim/test_state.py.
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in ("prodigy", "schedulefree_adamw") else pytest.mark.proof) for n in TABLE],
)
def test_every_optimizer_of_the_table_resumes_byte_identically(bench: Workbench, name: str) -> None:
    """A DoRA, constant schedule, no warm-up; with samples, saves and exports in between, or not."""
    whole = train(bench, name, "whole", **ASKED.get(name, {}))
    train(bench, name, "parts", run__stop_after=3, **WATCHED, **ASKED.get(name, {}))
    same(whole, train(bench, name, "parts", "auto", **WATCHED, **ASKED.get(name, {})))
    for file in ("bear.safetensors", "bear_comfyui.safetensors"):
        one, other = (bench.tmp / out / "adapters" / file for out in ("whole", "parts"))
        assert one.read_bytes() == other.read_bytes(), file
    text = (bench.tmp / "whole" / "config.toml").read_text()
    assert ("betas" in text) == (OPTIMIZERS[name].betas is not None)


@pytest.mark.slow
def test_the_log_has_the_rate_that_an_optimizer_finds_and_the_highest_of_all_groups(bench: Workbench, monkeypatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "growing", replace(ENTRIES["growing"], finds=Finds(start="d", factor="k", guard="")))
    checkpoint = train(bench, "growing", "found", run__max_steps=2, run__stop_after=2, optimizer__lr=1.0, schedule__warmup=0)
    first, last = metrics_of(bench.tmp / "found")
    assert 1e-3 < first["d"] < last["d"] == Saved(checkpoint, PIECES).pieces["optimizer"]["state"]["param_groups.0|d"]
    assert "highest_lr" not in first
    train(bench, "adamw", "plus", run__max_steps=1, run__stop_after=1, optimizer__lora_plus=16.0, schedule__warmup=0)
    (row,) = metrics_of(bench.tmp / "plus")
    assert row["highest_lr"] == pytest.approx(16 * row["lr"]) and "d" not in row


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_schedule_free_checkpoint_is_exported_as_its_run_did(bench: Workbench, kind: str) -> None:
    """It holds the weights that train. Groups of differing rates, so that each has to be found in its place."""
    rules = [{"component": "unet", "match": "*attn2.to_q", "lr": 3e-2}]
    checkpoint = train(
        bench, "schedulefree_adamw", "out", run__max_steps=3, run__stop_after=3, adapter__type=kind, adapter__rules=rules,
        optimizer__lora_plus=2.0,
    )  # fmt: skip
    made = open_checkpoint(checkpoint).export(bench.tmp / "again", write_atomic)
    assert set(made) == {"diffusers", "comfyui"}
    for path in made.values():
        assert path.read_bytes() == (bench.tmp / "out" / "adapters" / path.name).read_bytes(), path.name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["growing", "averaging"])
def test_what_groups_keep_cannot_be_left_out(bench: Workbench, monkeypatch, name: str) -> None:
    left_out = ENTRIES[name].group_keys[0]
    rest = tuple(key for key in ENTRIES[name].group_keys if key != left_out)
    monkeypatch.setitem(OPTIMIZERS, name, replace(ENTRIES[name], group_keys=rest))
    with pytest.raises(ValueError, match=f"do not name: {left_out}$"):
        train(bench, name, "out", run__max_steps=1)
    assert not list((bench.tmp / "out" / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_samples_and_exports_have_the_weights_to_be_used(bench: Workbench, monkeypatch, capsys) -> None:
    monkeypatch.setitem(OPTIMIZERS, "averaging", ENTRIES["averaging"])
    drawn, draw = [], sampling.draw_samples
    tree = bench.tree(
        run__max_steps=2, optimizer__name="averaging", optimizer__lr=1e-2, adapter__targets=["*attn1.to_q"],
        **WATCHED | {"export__every_steps": 1},
    )  # fmt: skip
    with built(configs.parse(tree)) as run:
        parameters = run.adapter.named_parameters()
        monkeypatch.setattr(
            sampling, "draw_samples",
            lambda *args, sample, **keys: draw(
                *args, sample=lambda asked: [drawn.append([p.clone() for p in parameters.values()]), sample(asked)][1], **keys
            ),
        )  # fmt: skip
        train_built(run)
        assert re.search(r"against the live adapter +equal", capsys.readouterr().out)
        (group,) = run.step.optimizer.param_groups
        z = run.step.optimizer.state[group["params"][0]]["z"]
        assert group["training"] and group["params"][0].numel() == z.numel()
        before, used = drawn[0], dict(zip(parameters, drawn[-1], strict=True))
        trained = TensorFile(bench.tmp / "out/checkpoints/step-00000002/adapter.safetensors")
        start = 0
        for (name, y), first in zip(parameters.items(), before, strict=True):
            assert torch.equal(trained.read(name), y), "a checkpoint holds the weights that train"
            x = (y - (1 - Averaging.beta) * z[start : start + y.numel()].view_as(y)) / Averaging.beta
            assert (used[name] - x).abs().max() < 1e-6 < (y - x).abs().max() and not torch.equal(first, y)
            start += -(-y.numel() // 256) * 256
        for stem in ("bear", "bear-00000001"):
            exported = TensorFile(bench.tmp / "out" / "adapters" / f"{stem}.safetensors")
            equal = [torch.equal(exported.read(name), used[name]) for name in parameters]
            assert all(equal) if stem == "bear" else not any(equal)
