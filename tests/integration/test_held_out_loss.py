"""The loss at fixed draws is the plain one, changes nothing in the run, and survives stops, processes and failures."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from typing import Any

import pytest
import torch

from scripts import adapter as adapter_tool
from scripts import make_model
from tests.harness import Workbench, built, metrics_of
from tests.integration import test_processes as processes
from tests.optimizers import ENTRIES
from tests.proofs.forks import Server
from trainer import config as configs
from trainer.base import draws
from trainer.base.errors import NonFiniteError
from trainer.base.progress import Phases
from trainer.base.types import Occurrence
from trainer.checkpoint import store
from trainer.data.images.views import View
from trainer.engine import held_out_loss
from trainer.kernels import dora_torch, scratch
from trainer.optim import OPTIMIZERS
from trainer.plan import fixed_draws
from trainer.plan.run_plan import make_plan, open_source, resolve
from workbench.adapters import measured
from workbench.commands import main as cli
from workbench.commands.launch import train
from workbench.planning.estimate import HELD_OUT, PHOTOS, forecast
from workbench.planning.op_trace import Trace

LENGTH = 5
TARGETS = {"sdxl": ["*attn1.to_q", "conv_in"], "flux": ["*attn.to_q"]}
FIELDS = {
    *("held_out_loss", "held_out_quarters", "trained_loss", "trained_quarters"),
    *("measured_photos", "held_out_photos", "held_out_copies", "held_out_by_photo", "trained_by_photo"),
}
ON = {"validation__loss_every_steps": 2}


@pytest.fixture(autouse=True)
def few_draws(monkeypatch) -> None:
    """Two in each quarter: what is promised does not depend on how many there are."""
    monkeypatch.setattr(fixed_draws, "FEWEST", 8)


def tree(bench: Workbench, out: str, family: str = "sdxl", **changes: Any) -> dict[str, Any]:
    return bench.tree(
        family,
        **{
            "run__output_dir": str(bench.tmp / out), "run__max_steps": LENGTH, "data__held_out": 1, "data__batch_size": 2,
            "data__flip": True, "data__caption_dropout": 0.5, "adapter__targets": TARGETS[family],
            "adapter__type": "dora", "optimizer__lr": 1e-2,
        } | changes,
    )  # fmt: skip


def run(bench: Workbench, out: str, resume_from: str | None = None, **changes: Any) -> list[dict[str, Any]]:
    train(configs.parse(tree(bench, out, **changes)), resume_from=resume_from)
    return metrics_of(bench.tmp / out)


def weights(bench: Workbench, out: str, step: int = LENGTH) -> dict[str, bytes]:
    folder = bench.tmp / out / "checkpoints" / f"step-{step:08d}"
    return {name: (folder / name).read_bytes() for name in ("adapter.safetensors", "optimizer.safetensors")}


def without(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in entry.items() if key not in FIELDS | {"at_start"}} for entry in log]


@pytest.mark.parametrize(
    ("family", "more"),
    [("sdxl", {"objective__min_snr_gamma": 1.0, "data__crop_jitter": 0.2}), pytest.param("flux", {}, marks=pytest.mark.slow)],
)
def test_it_is_the_plain_mean_squared_error_of_every_quarter(bench: Workbench, family: str, more: dict) -> None:
    """By the papers' formulas in fp64, of the photos as they are, with their own captions."""
    with built(configs.parse(tree(bench, "out", family, **ON, **more))) as made:
        measure = held_out_loss.HeldOutLoss.of(made.plan, made.components, made.reader, made.state.evaluating)
        found = measure.measure()
        assert measure.at_once == 2
        (example,) = made.plan.data.held_out
        count = fixed_draws.FEWEST  # of one photo
        quarters: list[list[float]] = [[], [], [], []]
        batch = measure.reader[(Occurrence(0, example.sample, 0),)]
        assert batch.captions == (example.photo.caption,)
        assert batch.crop_top_left.tolist() == [list(View().place(example).crop_top_left)]
        x = batch.latents.double()
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
        for number in range(count):
            share = (number % 4 + draws.uniform(0, "held_out_time", example.photo.sha256, number)) / 4
            noise = draws.normal(x.shape[1:], 0, "held_out_noise", example.photo.sha256, number)[None].double()
            if family == "sdxl":
                time = torch.tensor([int(share * 1000)])
                signal = (1 - betas[: time + 1]).prod()
                noised, target = signal.sqrt() * x + (1 - signal).sqrt() * noise, noise
            else:
                time = torch.tensor([share], dtype=torch.float32)
                noised, target = (1 - share) * x + share * noise, noise - x
            with torch.no_grad():
                told = made.family.images.predict(made.model, noised.float(), time, batch.conditioning, batch)
            quarters[int(share * 4)].append(float((told.double() - target).square().mean()))
    means = [sum(quarter) / len(quarter) for quarter in quarters]
    assert [len(quarter) for quarter in quarters] == [count / 4] * 4
    assert found["held_out_quarters"] == pytest.approx(means, rel=1e-5)
    assert found["held_out_loss"] == pytest.approx(sum(means) / 4, rel=1e-5)
    assert found["held_out_by_photo"] == {example.photo.sha256[:16]: pytest.approx(found["held_out_loss"])}
    assert found.keys() == FIELDS and found["trained_loss"] != found["held_out_loss"]


