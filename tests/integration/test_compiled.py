"""step.compile: whole runs of compiled blocks, and what "auto" comes to. One block: numerics/test_compiled_blocks.py."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.harness import PHOTOS, Workbench, metrics_of
from trainer import config as configs
from trainer.adapters.kinds import KINDS
from trainer.base.errors import UserError
from trainer.kernels import dora_torch
from trainer.plan.run_plan import RunPlan, make_plan, open_source, resolve
from trainer.resume.start_point import as_chosen
from trainer.run import setup
from trainer.runtime.device import Memory
from workbench.commands.launch import train
from workbench.planning import fitting, step_time
from workbench.planning.describe import step_seconds
from workbench.planning.estimate import forecast

pytestmark = pytest.mark.usefixtures("few_draws")

# Of a loss in fp16, relative: its products round to 2^-11, compiled in other places than eager.
ENVELOPE = 2.0**-11


def adapter_bytes(out: Path) -> bytes:
    return (out / "adapters" / "bear.safetensors").read_bytes()


def traced_only(monkeypatch, backend: str = "eager") -> None:
    """Have blocks traced, but not compiled any further. backend: torch's; AOT differentiates, too: what is dead goes."""
    lookup = torch._dynamo.lookup_backend
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: lookup(backend))


@pytest.mark.proof
def test_fp16_clipping_compile_validation_resume(bench: Workbench, capsys) -> None:
    """diffusers 10752 and its kind ("Attempting to unscale FP16 gradients"): all of them in one run, which overflows, too.
    Stopped and resumed it ends in the same bytes, and finds its programs where the first start left them."""
    losses = {}
    for out, compiled in (("eager", "none"), ("whole", "blocks"), ("parted", "blocks")):
        tree = bench.tree(
            "sdxl", run__output_dir=str(bench.tmp / out), run__max_steps=6, precision__compute="fp16", step__compile=compiled,
            precision__loss_scale=2.0**22, step__max_grad_norm=1e-3, step__accumulation=2, adapter__type="dora",
            memory__gradient_checkpointing=True, data__bucket_step=64, data__batch_size=1, data__held_out=1,
            validation__every_steps=2, validation__steps=1, validation__prompts=["a bear"], validation__loss_every_steps=2,
        )  # fmt: skip
        if out == "parted":
            for stop, resume in ((3, None), (6, "auto")):
                tree["run"]["stop_after"] = stop
                train(configs.parse(tree), resume_from=resume)
        else:
            train(configs.parse(tree), resume_from=None)
        losses[out] = metrics_of(bench.tmp / out)
    assert torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"] >= 1
    # Of a skipped update nothing is told.
    whole, parted = ([entry.pop("compiled", 0) for entry in losses[out]] for out in ("whole", "parted"))
    assert whole == [3, 0, 0, 0, 0, 0] and (sum(parted[:3]), sum(parted[3:])) == (3, 3)
    assert losses["parted"] == losses["whole"] and adapter_bytes(bench.tmp / "parted") == adapter_bytes(bench.tmp / "whole")
    for eager, compiled in zip(losses["eager"], losses["whole"], strict=True):
        assert eager["loss"] == pytest.approx(compiled["loss"], rel=ENVELOPE), eager["step"]
        assert (eager["skipped"], eager["loss_scale"]) == (compiled["skipped"], compiled["loss_scale"])
    assert {entry["skipped"] for entry in losses["whole"]} == {True, False}
    said = capsys.readouterr().out
    assert "blocks are compiled: each kind for 1 shape of micro-batches" in said
    assert "compiled 2 x BasicTransformerBlock of 1x16x48, BasicTransformerBlock of 1x4x48" in said


def in_shapes(folder: Path, sizes: tuple[tuple[int, int], ...]) -> Path:
    """Photos with captions, two of each size."""
    folder.mkdir()
    for place, size in enumerate(size for size in sizes for _ in range(2)):
        with Image.open(sorted(PHOTOS.glob("*.jpg"))[0]) as photo:
            photo.resize(size).rotate(place).save(folder / f"{place}.png")
        (folder / f"{place}.txt").write_text(f"photo {place}")
    return folder


