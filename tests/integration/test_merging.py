"""Adapters in a model's own weights, out of them again, side by side, and of another rank.

The adapters are drawn, not trained; the formulas of their readers are written out here, or are PEFT's own.
"""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from scripts import adapter as script
from tests.quantised_files import bitsandbytes_folder, comfy_file, quanto_folder
from trainer import quantization
from trainer.base.tensorfile import TensorFile, write_tensors
from trainer.models import FAMILIES
from trainer.models.opening import open_model
from workbench.adapters.base_weights import BaseWeights

pytestmark = pytest.mark.tool("adapters")

LAYERS = {
    "sdxl": ["unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q", "unet.down_blocks.0.resnets.0.conv1",
             "unet.mid_block.attentions.0.transformer_blocks.0.ff.net.2", "text_encoder.encoder.layers.0.self_attn.q_proj",
             "text_encoder_2.text_model.encoder.layers.1.self_attn.out_proj"],
    "flux": ["transformer.transformer_blocks.0.attn.to_q", "transformer.transformer_blocks.0.attn.to_v",
             "transformer.single_transformer_blocks.1.proj_mlp", "transformer.norm_out.linear"],
}  # fmt: skip


def drawn(seed: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(seed.encode())))


def weights_of(family: str, path: Path, config: Path | None = None) -> BaseWeights:
    source = open_model(FAMILIES[family], str(path), config=str(config) if config else None, recognise=quantization.recognise)
    return BaseWeights(source)


def magnitude_key(name: str) -> str:
    """That diffusers loads it by."""
    return f"{name}.lora_magnitude_vector{'.weight' if name.startswith('text_encoder') else ''}"


def diffusers_file(models: Path, family: str, path: Path, *, dora: bool, rank: int = 3, components: tuple = ()) -> Path:
    """With the keys of diffusers, scale 1, and magnitudes some way from ||W + BA||."""
    weights, tensors = weights_of(family, models / family), {}
    for name in LAYERS[family]:
        if components and not name.startswith(components):
            continue
        w = weights.weight(name)
        a = drawn(f"{name}a{rank}", rank, *w.shape[1:]) * 0.2
        b = drawn(f"{name}b{rank}", w.shape[0], rank, *(1 for _ in w.shape[2:])) * 0.2
        tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        if dora:
            v = w.flatten(1) + b.flatten(1) @ a.flatten(1)
            m = v.norm(dim=1) * (1 + 0.2 * drawn(f"{name}m", len(v)))
            tensors[magnitude_key(name)] = m.view(1, -1, 1, 1) if w.dim() == 4 else m
    write_tensors(path, tensors, {"format": "pt"})
    return path


def merge(*arguments: object) -> None:
    assert script.main(["merge", *map(str, arguments)]) == 0


# --- by each consumer's formula -----------------------------------------------------------------------------------------


def comfy_patch(weight: torch.Tensor, tensors: dict[str, torch.Tensor], stem: str, strength: float) -> torch.Tensor:
    """ComfyUI v0.3.64: LoRAAdapter.calculate_weight and weight_decompose (comfy/weight_adapter), in fp64."""
    up, down = (tensors[f"{stem}.{end}.weight"].double() for end in ("lora_up", "lora_down"))
    alpha = float(tensors[f"{stem}.alpha"]) / down.shape[0]
    lora_diff = torch.mm(up.flatten(start_dim=1), down.flatten(start_dim=1)).reshape(weight.shape)
    if f"{stem}.dora_scale" not in tensors:
        return weight + strength * alpha * lora_diff
    dora_scale = tensors[f"{stem}.dora_scale"].double()
    weight_calc = weight + lora_diff * alpha
    if dora_scale.shape[0] == weight_calc.shape[0]:
        norm = weight.reshape(weight.shape[0], -1).norm(dim=1, keepdim=True)
        weight_norm = norm.reshape(weight.shape[0], *[1] * (weight.dim() - 1))
    else:
        columns = weight_calc.transpose(0, 1)
        norm = columns.reshape(weight_calc.shape[1], -1).norm(dim=1, keepdim=True)
        weight_norm = norm.reshape(weight_calc.shape[1], *[1] * (weight_calc.dim() - 1)).transpose(0, 1)
    weight_norm = weight_norm + torch.finfo(weight.dtype).eps
    weight_calc = weight_calc * (dora_scale / weight_norm)
    return weight + strength * (weight_calc - weight)