CELLS = {
    "dora": {},
    "lora with dropout, live encoders": {
        "adapter__type": "lora", "adapter__dropout": 0.3, "memory__gradient_checkpointing": True, "data__cache": "none",
    },
    "a mode of its own": {"optimizer__name": "averaging"},
}  # fmt: skip


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.slow
def test_on_or_off_is_the_same_run(bench: Workbench, monkeypatch, cell: str) -> None:
    """With samples drawn or not: the same bytes, the same log but for what was measured. Stopped and resumed it is in
    test_resume_pairs.py."""
    monkeypatch.setitem(OPTIMIZERS, "averaging", ENTRIES["averaging"])
    more, drawn = CELLS[cell], {"validation__every_steps": 2, "validation__prompts": ["a bear"], "validation__steps": 1}
    off = run(bench, "off", **more)
    on = run(bench, "on", **more, **ON, **drawn)
    assert weights(bench, "on") == weights(bench, "off") and without(on) == off
    assert [entry["step"] for entry in on if entry.keys() >= FIELDS] == [2, 4, 5] and on[0]["at_start"].keys() == FIELDS
    for file in ("bear.safetensors", "bear_comfyui.safetensors"):
        assert len({(bench.tmp / out / "adapters" / file).read_bytes() for out in ("on", "off")}) == 1, file


@pytest.mark.slow
def test_a_signal_while_it_is_measured(bench: Workbench, monkeypatch, capsys) -> None:
    """One start that is stopped at each of the measurements, before the first step, after the second and at the end. It is
    obeyed in the middle; the step's line stays, and the next start adds what it lacks."""
    whole = run(bench, "whole", **ON)
    path = str(bench.write(tree(bench, "parts", **ON)))
    real, seen = Phases.__call__, []

    def interrupted(self, name: str, *more, **settings):
        if name == "held-out loss":
            seen.append(name)
            if len(seen) == place + 1:
                signal.raise_signal(signal.SIGTERM)
        return real(self, name, *more, **settings)

    # The start after each measures again what was interrupted, then up to the next place.
    for at, place in ((0, 0), (2, 1), (LENGTH, 2)):
        seen.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Phases, "__call__", interrupted)
            assert cli.main(["--config", path, "--resume_from", "auto"]) == 143
        assert len(seen) == place + 1 and "Traceback" not in capsys.readouterr().err, "it was measured again after the signal"
        if at:
            log = metrics_of(bench.tmp / "parts")
            assert log[-1]["step"] == at and "held_out_loss" not in log[-1]
    assert cli.main(["--config", path, "--resume_from", "auto"]) == 0
    assert metrics_of(bench.tmp / "parts") == whole
    assert weights(bench, "parts") == weights(bench, "whole")


@pytest.mark.slow
def test_without_held_out_photos_the_trained_ones_are_measured(bench: Workbench, capsys) -> None:
    log = run(bench, "out", data__held_out=0, **ON)
    assert "no photo is held out, so this loss cannot show memorising" in capsys.readouterr().out
    assert (
        log[0]["at_start"].keys()
        == log[-1].keys() & FIELDS
        == {"trained_loss", "trained_quarters", "trained_by_photo", "measured_photos"}
    )


@pytest.mark.slow
def test_too_little_memory_ends_the_run_at_a_whole_step(bench: Workbench, monkeypatch, capsys) -> None:
    real, calls = held_out_loss.HeldOutLoss._errors, []

    def full(self, example, numbers):
        calls.append(numbers)
        if len(calls) > 8:  # two at once of eight draws of two photos: before the first step it fits
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return real(self, example, numbers)

    monkeypatch.setattr(held_out_loss.HeldOutLoss, "_errors", full)
    path = str(bench.write(tree(bench, "out", **ON)))
    assert cli.main(["--config", path]) == 5
    assert "validation.loss_every_steps = 0" in capsys.readouterr().err
    assert [entry["step"] for entry in metrics_of(bench.tmp / "out")] == [1, 2]
    assert store.steps(bench.tmp / "out" / "checkpoints") == [2]


