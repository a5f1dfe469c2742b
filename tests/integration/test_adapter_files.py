"""Adapters travel: a checkpoint gives the files of its run, and files of every kind are read, told and converted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scripts import adapter as script
from tests.harness import DENOISER, Workbench, built, train_built
from trainer.tensorfile import TensorFile

KINDS = {
    "sdxl int8 dora": ("sdxl", {"adapter__type": "dora", "model__components__unet": {"dtype": "int8"}}),
    "sdxl dora": ("sdxl", {"adapter__type": "dora", "adapter__targets": "all"}),
    "flux dora": ("flux", {"adapter__type": "dora", "export__dora_scale": "magnitude"}),
    # Layers of one module of the original layout have one scale: then a conversion changes no number.
    "flux lora": ("flux", {"adapter__rslora": True, "adapter__rules": [
        {"component": "transformer", "match": "*ff.net.2", "rank": 2, "alpha": 3.0},
        {"component": "text_encoder", "match": "*q_proj", "rank": 3},
    ]}),
}  # fmt: skip
Runs = Callable[[str], Path]


@pytest.fixture(scope="module")
def outputs(models: Path, tmp_path_factory) -> Runs:
    """By the name of a kind, the output folder of four steps with a checkpoint and adapter files every second."""
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            family, more = KINDS[kind]
            bench = Workbench(models, tmp_path_factory.mktemp("run"))
            options = {
                "adapter__targets": ["*to_q", "*to_v", "*ff.net*"], "adapter__rank": 4, "adapter__alpha": 2.0,
                "adapter__rules": [{"component": DENOISER[family], "match": "*to_v", "rank": 2, "alpha": 3.0}],
                "optimizer__lr": 1e-2, "run__max_steps": 4, "checkpoint__every_steps": 2, "export__every_steps": 2,
            }  # fmt: skip
            with built(bench.config(family, **options | more)) as run:
                assert train_built(run)
            made[kind] = bench.tmp / "out"
        return made[kind]

    return of


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return TensorFile(path).read_all()


def ulps(one: torch.Tensor, other: torch.Tensor) -> int:
    """The largest distance, in fp32 numbers between; of numbers of one sign."""
    assert one.shape == other.shape and one.dtype == other.dtype == torch.float32
    return int((one.view(torch.int32).long() - other.view(torch.int32).long()).abs().max())


SLOW_DORAS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("sdxl int8 dora", "flux dora")]


@pytest.mark.parametrize("kind", ["flux lora", *SLOW_DORAS])
def test_a_checkpoint_gives_the_files_of_its_run(outputs: Runs, tmp_path: Path, monkeypatch, kind: str) -> None:
    """Byte for byte, in the middle and at the end, with the model's weights out of reach."""
    out, read = outputs(kind), TensorFile.read
    of_checkpoint = lambda self, *args: read(self, *args) if "step-" in str(self.path) else 1 / 0  # noqa: E731
    monkeypatch.setattr(TensorFile, "read", of_checkpoint)
    for step, name in ((2, "bear-00000002"), (4, "bear")):
        made = tmp_path / f"made-{step}"
        assert script.main(["export", str(out / "checkpoints" / f"step-{step:08d}"), str(made)]) == 0
        for end in ("", "_comfyui"):
            assert (made / f"bear{end}.safetensors").read_bytes() == (out / f"adapters/{name}{end}.safetensors").read_bytes()


def test_a_checkpoint_that_is_not_whole_gives_none(outputs: Runs, tmp_path: Path, capsys) -> None:
    folder = outputs("flux lora") / "checkpoints" / "step-00000002"
    copy = tmp_path / folder.name
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes()[:-1] if path.name == "adapter.safetensors" else path.read_bytes())
    assert script.main(["export", str(copy), str(tmp_path / "made")]) == 2
    assert "is not a valid checkpoint: adapter.safetensors has" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def convert(models: Path, family: str, source: Path, to: str, out: Path, *more: str) -> dict[str, torch.Tensor]:
    assert script.main(["convert", str(source), str(out), "--to", to, "--base", str(models / family), *more]) == 0
    return tensors(out)