def programs(
    bench: Workbench, monkeypatch, family: str, shapes: int, stops: tuple[int, ...], **overrides: Any
) -> list[list[int]]:
    """How many programs were made in each step, of each start: it stops after so many steps, and the next goes on."""
    traced_only(monkeypatch)
    photos = in_shapes(bench.tmp / "photos", ((64, 64), (80, 48), (96, 32))[:shapes])
    tree = bench.tree(
        family, run__max_steps=stops[-1], step__compile="blocks", step__accumulation=2, data__batch_size=1,
        data__sources=[{"path": str(photos)}], memory__gradient_checkpointing=True, **overrides,
    )  # fmt: skip
    for stop in stops:
        torch.compiler.reset()
        tree["run"]["stop_after"] = stop
        train(configs.parse(tree), resume_from=None if stop == stops[0] else "auto")
    made = [entry.get("compiled", 0) for entry in metrics_of(bench.tmp / "out")]
    return [made[start:stop] for start, stop in zip((0, *stops), stops, strict=False)]


@pytest.mark.proof
@pytest.mark.parametrize(
    ("family", "shapes", "stops", "each"), [("sdxl", 2, (6,), 3), ("sdxl", 3, (100, 200), 3), ("flux", 3, (100, 200), 4)]
)
def test_a_shape_makes_its_programs_once(
    bench: Workbench, monkeypatch, family: str, shapes: int, stops: tuple[int, ...], each: int
) -> None:
    """Neither an update nor samples, a held-out loss, an encoder's adapter or a checkpoint makes a further one; a resumed
    run makes its own."""
    encoder = {"component": "text_encoder", "match": "*q_proj", "rank": 2}
    made = programs(
        bench, monkeypatch, family, shapes, stops, precision__compute="bf16", adapter__rules=[encoder], data__held_out=1,
        validation__every_steps=2, validation__steps=1, validation__prompts=["a bear"], validation__loss_every_steps=3,
        checkpoint__every_steps=2,
    )  # fmt: skip
    for part in made:
        assert sum(part[:shapes]) == sum(part) == shapes * each  # in the first epoch, of an update for each shape


CARD = Memory(80 * 2**30, None, dora_torch, torch.device("cuda"))


