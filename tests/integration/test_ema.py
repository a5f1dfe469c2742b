"""Averages of the weights: right by the formula, kept over stops, drawn and exported, and no bit of the training changes."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from PIL import Image

from scripts import adapter as script
from tests.harness import Workbench, built, metrics_of, reseal, take_step, train_built
from tests.optimizers import ENTRIES
from trainer import config as configs
from trainer.base import files
from trainer.base.errors import Interrupted, UserError
from trainer.base.tensorfile import TensorFile
from trainer.kernels import dora_torch
from trainer.optim import OPTIMIZERS
from trainer.plan.run_plan import make_plan, open_source, resolve
from trainer.resume import allowed_changes
from trainer.runtime.jobs import Position
from workbench.commands import launch
from workbench.planning.estimate import SAMPLES, forecast

WATCHED: dict[str, Any] = {
    "validation__every_steps": 2, "validation__prompts": ["a bear"], "validation__steps": 1, "export__every_steps": 2,
}  # fmt: skip
CONSTANT: dict[str, Any] = {"ema__kind": "constant", "ema__decay": 0.5}


def tree(bench: Workbench, out: str, **more: Any) -> dict[str, Any]:
    return bench.tree(
        **{
            "run__output_dir": str(bench.tmp / out), "run__max_steps": 5, "optimizer__lr": 1e-2, "adapter__type": "dora",
            "adapter__targets": ["*attn1.to_q", "conv_in"],
        } | more
    )  # fmt: skip


def train(bench: Workbench, out: str, resume_from: str | None = None, allow: str | None = None, **more: Any) -> Path:
    """Returns the output folder."""
    allowed = allowed_changes.parse(allow, resume_from)
    launch.train(configs.parse(tree(bench, out, **more)), resume_from=resume_from, allowed=allowed)
    return bench.tmp / out


def read(path: Path) -> dict[str, torch.Tensor]:
    return TensorFile(path).read_all()


def not_finite(losses, *given) -> torch.Tensor:
    return losses(*given) * torch.nan


def by_formula(weights: list[dict[str, torch.Tensor]], decay: float) -> dict[str, torch.Tensor]:
    """fp64, of the weights before training and after each update; the decay rises as (1 + n) / (10 + n)."""
    average = {name: tensor.double() for name, tensor in weights[0].items()}
    for n, present in enumerate(weights[1:], 1):
        kept = min(decay, (n + 1.0) / (n + 10.0))
        average = {name: kept * tensor + (1 - kept) * present[name].double() for name, tensor in average.items()}
    return average


@pytest.mark.slow
def test_the_average_is_that_of_the_formula_and_only_made_by_updates_that_changed_something(
    bench: Workbench, monkeypatch
) -> None:
    with built(configs.parse(tree(bench, "out", **CONSTANT))) as run:
        weights = [{name: p.detach().clone() for name, p in run.adapter.named_parameters().items()}]
        for step, update in zip(range(1, 6), run.updates(), strict=False):
            if step == 3:  # not finite: the update is refused, and nothing moves
                with monkeypatch.context() as patched:
                    losses = partial(not_finite, run.step.losses)
                    patched.setattr(run.step, "losses", losses)
                    assert not take_step(run, step, update).updated
                continue
            assert take_step(run, step, update).updated
            weights.append({name: p.detach().clone() for name, p in run.adapter.named_parameters().items()})
        assert run.state.average.updates == 4
        right, found = by_formula(weights, 0.5), run.state.average.weights
        assert found.keys() == right.keys() == run.adapter.named_parameters().keys()
        moved = 0.0
        for name, average in right.items():
            # Four lerps, of which each rounds three times.
            bound = 4 * 3 * 2**-24 * max(float(each[name].abs().max()) for each in weights)
            assert (found[name].double() - average).abs().max() <= bound, name
            moved = max(moved, float((average - weights[-1][name].double()).abs().max()))
        assert moved > 1e-3, "the average is not the last weights"


@pytest.mark.slow
def test_a_run_with_an_average_trains_the_bytes_of_one_without(bench: Workbench) -> None:
    """Though samples are drawn with it and files exported in between. That its own bytes come back after a stop is shown in
    test_resume_pairs.py."""
    plain = train(bench, "plain")
    watched = train(bench, "watched", **CONSTANT | WATCHED)
    last = "checkpoints/step-00000005"
    for name in ("adapter", "optimizer"):
        one, other = (folder / last / f"{name}.safetensors" for folder in (plain, watched))
        assert one.read_bytes() == other.read_bytes(), name
    assert (watched / last / "ema.safetensors").exists() and not (plain / last / "ema.safetensors").exists()
    assert metrics_of(plain) == metrics_of(watched)
    assert {path.name for path in (plain / "adapters").glob("*.safetensors")} == {
        "bear.safetensors", "bear_comfyui.safetensors"
    }  # fmt: skip
    for name in ("bear.safetensors", "bear_comfyui.safetensors"):
        assert (plain / "adapters" / name).read_bytes() == (watched / "adapters" / name).read_bytes(), name
    made = {path.name for path in (watched / "adapters").glob("*.safetensors")}
    assert made == {
        f"{stem}{ema}{kind}.safetensors"
        for stem in ("bear", "bear-00000002", "bear-00000004") for ema in ("", "_ema") for kind in ("", "_comfyui")
    }  # fmt: skip
    drawn = {folder.name: sorted(path.name for path in folder.iterdir()) for folder in (watched / "samples").iterdir()}
    assert drawn == {f"step-0000000{n}": ["00.png", "00_ema.png"][: 1 + bool(n)] for n in (0, 2, 4, 5)}


@pytest.mark.slow
def test_files_and_samples_of_the_average_are_made_with_it(bench: Workbench, capsys) -> None:
    """DoRA's norms too: the file is what the live adapter gives with the average in place."""
    with built(configs.parse(tree(bench, "out", **CONSTANT | WATCHED))) as run:
        train_built(run)
        said = capsys.readouterr().out
        assert len(re.findall(r"against the live adapter.* equal", said)) == 2
        assert all(f"adapter ({kind}, average): " in said for kind in ("diffusers", "comfyui"))
        assert "sample 00_ema moved by" in said
        average = run.state.average.weights
        exported = TensorFile(bench.tmp / "out" / "adapters" / "bear_ema.safetensors")
        for name, tensor in average.items():
            assert torch.equal(exported.read(name).flatten(), tensor.flatten()), name
        assert exported.metadata["average"] == "constant, decay 0.5"
        assert "average" not in TensorFile(bench.tmp / "out" / "adapters" / "bear.safetensors").metadata
        # Of a DoRA the ComfyUI file needs the norm of the averaged weight: W + s B A, made dense here.
        scales = read(bench.tmp / "out" / "adapters" / "bear_ema_comfyui.safetensors")
        for layer, module in run.adapter.layers.items():
            a, b = (average[f"{layer}.lora_{x}.weight"].double().flatten(1) for x in "AB")
            w = module.get_base_layer().dequantize(torch.float32).double().flatten(1)
            c = (w + module.scaling["default"] * (b @ a)).norm(dim=1)
            g = average[f"{layer}.lora_magnitude_vector"].double() / c
            key = "lora_unet_input_blocks_0_0" if layer.endswith("conv_in") else None
            if key:
                scale = scales[f"{key}.dora_scale"].double().flatten()
                assert (scale / (g * w.norm(dim=1)) - 1).abs().max() < 1e-5
        request = run.plan.data.requests[0]
        pictures = {path.stem: Image.open(path) for path in (bench.tmp / "out/samples/step-00000005").iterdir()}
        assert json.loads(pictures["00_ema"].info["request"]).pop("weights") == "ema"
        assert pictures["00"].tobytes() != pictures["00_ema"].tobytes()
        assert request.prompt == pictures["00_ema"].info["prompt"]
    page = (bench.tmp / "out" / "report.html").read_text()
    assert "average of the weights (ema)" in page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "formats"),
    [
        ({"adapter__type": "lora"}, ["", "_comfyui"]),
        ({}, [""]),  # the other one needs the norms of the averaged weights
        ({"export__dora_scale": "magnitude"}, ["", "_comfyui"]),
    ],
)
def test_a_checkpoint_gives_the_files_of_its_average(bench: Workbench, capsys, more: dict, formats: list[str]) -> None:
    """Byte for byte those of the run, as far as the checkpoint has what they need; and it says which it has not."""
    out = train(bench, "out", run__max_steps=2, adapter__targets=["conv_in"], **CONSTANT | more)
    capsys.readouterr()
    assert script.main(["export", str(out / "checkpoints" / "step-00000002"), str(bench.tmp / "made")]) == 0
    said = capsys.readouterr().out
    made = {path.name for path in (bench.tmp / "made").iterdir()}
    assert made == {f"bear{end}.safetensors" for end in ("", "_comfyui", *(f"_ema{format}" for format in formats))}
    for name in made:
        assert (bench.tmp / "made" / name).read_bytes() == (out / "adapters" / name).read_bytes(), name
    assert ("comfyui, average: not written: this DoRA file needs the norms" in said) == (formats == [""])


