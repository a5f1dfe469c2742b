"""Every layout of checkpoints from 5 on gives its adapter files, and its run goes on. tests/layouts has one of each."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import pytest
import torch

from scripts import adapter as script
from tests.harness import ROOT, built, train_built
from tests.layouts.make import STOP, place, tree
from trainer import config as configs
from trainer.base.tensorfile import TensorFile
from trainer.checkpoint import state

FIXTURES = {int(path.name.partition(".")[0]): path for path in (ROOT / "tests" / "layouts").glob("*.tar.xz")}
STEP = f"step-{STOP:08d}"
UNKNOWN = {"ss_num_train_images", "ss_tag_frequency"}  # to layout 5: they are in the photos' captions


@pytest.fixture
def home(models: Path, tmp_path: Path, monkeypatch) -> Path:
    """A folder that is what the fixtures' relative paths start from."""
    place(tmp_path, models)
    monkeypatch.chdir(tmp_path)
    return tmp_path


LATER = {"sshs_legacy_hash", "modelspec.hash_sha256"}  # what headers have since


def said_now(metadata: dict[str, str]) -> dict[str, str]:
    """A header of then as it is written now: kohya's form of the resolution, and no trigger where there is none."""
    (side,) = set(metadata["ss_resolution"].split("x"))
    now = metadata | {"ss_resolution": f"({side}, {side})"}
    return {key: value for key, value in now.items() if key != "modelspec.trigger_phrase" or value}


def unpacked(layout: int, folder: Path) -> Path:
    with tarfile.open(FIXTURES[layout]) as archive:
        archive.extractall(folder / "then", filter="data")
    return folder / "then"


def test_every_layout_that_is_read_has_a_fixture(tmp_path: Path) -> None:
    assert sorted(FIXTURES) == list(range(state.OLDEST_LAYOUT, state.LAYOUT_VERSION + 1))
    for layout in FIXTURES:
        written = json.loads((unpacked(layout, tmp_path / str(layout)) / STEP / state.STATE).read_text())
        assert written["layout"] == layout


def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of files from before text encoders' magnitudes had the key that diffusers loads."""
    old = lambda name: name.startswith("text_encoder") and name.endswith(".lora_magnitude_vector")  # noqa: E731
    return {f"{name}.weight" if old(name) else name: tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("layout", FIXTURES)
def test_its_adapter_files_are_those_of_its_run(home: Path, layout: int) -> None:
    then = unpacked(layout, home)
    assert script.main(["export", str(then / STEP), str(home / "made")]) == 0
    for end in ("", "_comfyui"):
        made, own = (
            TensorFile(home / f"made/bear{end}.safetensors"),
            TensorFile(then / f"adapters/bear-{STOP:08d}{end}.safetensors"),
        )
        tensors, theirs = made.read_all(), renamed(own.read_all())
        assert tensors.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in tensors.items())
        said = {key: value for key, value in said_now(own.metadata).items() if not (layout == 5 and key in UNKNOWN)}
        if not end:  # the tensors' names are in the hash
            assert made.metadata.keys() == said.keys() | LATER
            said["sshs_model_hash"] = made.metadata["sshs_model_hash"]
            # Whose names the keys are: these layouts' runs said the original's of the library's, too.
            said["modelspec.implementation"] = "diffusers"
        assert said.items() <= made.metadata.items()


def test_layout_5_says_what_it_needs_of_the_model(home: Path, models: Path, capsys) -> None:
    then = unpacked(5, home)
    command = ["export", str(then / STEP), str(home / "made")]
    (home / "sdxl").unlink()
    assert script.main(command) == 2
    said = capsys.readouterr().err
    assert "model.path = 'sdxl'" in said and "give the model with --base" in said and not (home / "made").exists()
    assert script.main([*command, "--base", str(models / "flux")]) == 2
    assert "give the model with --base" in capsys.readouterr().err
    other = shutil.copytree(models / "sdxl", home / "other")
    configs_of = [other / name / "config.json" for name in ("text_encoder", "text_encoder_2")]
    first, second = (json.loads(path.read_text()) for path in configs_of)
    for path, config, size in zip(configs_of, (first, second), (second["hidden_size"], first["hidden_size"]), strict=True):
        path.write_text(json.dumps(config | {"hidden_size": size}))
    assert script.main([*command, "--base", str(other)]) == 2
    assert "text_encoder.encoder.layers.0.self_attn.q_proj is not as model.path" in capsys.readouterr().err
    assert script.main([*command, "--base", str(models / "sdxl")]) == 0
    assert (home / "made" / "bear_comfyui.safetensors").exists()
    assert script.main(["export", str(unpacked(6, home) / STEP), str(home / "m"), "--base", str(models / "sdxl")]) == 2
    assert "leave out --base" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("layout", FIXTURES)
def test_its_run_goes_on(home: Path, layout: int) -> None:
    """From its weights, over the same photos and frozen bits, to the end."""
    then = unpacked(layout, home)
    asked = tree("new")
    del asked["run"]["stop_after"]
    with built(configs.parse(asked), str(then / STEP)) as run:
        saved = TensorFile(then / STEP / "adapter.safetensors").read_all()
        now = run.adapter.state_dict()
        assert run.progress.step == STOP and now.keys() == saved.keys()
        assert all(torch.equal(tensor, now[name]) for name, tensor in saved.items())
        assert train_built(run)
    assert (home / "new/checkpoints/step-00000004/manifest.json").exists()
    assert json.loads((home / "new/checkpoints/step-00000004" / state.STATE).read_text())["layout"] == state.LAYOUT_VERSION
