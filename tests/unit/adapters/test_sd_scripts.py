"""The layers of a LoRA that sd-scripts drops, by its own rule over the library's modules; what files and conversions say."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scripts import adapter as script
from trainer.adapters import export, sd_scripts
from trainer.adapters.portable import Factors, Portable, recipe, squared_norm
from trainer.artifacts.exports import Artifacts
from trainer.base.tensorfile import TensorFile, write_tensors
from trainer.models.building import build
from workbench.adapter_files.opening import published

# networks/lora.py and lora_flux.py, create_modules: the classes within which every Linear and Conv2d gets a module. The
# library's classes and names for the same: FluxTransformerBlock is DoubleStreamBlock, and so on; the embedders are named.
CLASSES = {"Transformer2DModel", "ResnetBlock2D", "Downsample2D", "Upsample2D", "FluxTransformerBlock",
           "FluxSingleTransformerBlock", "CLIPAttention", "CLIPSdpaAttention", "CLIPMLP", "T5Attention",
           "T5DenseGatedActDense"}  # fmt: skip
EMBEDDERS = {"flux": ("x_embedder", "context_embedder", "time_text_embed.")}


@pytest.mark.parametrize(
    ("family", "component"),
    [("sdxl", "unet"), ("flux", "transformer"), *(pytest.param(f, c, marks=pytest.mark.slow) for f, c in
     (("sdxl", "text_encoder"), ("sdxl", "text_encoder_2"), ("flux", "text_encoder")))],
)  # fmt: skip
def test_the_layers_without_a_module_are_those_outside_of_its_classes(family: str, component: str) -> None:
    of = published(family)[0]
    module = build(of.family.component(component), of.config(component))
    built = {
        f"{name}.{inner}" if inner else name
        for name, block in module.named_modules()
        if type(block).__name__ in CLASSES
        for inner, child in block.named_modules()
        if isinstance(child, (torch.nn.Linear, torch.nn.Conv2d))
    }
    layers = of.layers(component)
    built |= {name for name in layers if name.startswith(EMBEDDERS.get(family, ())) and component == of.family.denoiser}
    full = {f"{component}.{name}" for name in layers}
    left = sd_scripts.left_out(full, of.family.adapters.not_in_sd_scripts)
    assert set(left) == full - {f"{component}.{name}" for name in built}
    assert bool(left) == (component not in ("text_encoder",))
    modules = of.modules(component)
    assert all(len({part in {n.partition(".")[2] for n in left} for part in m.parts}) == 1 for m in modules), "whole modules"


def factors(rows: int, columns: int, size: float, *kernel: int) -> Factors:
    """Of ||s B A|| = size: one number of B A."""
    a, b = torch.zeros(4, columns, *kernel), torch.zeros(rows, 4, *(1 for _ in kernel))
    a[(0,) * a.dim()], b[(0,) * b.dim()] = size / 2, 1.0
    return Factors(recipe(a), recipe(b), 8.0)


ATTENTION = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
ALL = Portable({ATTENTION: factors(1280, 1280, 4.0), "unet.conv_in": factors(320, 4, 3.0, 3, 3)})
PATTERNS = published("sdxl")[0].family.adapters.not_in_sd_scripts


def test_the_share_is_that_of_the_norms() -> None:
    """3 beside the root of 3^2 + 4^2; and against dense products in fp64, of ranks that differ."""
    assert sd_scripts.left_out_phrase(ALL, PATTERNS) == "'unet.conv_in': 60% of the norm of the update"
    assert sd_scripts.left_out_phrase(ALL.with_layers({ATTENTION: ALL.layers[ATTENTION]}), PATTERNS) == ""
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 5, 3, 3, generator=g), torch.randn(7, 3, 1, 1, generator=g)
    made = Factors(recipe(a), recipe(b), 2.0, rslora=True)
    dense = 2 / math.sqrt(3) * b.double().flatten(1) @ a.double().flatten(1)
    found = made.scaling**2 * squared_norm(*(each.make().double().flatten(1) for each in (made.a, made.b)))
    assert math.isclose(found, float(dense.square().sum()), rel_tol=1e-12)


@pytest.mark.parametrize(("layers", "dora"), [("all", False), ("all", True), ("default", False)])
def test_the_header_of_the_kohya_file_says_it(tmp_path: Path, layers: str, dora: bool) -> None:
    """Of a LoRA, and where layers are left out: else every byte is that of a file that knows nothing of it."""
    made = ALL if layers == "all" else ALL.with_layers({ATTENTION: ALL.layers[ATTENTION]})
    if dora:
        made = made.with_layers({
            name: Factors(f.a, f.b, f.alpha, magnitude=recipe(torch.ones(f.rows))) for name, f in made.layers.items()
        })  # fmt: skip
    about = export.About(
        name="bear", started="2025-01-01T00:00:00+00:00", step=1, epoch=1, learning_rate=1e-4, train_images=5,
        resolution="64x64", trigger_phrase="", seed=0, entries={}, dora_base="16 bit",
    )  # fmt: skip
    of, files = published("sdxl")[0], {}
    for patterns in (PATTERNS, ()):
        how = export.AdapterFiles(
            folder=tmp_path / str(len(patterns)), formats=export.FORMATS, dora_scale="magnitude", rows=len,
            fused={"unet": of.modules("unet")}, prefixes=of.family.kohya_prefixes(of.config), not_in_sd_scripts=patterns,
        )  # fmt: skip
        files[patterns] = export.write_files(how, "bear", about, lambda meaning: made, {})
    said = layers == "all" and not dora
    entry = TensorFile(files[PATTERNS]["comfyui"]).metadata.get("not_in_sd_scripts")
    assert entry == ("'unet.conv_in': 60% of the norm of the update" if said else None)
    for format in export.FORMATS:
        one, other = (files[patterns][format].read_bytes() for patterns in (PATTERNS, ()))
        assert (one == other) == (not said or format == "diffusers")
    heard: list[str] = []
    processes = SimpleNamespace(say=lambda line, whole=False: heard.append(line))
    state = SimpleNamespace(adapter=SimpleNamespace(layers=made.layers, kind=made.kind))
    plan = SimpleNamespace(model=SimpleNamespace(family=of.family))
    run = SimpleNamespace(context=SimpleNamespace(processes=processes), state=state, plan=plan)
    Artifacts._say_usage(run, files[PATTERNS])  # the end of a run
    not_taken = [line for line in heard if "sd-scripts" in line]
    assert not_taken == ([f"note: {sd_scripts.sentence(entry)}"] if said else not_taken[:dora])
    assert not dora or "as a DoRA not for A1111, InvokeAI, sd-scripts" in not_taken[0]


def test_a_file_for_sd_scripts_alone_is_made_where_it_is_asked_for(tmp_path: Path, capsys) -> None:
    tensors = {f"{name}.lora_{end}.weight": t.make() for name, f in ALL.layers.items() for end, t in (("A", f.a), ("B", f.b))}
    file, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    write_tensors(file, tensors)
    convert = ["convert", str(file), str(out), "--to"]
    assert script.main([*convert, "kohya"]) == 0
    assert "drops them without a message: 'unet.conv_in': 60% of" in capsys.readouterr().out
    assert len(TensorFile(out).entries) == 6 and "not_in_sd_scripts" in TensorFile(out).metadata
    assert script.main(["convert", str(out), str(tmp_path / "c.safetensors"), "--to", "diffusers"]) == 0
    assert "not_in_sd_scripts" not in TensorFile(tmp_path / "c.safetensors").metadata
    out.unlink()
    assert script.main([*convert, "kohya", "--for_sd_scripts"]) == 0
    assert "left out, as sd-scripts builds no module for them: 'unet.conv_in': 60% of" in capsys.readouterr().out
    stem = "lora_unet_middle_block_1_transformer_blocks_0_attn1_to_q"
    assert TensorFile(out).entries.keys() == {f"{stem}.{end}" for end in ("lora_down.weight", "lora_up.weight", "alpha")}
    assert "not_in_sd_scripts" not in TensorFile(out).metadata
    out.unlink()
    assert script.main([*convert, "diffusers", "--for_sd_scripts"]) == 2
    assert "--for_sd_scripts belongs to --to kohya, comfyui, lora" in capsys.readouterr().err
    conv = {key: tensor for key, tensor in tensors.items() if "conv_in" in key}
    write_tensors(file, conv)
    assert script.main([*convert, "kohya", "--for_sd_scripts"]) == 2
    assert "has no layer that sd-scripts builds a module for: 'unet.conv_in'" in capsys.readouterr().err
    write_tensors(file, conv | {"unet.conv_in.lora_magnitude_vector": torch.ones(1, 320, 1, 1)})
    assert script.main([*convert, "kohya", "--for_sd_scripts"]) == 2
    assert "is a DoRA, which sd-scripts has not: take --to lora" in capsys.readouterr().err