def test_merged_weights_are_those_of_comfyuis_formulas(models: Path, tmp_path: Path, capsys) -> None:
    """Linear, 3x3 convolution, text encoder; both axes; in turn, each with its strength. All else keeps its bits."""
    base = TensorFile(models / "sdxl-one.safetensors").read_all()
    unet, clip = "model.diffusion_model.", "conditioner.embedders.0.transformer."
    stems = {"lora_unet_" + n.removeprefix(unet).removesuffix(".weight").replace(".", "_"): n for n in base if unet in n}
    stems |= {"lora_te1_" + n.removeprefix(clip).removesuffix(".weight").replace(".", "_"): n for n in base if clip in n}
    chosen = ["lora_unet_middle_block_1_transformer_blocks_0_attn1_to_q", "lora_unet_input_blocks_1_0_in_layers_2",
              "lora_te1_text_model_encoder_layers_0_mlp_fc1"]  # fmt: skip
    files, told = [], json.dumps({"dora_scale": "comfyui_released: for ComfyUI"})
    for kind, strength in (("rows", 0.7), ("plain", -0.5), ("columns", 1.0)):
        tensors = {}
        for stem in chosen:
            shape = base[stems[stem]].shape
            tensors[f"{stem}.lora_down.weight"] = 0.2 * drawn(stem + kind, 3, *shape[1:])
            tensors[f"{stem}.lora_up.weight"] = 0.2 * drawn(kind + stem, shape[0], 3, *(1 for _ in shape[2:]))
            tensors[f"{stem}.alpha"] = torch.tensor(1.5)
            ones = [1] * (len(shape) - 2)
            if kind != "plain":
                size = (shape[0], 1, *ones) if kind == "rows" else (1, shape[1], *ones)
                tensors[f"{stem}.dora_scale"] = 1 + 0.2 * drawn(f"{stem}m", *size)
        path = tmp_path / f"{kind}.safetensors"
        write_tensors(path, tensors, {"ss_network_args": told} if kind == "rows" else None)
        files.append((path, tensors, strength))
    out = tmp_path / "merged.safetensors"
    merge(models / "sdxl-one.safetensors", *(f"{path}:{strength}" for path, _, strength in files), out, "--dtype", "fp32")
    assert "3 layers of sdxl changed" in capsys.readouterr().out
    merged = TensorFile(out).read_all()
    assert merged.keys() == base.keys()
    for stem in chosen:
        expected = base[stems[stem]].double()
        for _, tensors, strength in files:
            expected = comfy_patch(expected, tensors, stem, strength)
        got = merged.pop(stems[stem])
        assert got.dtype == torch.float32 and torch.allclose(got.double(), expected, rtol=2**-23, atol=1e-12), stem
    for name, tensor in merged.items():
        assert torch.equal(tensor, base[name].to(tensor.dtype)), name
    said = json.loads(TensorFile(out).metadata["merged_adapters"])
    assert [(each["file"], each["strength"]) for each in said] == [(path.name, strength) for path, _, strength in files]


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_merged_weights_are_those_that_diffusers_fuses(models: Path, tmp_path: Path, dora: bool) -> None:
    """PEFT's own arithmetic, in fp64: Linear, convolution and both text encoders. A stock pipeline reads the folder."""
    from diffusers import StableDiffusionXLPipeline

    file, out = diffusers_file(models, "sdxl", tmp_path / "a.safetensors", dora=dora), tmp_path / "merged"
    merge(models / "sdxl", file, out, "--dtype", "fp32")
    theirs = StableDiffusionXLPipeline.from_pretrained(models / "sdxl", torch_dtype=torch.float64)
    theirs.load_lora_weights(TensorFile(file).read_all())
    for part in (theirs.unet, theirs.text_encoder, theirs.text_encoder_2):
        part.to(torch.float64)
    for part in (theirs.unet, theirs.text_encoder, theirs.text_encoder_2):
        for module in part.modules():
            if hasattr(module, "lora_A"):
                module.merge()
    ours = StableDiffusionXLPipeline.from_pretrained(out, torch_dtype=torch.float32)
    base = weights_of("sdxl", models / "sdxl")
    for name in LAYERS["sdxl"]:
        component, _, layer = name.partition(".")
        got, expected = (getattr(pipe, component).get_submodule(layer) for pipe in (ours, theirs))
        got, expected = got.weight.detach().double(), expected.base_layer.weight.detach()
        assert expected.dtype == torch.float64
        change = (expected - base.weight(name)).norm()
        assert change > 0.05 * expected.norm() and (got - expected).norm() < 2e-7 * expected.norm(), name
    for component in ("unet", "text_encoder", "text_encoder_2", "vae"):
        mine, stock = (getattr(pipe, component).state_dict() for pipe in (ours, theirs))
        changed = {f"{n.partition('.')[2]}." for n in LAYERS["sdxl"] if n.startswith(f"{component}.")}
        kept = [key for key in mine if not key.startswith(tuple(changed))]
        assert kept and all(torch.equal(mine[key].double(), stock[key].double()) for key in kept)


