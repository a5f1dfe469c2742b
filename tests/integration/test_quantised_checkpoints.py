"""Models that are quantised already: taken as they are, from the file to the exported adapter, or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import hub
from tests import quantised_files as files
from tests.harness import Workbench, built, metrics_of
from trainer.base.tensorfile import TensorFile, write_tensors
from trainer.quantization import FrozenLayer
from workbench.commands import main as cli

UNET, CLIP_L, CLIP_G = ("model.diffusion_model.", "conditioner.embedders.0.transformer.", "conditioner.embedders.1.model.")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# What a user may have, and what each quantised component becomes: (family, writer, {component: (dtype, backend)}).
Writer = Callable[[Path, Path], Path]
MODELS: dict[str, tuple[str, Writer, dict[str, tuple[str, str]]]] = {
    "raw float8, all of an SDXL file": (
        "sdxl", lambda models, to: files.float8_file(models / "sdxl-one.safetensors", to / "m.safetensors"),
        {"unet": ("fp8_e4m3", "native"), "text_encoder": ("fp8_e4m3", "native"), "text_encoder_2": ("fp8_e4m3", "native")},
    ),
    "raw float8, the transformer of a Flux file": (
        "flux",
        lambda models, to: files.float8_file(
            models / "flux-one.safetensors", to / "m.safetensors", torch.float8_e5m2
        ),
        {"transformer": ("fp8_e5m2", "native")},
    ),
    "ComfyUI float8, Flux": (
        "flux", lambda models, to: files.comfy_file(models / "flux-one.safetensors", to / "m.safetensors", new=False),
        {"transformer": ("fp8_e4m3", "native")},
    ),
    "ComfyUI float8 with comfy_quant, SDXL": (
        "sdxl",
        lambda models, to: files.comfy_file(
            models / "sdxl-one.safetensors", to / "m.safetensors", new=True, prefix=UNET
        ),
        {"unet": ("fp8_e4m3", "native")},
    ),
    "bitsandbytes nf4, nested, Flux": (
        "flux",
        lambda models, to: files.bitsandbytes_folder(
            models / "flux", to / "m", "nf4-double", ["transformer", "text_encoder_2"]
        ),
        {"transformer": ("nf4", "bitsandbytes"), "text_encoder_2": ("nf4", "bitsandbytes")},
    ),
    "bitsandbytes int8, SDXL": (
        "sdxl", lambda models, to: files.bitsandbytes_folder(models / "sdxl", to / "m", "int8", ["unet"]),
        {"unet": ("int8", "bitsandbytes")},
    ),
    "quanto int4, Flux": (
        "flux", lambda models, to: files.quanto_folder(models / "flux", to / "m", "int4", ["transformer"]),
        {"transformer": ("int4", "quanto")},
    ),
    "quanto int8, SDXL": (
        "sdxl", lambda models, to: files.quanto_folder(models / "sdxl", to / "m", "int8", ["unet", "text_encoder"]),
        {"unet": ("int8", "quanto"), "text_encoder": ("int8", "quanto")},
    ),
}  # fmt: skip


def tree_for(bench: Workbench, family: str, path: Path, **more):
    return bench.tree(
        family, model__path=str(path), adapter__type="dora", adapter__targets="attention+mlp", run__max_steps=2,
        optimizer__lr=1e-2, data__cache_dir=str(bench.tmp / "cache"), **more,
    )  # fmt: skip


# The quick suite has a file and a folder; the second is also stopped and resumed.
IN_DEFAULT = ("ComfyUI float8, Flux", "bitsandbytes nf4, nested, Flux")


@pytest.mark.parametrize(
    "name", [name if name in IN_DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_a_quantised_model_is_taken_as_it_is(bench: Workbench, name: str, monkeypatch, capsys) -> None:
    """dtype left out: stored as the file holds it, codes untouched; trains, stops, goes on over the same base, exports."""
    family, write, wanted = MODELS[name]
    path, converted = write(bench.models, bench.tmp), []
    load_weight = FrozenLayer.load_weight
    monkeypatch.setattr(
        FrozenLayer, "load_weight", lambda self, w: (converted.append(self.format.dtype_name), load_weight(self, w))
    )
    for stop in (1, 2) if name == IN_DEFAULT[1] else (2,):
        tree = tree_for(bench, family, path, run__stop_after=stop)
        assert cli.main(["--config", str(bench.write(tree)), "--resume_from", "auto"]) == 0
    said = capsys.readouterr().out
    for component, (dtype, backend) in wanted.items():
        kind = dtype if backend == "native" else f"{dtype} ({backend})"
        assert f"{component}: " in said and f"layers stored as {kind}, as the file holds it" in said
    assert not set(converted) - {"fp32", "bf16", "fp16"}, "nothing is quantised here"
    assert [entry["step"] for entry in metrics_of(bench.tmp / "out")] == [1, 2]
    # There is no 16-bit weight to export for: the magnitudes are those that were trained, and it is said.
    made_for = "the weights as the model's file holds them quantised ("
    assert f"the DoRA's files are made for {made_for}" in said
    trained = TensorFile(bench.tmp / "out" / "checkpoints" / "step-00000002" / "adapter.safetensors").read_all()
    norms = TensorFile(bench.tmp / "out" / "checkpoints" / "step-00000002" / "norms.safetensors").entries
    assert norms and not any(key.endswith("original_norm") for key in norms)
    exported = TensorFile(bench.tmp / "out" / "adapters" / "bear.safetensors")
    assert made_for in json.loads(exported.metadata["ss_network_args"])["dora_base"]
    assert all(torch.equal(exported.read(key).flatten(), tensor.flatten()) for key, tensor in trained.items())


@pytest.mark.slow
@pytest.mark.parametrize("new", [False, True])
def test_fused_tensors_of_a_float8_file_keep_their_codes(bench: Workbench, new: bool) -> None:
    """q, k and v share one tensor and one scale in the file: each takes its rows of the codes, and the scale."""
    path = files.comfy_file(bench.models / "flux-one.safetensors", bench.tmp / "m.safetensors", new=new)
    file = TensorFile(path)
    original = next(key for key in file.entries if key.endswith("double_blocks.0.img_attn.qkv.weight"))
    scale = original.removesuffix(".weight") + (".weight_scale" if new else ".scale_weight")
    with built(bench.config("flux", model__path=str(path), data__cache_dir=str(bench.tmp / "cache"))) as run:
        attention = run.model.modules["transformer"].get_submodule("transformer_blocks.0.attn")
        layers = [getattr(attention, name).get_base_layer() for name in ("to_q", "to_k", "to_v")]
        codes = torch.cat([layer.payload_weight for layer in layers]).view(torch.uint8)
        scales = torch.cat([layer.payload_scale for layer in layers])
    assert torch.equal(codes, file.read(original).view(torch.uint8))
    assert bool((scales == file.read(scale)).all())


@pytest.mark.slow
def test_a_float8_file_can_be_widened_by_name(bench: Workbench, capsys) -> None:
    """dtype = "bf16" over a raw float8 file: every value is exact in bf16. Norms, biases and the VAE are widened anyway."""
    path = files.float8_file(bench.models / "sdxl-one.safetensors", bench.tmp / "m.safetensors")
    config = bench.config(
        model__path=str(path), model__components={"unet": {"dtype": "bf16"}}, validation__every_steps=2,
        validation__prompts=["a bear"], data__cache_dir=str(bench.tmp / "cache"),
    )  # fmt: skip
    file = TensorFile(path)
    with built(config) as run:
        assert "unet: held as fp8_e4m3 in the model's file, widened to bf16" in capsys.readouterr().out
        unet, vae = run.model.modules["unet"], run.model.modules["vae"]
        layer = unet.get_submodule("conv_in")
        assert layer.format.name == "bf16" and run.components.storage.keys() == {"text_encoder", "text_encoder_2"}
        assert torch.equal(layer.payload_weight.float(), file.read(f"{UNET}input_blocks.0.0.weight").float())
        assert torch.equal(layer.bias, file.read(f"{UNET}input_blocks.0.0.bias").float())
        assert torch.equal(vae.decoder.conv_in.payload_weight, file.read("first_stage_model.decoder.conv_in.weight").float())
        assert {p.dtype for module in (unet, vae) for n, p in module.named_parameters() if "lora" not in n} == {torch.float32}


@pytest.mark.slow
def test_what_cannot_be_taken_is_refused_before_anything_is_written(bench: Workbench, capsys) -> None:
    comfy = files.comfy_file(bench.models / "flux-one.safetensors", bench.tmp / "c.safetensors", new=False)
    fused = files.bitsandbytes_file(bench.models / "flux-one.safetensors", bench.tmp / "b.safetensors", "nf4")
    folder = files.bitsandbytes_folder(bench.models / "flux", bench.tmp / "nf4", "nf4", ["transformer"])
    other_blocks = bench.tmp / "blocks"
    shutil.copytree(folder, other_blocks, symlinks=True)
    shards = other_blocks / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = TensorFile(shards).read_all()
    for name in [name for name in tensors if ".quant_state." in name]:
        state = json.loads(bytes(tensors[name].tolist())) | {"blocksize": 128}
        tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    shards.unlink()
    write_tensors(shards, tensors)
    refusals = [
        (comfy, {"dtype": "nf4"}, "model.components.transformer.dtype = 'nf4'", "holds this component as fp8_e4m3"),
        (comfy, {"dtype": "fp8_e5m2"}, "model.components.transformer.dtype = 'fp8_e5m2'", "leave dtype out"),
        (comfy, {"backend": "quanto"}, "model.components.transformer.backend = 'quanto'", "use 'native'"),
        (comfy, {"exclude": ["*.to_q"]}, "model.components.transformer.exclude: '*.to_q' matches", "16-bit file"),
        (folder, {"dtype": "fp4"}, "model.components.transformer.dtype = 'fp4'", "holds this component as nf4"),
        (fused, {}, "several layers share it", "diffusers' layout"),
        (other_blocks, {}, "quant_state says blocksize = 128", "only 64 can be read"),
    ]
    alone = bench.tmp / "alone.safetensors"
    alone.symlink_to(fused)
    refusals.append((alone, {}, str(alone), "does not show its shape", "diffusers' layout"))
    for path, component, *texts in refusals:
        tree = tree_for(bench, "flux", path, model__components={"transformer": component})
        if path is alone:
            others = ("text_encoder", "text_encoder_2", "vae")
            tree["model"]["components"] |= {n: {"path": str(bench.models / "flux" / n)} for n in others}
        elif path.is_file():
            tree["model"]["config"] = str(bench.models / "flux-one")
        assert cli.main(["--config", str(bench.write(tree))]) == 2, component
        error = capsys.readouterr().err
        assert all(text in error for text in texts) and "Traceback" not in error, error
        assert not (bench.tmp / "out").exists() and not (bench.tmp / "cache").exists()


def test_damaged_parts_of_a_quantised_weight_are_named(bench: Workbench, capsys) -> None:
    folder = files.bitsandbytes_folder(bench.models / "flux", bench.tmp / "nf4", "nf4", ["transformer"])
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    data = bytearray(file.read_bytes())
    data[TensorFile(file).entries["transformer_blocks.0.attn.to_q.weight.quant_state.bitsandbytes__nf4"].start] ^= 8
    file.write_bytes(data)
    assert cli.main(["--config", str(bench.write(tree_for(bench, "flux", folder)))]) == 2
    error = capsys.readouterr().err
    assert "transformer_blocks.0.attn.to_q.weight" in error and str(file) in error and "quant_state" in error


@pytest.mark.slow
def test_plan_counts_the_payload(bench: Workbench, capsys) -> None:
    folder = files.bitsandbytes_folder(bench.models / "flux", bench.tmp / "nf4", "nf4", ["transformer"])
    assert cli.main(["--config", str(bench.write(tree_for(bench, "flux", folder))), "--plan"]) == 0
    assert "transformer     stored nf4 (bitsandbytes)" in capsys.readouterr().out


@pytest.mark.slow
def test_a_local_component_of_a_hub_model_is_known_when_planning(bench: Workbench, monkeypatch, capsys) -> None:
    """Only configs of a hub id are there then, but the file of `path` is: it decides, and is checked like any other."""
    file = files.comfy_file(bench.models / "flux-one.safetensors", bench.tmp / "c.safetensors", new=False)
    tree = tree_for(bench, "flux", file, model__components={"transformer": {"path": str(file)}})
    tree["model"]["path"] = "someone/flux"
    config = ["--config", str(bench.write(tree)), "--plan"]
    with hub.serve({"someone/flux": bench.models / "flux"}) as stand_in:
        stand_in.use(monkeypatch, bench.tmp / "home")
        assert cli.main(config) == 0
        assert "transformer     stored fp8_e4m3" in capsys.readouterr().out
        assert cli.main([*config, "--set", "model.components.transformer.dtype=nf4"]) == 2
        assert "holds this component as fp8_e4m3" in capsys.readouterr().err
        tensors = TensorFile(file).read_all()
        tensors.pop("img_in.bias")
        file.unlink()
        write_tensors(file, tensors)
        assert cli.main(config) == 2
        assert "tensor 'img_in.bias' of component 'transformer' is missing" in capsys.readouterr().err