@pytest.mark.parametrize(
    "error",
    [Interrupted(15), *(pytest.param(error, marks=pytest.mark.slow)
     for error in (torch.OutOfMemoryError("out of memory"), OSError(28, "full"), KeyError()))],
)  # fmt: skip
def test_whatever_ends_a_sample_of_the_average_the_weights_come_back(bench: Workbench, monkeypatch, error) -> None:
    with built(configs.parse(tree(bench, "out", **CONSTANT | WATCHED))) as run:
        for step, update in zip(range(1, 3), run.updates(), strict=False):
            take_step(run, step, update)
            run.progress.step = step
        before = {name: p.detach().clone() for name, p in run.adapter.named_parameters().items()}
        kept = {name: t.clone() for name, t in run.state.average.weights.items()}
        seen = []

        def sample(*arguments):
            seen.append({name: p.detach().clone() for name, p in run.adapter.named_parameters().items()})
            if len(seen) == 2:
                raise error
            return Image.new("RGB", (8, 8))

        monkeypatch.setitem(vars(run.family.images), "draw", sample)  # it is frozen, and there to the end
        with pytest.raises(type(error)):
            run.artifacts().draw_samples(Position(2, 4))
        for name, parameter in run.adapter.named_parameters().items():
            assert torch.equal(parameter, before[name]) and torch.equal(seen[0][name], before[name])
            assert torch.equal(seen[1][name], kept[name]) and torch.equal(run.state.average.weights[name], kept[name])
        assert all(layer.stale for layer in run.adapter.layers.values())
        assert not (bench.tmp / "out" / "samples" / "step-00000002").exists()