# --- files --------------------------------------------------------------------------------------------------------------


def same_model(family: str, one: BaseWeights, other: BaseWeights, components: list[str]) -> None:
    for component in components:
        assert one.reads(component).keys() == other.reads(component).keys()
        for name in one.reads(component):
            assert torch.equal(one.tensor(component, name), other.tensor(component, name)), name


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_every_layout_holds_the_same_merged_model(models: Path, tmp_path: Path, family: str) -> None:
    """A folder, the single file, and one file made of the folder; modules that the original layout fuses as well."""
    only = ("transformer",) if family == "flux" else ()
    file = diffusers_file(models, family, tmp_path / "a.safetensors", dora=True, components=only)
    made = {}
    for name in ("folder", "one.safetensors"):  # what a killed merge left
        (tmp_path / f".{name}.{os.getpid()}.0a.tmp").mkdir()
    for base, out in ((family, "folder"), (f"{family}-one.safetensors", "one.safetensors"), (family, "all.safetensors")):
        merge(models / base, file, tmp_path / out)
        configs = models / family if out.endswith(".safetensors") else None
        made[out] = weights_of(family, tmp_path / out, configs)
    every = [component.name for component in FAMILIES[family].components]
    assert not list(tmp_path.glob(".*"))
    same_model(family, made["folder"], made["all.safetensors"], every)
    same_model(family, made["folder"], made["one.safetensors"], ["transformer"] if family == "flux" else every)
    kept = TensorFile(models / f"{family}-one.safetensors").entries
    now = TensorFile(tmp_path / "one.safetensors").entries
    assert {n: (e.dtype, e.shape) for n, e in now.items()} == {n: (e.dtype, e.shape) for n, e in kept.items()}