@pytest.mark.slow
def test_it_is_planned(bench: Workbench, monkeypatch) -> None:
    """What it takes is what the plan says; a held-out photo may be the largest that is encoded."""
    config = configs.parse(tree(bench, "out", "flux", data__bucket_step=64, **ON))
    source = open_source(config)
    plan = make_plan(resolve(config, source), source, processes=1)
    foretold = {phase.name: phase for phase in forecast(plan, dora_torch, base=lambda: 1).phases}
    (stage,) = (phase for name, phase in foretold.items() if name.startswith(HELD_OUT))
    assert stage.peak < max(phase.peak for phase in foretold.values())
    assert any(name.startswith(PHOTOS) for name in foretold)
    trace = Trace()
    monkeypatch.setattr(scratch, "_buffers", {})  # those of an earlier test may be larger
    with built(config) as made:
        measure = held_out_loss.HeldOutLoss.of(made.plan, made.components, made.reader, made.state.evaluating)
        example = plan.data.measured["held_out"][0]
        batch = measure.reader[(Occurrence(0, example.sample, 0),)]
        given = batch, torch.tensor([0.1, 0.9]), torch.randn(2, *batch.latents.shape[1:])
        measure.errors(*given)
        modules = [t for module in made.model.modules.values() for t in (*module.parameters(), *module.buffers())]
        trace.enter(modules + [parameter.grad for parameter in made.step.parameters])
        trace.reset()
        with trace:
            measure.errors(*given)
        planned = stage.peak - stage.parts["optimizer"]
        assert trace.peak == pytest.approx(planned, rel=0.02)


FEW = "from trainer.plan import fixed_draws\nfixed_draws.FEWEST = 8\n"
PAUSED = """
from trainer.engine.held_out_loss import HeldOutLoss
measured = HeldOutLoss._errors
def slow(self, example, numbers):
    time.sleep(0.05)
    return measured(self, example, numbers)
HeldOutLoss._errors = slow
"""


@pytest.mark.slow
def test_two_processes_share_it(server: Server, bench: Workbench) -> None:
    """The same numbers as of one, where the adapter is the same; a signal to one of them stops both in the middle."""
    one = run(bench, "one", **ON)
    processes.run_both(server, bench, tree(bench, "two", **ON), patch=FEW)
    two = metrics_of(bench.tmp / "two")
    assert two[0]["at_start"] == one[0]["at_start"]
    assert [entry["step"] for entry in two if entry.keys() >= FIELDS] == [2, 4, 5]

    changes = ON | {"validation__loss_every_steps": 1, "run__max_steps": 100, "data__held_out": 2, "data__batch_size": 1}
    both = processes.start_both(server, bench, tree(bench, "stopped", **changes), patch=FEW + PAUSED)
    log, deadline = bench.tmp / "stopped" / "metrics.jsonl", time.monotonic() + 90
    while not (log.exists() and log.read_text().count("\n") >= 2):
        assert time.monotonic() < deadline, both.said
        time.sleep(0.02)
    time.sleep(0.3)
    os.kill(both.pids[1], signal.SIGTERM)
    statuses, said = both.wait()
    assert statuses == [128 + signal.SIGTERM] * 2, said
    (step,) = store.steps(bench.tmp / "stopped" / "checkpoints")
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == list(range(1, step + 1)) and step < 100


def average(*arguments: object) -> int:
    return adapter_tool.main(["average", *map(str, arguments)])


def told(said: str) -> dict[str, list[float]]:
    """Whose -> [the held-out loss, that of trained photos], of what `adapter.py average --config` prints."""
    found = re.findall(r"^ +([\d.]+) +([\d.]+)  (\S.*)$", said, re.MULTILINE)
    return {name: [float(held_out), float(trained)] for held_out, trained, name in found}


def losses(entry: dict[str, Any]) -> Any:
    return pytest.approx([entry[name] for name in ("held_out_loss", "trained_loss")], rel=1e-5)


