"""What `--plan` says of memory is what a run takes; whether it fits; what would make it smaller."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from collections import Counter, deque
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from benchmarks import paired_steps
from tests.harness import DENOISER, PHOTOS, ROOT, Workbench, built, take_step
from tests.integration.test_full_size import sparse_model
from trainer import config as configs
from trainer import kernels, optim
from trainer.base import progress as phases
from trainer.base import tiles
from trainer.base.errors import UserError
from trainer.base.progress import QUIET, Phases
from trainer.base.signals import Signals
from trainer.base.tensorfile import TensorFile
from trainer.engine.components import Components
from trainer.kernels import dora_torch, scratch
from trainer.models.base import SampleRequest
from trainer.plan.changes import in_words
from trainer.plan.run_plan import RunPlan, make_plan, open_source, resolve
from trainer.quantization.table import ALL_FORMATS
from trainer.run import loop as loops
from trainer.run.run import make_loop
from trainer.runtime.device import Memory, start_processes
from workbench.commands import main as cli
from workbench.planning import fitting, step_time, suggestions
from workbench.planning.describe import band, describe_memory, describe_time, step_seconds
from workbench.planning.dry_run import Rehearsal, without_values
from workbench.planning.estimate import CAPTIONS, SAMPLES, STEP, WORKER, Forecast, Stage, forecast
from workbench.planning.estimate import PHOTOS as ENCODING
from workbench.planning.op_trace import Cost, Trace, Work
from workbench.planning.step_time import Machine
from workbench.planning.suggestions import share_in, with_keys

FEW = ["*attn1.to_q"]  # layers of SDXL: what is asked does not depend on how many are adapted
CELLS = [(family, format.dtype_name, format.backend) for family in DENOISER for format in ALL_FORMATS]


def planned(bench: Workbench, family: str = "sdxl", **changes) -> RunPlan:
    config = configs.parse(bench.tree(family, **changes))
    source = open_source(config)
    return make_plan(resolve(config, source), source, processes=1)


def tensors_of(run) -> list:
    modules = run.model.modules.values()
    return [t for module in modules for t in (*module.parameters(), *module.buffers())] + [
        p.grad for p in run.step.parameters
    ]


QUICK = [("flux", "lora", 4)]


@pytest.mark.parametrize(
    ("family", "adapter", "rank"),
    [
        pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.slow if cell[2] > 4 else pytest.mark.proof)
        # Of a rank like 512 the largest moment is before the forward: what follows from A, B and m is made anew.
        for cell in [*itertools.product(DENOISER, ("lora", "dora"), (4,)), ("flux", "dora", 512), ("flux", "lokr", 5)]
    ],
)
def test_a_step_takes_what_was_foretold(bench: Workbench, family: str, adapter: str, rank: int, monkeypatch) -> None:
    """A real step, its tensors counted as they come and go, against the same step without values.

    Without checkpointing: torch's frames of recomputed blocks are cyclic, and live until the collector comes, in a step of
    tiny blocks a varying share of the whole. The peaks of a GPU, below, are of recomputed blocks.
    """
    changes = {"precision__compute": "bf16", "data__batch_size": 1, "run__max_steps": 20}
    changes |= {"adapter__type": adapter, "adapter__rank": rank}
    foretold = {phase.name: phase for phase in forecast(planned(bench, family, **changes), dora_torch, base=lambda: 1).phases}
    trace = Trace()
    monkeypatch.setattr(scratch, "_buffers", {})  # those of an earlier test may be larger
    with built(bench.config(family, **changes), None) as run:
        updates = run.updates()
        take_step(run, 1, next(updates))  # the optimizer has its state from here on
        trace.enter(tensors_of(run))
        trace.enter(t for state in run.step.optimizer.state.values() for t in state.values())
        for update in updates:
            batches = [run.reader[micro_batch] for micro_batch in update]
            height, width = batches[0].target_size[0].tolist()
            phase = foretold.get(f"{STEP} {width}x{height}, batch 1")
            if phase is not None:
                break
        trace.reset()
        with trace:
            run.step.run(2, batches, [occurrence for micro_batch in update for occurrence in micro_batch])
    assert trace.peak == pytest.approx(phase.peak, rel=0.02)


# Of each format one family in --all: what a format holds is the same in both.
@pytest.mark.parametrize(
    ("family", "dtype", "backend"),
    [pytest.param(*cell, marks=pytest.mark.slow if cell[0] == "flux" else pytest.mark.proof) for cell in CELLS],
)
def test_every_storage_is_planned(bench: Workbench, family: str, dtype: str, backend: str) -> None:
    name = DENOISER[family]
    plan = planned(
        bench, family, **{f"model__components__{name}": {"dtype": dtype, "backend": backend}}, adapter__type="dora"
    )
    with patch.object(kernels, "_is_cuda", lambda *_: True):
        found = forecast(plan, kernels.planned("auto"))
    assert {part for phase in found.phases for part in phase.parts} == {
        "weights", "adapter", "gradients", "optimizer", "saved", "transient",
    }  # fmt: skip
    assert all(size >= 0 for phase in found.phases for size in phase.parts.values())
    step = next(phase for phase in found.phases if phase.name.startswith(STEP))
    components = Components(
        plan.model, kernels=dora_torch, digests=None, processes=start_processes(plan.config), phases=QUIET
    )
    module = components.load(name)
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*module.parameters(), *module.buffers())}
    assert step.loaded == {name: sum(held.values())} and step.parts["weights"] == sum(held.values())


def test_an_optimizer_of_8_bits_is_planned() -> None:
    """It has tables of its codes, with values. Its state takes a quarter, and the scales of its blocks."""

    def state(name: str) -> int:
        group = {
            "params": [nn.Parameter(torch.empty(2**20, device="meta"))],
            "lr": 1e-4,
            "weight_decay": 0,
            "magnitudes": False,
        }
        with without_values():
            return optim.state_bytes(name, optim.build_optimizer(name, [group]))

    assert state("adamw8bit") == pytest.approx((1 + 4 / 256) / 4 * state("adamw"), rel=1e-3)


def forecasts() -> st.SearchStrategy[Forecast]:
    sizes = st.integers(0, 2**36)
    phase = st.builds(lambda w, s: Stage(f"{STEP} 64x64, batch 1", {"weights": w, "saved": s, "transient": 0}), sizes, sizes)
    return st.builds(lambda phases: Forecast(tuple(phases), 0, 0), st.lists(phase, min_size=1, max_size=4))


@given(forecasts(), st.integers(1, 2**37), st.integers(0, 2**36))
def test_more_memory_never_turns_yes_into_no(found: Forecast, memory: int, more: int) -> None:
    def answer(size: int) -> bool:
        last = describe_memory(found, size, [], accumulation=1).splitlines()[-1]
        assert last.startswith(("fits: ", "does not fit: "))
        return last.startswith("fits: ")

    assert answer(memory) <= answer(memory + more)


@pytest.mark.slow
@given(st.lists(st.integers(1, 99), min_size=6, max_size=6), st.integers(1, 120), st.integers(0, 50))
def test_more_memory_never_means_more_recomputation(needs: list[int], memory: int, more: int) -> None:
    """needs: GiB by how many blocks are recomputed, fewer first; more of them never need more."""
    needs = sorted(needs, reverse=True)
    places = {every: place for place, every in enumerate((False, 4, 3, 2, "selective", True))}

    def stub(plan, kernels, *, base=None):
        size = needs[places[plan.config.memory.gradient_checkpointing]] * 2**30
        return Forecast((Stage(f"{STEP} 64x64, batch 1", {"weights": size}),), 0, 0)

    def place(size: int) -> int:
        config = CONFIG.model_copy(update={"memory": CONFIG.memory.model_copy(update={"fit": f"{size}GiB"})})
        try:
            fitted = fitting.fitted(replace(PLAN, config=config), Memory(0, None, dora_torch))
        except UserError:
            return len(places)
        return places[fitted.config.memory.gradient_checkpointing]

    with patch.object(fitting, "forecast", stub), patch.object(fitting, "changes", lambda *_: []):
        assert place(memory) >= place(memory + more)


@pytest.fixture(scope="module", autouse=True)
def plan_for_stubs(models, tmp_path_factory):
    global PLAN, CONFIG
    PLAN = planned(Workbench(models, tmp_path_factory.mktemp("stubs")))
    CONFIG = PLAN.config


@pytest.mark.slow
def test_the_last_line_answers(bench: Workbench, capsys) -> None:
    """On any machine, status 0; a plan that fits says "not fit" nowhere, one that does not never says "fits" alone."""
    samples = {"validation__every_steps": 1, "validation__prompts": ["a"]}
    path = bench.write(bench.tree(data__batch_size=2, adapter__targets=FEW, **samples))
    said = []
    for how in (("--plan_memory", "12GiB"), ("--plan_memory", "600MiB"), ("--plan",)):
        assert cli.main(["--config", str(path), *how]) == 0
        said.append(capsys.readouterr().out)
    large, small, here = said
    assert large.splitlines()[-1].startswith("fits: ") and "not fit" not in large
    assert small.splitlines()[-1].startswith("does not fit: ")
    assert not re.search(r"(?<!not )\bfits\b", small)
    assert "memory.gradient_checkpointing = true: " in small
    assert here.splitlines()[-1].startswith("fits: ")


@pytest.mark.parametrize("size", ["12", ""])
def test_a_size_without_a_unit_is_refused(bench: Workbench, capsys, size: str) -> None:
    assert cli.main(["--config", str(bench.write(bench.tree())), "--plan_memory", size]) == 2
    assert f"--plan_memory {size!r}: write a number and its unit" in capsys.readouterr().err
    assert not (bench.tmp / "out").exists(), "nothing is trained"


@pytest.fixture
def whatever_it_saves(monkeypatch) -> None:
    """Of tiny models every change saves next to nothing. It is advised all the same, from one byte on."""
    monkeypatch.setattr(suggestions, "LEAST", 1)
    monkeypatch.setattr(suggestions, "LEAST_SHARE", 0.0)


@pytest.mark.slow
@pytest.mark.usefixtures("whatever_it_saves")
def test_advice_is_what_the_changed_config_would_take(bench: Workbench) -> None:
    """Each change on top of those before it, planned anew as its own config."""
    few = {"adapter__type": "dora", "adapter__targets": FEW, "precision__compute": "bf16"}
    plan = planned(bench, data__batch_size=4, **few)
    found = forecast(plan, dora_torch)
    steps = suggestions.changes(plan, dora_torch, found, 0)
    totals = [found.total, *(change.after.total for change in steps)]
    assert totals == sorted(totals, reverse=True) and len(steps) >= 4
    keys: dict = {}
    said = {
        "memory.gradient_checkpointing = true": {"memory__gradient_checkpointing": True},
        "memory.offload = 'blocks'": {"memory__offload": "blocks", "memory__resident_blocks": 0},
        "data.batch_size = 1, step.accumulation = 4": {"data__batch_size": 1, "step__accumulation": 4},
    }
    checked = 0
    for change in steps:
        if change.what not in said:
            continue
        keys |= said[change.what]
        anew = planned(bench, **few | {"data__batch_size": 4} | keys)
        there = [phase.peak for phase in forecast(anew, dora_torch).phases if phase.name.startswith(STEP)]
        foretold = [phase.peak for phase in change.after.phases if phase.name.startswith(STEP)]
        assert max(there) == pytest.approx(max(foretold), rel=0.1), change.what
        checked += 1
    assert checked == 3


@pytest.mark.parametrize(
    ("largest", "what", "keys"),
    [
        pytest.param(
            ENCODING, "model.components.vae.dtype = 'bf16'", {"model__components__vae": {"dtype": "bf16"}},
            marks=pytest.mark.proof,
        ),
        pytest.param(ENCODING, "data.resolution = 512", {"data__resolution": 512}, marks=pytest.mark.slow),
        pytest.param(
            CAPTIONS, "model.components.text_encoder_2.dtype = 'fp8_e4m3'",
            {"model__components__text_encoder_2": {"dtype": "fp8_e4m3"}}, marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("whatever_it_saves")
def test_advice_where_encoding_is_the_largest_phase(bench: Workbench, largest: str, what: str, keys: dict) -> None:
    """Alone on the ladder, each is what the changed config would take; together, what is the largest phase changes."""

    def encoding(**more) -> tuple[RunPlan, Forecast]:
        given = {"precision__compute": "bf16", "data__enlarge": True, "data__resolution": 768, "adapter__targets": FEW}
        plan = planned(bench, **given | more)
        found = forecast(plan, dora_torch)
        return plan, replace(found, phases=tuple(phase for phase in found.phases if phase.name.startswith(largest)))

    plan, found = encoding()
    steps = {change.what: change for change in suggestions.changes(plan, dora_torch, found, 0)}
    assert what in steps
    with patch.object(suggestions, "ladder", lambda *given: [rung for rung in ladder(*given) if in_words(rung[1]) == what]):
        (alone,) = suggestions.changes(plan, dora_torch, found, 0)
    _, anew = encoding(**keys)
    assert alone.after.largest.peak == pytest.approx(anew.largest.peak, rel=0.1)


ladder = suggestions.ladder


@pytest.mark.slow
def test_a_change_that_helps_only_after_another_is_still_found() -> None:
    """Samples are the largest phase: recomputing blocks saves nothing, until there are none."""

    def stub(plan, kernels, *, base=None):
        saved = 1 if plan.config.memory.gradient_checkpointing is True else 60
        step = Stage(f"{STEP} 64x64, batch 1", {"weights": 0, "saved": saved * 2**30, "transient": 0})
        return Forecast((step, Stage(f"{SAMPLES} 64x64", {"weights": 0, "transient": 80 * 2**30})), 0, 0)

    plan = replace(PLAN, data=replace(PLAN.data, requests=(SampleRequest("a", "", 64, 64, 0, 1, None),)))
    with patch.object(suggestions, "forecast", stub):
        found = stub(plan, None)
        told = suggestions.changes(plan, dora_torch, found, 4 * 2**30)
    assert [change.what.partition(" ")[0] for change in told] == ["validation.every_steps", "memory.gradient_checkpointing"]
    assert told[-1].after.fits(4 * 2**30)


@pytest.mark.slow
def test_a_dtype_that_is_advised_after_another_takes_its_place() -> None:
    """nf4 after float8: the bytes that a component has in nf4, not that share of those in float8. Small layers take more."""
    for name, told in (("text_encoder_2", ["fp8_e4m3", "nf4"]), ("unet", ["fp8_e4m3"])):
        found = Forecast((Stage(f"{CAPTIONS} ({name})", {"weights": 2**36}, {name: 2**36}),), 0, 0)
        with patch.object(suggestions, "forecast", lambda *_, found=found, **__: found):
            chosen = {change.what: change.after for change in suggestions.changes(PLAN, dora_torch, found, 2**32)}
        assert [*chosen] == [f"model.components.{name}.dtype = {dtype!r}" for dtype in told]
        for dtype, after in zip(told, chosen.values(), strict=True):
            assert after.phases[0].loaded[name] == pytest.approx(share_in(dtype, PLAN, name) * 2**36)


@pytest.mark.slow
@pytest.mark.parametrize(("state", "on_cpu", "told"), [(2**34, False, True), (2**34, True, False), (2**24, False, False)])
def test_advice_that_saves_next_to_nothing_is_left_out(state: int, on_cpu: bool, told: bool) -> None:
    """Each line saves 1 MiB and half a percent of what is missing; on a CPU none names AdamW8bit, whose update needs more."""

    def stub(plan, kernels, *, base=None):
        kept = 2**32 if plan.config.memory.gradient_checkpointing is True else 2**34
        step = Stage(f"{STEP} 64x64, batch 2", {"weights": 2**33, "optimizer": state, "saved": kept, "transient": 0})
        return Forecast((step,), 0, 0, base=2**28 if on_cpu else 0)

    with patch.object(suggestions, "forecast", stub):
        found, memory = stub(PLAN, None), 2**32
        chosen = suggestions.changes(PLAN, dora_torch, found, memory)
    before = found.total
    for change in chosen:
        assert before - change.after.total >= max(2**20, 0.005 * (before - memory))
        before = change.after.total
    assert ("optimizer.name = 'adamw8bit'" in [change.what for change in chosen]) == told


@pytest.mark.slow
def test_a_plan_says_what_the_host_of_an_accelerator_holds(bench: Workbench) -> None:
    """While weights are read, or in steps: whichever takes more. On a CPU the table has it all."""

    def host(**changes) -> tuple[Forecast, dict[str, int]]:
        found = forecast(planned(bench, run__max_steps=20, **changes), dora_torch)
        told = describe_memory(found, 2**40, [], accumulation=1)
        assert "  on the host: " in told and "not counted: what the device's libraries take" in told
        assert found.host["the program"] > 2**27
        return found, {what: size for what, size in found.host.items() if what != "the program"}

    found, starting = host(data__cache="memory", adapter__rank=1, adapter__targets=["*attn1.to_q"])
    model = bench.models / "sdxl"
    largest = max(prod(entry.shape) for file in model.rglob("*.safetensors") for entry in TensorFile(file).entries.values())
    assert starting["the cache"] == found.cache and starting["a weight on its way"] == 4 * largest
    assert 0 < starting["captions between text encoders"] < found.cache
    found, stepping = host(adapter__rank=256, data__num_workers=2)
    assert stepping == {"a checkpoint that is written": found.checkpoint, "workers": 2 * WORKER}
    assert forecast(planned(bench), dora_torch, base=lambda: 1).host == {}


@pytest.mark.slow
def test_the_weights_of_a_start_are_counted(bench: Workbench) -> None:
    """Once on the host, and once more in a checkpoint."""
    for base in (lambda: 1, None):
        anew, started = (
            forecast(planned(bench, **more), dora_torch, base=base) for more in ({}, {"adapter__init_from": "a.safetensors"})
        )
        size = started.checkpoint - anew.checkpoint
        rank = 4
        assert size == 4 * sum(rank * (weight.shape[0] + prod(weight.shape[1:])) for weight in attention_of(bench))
        if base is None:
            assert started.host["the weights of adapter.init_from"] == size and anew.host.keys() < started.host.keys()
        else:
            there, before = (found.phases[-1].parts["adapter"] for found in (started, anew))
            assert there - before == size


def attention_of(bench: Workbench) -> list:
    """The weights that the preset adapts."""
    file = TensorFile(next((bench.models / "sdxl" / "unet").glob("*.safetensors")))
    ends = ("to_q.weight", "to_k.weight", "to_v.weight", "to_out.0.weight")
    return [entry for name, entry in file.entries.items() if name.endswith(ends)]


@pytest.mark.slow
def test_memory_fit_chooses_and_changes_no_byte(bench: Workbench) -> None:
    from workbench.commands.launch import train

    def run(out: str, **more) -> bytes:
        train(bench.config(run__output_dir=str(bench.tmp / out), adapter__targets=FEW, **more), resume_from=None)
        return (bench.tmp / out / "adapters" / "bear.safetensors").read_bytes()

    plan = planned(bench, adapter__targets=FEW)
    sizes = [
        forecast(with_keys(plan, {"memory.gradient_checkpointing": every}), dora_torch).largest.peak
        for every in (False, True)
    ]
    assert sizes[1] < sizes[0]

    def small(plan, kernels, *, base=None):
        return forecast(plan, kernels)

    free = run("free")
    with patch.object(suggestions, "forecast", small), patch.object(fitting, "forecast", small):
        all_of_it = forecast(plan, dora_torch).total
        fitted = run("fitted", memory__fit=f"{(all_of_it - 1) // 1000}kB")
        assert configs.read_resolved(bench.tmp / "fitted" / "config.toml")["memory"]["gradient_checkpointing"] is not False
        with pytest.raises(UserError, match=r"memory.fit = '1MB': with every block recomputed the run needs "):
            run("refused", memory__fit="1MB")
    assert fitted == free and not (bench.tmp / "refused" / "checkpoints").exists()


BENCHMARKS = ROOT / "docs" / "benchmarks"
GPU = json.loads((BENCHMARKS / "GPU-2026-11-22.json").read_text())
MEASURED = GPU["steps"]["steps"]


def gpu_rows() -> list:
    """In --all that of codes, at the smaller size; a step over any other format is foretold in the same way."""
    chosen = [row["pixels"] == 512 and row["storage"] == "nf4" for row in MEASURED]
    names = [f"{row['model']} {row['storage']} {row['pixels']}" for row in MEASURED]
    return [
        pytest.param(row, id=name, marks=pytest.mark.slow if short else pytest.mark.proof)
        for row, name, short in zip(MEASURED, names, chosen, strict=True)
    ]


def full_size_step(folder: Path, row: dict, adapter: str) -> Stage:
    """The plan of a step of rank 16, every block recomputed, batch 1. row: its model, dtype and pixels."""
    family = row["model"].lower()
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not (folder / family).exists():
            sparse_model(monkeypatch, folder / family, family=family, layout="diffusers")
    tree = {
        "run": {"name": "x", "output_dir": str(folder / "out"), "max_steps": 1},
        "model": {
            "family": family, "path": str(folder / family), "components": {DENOISER[family]: {"dtype": row["dtype"]}}
        },
        "precision": {"matmul": "fp8" if row.get("scaled") else "compute"},
        "adapter": {"type": adapter, "rank": 16, "targets": "attention+mlp"},
        "data": {"resolution": row["pixels"], "enlarge": True, "sources": [{"path": str(PHOTOS)}]},
        "memory": {"gradient_checkpointing": True},
        "validation": {"every_steps": 0},
    }  # fmt: skip
    config = configs.parse(tree)
    source = open_source(config)
    found = forecast(make_plan(resolve(config, source), source, processes=1), kernels.planned("auto"))
    (phase,) = [p for p in found.phases if p.name == f"{STEP} {row['pixels']}x{row['pixels']}, batch 1"]
    return phase


@pytest.mark.parametrize("row", gpu_rows())
def test_the_peaks_that_a_gpu_measured(tmp_path_factory, row: dict) -> None:
    """benchmarks/bench_step.py on an H100. The margin is not part of the peak."""
    storage, scaled, _ = row["storage"].partition(" + fp8 matmul")
    dtype, _, adapter = storage.partition(" ")
    asked = {"model": row["model"], "pixels": row["pixels"], "dtype": dtype, "scaled": scaled}
    phase = full_size_step(tmp_path_factory.getbasetemp() / "full-size", asked, adapter.lower() or "dora")
    assert 0.98 * row["peak_bytes"] < phase.peak < 1.1 * row["peak_bytes"], f"{phase.peak / row['peak_bytes']:.3f}"


H200 = json.loads((BENCHMARKS / "GPU-2026-11-26.json").read_text())


@pytest.mark.parametrize("pixels", [pytest.param(1024, marks=pytest.mark.slow), pytest.param(512, marks=pytest.mark.proof)])
def test_the_time_that_a_card_was_busy(tmp_path_factory, pixels: int) -> None:
    """An H200, a DoRA over bf16: what the host takes is no part of it. A LoRA's step was another one then: it made products
    again that nothing reads."""
    side = H200["steps"]["cells"][f"Flux {pixels} px, batch 1: graphs and PEFT"]["sides"]["DoRA bf16, graphs"]
    asked = {"model": "Flux", "pixels": pixels, "dtype": "bf16"}
    phase = full_size_step(tmp_path_factory.getbasetemp() / "full-size", asked, "dora")
    card = step_time.on_card(H200["device"], 1e-6)
    assert card is not None
    least, most = (
        sum(speed.device_seconds(cost, 1.0) for cost in (phase.cost, phase.once)) for speed in (card.best, card.worst)
    )
    print(f"{pixels} px: foretold {band(least, most)}, measured {side['busy_ms'] / 1000:.2f} s")
    assert least < side["busy_ms"] / 1000 < most


STEPS = json.loads((BENCHMARKS / "step-time-CPU-2026-11-25.json").read_text())


@pytest.mark.parametrize(
    ("row", "side"),
    [
        pytest.param(row, side, id=f"{row['cell']} {side}", marks=() if row["cell"][:9] == "tiny-flux" else pytest.mark.slow)
        for row in STEPS
        for side in row["seconds"]
    ],
)
def test_the_times_that_a_cpu_measured(bench: Workbench, row: dict, side: str) -> None:
    """benchmarks/paired_steps.py --sides plan: the calmest step, as the probe of that CPU is the fastest. The tiny models,
    whose steps are launches, gave the ranges of a CPU; the pocket models, which compute, did not."""
    (cell,) = [cell for cell in paired_steps.CELLS if cell.name == row["cell"]]
    own, _ = paired_steps.SIDES["plan"][0][side]
    least, most = paired_steps.foretold(cell, own, row["probe"], bench.tmp, bench.models)
    print(f"{cell.name}, {side}: foretold {band(least, most)}, measured {min(row['seconds'][side]):.3f} s")
    assert least < min(row["seconds"][side]) < most


def test_a_plan_says_how_long_a_step_takes(bench: Workbench, monkeypatch) -> None:
    """On a card of the table, with what is left of the run; on another one, or on none, it has no figures and says so."""
    plan = replace(PLAN, length=replace(PLAN.length, max_steps=1000))
    found = Forecast((Stage(f"{STEP} 64x64, batch 2", {}, cost=Cost(Counter({Work(10**9, 0): 100}))),), 0, 0)
    monkeypatch.setattr(step_time, "bare_operator", lambda: 1e-6)
    for name, told in (("NVIDIA L4", r"time: about \S+ to \S+ s a step on NVIDIA L4, .+ for 900 steps \(an estimate .+\)"),
                       ("Pretend 1", r"time: no figures for a step's time on Pretend 1 \(.+\)")):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert re.fullmatch(told, describe_time(plan, found, torch.device("cuda"), start_step=100))
    assert describe_time(plan, found, None) == "time: no figures for a step: --plan_memory names no card"


def test_a_step_is_as_long_as_its_average_micro_batch(bench: Workbench) -> None:
    """Of two sizes the operators at the larger one count with the share of the average; what an update makes anew, once."""
    plan = planned(bench, data__batch_size=1, step__accumulation=3, adapter__targets=FEW)
    sizes = [prod(example.bucket) for example in plan.data.examples]
    assert len(set(sizes)) == 2
    rates = step_time.Speed({4: 1.0}, memory=1.0, launch=0.0, host=0.0)
    found = Forecast((Stage(f"{STEP} x", {}, cost=Cost(Counter([Work(10**6)])), once=Cost(Counter([Work(7)]))),), 0, 0)
    least, most = step_seconds(plan, found, Machine(rates, rates, card=False))
    average = sum(sizes) / len(sizes) / max(sizes) * len(sizes) / (plan.length.steps_per_epoch * 3)
    assert least == most == pytest.approx(3 * average * 10**6 + 7)


@pytest.mark.slow
def test_large_images_pass_the_vae_in_tiles(tmp_path, monkeypatch) -> None:
    """At full size 2048 px take about as much as 1024 px; as a whole they would take four times that (docs/memory.md)."""
    sparse_model(monkeypatch, tmp_path / "sdxl", family="sdxl", layout="diffusers")

    def transient(size: int) -> tuple[int, int]:
        """Of encoding a photo, and of drawing one."""
        tree = {
            "run": {"name": "x", "output_dir": str(tmp_path / "out"), "max_steps": 1},
            "model": {"family": "sdxl", "path": str(tmp_path / "sdxl")},
            "data": {"resolution": size, "enlarge": True, "sources": [{"path": str(PHOTOS)}]},
            "validation": {"prompts": ["a"], "steps": 1},
        }
        config = configs.parse(tree)
        source = open_source(config)
        run = Rehearsal(make_plan(resolve(config, source), source, processes=1), kernels=dora_torch)
        with without_values():
            for component in ("vae", "unet"):
                run.components.load(component)
            told = run.encode_prompts(["a"])
            peaks = []
            for work in (
                partial(run.encode_images, size, size, 1),
                partial(run.sample, run.plan.data.requests[0], told, told),
            ):
                trace = Trace()
                modules = run.components.model.modules.values()
                weights = trace.enter(t for module in modules for t in (*module.parameters(), *module.buffers()))
                with trace:
                    work()
                peaks.append(trace.peak - weights)
        return tuple(peaks)

    small, large = transient(1024), transient(2048)
    with monkeypatch.context() as whole:
        whole.setattr(tiles, "WHOLE", 2**40)
        untiled = transient(2048)
    for of_small, of_large, of_whole in zip(small, large, untiled, strict=True):
        assert of_large < 1.1 * of_small and of_whole > 3.5 * of_large


@pytest.mark.parametrize(
    "cells",
    # The tiny Flux misses its limit in some runs (docs/benchmarks/forecasts.md).
    [
        pytest.param(cells, marks=pytest.mark.proof)
        for cells in ("tiny SDXL", "pocket*", "tiny Flux", "unseen*", "SDXL*", "Flux*")
    ],
)
def test_whole_processes_on_a_cpu_take_what_was_foretold(tmp_path, cells: str) -> None:
    command = [sys.executable, "tests/proofs/memory_measured.py", "--cells", cells, "--keep", str(tmp_path)]
    done = subprocess.run([*command, "--out", str(tmp_path / "out.json")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "measured above it" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_tells_its_pace_and_the_time_left(bench: Workbench, capsys, monkeypatch) -> None:
    """The first step takes minutes, as where kernels are made, and the others seconds: it counts once."""
    now = 0.0
    clock = SimpleNamespace(time=time.time, monotonic=lambda: now, perf_counter=lambda: now)
    with built(bench.config(run__max_steps=100, run__stop_after=6)) as run, Signals() as signals:
        step = run.step.run

        def timed(number, *given):
            nonlocal now
            now += 500.0 if number == 1 else 2.0
            return step(number, *given)

        monkeypatch.setattr(run.step, "run", timed)
        monkeypatch.setattr(loops, "time", clock)
        monkeypatch.setattr(phases, "time", clock)
        capsys.readouterr()
        deque(make_loop(replace(run, context=replace(run.context, phases=Phases(show=True, every=1.0))), signals).steps(), 0)
    lines = capsys.readouterr().err.splitlines()
    told = [re.sub(r", epoch .*, lr [^,]*|, memory [^,]*", "", line) for line in lines if line.startswith("step ")]
    assert told[2:6] == [
        f"step {made}/100, 0.5 images/s, {left} left"
        for made, left in ((3, "3 min 14 s"), (4, "3 min 12 s"), (5, "3 min 10 s"), (6, "3 min 8 s"))
    ]
    assert lines[-1] == "training: 6 steps in 8 min 30 s, 2.0 s a step in the steps alone"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("adamw", {}, "adamw8bit"), ("adamw", {"amsgrad": True}, None), ("lion", {}, "lion8bit"),
        ("prodigy", {}, None), ("adamw8bit", {}, None),
    ],
)  # fmt: skip
def test_the_same_optimizer_in_8_bits_is_advised_alone(name: str, options: dict[str, bool], told: str | None) -> None:
    given = {"name": name, "options": options, "betas": None, "eps": None}
    optimizer = PLAN.config.optimizer.model_copy(update=given)
    found = Forecast((Stage(f"{STEP} 64x64, batch 2", {"weights": 2**33, "optimizer": 2**34}),), 0, 0)
    plan = replace(PLAN, config=PLAN.config.model_copy(update={"optimizer": optimizer}))
    with patch.object(suggestions, "forecast", lambda *_, **__: found):
        chosen = suggestions.changes(plan, dora_torch, found, 2**32)
    advised = [change.what for change in chosen if change.what.startswith("optimizer.name")]
    assert advised == ([f"optimizer.name = {told!r}"] if told else [])


@pytest.mark.slow
def test_a_plan_counts_what_is_still_to_be_written_to_the_disk(bench: Workbench, monkeypatch, capsys) -> None:
    free = shutil.disk_usage(bench.tmp)._replace(free=2**20)  # for the adapter files alone
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    config = bench.write(bench.tree(data__cache="memory"))
    for there in (False, True):
        if there:  # as long as any checkpoints would be; it takes no room
            (bench.tmp / "out" / "checkpoints").mkdir(parents=True)
            with open(bench.tmp / "out" / "checkpoints" / "sparse", "wb") as file:
                file.truncate(2**40)
        assert cli.main(["--config", str(config), "--plan"]) == (0 if there else 2)
        assert capsys.readouterr().err.startswith("error: run.output_dir need about") != there