def test_a_lora_goes_from_one_of_the_runs_files_to_the_other(outputs: Runs, models: Path, tmp_path: Path) -> None:
    """Tensors and scales bit for bit, by every way there and back. rsLoRA's alpha becomes the one that gives its scale."""
    own = outputs("flux lora") / "adapters"
    diffusers, comfyui = own / "bear.safetensors", own / "bear_comfyui.safetensors"
    for to in ("kohya", "comfyui", "lora"):
        there = convert(models, "flux", diffusers, to, tmp_path / f"{to}.safetensors")
        same(there, tensors(comfyui))
        back = convert(models, "flux", tmp_path / f"{to}.safetensors", "diffusers", tmp_path / f"{to}-back.safetensors")
        same(back, tensors(diffusers))
    other = convert(models, "flux", comfyui, "onetrainer", tmp_path / "onetrainer.safetensors")
    assert all(key.startswith(("lora_transformer_", "lora_te1_text_model_")) for key in other)
    same(
        convert(models, "flux", tmp_path / "onetrainer.safetensors", "comfyui", tmp_path / "again.safetensors"),
        tensors(comfyui),
    )


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sdxl dora", "flux dora"])
def test_a_dora_goes_from_one_convention_to_the_other(outputs: Runs, models: Path, tmp_path: Path, kind: str) -> None:
    """A, B and alpha bit for bit; magnitudes of the other convention as the run itself writes them, to two roundings."""
    family, own = KINDS[kind][0], outputs(kind) / "adapters"
    scale = ["--dora_scale", "magnitude"] if kind == "flux dora" else []
    for source, to, wanted, more in (
        ("bear.safetensors", "comfyui", "bear_comfyui.safetensors", scale),
        ("bear_comfyui.safetensors", "diffusers", "bear.safetensors", []),
    ):
        made = convert(models, family, own / source, to, tmp_path / f"{to}.safetensors", *more)
        theirs = tensors(own / wanted)
        assert made.keys() == theirs.keys()
        for key, tensor in theirs.items():
            if key.endswith(("dora_scale", "magnitude_vector")) and kind == "sdxl dora":
                assert ulps(made[key], tensor) <= 8, key
            else:
                assert torch.equal(made[key], tensor), key
        assert TensorFile(own / wanted).metadata.keys() <= TensorFile(tmp_path / f"{to}.safetensors").metadata.keys()


@pytest.mark.slow
def test_an_approximation_of_a_dora_states_its_error(outputs: Runs, models: Path, tmp_path: Path, capsys) -> None:
    """Against the dense change by this test's own formula; at full rank nothing is left of it."""
    own, base = outputs("sdxl dora") / "adapters" / "bear.safetensors", str(models / "sdxl")
    lost = {}
    for rank in ("2", "4", "4096"):
        out = tmp_path / f"{rank}.safetensors"
        assert script.main(["convert", str(own), str(out), "--to", "lora", "--base", base, "--rank", rank]) == 0
        said = next(line for line in capsys.readouterr().out.splitlines() if "in place of a DoRA" in line)
        lost[rank] = float(said.split("of a DoRA: ")[1].split("%")[0]) / 100
        file = TensorFile(out)
        assert not any("dora" in key for key in file.entries)
        assert file.metadata["ss_network_module"] == "networks.lora"
        assert "dora" not in json.loads(file.metadata["ss_network_args"])
    assert lost["2"] > lost["4"] > 0 and lost["4096"] < 1e-6


@pytest.mark.slow
def test_show_says_what_a_file_is(outputs: Runs, models: Path, tmp_path: Path, capsys) -> None:
    path, plot = outputs("sdxl dora") / "adapters" / "bear_comfyui.safetensors", tmp_path / "plots" / "a.png"
    assert script.main(["show", str(path), "--base", str(models / "sdxl"), "--plot", str(plot)]) == 0
    said = capsys.readouterr().out
    for words in ("DoRA for sdxl", "keys: kohya (", "rank: 4 (", "; beside the module", "output (",
                  "ComfyUI's releases (the reader divides by ||W||)", "every layer of unet is adapted",
                  "ss_output_name: bear", "||sBA|| / ||W|| by block", "unet.down_blocks.0"):  # fmt: skip
        assert words in said, (words, said)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_show_says_which_layers_are_not_there(outputs: Runs, models: Path, capsys) -> None:
    flux = outputs("flux lora") / "adapters" / "bear_comfyui.safetensors"
    assert script.main(["show", str(flux), "--base", str(models / "flux")]) == 0
    said = capsys.readouterr().out
    assert "LoRA for flux" in said and "not adapted of transformer" in said and "block-diagonal (" in said


def test_a_file_of_another_size_asks_for_its_model(outputs: Runs, capsys) -> None:
    assert script.main(["show", str(outputs("flux lora") / "adapters" / "bear.safetensors")]) == 2
    assert "--base" in capsys.readouterr().err