@pytest.mark.slow
def test_average_tells_the_losses_that_the_runs_logged(bench: Workbench, capsys) -> None:
    """`adapter.py average --config`: of the model alone, of a checkpoint of a DoRA, of a file of a LoRA that has less, and of
    the mean. It says nothing else, and leaves the runs as they are."""
    dora = run(bench, "dora", **ON, run__max_steps=2)
    less = {"adapter__type": "lora", "adapter__rank": 2, "adapter__targets": ["conv_in"]}
    lora = run(bench, "lora", **ON, run__max_steps=2, run__seed=8, **less)
    given = [store.newest_valid(bench.tmp / "dora" / "checkpoints")[0], bench.tmp / "lora" / "adapters" / "bear.safetensors"]
    before = {path: path.read_bytes() for path in bench.tmp.rglob("*") if path.is_file()}
    out, config = bench.tmp / "mean.safetensors", ["--config", bench.tmp / "dora" / "config.toml"]
    capsys.readouterr()
    assert average(out, *given, "--rank", 6, "--weights", 3, 1, *config) == 0
    said = capsys.readouterr().out
    found = told(said)
    assert [*found] == ["without an adapter", *map(str, given), str(out)]
    alone, one, other, mean = found.values()
    assert alone == losses(dora[0]["at_start"])
    assert one == losses(dora[-1]) and other == losses(lora[-1]) and one != pytest.approx(other, rel=1e-3)
    assert said.startswith(f"diffusers: {out}: DoRA of rank 6 at most, the mean of 2\n  of the mean's change of the weights ")
    assert "the held-out loss of one photo decides nothing" in said and "1 held-out photos" in said
    assert said.count("\n") == 2 + 2 + 1 + len(found), "nothing of what a run says when it starts"
    assert {path: path.read_bytes() for path in bench.tmp.rglob("*") if path.is_file() and path != out} == before
    # The mean of a file with itself is the file; its loss is what was told of the mean before.
    again = bench.tmp / "again.safetensors"
    assert average(again, out, out, "--rank", 6, *config) == 0
    found = told(capsys.readouterr().out)
    assert found[str(out)] == pytest.approx(mean, rel=1e-5) and found[str(again)] == pytest.approx(mean, rel=1e-5)


@pytest.mark.slow
def test_average_writes_nothing_where_a_loss_cannot_be_measured(bench: Workbench, capsys, monkeypatch) -> None:
    """What can be told is refused before the model's weights are read; what fails later comes before the mean is written."""
    run(bench, "out", run__max_steps=1)
    checkpoint = store.newest_valid(bench.tmp / "out" / "checkpoints")[0]
    file, out = bench.tmp / "out" / "adapters" / "bear.safetensors", bench.tmp / "mean" / "mean.safetensors"

    def refused(status: int = 2, given: Any = file, **changes: Any) -> str:
        config = bench.write(tree(bench, "none", **changes))
        there = {*bench.tmp.rglob("*")}
        capsys.readouterr()
        assert average(out, given, given, "--rank", 4, "--config", config) == status
        assert {*bench.tmp.rglob("*")} == there, "nothing is written, nor begun"
        said = capsys.readouterr()
        assert not said.out and said.err.count("error: ") == 1
        return said.err

    with monkeypatch.context() as patch:
        patch.setattr(measured, "HeldOutLosses", None)  # a weight is read
        assert "data.held_out = 0 in the config" in refused(data__held_out=0)
        assert "nowhere" in refused(data__sources=[{"path": str(bench.tmp / "nowhere")}])
        assert "data.held_out = 9" in refused(data__held_out=9)
        said = refused(adapter__targets=["conv_in"])
        assert f"{file} has layers that this run does not adapt" in said and "attn1.to_q" in said
        assert "nothing" in refused(model__path=str(bench.tmp / "nothing"))
        assert "is of sdxl, the config's model of flux" in refused(
            given=checkpoint, model__family="flux", model__path=str(bench.models / "flux"), adapter__targets=TARGETS["flux"]
        )
        assert "adapter.colour" in refused(adapter__colour="red")

    def fails(*given: Any) -> None:
        raise NonFiniteError("an overflow")

    monkeypatch.setattr(held_out_loss.HeldOutLoss, "measure", fails)
    assert "an overflow" in refused(status=4)


@pytest.mark.slow
def test_adapters_of_different_models_have_no_mean(bench: Workbench, capsys) -> None:
    """The frozen weights of another model have other digests."""
    run(bench, "one", run__max_steps=1)
    other = bench.tmp / "other"
    assert make_model.main([*["--size", "tiny", "--family", "sdxl", "--layout", "diffusers", "--seed", "5"], str(other)]) == 0
    run(bench, "two", model__path=str(other), data__cache_dir=str(bench.tmp / "cache"), run__max_steps=1)
    files, out = [bench.tmp / name / "adapters" / "bear.safetensors" for name in ("one", "two")], bench.tmp / "no.safetensors"
    assert average(out, *files, "--rank", 4, "--base", other) == 2
    assert "are over different models" in capsys.readouterr().err and not out.exists()
    # The model in which the losses are measured is one of them.
    config = bench.tmp / "two" / "config.toml"
    assert average(out, files[0], files[0], "--rank", 4, "--config", config) == 2
    said = capsys.readouterr().err
    assert f"the config's {other} and {files[0]} are over different models" in said and not out.exists()
