"""What makes two starts the same run is content: photos, captions and model files may move, and may not change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests import hub
from tests.harness import PHOTOS, Workbench, metrics_of
from trainer import quantization
from trainer.base.errors import UserError
from trainer.base.tensorfile import TensorFile, write_tensors
from trainer.models import family_named
from trainer.models.opening import open_model
from trainer.resume import pins
from workbench.commands import main as cli

VAE, UNET = "vae/diffusion_pytorch_model.safetensors", "unet/diffusion_pytorch_model.safetensors"


def stopped_tree(bench: Workbench, out: str = "out", **overrides) -> dict:
    """Of a run of four steps over photos and a model of its own; what it leaves can be compared byte by byte."""
    return bench.tree(
        **{
            "run__output_dir": str(bench.tmp / out), "run__max_steps": 4, "adapter__type": "dora",
            "adapter__targets": ["*attn1.to_q"], "model__path": str(bench.tmp / "model"),
            "data__sources": [{"path": str(bench.tmp / "photos")}], "data__caption_dropout": 0.3, "data__flip": True,
            "data__cache_dir": str(bench.tmp / "cache"), "optimizer__lr": 1e-2,
        } | overrides
    )  # fmt: skip


def train(bench: Workbench, tree: dict, *arguments: str) -> int:
    return cli.main(["--config", str(bench.write(tree)), *arguments])


def put_down(bench: Workbench) -> None:
    shutil.copytree(bench.models / "sdxl", bench.tmp / "model")
    shutil.copytree(PHOTOS, bench.tmp / "photos")


def results(out: Path) -> dict[str, bytes]:
    names = ("checkpoints/step-00000004/adapter.safetensors", "checkpoints/step-00000004/optimizer.safetensors",
             "adapters/bear.safetensors", "adapters/bear_comfyui.safetensors")  # fmt: skip
    return {name: (out / name).read_bytes() for name in names}


MOVES = {
    "all at once": {
        "data__sources": [{"path": "photos/../elsewhere/other name"}], "model__path": "~/elsewhere/sdxl",
        "data__cache_dir": "another cache", "model__components": {"vae": {"path": "HERE/elsewhere/a vae"}},
        "model__cache_dir": "HERE/converted",
    },
    "the hub": {"model__path": "somebody/sdxl", "model__variant": "none", "data__sources": [{"path": "~/photos"}]},
}  # fmt: skip


@pytest.mark.parametrize("what", ["all at once", *(pytest.param(what, marks=pytest.mark.slow) for what in list(MOVES)[1:])])
def test_photos_model_and_output_may_move(bench: Workbench, monkeypatch, what: str) -> None:
    put_down(bench)
    monkeypatch.chdir(bench.tmp)
    monkeypatch.setenv("HOME", str(bench.tmp))
    assert train(bench, stopped_tree(bench, "whole")) == 0
    assert train(bench, stopped_tree(bench, "stopped", run__stop_after=2)) == 0
    shutil.copytree("photos", "elsewhere/other name")
    shutil.copytree("model", "elsewhere/sdxl")
    shutil.copytree("model/vae", "elsewhere/a vae")
    # The output folder moves, too: it has another name, and is a copy of the stopped run.
    shutil.copytree("stopped", "moved")
    moved = json.loads(json.dumps(MOVES[what]).replace("HERE", str(bench.tmp)))
    start = "~/moved/checkpoints/step-00000002" if what == "all at once" else "auto"
    with hub.serve({"somebody/sdxl": bench.tmp / "model"}) as served:
        served.use(monkeypatch, bench.tmp / "home")
        tree = stopped_tree(bench, **moved | {"run__output_dir": "~/moved"})
        assert train(bench, tree, "--resume_from", start) == 0
        assert results(Path("moved")) == results(Path("whole"))
        assert metrics_of("moved") == metrics_of("whole")
        assert (UNET in served.weights_sent()) == (what == "the hub")


def edit_json(path: Path, key: str, value) -> None:
    tree = json.loads(path.read_text())
    assert tree[key] != value
    path.write_text(json.dumps(tree | {key: value}))


def flip_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1 if path.suffix != ".safetensors" else max(e.start for e in TensorFile(path).entries.values())] ^= 1
    path.write_bytes(data)


def contents_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.slow
def test_changed_contents_are_refused_by_name(bench: Workbench, capsys) -> None:
    put_down(bench)
    model, photos = bench.tmp / "model", bench.tmp / "photos"
    assert train(bench, stopped_tree(bench, run__stop_after=2)) == 0
    before = contents_of(bench.tmp / "out")
    tokenizer = "tokenizer/tokenizer_config.json"
    changes = {
        "other contents: 0/01.jpg\n": lambda: (photos / "01.jpg").write_bytes((photos / "01.jpg").read_bytes() + b"\0"),
        "other captions: 0/02.jpg\n": lambda: (photos / "02.txt").write_text("another caption"),
        "removed: 0/03.jpg\n": lambda: (photos / "03.jpg").rename(photos / "3.jpg"),
        "vae (its files or its config.json)": lambda: flip_last_bit(model / VAE),
        "text_encoder_2 (its files or": lambda: flip_last_bit(model / "text_encoder_2/model.safetensors"),
        "other vae ": lambda: edit_json(model / "vae/config.json", "scaling_factor", 0.5),
        "other tokenizers (": lambda: (model / tokenizer).write_text((model / tokenizer).read_text() + " "),
        "scheduler_config.json": lambda: edit_json(model / "scheduler/scheduler_config.json", "beta_end", 0.013),
        "config.json of unet": lambda: edit_json(model / "unet/config.json", "norm_eps", 1e-3),
        "frozen base differs: unet.": lambda: flip_last_bit(model / UNET),
    }  # fmt: skip
    for named, change in changes.items():
        change()
        capsys.readouterr()
        assert train(bench, stopped_tree(bench), "--resume_from", "auto") == 2, named
        errors = capsys.readouterr().err
        assert named in errors and "restore" in errors and "Traceback" not in errors, errors
        assert contents_of(bench.tmp / "out") == before, f"{named}: a refused start changed the output"
        for folder in (model, photos):
            shutil.rmtree(folder)
        put_down(bench)
    assert train(bench, stopped_tree(bench), "--resume_from", "auto") == 0


@pytest.mark.slow
def test_adapter_files_without_a_checkpoint_are_of_the_places_that_the_config_says(bench: Workbench, capsys) -> None:
    """Nothing pins contents there, so a fresh start over other photos must not mix its files with theirs."""
    put_down(bench)
    assert train(bench, stopped_tree(bench, run__max_steps=1, export__every_steps=1)) == 0
    shutil.rmtree(bench.tmp / "out" / "checkpoints")
    (bench.tmp / "photos").rename(bench.tmp / "others")
    moved = stopped_tree(bench, data__sources=[{"path": str(bench.tmp / "others")}])
    assert train(bench, moved) == 2
    assert "data.sources.0.path" in capsys.readouterr().err


def test_markers_and_live_encoders_are_part_of_a_models_contents(bench: Workbench) -> None:
    family = family_named("sdxl")

    def contents(path: Path, encoders=("vae",)) -> dict[str, str]:
        source = open_model(family, str(path), recognise=quantization.recognise)
        return source.contents(encoders, lambda file: file.name)

    path = bench.tmp / "one.safetensors"
    shutil.copy(bench.models / "sdxl-one.safetensors", path)
    plain, tensors = contents(path), TensorFile(path).read_all()
    write_tensors(path, tensors | {"v_pred": torch.zeros(0)}, {})
    marked = contents(path)
    assert {name for name in plain if plain[name] != marked[name]} == {"markers"}
    folder = bench.models / "sdxl"
    one, other = contents(folder), contents(folder, ("vae", "text_encoder"))
    assert {name for name in one.keys() | other.keys() if one[name] != other[name]} == {"text_encoder"}
    components = {component.name for component in family.components}
    assert one.keys() == other.keys() == components | {"tokenizers", "scheduler", "markers"}


def test_a_repository_whose_files_changed_is_told_of_its_earlier_snapshots() -> None:
    snapshots = Path("hub/models--someone--sdxl/snapshots")
    record = {"unet.conv_in": {"format": "bf16", "library": "torch 2", "tensors": {}}}
    for pin, other in (
        (pins.pin_model({"vae": "a"}, cached=("vae",), snapshots=snapshots), {"vae": "b"}),
        (pins.pin_quantization(record, snapshots=snapshots), {}),
    ):
        with pytest.raises(
            UserError, match=f"earlier files may still be .*model.path to their snapshot folder in {snapshots}"
        ):
            pin.load_state_dict(other)
    with pytest.raises(UserError, match="other config.json of unet.*another run.output_dir.$"):
        pins.pin_model({"unet": "a"}).load_state_dict({"unet": "b"})