@pytest.fixture
def h100(monkeypatch) -> None:
    """A card that is not there, beside this host."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(fitting, "check_compiler", lambda device: None)
    monkeypatch.setattr(step_time, "bare_operator", lambda: 1e-6)


def planned(bench: Workbench, steps: int = 10, **more: Any) -> RunPlan:
    config = bench.config("flux", run__max_steps=steps, step__compile="auto", data__batch_size=1, **more)
    source = open_source(config)
    return make_plan(resolve(config, source), source, processes=1)


def chosen(plan: RunPlan, there: Memory = CARD) -> tuple[str, str]:
    """("blocks" or "none", the line)."""
    said: list[str] = []
    compiled = fitting.compiling(plan, there, say=said.append).config.step.compile
    (line,) = said
    assert line.startswith(f"step.compile = 'auto': {compiled!r}, as ")
    return compiled, line


@pytest.mark.slow
@pytest.mark.usefixtures("h100")
@pytest.mark.parametrize("graphs", ["auto", False])
def test_auto_compiles_where_the_least_that_is_saved_is_more_than_the_most_that_it_takes(bench: Workbench, graphs) -> None:
    """With graphs the host is waited for in neither case. Both estimates are said."""
    plan, machine = planned(bench, step__graphs=graphs), step_time.on_card("NVIDIA H100 80GB HBM3", 1e-6)
    needs = forecast(plan, dora_torch)
    assert machine is not None and bool(needs.graphs) is (graphs == "auto")
    if graphs == "auto":
        ends = step_seconds(plan, needs, machine.scaled(1, 0))
        saved = [(1 - step_time.COMPILED_CARD) * each for each in ends]
    else:  # on this card these steps, which compute next to nothing, are the host's time at best
        (least, most), (_, of_card) = (step_seconds(plan, needs, each) for each in (machine, machine.scaled(1, 0)))
        share = 1 - step_time.COMPILED_HOST, 1 - step_time.COMPILED_CARD
        saved = [share[0] * least, share[0] * (most - of_card) + share[1] * of_card]
    enough = ceil(2 * step_time.COMPILING[1] / min(saved))  # photos of two sizes
    for steps, choice in ((enough + 1, "blocks"), (enough - 1, "none")):
        compiled, line = chosen(planned(bench, steps, step__graphs=graphs))
        assert compiled == choice and f"in {steps:,} steps, and to take 1.4 to 2.9 min for 2 sizes of micro-batches" in line
        assert "compiling is estimated to save 2.9 " in line


@pytest.mark.slow
@pytest.mark.usefixtures("h100")
def test_auto_does_not_compile_where_there_is_a_reason_against_it(bench: Workbench, monkeypatch) -> None:
    plan, others = planned(bench, 10**9), replace(CARD, largest=lambda number: [1])
    assert chosen(plan)[0] == "blocks"
    assert "another process does not earn its compile time back" in chosen(plan, others)[1]
    assert "no card is named" in chosen(plan, replace(CARD, device=None))[1]
    assert "this run is on cpu" in chosen(plan, replace(CARD, device=torch.device("cpu")))[1]
    with monkeypatch.context() as patched:
        patched.setitem(KINDS, "lora", replace(KINDS["lora"], factors=lambda state: (state, state)))
        assert "this kind makes A and B in every forward" in chosen(plan)[1]
    with monkeypatch.context() as patched:
        patched.setattr(fitting, "RECOMPUTES", False)
        assert chosen(plan)[0] == "blocks"
        assert "need more memory than the plan says" in chosen(planned(bench, memory__gradient_checkpointing=True))[1]
    with monkeypatch.context() as patched:
        patched.setattr(fitting, "check_compiler", setup.check_compiler)
        patched.setattr("torch.utils._triton.has_triton", lambda: False)
        assert "needs Triton, which is not here" in chosen(plan)[1]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Z1")
    assert "no figures for a step's time on NVIDIA Z1" in chosen(plan)[1]


def test_auto_is_what_the_first_start_chose(bench: Workbench) -> None:
    for saved, kept in (({"step": {"compile": "blocks"}}, "blocks"), ({"step": {"compile": "none"}}, "none"), ({}, "none")):
        assert as_chosen(bench.config(step__compile="auto"), saved).step.compile == kept
        assert as_chosen(bench.config(step__compile="blocks"), saved).step.compile == "blocks", "a word of its own"
    fit = bench.config(step__compile="auto", memory__fit="auto")
    assert as_chosen(fit, {"step": {"compile": "blocks"}, "memory": {"gradient_checkpointing": 3}}).memory != fit.memory


@pytest.mark.slow
def test_auto_is_none_on_a_cpu_and_a_run_keeps_it(bench: Workbench, monkeypatch, capsys) -> None:
    tree = bench.tree(run__max_steps=2, run__stop_after=1, step__compile="auto")
    train(configs.parse(tree), resume_from=None)
    assert "'none', as it chooses 'blocks' on a CUDA card alone, and this run is on cpu" in capsys.readouterr().out
    assert configs.read_resolved(bench.tmp / "out" / "config.toml")["step"]["compile"] == "none"
    monkeypatch.setattr(fitting, "_compile_choice", lambda plan, there: ("blocks", "a card is here now"))
    del tree["run"]["stop_after"]
    tree["step"]["compile"] = "blocks"
    with pytest.raises(UserError, match=r"step\.compile: 'none' -> 'blocks'\n.*--allow step\.compile"):
        train(configs.parse(tree), resume_from="auto")
    tree["step"]["compile"] = "auto"
    train(configs.parse(tree), resume_from="auto")
    assert "step.compile" not in capsys.readouterr().out and "compiled" not in metrics_of(bench.tmp / "out")[1]


@pytest.mark.proof
def test_a_run_that_auto_compiled_stays_compiled(bench: Workbench, monkeypatch) -> None:
    """Where it goes on without a card, too; where nothing compiles, it is refused."""
    traced_only(monkeypatch)
    tree = bench.tree("flux", run__max_steps=2, run__stop_after=1, step__compile="auto")
    with monkeypatch.context() as patched:
        patched.setattr(fitting, "_compile_choice", lambda plan, there: ("blocks", "a card is here"))
        train(configs.parse(tree), resume_from=None)
    del tree["run"]["stop_after"]
    with torch._inductor.config.patch("cpp.cxx", (None, "no-such-compiler")), pytest.raises(UserError, match="no-such-comp"):
        train(configs.parse(tree), resume_from="auto")
    train(configs.parse(tree), resume_from="auto")
    assert all(entry["compiled"] for entry in metrics_of(bench.tmp / "out"))
