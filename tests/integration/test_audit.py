"""scripts/audit.py: what storage formats cost is what runs with them log, and what ought to be excluded is found."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import audit, make_model
from tests.harness import DENOISER, ROOT, Workbench, built, metrics_of, train_built
from tests.quantised_files import bitsandbytes_folder
from trainer import config as configs
from trainer.base.tensorfile import TensorFile, write_tensors
from trainer.models.loading import ModelSource
from trainer.plan.run_plan import make_plan, open_source, resolve

pytestmark = pytest.mark.tool("audit")

POCKET = ROOT / "examples" / "pocket_sdxl"
FILE = "unet/diffusion_pytorch_model.safetensors"
WILD = "up_blocks.1.attentions.0.transformer_blocks.0.attn1.to_out.0"


def audited(model: Path | str, config: Path | str, out: Path, *more: str) -> dict[str, Any]:
    assert audit.main([str(model), "--config", str(config), "--out", str(out), *more]) == 0
    return json.loads((out / "audit.json").read_text())


def logged(bench: Workbench, name: str, stored: dict[str, Any], seed: int = 0) -> float:
    """The loss that a run of the pocket SDXL logs before its first step."""
    config = configs.load("pocket_sdxl.toml", [
        f"run.output_dir={bench.tmp / name}", "run.max_steps=1", "validation.loss_every_steps=1", "validation.every_steps=0",
        "adapter.targets=attention", "data.batch_size=4", f"data.cache_dir={bench.tmp / 'cache'}", f"validation.seed={seed}",
        *(f"model.components.unet.{key}={json.dumps(value)}" for key, value in stored.items()),
    ])  # fmt: skip
    with built(config) as run:
        assert train_built(run)
    return metrics_of(bench.tmp / name)[0]["at_start"]["trained_loss"]


@pytest.mark.slow
def test_what_is_told_is_what_runs_measure(bench: Workbench, capsys) -> None:
    """The number that runs log at the same draws; at other draws one within the band; and the estimate within its own. The
    `exclude` that is printed gives the run that it says."""
    found = audited(
        POCKET, "pocket_sdxl.toml", bench.tmp / "audit", "--set", "data.batch_size=4", "--formats", "fp8_e5m2", "--alone", "0"
    )
    cost = found["formats"]["fp8_e5m2"]
    base, run = logged(bench, "base", {"dtype": "bf16"}), logged(bench, "run", {"dtype": "fp8_e5m2"})
    assert found["loss"] == base
    assert cost["measured"]["loss"] == pytest.approx(run - base, rel=1e-9, abs=1e-12) and run != base
    other = logged(bench, "other-run", {"dtype": "fp8_e5m2"}, 1) - logged(bench, "other-base", {"dtype": "bf16"}, 1)
    assert other != run - base and abs(other - cost["measured"]["loss"]) <= cost["measured"]["band"]
    assert abs(cost["estimated"]["loss"] - (run - base)) <= cost["estimated"]["band"]
    assert cost["estimated"]["prediction"] == pytest.approx(cost["measured"]["prediction"], rel=0.1)
    said = capsys.readouterr().out
    printed = tomllib.loads(said[said.index("[model.components.unet]") : said.index("peak memory")])
    table = printed["model"]["components"]["unet"]
    assert table["exclude"] == cost["excluded"]["layers"] and len(table["exclude"]) == 10
    spared = cost["excluded"]["measured"]
    assert logged(bench, "spared", table) - base == pytest.approx(spared["loss"], rel=1e-9, abs=1e-12)
    assert spared["squared"] < cost["measured"]["squared"]
    weights = TensorFile(POCKET / FILE).entries
    shapes = [weights[f"{name}.weight"].shape for name in table["exclude"]]
    # In bf16 two bytes a weight, in float8 one and a scale for each row.
    assert cost["excluded"]["bytes"] == sum(torch.Size(shape).numel() - 4 * shape[0] for shape in shapes)
    assert "url(" not in (page := (bench.tmp / "audit" / "audit.html").read_text()) and table["exclude"][0] in page


@pytest.mark.proof
def test_a_wild_layer_is_the_first(tmp_path: Path) -> None:
    """One weight in each row a hundred times as large as the largest: eight bits have no room for the others then."""
    model = tmp_path / "wild"
    shutil.copytree(POCKET, model)
    file = TensorFile(model / FILE)
    tensors = {name: file.read(name) for name in file.entries}
    wild = tensors[f"{WILD}.weight"]
    wild[:, 0] = 100 * wild.abs().max()
    write_tensors(model / FILE, tensors, file.metadata)
    more = ("--formats", "int8", "--layers", "1")
    tame = audited(POCKET, "pocket_sdxl.toml", tmp_path / "tame", *more)["formats"]["int8 (quanto)"]
    assert [layer["name"] for layer in tame["layers"]].index(WILD) > 20
    found = audited(model, "pocket_sdxl.toml", tmp_path / "out", *more)["formats"]["int8 (quanto)"]
    first, second = found["layers"][:2]
    assert first["name"] == WILD and first["measured"] is not None
    assert first["estimated"]["squared"] > 2 * second["estimated"]["squared"]
    assert found["excluded"]["measured"]["squared"] < found["measured"]["squared"] / 2


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("flux", marks=pytest.mark.slow),
        *(pytest.param(each, marks=pytest.mark.proof) for each in ("flux2", "sdxl")),
    ],
)
def test_every_family_is_audited_by_the_same_code(bench: Workbench, family: str) -> None:
    """Held-out photos count where there are any; layers that the config or the family keeps are not among those listed."""
    model = bench.models / family
    if family == "flux2":
        model = bench.tmp / "flux2"
        assert make_model.main(["--size", "tiny", "--family", "flux2", "--layout", "diffusers", str(model)]) == 0
    tree = bench.tree(family, model__path="is/not/read", data__held_out=1)
    denoiser = DENOISER.get(family, "transformer")
    tree["model"]["components"][denoiser] = {"dtype": "nf4", "exclude": ["*.to_q"]}
    found = audited(model, bench.write(tree), bench.tmp / "audit", "--formats", "fp8_e4m3", "nf4", "--layers", "2")
    assert list(found["formats"]) == ["fp8_e4m3", "nf4 (bitsandbytes)"] and found["photos"] == {"held_out": 1}
    for cost in found["formats"].values():
        assert cost["layers"] and not any(layer["name"].endswith(".to_q") for layer in cost["layers"])
        alone = [layer for layer in cost["layers"] if layer["measured"]]
        assert [layer["name"] for layer in alone] == cost["excluded"]["layers"]
        measured, estimated = cost["measured"], cost["estimated"]
        assert abs(estimated["loss"] - measured["loss"]) <= estimated["band"]
        assert estimated["prediction"] == pytest.approx(measured["prediction"], rel=0.3)  # of 32 draws of the probe
        for own in alone:
            assert own["estimated"]["prediction"] == pytest.approx(own["measured"]["prediction"], rel=0.5)


def refusals(bench: Workbench) -> dict[str, tuple[list[str], str]]:
    """What is given instead, and what is said of it."""
    model, tree, empty = str(bench.models / "sdxl"), bench.tree("sdxl"), bench.tmp / "empty"
    empty.mkdir()
    shutil.copyfile(next(Path(tree["data"]["sources"][0]["path"]).glob("*.jpg")), bench.tmp / "photo.jpg")
    path = str(bench.write(tree))
    prior = bench.tree("sdxl")
    prior["data"]["sources"][0]["regularisation"] = True
    priors = str(bench.write(prior, "prior.toml"))
    stored = bench.tmp / "nf4"
    bitsandbytes_folder(bench.models / "flux", stored, "nf4", ["transformer"])
    flux = str(bench.write(bench.tree("flux"), "flux.toml"))
    return {
        "no format": ([model, "--config", path, "--formats", "fp9"], "--formats fp9 is no storage format; use fp8_e4m3,"),
        "the base": ([model, "--config", path, "--formats", "bf16"], "--formats bf16 is not quantised"),
        "no backend": ([model, "--config", path, "--formats", "nf4:quanto"], "--formats nf4:quanto"),
        "no model": ([str(bench.tmp / "gone"), "--config", path], "does not exist"),
        "no photos": ([model, "--config", path, "--set", f'data.sources=[{{path="{empty}"}}]'], str(empty)),
        "priors alone": ([model, "--config", priors], "all have regularisation = true"),
        "quantised already": ([str(stored), "--config", flux], "is stored as nf4 (bitsandbytes) in the model's"),
        "float8 products": (
            [model, "--config", path, "--set", "precision.matmul=fp8", "model.components.unet.dtype=fp8_e4m3"],
            "precision.matmul = 'fp8'",
        ),
        "no layer left": (
            [model, "--config", path, "--set", 'model.components.unet.exclude=["*"]', "--formats", "nf4"],
            "--formats nf4: no layer of the unet would be stored so; look at its exclude = ['*']",
        ),
        "no layers": ([model, "--config", path, "--layers", "0"], "--layers 0"),
        "out is a file": ([model, "--config", path, "--out", str(bench.tmp / "photo.jpg")], "--out"),
    }  # fmt: skip


def test_what_cannot_be_audited_is_refused_before_a_weight_is_read(bench: Workbench, monkeypatch, capsys) -> None:
    def read(*_, **__) -> None:
        raise AssertionError("a weight was read")

    cases = refusals(bench)
    monkeypatch.setattr(ModelSource, "load", read)
    monkeypatch.chdir(bench.tmp)
    for name, (arguments, said) in cases.items():
        capsys.readouterr()
        assert audit.main(arguments) == 2, name
        told = capsys.readouterr()
        assert said in told.err and told.err.count("error:") == 1 and "Traceback" not in told.err, (name, told.err)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert audit.main(cases["no model"][0]) == 2 and "one process" in capsys.readouterr().err
    assert not (bench.tmp / "audit").exists()


@pytest.mark.proof
def test_the_printed_table_is_a_config(bench: Workbench) -> None:
    """What the config excludes itself stays excluded."""
    kept = {"dtype": "nf4", "exclude": ["mid_block.*"]}
    tree = bench.tree("sdxl", model__components__unet=kept)
    found = audited(
        bench.models / "sdxl", bench.write(tree), bench.tmp / "audit", "--formats", "int8", "--layers", "1", "--alone", "0"
    )
    chosen = found["formats"]["int8 (quanto)"]["excluded"]["layers"]
    tree["model"]["components"]["unet"] = {"dtype": "int8", "exclude": ["mid_block.*", *chosen]}
    config = configs.parse(tree)
    source = open_source(config)
    assert make_plan(resolve(config, source), source, processes=1).model.storage["unet"].exclude == ("mid_block.*", *chosen)
