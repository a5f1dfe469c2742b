"""A LoKr trains, is killed and resumed in the same bytes; its files are read back by their readers' formulas, in fp64."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from scripts import adapter as script
from scripts import make_model, replay, sample
from tests.harness import Workbench, assert_merged_alike, built, take_step
from tests.unit.adapters.test_lokr import read_by_comfyui
from trainer import config as configs
from trainer.base.files import write_atomic
from trainer.base.tensorfile import TensorFile
from workbench.adapter_files.opening import open_adapter, open_checkpoint
from workbench.adapters.base_weights import whole_model_at
from workbench.commands import main as cli

TARGETS = {
    "sdxl": ["*attn1.to_q", "*ff.net.0.proj", "conv_in", "*downsamplers.0.conv"],
    "flux": ["*.attn.to_q", "*.attn.to_k", "single_transformer_blocks.*.proj_out"],
    "flux2": ["*.attn.to_q", "*.attn.to_k", "*.attn.to_out*"],
}


def tree(bench: Workbench, out: str, family: str = "sdxl", **more: Any) -> dict[str, Any]:
    settings = {
        "adapter__type": "lokr", "adapter__targets": TARGETS[family], "adapter__rank": 2, "adapter__alpha": 1.0,
        "run__max_steps": 4, "run__output_dir": str(bench.tmp / out), "checkpoint__every_steps": 1, "optimizer__lr": 1e-2,
    }  # fmt: skip
    return bench.tree(family, **(settings | more))


@pytest.fixture
def flux2(models: Path) -> None:
    """A tiny klein beside the other tiny models."""
    wanted = ["--size", "tiny", "--family", "flux2", "--layout", "diffusers", str(models / "flux2")]
    assert (models / "flux2").exists() or make_model.main(wanted) == 0


def run(bench: Workbench, tree: dict, *arguments: str) -> int:
    return cli.main(["--config", str(bench.write(tree)), *arguments])


@pytest.mark.slow
def test_it_is_killed_resumed_exported_and_read_back(bench: Workbench, capsys) -> None:
    whole, parts = bench.tmp / "whole", bench.tmp / "parts"
    assert run(bench, tree(bench, "whole", adapter__decompose="both", adapter__rank=1)) == 0
    assert "no file for diffusers: its loader of sdxl takes no LoKr" in capsys.readouterr().out
    command = [sys.executable, "train.py", "--config", str(bench.write(tree(
        bench, "parts", adapter__decompose="both", adapter__rank=1)))]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (parts / "checkpoints/step-00000001/manifest.json").exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert cli.main([*command[2:], "--resume_from", "latest"]) == 0
    last = Path("checkpoints/step-00000004")
    for name in (last / "adapter.safetensors", last / "optimizer.safetensors", Path("adapters/bear_comfyui.safetensors")):
        assert (whole / name).read_bytes() == (parts / name).read_bytes(), name
    assert [path.name for path in (whole / "adapters").glob("*.safetensors")] == ["bear_comfyui.safetensors"]
    # A checkpoint gives the run's own file.
    for path in open_checkpoint(whole / last).export(bench.tmp / "again", write_atomic).values():
        assert path.read_bytes() == (whole / "adapters" / path.name).read_bytes()
    # ComfyUI's formula over the file, against what the layers hold, merged.
    tensors = TensorFile(whole / "adapters/bear_comfyui.safetensors").read_all()
    assert any(key.endswith("lokr_w1_a") for key in tensors) and any(key.endswith("lokr_w2_b") for key in tensors)
    with built(configs.parse(tree(bench, "whole", adapter__decompose="both", adapter__rank=1)), resume_from="latest") as made:
        links = {part: module.original for module in made.plan.model.fused["unet"] for part in module.parts}
        for name, layer in made.state.adapter.layers.items():
            own = name.partition(".")[2]
            stem = f"lora_unet_{links[own].replace('.', '_')}"
            theirs = read_by_comfyui(tensors, stem, tuple(layer.get_base_layer().weight_shape))
            ours = layer.get_delta_weight("default").double()
            size = layer.get_base_layer().dequantize(torch.float64).norm()
            assert theirs.norm() > 0 and (ours - theirs).norm() <= 2**-20 * size, name


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_its_layers_compute_what_their_merged_weights_do(bench: Workbench, family: str) -> None:
    """Live and merged, after each of two steps: what is made once for an update is never stale."""
    with built(configs.parse(tree(bench, "out", family, precision__compute="fp32"))) as training:
        updates = training.updates()
        for step in (1, 2):
            take_step(training, step, next(updates))
            for layer in training.state.adapter.layers.values():
                assert_merged_alike(layer)


@pytest.mark.slow
def test_its_file_is_merged_converted_shown_and_compared(bench: Workbench, capsys) -> None:
    """Into the model in fp64; into a LoRA of a rank, whose error is said and is that of the dense change."""
    config = tree(bench, "out", run__max_steps=2, adapter__targets=["*attn1.to_q", "conv_in"])
    assert run(bench, config) == 0
    card = (bench.tmp / "out/adapters/README.md").read_text()
    assert "A LoKr, trained on" in card and "load_lora_weights" not in card
    header = ModelCard(card).data
    assert header.library_name is None and header.tags == ["text-to-image", "lora", "lokr", "sdxl", "template:sd-lora"]
    file, lora = bench.tmp / "out/adapters/bear_comfyui.safetensors", bench.tmp / "lora.safetensors"
    with built(configs.parse(config), resume_from="latest") as made:
        changes = {name: layer.get_delta_weight("default").double() for name, layer in made.state.adapter.layers.items()}
        weights = {n: each.get_base_layer().dequantize(torch.float64) for n, each in made.state.adapter.layers.items()}
    capsys.readouterr()
    assert script.main(["merge", str(bench.models / "sdxl"), f"{file}:2", str(bench.tmp / "merged"), "--dtype", "fp32"]) == 0
    merged = TensorFile(next((bench.tmp / "merged/unet").glob("*.safetensors")))
    for name, change in changes.items():
        found = merged.read(f"{name.partition('.')[2]}.weight").double()
        assert (found - weights[name] - 2 * change).norm() <= 2**-22 * weights[name].norm(), name
    capsys.readouterr()
    assert script.main(["convert", str(file), str(lora), "--to", "lora", "--rank", "2"]) == 0
    said, left, whole = capsys.readouterr().out, 0.0, 0.0
    portable = open_adapter(lora, [whole_model_at(str(bench.models / "sdxl"))]).portable
    assert portable.kind.name == "lora" and {factors.rank for factors in portable.layers.values()} == {2}
    for name, factors in portable.layers.items():
        dense = factors.scaling * factors.b.make().double().flatten(1) @ factors.a.make().double().flatten(1)
        difference = float((dense - changes[name].flatten(1)).norm())
        nearest = float(torch.linalg.svdvals(changes[name].flatten(1))[2:].norm())
        assert difference == pytest.approx(nearest, rel=1e-3, abs=1e-5 * float(weights[name].norm())), name
        left, whole = left + difference**2, whole + float(changes[name].norm()) ** 2
    assert f"in place of a LoKr: {(left / whole) ** 0.5:.1%}"[:-2] in said
    base = ["--base", str(bench.models / "sdxl")]
    assert script.main(["show", str(file), *base]) == 0 and "LoKr for sdxl" in capsys.readouterr().out
    assert script.main(["compare", str(file), str(lora), *base]) == 0
    for arguments, words in (
        (["--to", "diffusers"], "is a LoKr, which diffusers' loader of sdxl does not take; --to comfyui keeps it"),
        (["--to", "lora"], "is a LoKr; give the LoRA's rank with --rank ("),
    ):
        assert script.main(["convert", str(file), str(bench.tmp / "no.safetensors"), *arguments, *base]) == 2
        assert words in capsys.readouterr().err
    again = bench.tmp / "again.safetensors"
    assert script.main(["convert", str(file), str(again), "--to", "kohya", *base]) == 0
    one, other = TensorFile(file).read_all(), TensorFile(again).read_all()
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
def test_a_file_of_flux2_loads_in_the_stock_pipeline(flux2: None, bench: Workbench) -> None:
    """Whose loader has a branch for LoKr: each layer's change is that of the run, in fp64."""
    from diffusers import Flux2KleinPipeline

    assert run(bench, tree(bench, "out", "flux2", run__max_steps=2)) == 0
    file = bench.tmp / "out/adapters/bear.safetensors"
    pipe = Flux2KleinPipeline.from_pretrained(bench.models / "flux2", torch_dtype=torch.float32)
    pipe.load_lora_weights(str(file))
    with built(configs.parse(tree(bench, "out", "flux2", run__max_steps=2)), resume_from="latest") as made:
        for name, layer in made.state.adapter.layers.items():
            stock = pipe.transformer.get_submodule(name.partition(".")[2])
            theirs, ours = stock.get_delta_weight("default_0"), layer.get_delta_weight("default")
            assert theirs.norm() > 0 and (ours - theirs).norm() <= 2**-20 * stock.base_layer.weight.norm(), name