@pytest.mark.slow
def test_regrouped_parameters_keep_their_averages(bench: Workbench) -> None:
    """A rule gets a rate of its own, so the optimizer's groups are others: the average is by name."""
    rule = {"component": "unet", "match": "conv_in"}
    first = train(bench, "out", run__stop_after=2, adapter__rules=[rule], **CONSTANT)
    before = read(first / "checkpoints/step-00000002/ema.safetensors")
    train(bench, "out", "auto", "adapter.rules", run__stop_after=2, adapter__rules=[rule | {"lr": 5e-3}], **CONSTANT)
    after = read(first / "checkpoints/step-00000002/ema.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_what_cannot_be_is_refused_with_the_reason(bench: Workbench, monkeypatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "averaging", ENTRIES["averaging"])
    with pytest.raises(UserError, match=r"ema.kind = 'constant' cannot be combined with optimizer.name = 'averaging': its w"):
        train(bench, "out", optimizer__name="averaging", model__path=str(bench.tmp / "nowhere"), **CONSTANT)
    with pytest.raises(UserError, match=r"ema.decay = 0.5 has no effect with ema.kind = 'none'"):
        train(bench, "out", ema__decay=0.5)
    for decay in (0.0, 1.0, -0.1):
        with pytest.raises(UserError, match="ema.decay"):
            train(bench, "out", ema__kind="constant", ema__decay=decay)
    assert not (bench.tmp / "out").exists()


def as_an_earlier_version(root: Path, step: int, **values: Any) -> None:
    """Give a run's config.toml and checkpoint the keys that earlier versions had, with their defaults or these values."""
    folder = root / "checkpoints" / f"step-{step:08d}"
    earlier = {
        "ema__snapshot_every_steps": 0, "export__license_link": "", "optimizer__min_8bit_size": 4096,
        "precision__loss_scale_growth_interval": 2000,
    } | values  # fmt: skip
    state = json.loads((folder / "state.json").read_text())
    for key, value in earlier.items():
        table, _, name = key.partition("__")
        state["pieces"]["config"]["state"][table][name] = value
    (folder / "state.json").write_bytes(files.json_bytes(state))
    (root / "config.toml").write_text(tomli_w.dumps(state["pieces"]["config"]["state"]))
    reseal(folder)


@pytest.mark.slow
def test_a_run_of_an_earlier_version_goes_on_to_the_same_bytes_or_is_refused_in_one_sentence(bench: Workbench) -> None:
    """By its own config.toml, which has keys that there are no more."""
    one = CONSTANT | {"run__max_steps": 2}
    whole = train(bench, "whole", **one)
    parts = train(bench, "parts", **one | {"run__stop_after": 1})
    as_an_earlier_version(parts, 1)
    config = configs.load(str(parts / "config.toml"), ["run.stop_after="])
    with pytest.raises(UserError, match="already holds this run's checkpoints; add --resume_from auto"):
        launch.train(config, resume_from=None)
    as_an_earlier_version(parts, 1, ema__kind="power", ema__snapshot_every_steps=1)
    before = {path: path.read_bytes() for path in parts.rglob("*.*") if path.is_file()}
    for average in (CONSTANT, {}):  # as the sentence says, and without the key that the checkpoint's piece was asked by
        for resume_from, what in (("auto", "the checkpoint .*step-00000001"), (None, "run.output_dir = '.*parts'")):
            gone = "ema.kind = 'power', ema.snapshot_every_steps = 1: averages of any length are gone; "
            with pytest.raises(UserError, match=f"^{what}: {gone}.*028b4cb$"):
                train(bench, "parts", resume_from, **{"run__max_steps": 2} | average)
    assert before == {path: path.read_bytes() for path in parts.rglob("*.*") if path.is_file()}, "half-written"
    as_an_earlier_version(parts, 1, ema__kind="constant")
    launch.train(config, resume_from="auto")
    assert "snapshot_every_steps" not in (parts / "config.toml").read_text()
    last = "checkpoints/step-00000002"
    files_of = [f"{last}/{piece}.safetensors" for piece in ("adapter", "optimizer", "ema")]
    for file in (*files_of, "adapters/bear_ema.safetensors"):
        assert (whole / file).read_bytes() == (parts / file).read_bytes(), file


@pytest.mark.slow
def test_an_average_neither_comes_nor_goes_in_mid_run(bench: Workbench) -> None:
    one = {"run__max_steps": 2, "run__stop_after": 1, "adapter__targets": ["conv_in"]}
    train(bench, "with", **CONSTANT | one)
    with pytest.raises(UserError, match="has ema, which ema.kind asks for: set ema.kind as it was when the run started"):
        train(bench, "with", "auto", **one)
    train(bench, "without", **one)
    with pytest.raises(UserError, match="lacks ema, which ema.kind asks for"):
        train(bench, "without", "auto", **CONSTANT | one)


@pytest.mark.slow
def test_the_plan_counts_it(bench: Workbench) -> None:
    found = []
    for more in ({}, CONSTANT):
        config = configs.parse(tree(bench, "out", **WATCHED | more))
        source = open_source(config)
        found.append(forecast(make_plan(resolve(config, source), source, processes=1), dora_torch))
    with built(configs.parse(tree(bench, "out", **CONSTANT))) as run:
        size = sum(tensor.nbytes for tensor in run.state.average.weights.values())
        assert size == sum(p.nbytes for p in run.adapter.named_parameters().values())
    plain, averaged = found
    assert averaged.checkpoint - plain.checkpoint == size
    for one, other in zip(plain.phases, averaged.phases, strict=True):
        assert other.parts.get("averages", 0) == (0 if one.name.startswith("encoding") else size), one.name
        # While samples are drawn the weights that train lie beside the average that is drawn with.
        more = other.peak - one.peak
        if one.name.startswith(SAMPLES):  # with what follows from the weights, made anew beside what a step had
            assert 2 * size <= more <= 2 * size + one.parts["adapter"]
        else:
            assert more == (0 if one.name.startswith("encoding") else size), one.name