@pytest.mark.slow
def test_scaled_float8_is_comfyuis(models: Path, tmp_path: Path) -> None:
    """One scale a Linear of the denoiser, max |W| / 448; read back here as what it is. The VAE stays fp32."""
    file = diffusers_file(models, "sdxl", tmp_path / "a.safetensors", dora=False)
    for dtype in ("fp8", "fp32"):
        merge(models / "sdxl-one.safetensors", file, tmp_path / f"{dtype}.safetensors", "--dtype", dtype)
    scaled, exact = (TensorFile(tmp_path / f"{dtype}.safetensors").read_all() for dtype in ("fp8", "fp32"))
    unet = "model.diffusion_model."
    assert scaled.pop(f"{unet}scaled_fp8").numel() == 2
    for name, wide in exact.items():
        tensor = scaled[name]
        if name.startswith(unet) and name.endswith(".weight") and wide.dim() == 2:
            scale = scaled.pop(name.removesuffix("weight") + "scale_weight")
            assert scale.shape == () and torch.equal(scale, wide.abs().max() / 448)
            assert tensor.dtype == torch.float8_e4m3fn
            assert ((tensor.float() * scale - wide).abs() <= wide.abs() / 16 + scale * 2**-10).all(), name
        elif name.startswith("first_stage_model."):
            assert torch.equal(tensor, wide)
        elif wide.is_floating_point() and wide.numel() > 1:
            assert tensor.dtype == torch.bfloat16, name
    assert scaled.keys() == exact.keys()
    read = weights_of("sdxl", tmp_path / "fp8.safetensors", models / "sdxl")
    layer = LAYERS["sdxl"][0]
    assert (read.weight(layer) - weights_of("sdxl", tmp_path / "fp32.safetensors", models / "sdxl").weight(layer)).norm() > 0