@pytest.mark.slow
def test_a_run_starts_from_its_file(bench: Workbench, capsys) -> None:
    """Of the same shapes, whatever its scale is; a LoRA's file is refused, and a LoRA's run refuses this one."""
    assert run(bench, tree(bench, "out", run__max_steps=2)) == 0
    file = bench.tmp / "out/adapters/bear_comfyui.safetensors"
    again = tree(bench, "again", adapter__init_from=str(file), adapter__alpha=4.0)
    changes = []
    for config, resume_from in ((again, None), (tree(bench, "out", run__max_steps=2), "latest")):
        with built(configs.parse(config), resume_from) as made:
            changes.append({name: layer.get_delta_weight("default") for name, layer in made.state.adapter.layers.items()})
    for name, one in changes[0].items():
        assert one.norm() > 0 and (one - changes[1][name]).norm() <= 1e-3 * one.norm(), name
    capsys.readouterr()
    for keys, said in (
        ({"adapter__rank": 1}, "this run's has {'lokr_w1': "), ({"adapter__factor": 4}, "set adapter.rank, adapter.factor, "),
        ({"adapter__type": "lora"}, "is a LoKr and adapter.type = 'lora'; set adapter.type = 'lokr', or make a LoRA of it"),
    ):  # fmt: skip
        assert run(bench, tree(bench, "next", adapter__init_from=str(file), **keys)) == 2
        assert said in capsys.readouterr().err and not (bench.tmp / "next").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"adapter__rank_dropout": 0.1}, "a LoKr has no rows of A; LyCORIS drops rows of its whole product"),
        ({"adapter__module_dropout": 0.1}, "adapter.module_dropout = 0.1 cannot be combined with adapter.type = 'lokr'"),
        ({"adapter__max_norm": 1.0}, "a LoKr has others; leave it out or adapter.type = 'lora'"),
        ({"optimizer__lora_plus": 2.0}, "it is the rate of B over that of A, which a LoKr has not"),
        ({"optimizer__magnitude_lr": 1e-3}, "optimizer.magnitude_lr = 0.001 has no effect with adapter.type = 'lokr'"),
        ({"adapter__decompose": "none"}, "adapter.rank = 2 has no effect with adapter.decompose = 'none', whose matrices"),
        ({"adapter__type": "lora", "adapter__factor": 4}, "adapter.factor = 4 has no effect with adapter.type = 'lora'"),
        ({"adapter__type": "dora", "adapter__decompose": "both"}, "adapter.decompose = 'both' has no effect with adapter"),
        ({"adapter__factor": 0}, "adapter.factor = 0"),
        ({"export__formats": ["diffusers"]}, "would leave no file: diffusers' loader of sdxl takes no LoKr; add 'comfyui'"),
    ],
)  # fmt: skip
def test_what_it_does_not_go_with_is_refused_by_name(bench: Workbench, capsys, more: dict, said: str) -> None:
    assert run(bench, tree(bench, "out", **more)) == 2
    assert said in capsys.readouterr().err and not (bench.tmp / "out").exists()


@pytest.mark.slow
def test_a_text_encoder_whose_files_are_pefts_is_refused(flux2: None, bench: Workbench, capsys) -> None:
    rules = [{"component": "text_encoder", "match": "*q_proj"}]
    assert run(bench, tree(bench, "out", "flux2", adapter__rules=rules)) == 2
    assert "adapts text_encoder, whose files are a folder of PEFT's, and no LoKr is written there" in capsys.readouterr().err


@pytest.mark.slow
def test_a_step_is_replayed_and_its_file_drawn_with(bench: Workbench, capsys) -> None:
    config = tree(bench, "out", run__max_steps=2, adapter__targets=["*attn1.to_q", "conv_in"])
    assert run(bench, config) == 0
    capsys.readouterr()
    assert replay.main([str(bench.tmp / "out/checkpoints/step-00000001")]) == 0
    file = bench.tmp / "out/adapters/bear_comfyui.safetensors"
    size = ["--width", "64", "--height", "64", "--sampling_steps", "1"]
    out = bench.tmp / "pictures"
    assert sample.main([str(bench.models / "sdxl"), str(file), "--prompt", "a bear", "--out", str(out), *size]) == 0
    assert list(out.glob("*.png"))
