"""A run whose frozen base is shared out among its processes: the bytes of one that has it whole in each.

What processes do beside one another is in unit/runtime/test_sharding.py: here they are processes, which gloo connects.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from scripts import make_model
from tests.harness import Workbench, built, metrics_of
from tests.integration.test_processes import LOST, made, run_both, start_both, tree
from tests.proofs.forks import Server
from trainer.base.errors import UserError
from trainer.checkpoint import store
from trainer.kernels import dora_torch
from trainer.models import FAMILIES
from trainer.plan.run_plan import make_plan, open_source, resolve
from trainer.runtime.streaming import SLOTS
from workbench.planning.estimate import STEP, Forecast, forecast

SAMPLE = {"prompt": "a bear", "seed": 1, "steps": 2, "width": 64, "height": 64}


def config_of(bench: Workbench, out: str, family: str, storage: str, adapter: str, **more: Any) -> dict:
    """Three micro-batches to an epoch's last update, so that one process has one less; and all that the main process does
    alone: samples, held-out losses of a share each, adapter files with norms."""
    keys = {
        "run__max_steps": 4, "adapter__type": adapter, "adapter__dropout": 0.0, "adapter__targets": "attention+mlp",
        "precision__compute": "bf16", "model__components": {FAMILIES[family].denoiser: {"dtype": storage}},
        "validation__every_steps": 2, "validation__loss_every_steps": 4, "validation__samples": [SAMPLE],
        "export__every_steps": 2, "ema__kind": "constant", "memory__gradient_checkpointing": True,
    }  # fmt: skip
    return tree(bench, out, processes=2, family=family, **(keys | more))


def left(out: Path) -> dict[str, Any]:
    """All that a run leaves, but for times."""
    lines = [{k: v for k, v in e.items() if "second" not in k and k not in ("time", "peak_bytes")} for e in metrics_of(out)]
    record = out / "checkpoints" / store.folder_name(4) / "quantization.json"
    return made(out) | {"metrics": lines, "quantization": record.read_text()}


CELLS = [
    ("sdxl", "fp8_e4m3", "dora", 2, pytest.mark.slow),
    ("flux", "nf4", "lora", 2, pytest.mark.slow),
    ("sdxl", "nf4", "lokr", 2, pytest.mark.proof),
    ("zimage", "fp8_e4m3", "dora", 2, pytest.mark.slow),  # whose processes go through the blocks once a length of captions
    ("flux3", "fp8_e4m3", "lora", 2, pytest.mark.proof),  # of whose blocks those of references are not passed
    ("flux", "int8", "dora", 4, pytest.mark.proof),
    ("sdxl", "bf16", "lora", 4, pytest.mark.proof),
]


@pytest.mark.parametrize(
    ("family", "storage", "adapter", "count"), [pytest.param(*cell, marks=mark) for *cell, mark in CELLS]
)
def test_its_bytes_are_those_of_a_run_that_has_the_base_whole(
    server: Server, bench: Workbench, family: str, storage: str, adapter: str, count: int
) -> None:
    """Also of one that went on from a checkpoint of the other kind."""
    if not (bench.models / family).exists():
        wanted = ["--size", "tiny", "--family", family, "--layout", "diffusers", str(bench.models / family)]
        assert make_model.main(wanted) == 0

    def run(out: str, *arguments: str, **more: Any) -> dict[str, Any]:
        config = config_of(bench, out, family, storage, adapter, **more)
        said = run_both(server, bench, config, *arguments, count=count)
        assert said.count(f"blocks are shared out among {count} processes") == bool(more.get("memory__shard"))
        return left(bench.tmp / out)

    whole = run("whole")
    assert len([name for name in whole if name.startswith("samples/")]) == 5
    assert run("shared", memory__shard=True) == whole
    for before, after in ((False, True), (True, False)) if count > 2 else ((False, True),):
        out = f"{before} to {after}"
        source = bench.tmp / ("shared" if before else "whole")
        shutil.copytree(source / "checkpoints" / store.folder_name(2), bench.tmp / "stopped" / "checkpoints" / "step")
        went_on = run(out, "--resume_from", str(bench.tmp / "stopped/checkpoints/step"), memory__shard=after)
        last = f"checkpoints/{store.folder_name(4)}/"
        assert {n: e for n, e in went_on.items() if n.startswith(last)} == {
            n: e for n, e in whole.items() if n.startswith(last)
        }
        shutil.rmtree(bench.tmp / "stopped")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "adapter", "saved"), [(signal.SIGKILL, "dora", []), (signal.SIGSTOP, "lora", [2])], ids=["dora", "lora"]
)
def test_a_process_that_is_lost_takes_its_part_along(
    server: Server, bench: Workbench, signum: int, adapter: str, saved: list[int]
) -> None:
    """The other one ends with status 143, and half-writes nothing. It saves the last whole step where a checkpoint needs no
    norm of the base."""
    nothing = dict.fromkeys(("validation__every_steps", "validation__loss_every_steps", "checkpoint__every_steps"), 0)
    more = {"memory__shard": True, "run__lost_after": 10, "export__every_steps": 0} | nothing
    config = config_of(bench, "out", "sdxl", "bf16", adapter, **more)
    patch = f"at, victim, signum = 'step', 1, {int(signum)}\n{LOST}"
    both = start_both(server, bench, config, patch=patch, launched=False)
    try:
        status = server.wait(both.pids[0])
    finally:
        os.kill(both.pids[1], signal.SIGKILL)  # a zombie still has its number
    server.wait(both.pids[1])
    assert status == 143 and "Traceback" not in both.said, both.said[-3000:]
    assert store.steps(bench.tmp / "out" / "checkpoints") == saved
    assert not list((bench.tmp / "out").rglob("*.tmp"))


@pytest.mark.slow
def test_what_is_whole_is_loaded_without_the_others(bench: Workbench, monkeypatch) -> None:
    """As the VAE by the main process alone, for samples, while the others lend: they would take it for its end."""
    with built(bench.config("sdxl", adapter__targets=["*attn1.to_q"])) as run:
        monkeypatch.setattr(run.context.processes, "settle", lambda: pytest.fail("in common"))
        run.components.unload(["vae"])
        assert run.components.load("vae") is run.model.modules["vae"]


def planned(bench: Workbench, processes: int, **more: Any) -> Forecast:
    overrides = {"adapter__type": "dora", "adapter__targets": "attention+mlp", "precision__compute": "bf16"}
    config = bench.config("flux", model__components={"transformer": {"dtype": "fp8_e4m3"}}, **overrides, **more)
    source = open_source(config)
    return forecast(make_plan(resolve(config, source), source, processes=processes), dora_torch)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_a_plan_counts_the_part_of_one_process(bench: Workbench, processes: int) -> None:
    """And the slots, and nothing on the host."""

    def step(found: Forecast) -> int:
        return max(phase.peak for phase in found.phases if phase.name.startswith(STEP))

    whole, shared = planned(bench, processes), planned(bench, processes, memory__shard=True)
    assert shared.streaming is not None
    blocks = shared.streaming.blocks
    kept = sum(blocks) // processes + SLOTS * max(blocks)
    assert step(shared) == pytest.approx(step(whole) - sum(blocks) + kept, rel=0.01)
    assert shared.host.keys() == whole.host.keys() and not shared.streaming.resident
    assert f"shared out among {processes} processes" in shared.streaming.about


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, r"shard = true shares the base out among several processes, and there is 1: start as many .*WORLD_SIZE=N"),
        ({"memory__offload": "blocks"}, "memory.shard = true cannot be combined with memory.offload = 'blocks'"),
        (
            {"memory__fit": "12GiB", "memory__fit_by": ["resident_blocks"]},
            "memory.shard = true cannot be combined with 'resident_blocks' in memory.fit_by",
        ),
        ({"step__graphs": True}, "step.graphs = true cannot be combined with memory.shard = true"),
    ],
)
def test_what_it_does_not_go_with_is_refused(bench: Workbench, more: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        planned(bench, 1, memory__shard=True, **more)