def refused(capsys, *arguments: object) -> str:
    assert script.main([*map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_what_rounding_takes_of_a_small_change_is_told_with_its_remedy(models: Path, tmp_path: Path, capsys) -> None:
    file = diffusers_file(models, "flux", tmp_path / "a.safetensors", dora=False)
    for dtype in ("bf16", "fp32"):
        assert script.main(["merge", str(models / "flux"), f"{file}:0.001", str(tmp_path / dtype), "--dtype", dtype]) == 0
        assert ("; --dtype fp32 keeps it" in capsys.readouterr().out) == (dtype == "bf16")


def test_what_cannot_be_merged_is_refused_and_leaves_nothing(models: Path, tmp_path: Path, capsys) -> None:
    file = diffusers_file(models, "flux", tmp_path / "a.safetensors", dora=False)
    out = tmp_path / "out"
    said = refused(capsys, "merge", models / "sdxl", file, out)
    assert "of no model that is known here" in said and "transformer." in said
    assert "let OUT" in refused(capsys, "merge", models / "flux-one.safetensors", file, out)
    assert "ComfyUI's" in refused(capsys, "merge", models / "flux", file, out, "--dtype", "fp8")
    assert "finite number" in refused(capsys, "merge", models / "flux", f"{file}:nan", out)
    clip = tmp_path / "clip.safetensors"
    layer = "text_encoder.encoder.layers.0.self_attn.q_proj"
    write_tensors(clip, {f"{layer}.lora_A.weight": torch.ones(1, 32), f"{layer}.lora_B.weight": torch.ones(32, 1)})
    missing = refused(capsys, "merge", models / "flux-one.safetensors", clip, tmp_path / "o.safetensors")
    assert "would hold no text_encoder" in missing
    huge = script.main(["merge", str(models / "flux"), f"{file}:1e8", str(out), "--dtype", "fp16"])
    assert huge == 4 and "would not be finite" in capsys.readouterr().err
    out.mkdir()
    assert "exists" in refused(capsys, "merge", models / "flux", file, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "clip.safetensors", "out"]


# --- out again, side by side, smaller -----------------------------------------------------------------------------------


def products(path: Path) -> dict[str, torch.Tensor]:
    """B A of every layer of a file in diffusers' keys whose scale is 1, fp64."""
    tensors = TensorFile(path).read_all()
    names = [key.removesuffix(".lora_A.weight") for key in tensors if key.endswith(".lora_A.weight")]
    return {
        n: tensors[f"{n}.lora_B.weight"].double().flatten(1) @ tensors[f"{n}.lora_A.weight"].double().flatten(1)
        for n in names
    }


@pytest.mark.slow
def test_an_adapter_comes_out_of_the_model_again(models: Path, tmp_path: Path, capsys) -> None:
    """Merged in fp32, at its rank: to 1e-3 of the change. At a lower rank what is lost is the tail, and is printed."""
    file, merged = diffusers_file(models, "sdxl", tmp_path / "a.safetensors", dora=False), tmp_path / "merged"
    merge(models / "sdxl", file, merged, "--dtype", "fp32")
    given = products(file)
    for rank in (3, 2):
        out = tmp_path / f"rank{rank}.safetensors"
        capsys.readouterr()
        assert script.main(["extract", str(merged), str(models / "sdxl"), str(out), "--rank", str(rank)]) == 0
        said, got = capsys.readouterr().out, products(out)
        assert got.keys() == given.keys() and "5 layers differ" in said and " s\n" in said
        tail_sq = whole_sq = 0.0
        for name, change in given.items():
            off, values = float((got[name] - change).norm()), torch.linalg.svdvals(change)
            tail = float(values[rank:].square().sum().sqrt())
            assert off <= 1e-3 * float(change.norm()) if rank == 3 else abs(off - tail) <= 1e-4 * tail, name
            tail_sq, whole_sq = tail_sq + tail**2, whole_sq + float(values.square().sum())
        printed = float(said.split("leaves out ")[1].split("%")[0]) / 100
        assert abs(printed - (tail_sq / whole_sq) ** 0.5) < 1e-5
    same = script.main(
        ["extract", str(models / "sdxl"), str(models / "sdxl"), str(tmp_path / "no.safetensors"), "--rank", "1"]
    )
    assert same == 2 and "nothing to extract" in capsys.readouterr().err


@pytest.mark.slow
def test_the_change_of_a_dora_has_a_tail(models: Path, tmp_path: Path, capsys) -> None:
    """It scales rows of W: not of low rank. What an extract leaves out is that tail, whatever the adapter's own rank."""
    file, merged = diffusers_file(models, "sdxl", tmp_path / "a.safetensors", dora=True), tmp_path / "merged"
    merge(models / "sdxl", file, merged, "--dtype", "fp32")
    out = tmp_path / "out.safetensors"
    assert script.main(["extract", str(merged), str(models / "sdxl"), str(out), "--rank", "3"]) == 0
    now, before, lost, whole = weights_of("sdxl", merged), weights_of("sdxl", models / "sdxl"), 0.0, 0.0
    for name in LAYERS["sdxl"]:
        values = torch.linalg.svdvals((now.weight(name).double() - before.weight(name)).flatten(1)).square()
        lost, whole = lost + float(values[3:].sum()), whole + float(values.sum())
    printed = float(capsys.readouterr().out.split("leaves out ")[1].split("%")[0]) / 100
    assert printed > 0.1 and abs(printed - (lost / whole) ** 0.5) < 1e-5


def compared(capsys, *arguments: object) -> str:
    assert script.main(["compare", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_two_adapters_are_compared(models: Path, tmp_path: Path, capsys) -> None:
    one = diffusers_file(models, "sdxl", tmp_path / "a.safetensors", dora=False)
    tensors, base = TensorFile(one).read_all(), ("--base", models / "sdxl")
    assert "equal, byte for byte" in compared(capsys, one, shutil.copy(one, tmp_path / "copy.safetensors"), *base)
    write_tensors(tmp_path / "b.safetensors", tensors, {"other": "header"})
    said = compared(capsys, one, tmp_path / "b.safetensors", *base)
    assert "bit for bit" in said and "byte for byte" not in said
    half = {k: t * 0.5 if "lora_B" in k else t for k, t in tensors.items() if not k.startswith("text_encoder.")}
    write_tensors(tmp_path / "half.safetensors", half)
    said = compared(capsys, one, tmp_path / "half.safetensors", *base)
    assert "that both have: 50.0000%" in said and "only A has 1 layers: text_encoder.encoder" in said
    assert "unet.down_blocks.1: 50.0000%; rank 3\n" in said and "bit for bit" not in said
    dora = diffusers_file(models, "sdxl", tmp_path / "d.safetensors", dora=True)
    with_base = compared(capsys, dora, one, *base)
    w = weights_of("sdxl", models / "sdxl")
    apart = whole = 0.0
    for name, change in products(dora).items():
        v = w.weight(name).double().flatten(1) + change
        m = TensorFile(dora).read(magnitude_key(name)).double().flatten()
        scaled = v * (m / v.norm(dim=1))[:, None]
        apart += float((scaled - v).square().sum())
        whole += float((scaled - v + change).square().sum())
    assert f"that both have: {(apart / whole) ** 0.5:.4%}" in with_base


def test_a_resized_adapter_is_the_nearest_of_its_rank(models: Path, tmp_path: Path, capsys) -> None:
    file, out = diffusers_file(models, "sdxl", tmp_path / "a.safetensors", dora=True), tmp_path / "b.safetensors"
    base = ("--base", str(models / "sdxl"))
    assert script.main(["resize", str(file), str(out), "--rank", "2", *base]) == 0
    said, given, got = capsys.readouterr().out, products(file), products(out)
    worst = 0.0
    scale = json.loads(TensorFile(out).metadata["lora_adapter_metadata"])
    assert scale["unet.r"] == 2 and scale["unet.lora_alpha"] == 2
    for name, change in given.items():
        values = torch.linalg.svdvals(change)
        tail = float(values[2:].square().sum().sqrt())
        assert abs(float((got[name] - change).norm()) - tail) <= 1e-4 * tail
        worst = max(worst, tail / float(change.norm()))
        key = magnitude_key(name)
        assert torch.equal(TensorFile(out).read(key), TensorFile(file).read(key))
    assert f"at most {worst:.2%} of s B A is lost" in said
    assert "no layer has a rank above 3" in refused(capsys, "resize", file, tmp_path / "c.safetensors", "--rank", "3", *base)


@pytest.mark.parametrize(
    "kind", ["nf4", pytest.param("comfy", marks=pytest.mark.slow), pytest.param("quanto", marks=pytest.mark.slow)]
)
def test_a_quantised_model_is_merged_as_the_numbers_it_stands_for(models: Path, tmp_path: Path, capsys, kind: str) -> None:
    """Codes cannot take the change: a dtype is asked for, and the layer is its value plus s B A."""
    folder, layer = tmp_path / "model", "unet.mid_block.attentions.0.transformer_blocks.0.ff.net.2"
    if kind == "comfy":
        folder, source = tmp_path / "model.safetensors", models / "sdxl-one.safetensors"
        comfy_file(source, folder, new=False, prefix="model.diffusion_model.")
        base = weights_of("sdxl", folder, folder.with_suffix(""))
    else:
        make = partial(quanto_folder, dtype="int8") if kind == "quanto" else partial(bitsandbytes_folder, kind=kind)
        make(models / "sdxl", folder, components=["unet"])
        base = weights_of("sdxl", folder)
    file = diffusers_file(models, "sdxl", tmp_path / "a.safetensors", dora=False, components=("unet.mid_block",))
    out = tmp_path / "merged.safetensors"
    assert "the model holds unet quantised, and weights are merged as numbers: give --dtype" in refused(
        capsys, "merge", folder, file, out
    )
    assert not out.exists()
    merge(folder, file, out, "--dtype", "fp32")
    merged = weights_of("sdxl", out, models / "sdxl")
    a, b = (TensorFile(file).read(f"{layer}.lora_{factor}.weight").double() for factor in "AB")
    wanted = base.weight(layer).double() + b @ a
    assert (merged.weight(layer).double() - wanted).norm() <= 2**-24 * wanted.norm()
    other = layer.replace("net.2", "net.0.proj")
    assert torch.equal(merged.weight(other), base.weight(other))
    assert (base.weight(layer) - weights_of("sdxl", models / "sdxl").weight(layer)).norm() > 1e-4 * wanted.norm()
