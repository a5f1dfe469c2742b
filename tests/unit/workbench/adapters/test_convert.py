"""Conversions that change numbers or refuse to: scales that differ in one module, DoRAs of other trainers, known faults.

A fault that other programs had is named by their issue. Numbers are compared with formulas written out here, in fp64.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trainer.adapters.portable import Factors, Portable, recipe
from trainer.base.errors import UserError
from trainer.base.tensorfile import TensorFile, write_tensors
from workbench.adapter_files.opening import OpenedAdapter, open_adapter, published
from workbench.adapter_files.reading import ReadAdapter
from workbench.adapters.convert import Conversion, WrittenAdapter, change_of, convert

BLOCK = "transformer.transformer_blocks.0.attn"
QKV = [f"{BLOCK}.to_q", f"{BLOCK}.to_k", f"{BLOCK}.to_v"]
FUSED = "lora_unet_double_blocks_0_img_attn_qkv"
Q = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
ONETRAINER = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
CONV = "lora_unet_conv_in"


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def written(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> Path:
    write_tensors(path, {key: tensor.contiguous() for key, tensor in tensors.items()}, metadata)
    return path


def converted(path: Path, to: str, family: str | None = None, **more) -> tuple[dict[str, torch.Tensor], WrittenAdapter]:
    out = path.with_name(f"{to}.safetensors")
    out.unlink(missing_ok=True)  # a test may convert twice, and no file is written over
    weight = more.pop("weight", None)
    done = convert(open_adapter(path, family=family), out, Conversion(to, **more), weight)
    return TensorFile(out).read_all(), done


def product(tensors: dict[str, torch.Tensor], stem: str) -> torch.Tensor:
    """s B A of a kohya module, fp64."""
    down, up = (tensors[f"{stem}.{end}.weight"].double().flatten(1) for end in ("lora_down", "lora_up"))
    return float(tensors[f"{stem}.alpha"]) / len(down) * up @ down


def applied(tensors: dict[str, torch.Tensor], stem: str) -> torch.Tensor:
    """s B A x of some x, fp64: as telling as the product, and quicker."""
    down, up = (tensors[f"{stem}.{end}.weight"].double() for end in ("lora_down", "lora_up"))
    return float(tensors[f"{stem}.alpha"]) / len(down) * up @ (down @ drawn(99, down.shape[1], 4).double())


# --- one module, several scales -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True], ids=["own A", "one A"])
def test_layers_of_one_module_may_have_scales_that_differ(tmp_path: Path, shared: bool) -> None:
    """Put together, B carries the ratio; taken apart again every product is the one before, but for one rounding."""
    ranks, alphas = ([4, 4, 4], [4.0, 1.0, 3.0]) if shared else ([4, 2, 3], [4.0, 3.0, 0.3])
    tensors, products = {}, []
    for seed, (name, rank, alpha) in enumerate(zip(QKV, ranks, alphas, strict=True)):
        a, b = drawn(0 if shared else seed, rank, 3072), drawn(seed + 10, 3072, rank)
        stem = "lora_transformer_" + name.removeprefix("transformer.").replace(".", "_")
        tensors |= {f"{stem}.lora_down.weight": a, f"{stem}.lora_up.weight": b, f"{stem}.alpha": torch.tensor(alpha)}
        products.append(applied(tensors, stem))
    file = written(tmp_path / "a.safetensors", tensors)
    fused, done = converted(file, "kohya", "flux")  # FLUX.2 klein 4B has such layers, too
    assert sorted(fused) == [f"{FUSED}.{end}" for end in ("alpha", "lora_down.weight", "lora_up.weight")]
    assert len(fused[f"{FUSED}.lora_down.weight"]) == sum(ranks)
    assert any("layers of different scales: B carries the ratio" in note for note in done.notes)
    wanted = torch.cat(products)
    assert (applied(fused, FUSED) - wanted).norm() <= 2**-23 * wanted.norm()
    back, _ = converted(tmp_path / "kohya.safetensors", "onetrainer", "flux")
    for name, expected in zip(QKV, products, strict=True):
        stem = "lora_transformer_" + name.removeprefix("transformer.").replace(".", "_")
        assert (applied(back, stem) - expected).norm() <= 2**-23 * expected.norm(), name


def test_layers_of_one_scale_and_one_a_stay_one_pair(tmp_path: Path) -> None:
    fused = {
        f"{FUSED}.lora_down.weight": drawn(0, 4, 3072),
        f"{FUSED}.lora_up.weight": drawn(1, 9216, 4),
        f"{FUSED}.alpha": torch.tensor(2.0),
    }
    file = written(tmp_path / "a.safetensors", fused)
    converted(file, "diffusers", "flux")
    back, _ = converted(tmp_path / "diffusers.safetensors", "kohya", "flux")
    assert back.keys() == fused.keys() and all(torch.equal(back[key], tensor) for key, tensor in fused.items())


# --- DoRAs of other trainers ----------------------------------------------------------------------------------------------


def weight_decompose(weight: torch.Tensor, tensors: dict[str, torch.Tensor], stem: str, on_output: bool) -> torch.Tensor:
    """LyCORIS 3.2 (modules/locon.py, `apply_weight_decompose`) and OneTrainer (modules/module/LoRAModule.py, `DoRAModule`):
    m V / ||V||, the norm over all axes but the output's, or but the input's; without the eps of the second. fp64."""
    v = weight.double() + product(tensors, stem).view(weight.shape)
    if on_output:
        norm = v.reshape(v.shape[0], -1).norm(dim=1).reshape(v.shape[0], *[1] * (v.dim() - 1))
    else:
        norm = v.transpose(0, 1).reshape(v.shape[1], -1).norm(dim=1).reshape(v.shape[1], *[1] * (v.dim() - 1)).transpose(0, 1)
    return v * (tensors[f"{stem}.dora_scale"].double() / norm)


SHAPES = {"Linear": (ONETRAINER, Q, (1280, 1280)), "Conv2d": (CONV, "unet.conv_in", (320, 4, 3, 3))}


@pytest.mark.parametrize("on_output", [True, False], ids=["output axis", "input axis"])
@pytest.mark.parametrize("kind", SHAPES)
def test_onetrainers_and_lycoris_doras_mean_what_these_programs_compute(tmp_path: Path, kind: str, on_output: bool) -> None:
    """Square layers, too, where the shape alone tells the axis. What the format cannot hold is refused."""
    stem, layer, shape = SHAPES[kind]
    ones = (1,) * (len(shape) - 2)
    w = drawn(1, *shape)
    tensors = {
        f"{stem}.lora_down.weight": 0.1 * drawn(2, 4, *shape[1:]),
        f"{stem}.lora_up.weight": 0.1 * drawn(3, shape[0], 4, *ones),
        f"{stem}.alpha": torch.tensor(2.0),
        f"{stem}.dora_scale": 1 + drawn(4, *((shape[0], 1) if on_output else (1, shape[1])), *ones).abs(),
    }
    file = written(tmp_path / "a.safetensors", tensors)
    opened = open_adapter(file)
    factors = opened.portable.layers[layer]
    assert factors.axis == ("output" if on_output else "input") and opened.portable.meaning == "magnitude"
    change = change_of(w, factors, "magnitude").view(shape)
    wanted = weight_decompose(w, tensors, stem, on_output)
    assert (w.double() + change - wanted).norm() <= 1e-12 * wanted.norm()
    other, _ = converted(file, "kohya")
    key = next(key for key in other if key.endswith(".dora_scale"))
    assert torch.equal(other[key], tensors[f"{stem}.dora_scale"])  # of its own shape, which says the axis
    if on_output:
        peft, _ = converted(file, "diffusers")
        assert torch.equal(peft[f"{layer}.lora_magnitude_vector"].flatten(), tensors[f"{stem}.dora_scale"].flatten())
        assert peft[f"{layer}.lora_magnitude_vector"].shape == ((1, shape[0], 1, 1) if ones else (shape[0],))
    else:
        with pytest.raises(UserError, match="of the input axis .*which PEFT's DoRA has not"):
            converted(file, "diffusers")


def test_a_dora_becomes_comfyuis_and_comes_back(tmp_path: Path) -> None:
    """ComfyUI's releases divide by ||W||: what they then compute is the DoRA. Back again within two roundings."""
    w = drawn(1, 1280, 1280)
    tensors = {
        f"{ONETRAINER}.lora_down.weight": 0.1 * drawn(2, 4, 1280),
        f"{ONETRAINER}.lora_up.weight": 0.1 * drawn(3, 1280, 4),
        f"{ONETRAINER}.alpha": torch.tensor(4.0),
        f"{ONETRAINER}.dora_scale": 30 + drawn(4, 1280, 1),
    }
    file = written(tmp_path / "a.safetensors", tensors)
    comfy, _ = converted(file, "comfyui", weight=lambda name: w)
    stem = "lora_unet_middle_block_1_transformer_blocks_0_attn1_to_q"
    v = w.double() + product(comfy, stem)
    released = v * (comfy[f"{stem}.dora_scale"].double() / w.double().norm(dim=1, keepdim=True))
    wanted = weight_decompose(w, tensors, ONETRAINER, True)
    assert (released - wanted).norm() <= 2**-23 * wanted.norm()
    back, _ = converted(tmp_path / "comfyui.safetensors", "onetrainer", weight=lambda name: w)
    assert torch.allclose(back[f"{ONETRAINER}.dora_scale"], tensors[f"{ONETRAINER}.dora_scale"], rtol=2**-22, atol=0)
    with pytest.raises(UserError, match="give it with --base"):
        converted(file, "comfyui")


# --- faults of other programs, by their issues ------------------------------------------------------------------------------


FORMATS = ("diffusers", "kohya", "comfyui", "onetrainer")


def a_lora(tmp_path: Path, alpha: float | None = 1.0, dtype: torch.dtype = torch.float32) -> Path:
    """Of a Linear and a convolution of SDXL, rank 4."""
    tensors = {}
    for stem, _, shape in SHAPES.values():
        ones = (1,) * (len(shape) - 2)
        tensors |= {f"{stem}.lora_down.weight": drawn(2, 4, *shape[1:]).to(dtype),
                    f"{stem}.lora_up.weight": drawn(3, shape[0], 4, *ones).to(dtype)}  # fmt: skip
        if alpha is not None:
            tensors[f"{stem}.alpha"] = torch.tensor(alpha)
    return written(tmp_path / "a.safetensors", tensors)


def scale_told(path: Path) -> set[float]:
    """alpha / rank as each consumer reads it: PEFT from the metadata, the others from `.alpha`; 1 without."""
    file = TensorFile(path)
    if "lora_adapter_metadata" in file.metadata:
        said = json.loads(file.metadata["lora_adapter_metadata"])
        return {said["unet.lora_alpha"] / said["unet.r"]}
    alphas = {name: file.read(name) for name in file.entries if name.endswith(".alpha")}
    downs = [name for name in file.entries if name.endswith(".lora_down.weight")]
    assert len(alphas) in (0, len(downs))
    return {
        float(alpha) / file.entries[name.replace(".alpha", ".lora_down.weight")].shape[0] for name, alpha in alphas.items()
    }


@pytest.mark.parametrize("to", FORMATS)
def test_diffusers_6087_an_alpha_is_not_forgotten(tmp_path: Path, to: str) -> None:
    """A file without it scaled by one. alpha / rank = 1/4 reaches every format; without any, all say one themselves."""
    for alpha, scale in ((1.0, 0.25), (None, 1.0)):
        converted(a_lora(tmp_path, alpha), to)
        assert scale_told(tmp_path / f"{to}.safetensors") == {scale}


@pytest.mark.parametrize("to", FORMATS)
def test_a_convolutions_factors_keep_their_four_axes(tmp_path: Path, to: str) -> None:
    """Flattened ones load nowhere, or are multiplied as a Linear's."""
    made, _ = converted(a_lora(tmp_path), to)
    shapes = sorted(tuple(t.shape) for key, t in made.items() if "conv" in key or "input_blocks_0_0" in key if t.dim() > 1)
    assert shapes == [(4, 4, 3, 3), (320, 4, 1, 1)]


@pytest.mark.parametrize("to", FORMATS)
def test_numbers_and_dtypes_stay(tmp_path: Path, to: str) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        made, _ = converted(a_lora(tmp_path, dtype=dtype), to)
        matrices = [t for t in made.values() if t.dim() > 1]
        assert len(matrices) == 4 and all(t.dtype == dtype for t in matrices)
        assert sorted(float(t.double().sum()) for t in matrices) == sorted(
            float(t.double().sum()) for t in TensorFile(tmp_path / "a.safetensors").read_all().values() if t.dim() > 1
        )


def test_comfyui_5972_no_key_is_left_out_with_a_line_in_the_log(tmp_path: Path) -> None:
    """ "lora key not loaded", and half an adapter. Here the file is refused, by the names."""
    tensors = TensorFile(a_lora(tmp_path)).read_all()
    for odd in ("lora_unet_input_blocks_99_1_proj_in.lora_down.weight", "lora_unet_conv_in.scale"):
        file = written(tmp_path / "odd.safetensors", tensors | {odd: torch.ones(2, 2)})
        with pytest.raises(UserError) as refused:
            open_adapter(file)
        assert odd in str(refused.value) or odd.partition(".")[0] in str(refused.value)


def test_comfyui_12938_a_flat_dora_scale_is_never_written(tmp_path: Path) -> None:
    """A flat one broadcasts along the wrong axis of a square layer, silently."""
    w = drawn(1, 1280, 1280)
    factors = Factors(recipe(drawn(2, 4, 1280)), recipe(drawn(3, 1280, 4)), 4.0, magnitude=recipe(drawn(4, 1280).abs()))
    of = published("sdxl")[0]
    opened = OpenedAdapter(tmp_path / "a", of, (of.label,), ReadAdapter(Portable({Q: factors})))
    for to in ("kohya", "comfyui", "onetrainer"):
        convert(opened, out := tmp_path / f"{to}.safetensors", Conversion(to), lambda name: w)
        scales = [e for name, e in TensorFile(out).entries.items() if name.endswith(".dora_scale")]
        assert [scale.shape for scale in scales] == [(1280, 1)], to


def test_safetensors_469_a_view_is_written_as_its_numbers(tmp_path: Path) -> None:
    """Its writer refuses tensors that are not contiguous, at the end of a training. Here no more is stored than is seen."""
    whole = drawn(5, 8, 2560)
    factors = Factors(recipe(whole[::2, ::2]), recipe(whole.t()[:1280, :4]), 4.0)
    of = published("sdxl")[0]
    opened = OpenedAdapter(tmp_path / "a", of, (of.label,), ReadAdapter(Portable({Q: factors})))
    convert(opened, tmp_path / "out.safetensors", Conversion("diffusers"))
    made = TensorFile(tmp_path / "out.safetensors").read_all()
    assert torch.equal(made[f"{Q}.lora_A.weight"], whole[::2, ::2]) and torch.equal(
        made[f"{Q}.lora_B.weight"], whole.t()[:1280, :4]
    )
    assert (tmp_path / "out.safetensors").stat().st_size < 2 * (4 * 1280 * 4) + 4096


def test_mflux_458_the_shared_a_of_a_fused_module_is_never_split(tmp_path: Path) -> None:
    """It was, wherever the rank divides by the number of layers. B is, by rows: linear1's mlp has four times those of q."""
    stem, single = "lora_unet_single_blocks_3_linear1", "transformer.single_transformer_blocks.3"
    up, down = drawn(1, 21504, 4), drawn(2, 4, 3072)
    file = written(tmp_path / "a.safetensors", {f"{stem}.lora_up.weight": up, f"{stem}.lora_down.weight": down})
    made, _ = converted(file, "diffusers")
    rows = {f"{single}.attn.to_q": (0, 3072), f"{single}.attn.to_k": (3072, 6144), f"{single}.attn.to_v": (6144, 9216),
            f"{single}.proj_mlp": (9216, 21504)}  # fmt: skip
    assert {key.partition(".lora_")[0] for key in made} == rows.keys()
    for name, (first, last) in rows.items():
        assert torch.equal(made[f"{name}.lora_B.weight"], up[first:last]) and torch.equal(made[f"{name}.lora_A.weight"], down)


def test_comfyui_3494_kohyas_keys_hold_no_name_of_pefts(tmp_path: Path) -> None:
    """diffusers' converter left dots and `lora_magnitude_vector` in them: a DoRA that loads nowhere."""
    stem, _, shape = SHAPES["Linear"]
    tensors = TensorFile(a_lora(tmp_path)).read_all() | {f"{ONETRAINER}.dora_scale": 1 + drawn(4, shape[0], 1).abs()}
    tensors = {key: tensor for key, tensor in tensors.items() if key.startswith(stem)}
    file = written(tmp_path / "b.safetensors", tensors)
    converted(file, "diffusers")
    for to, more in (("kohya", {}), ("comfyui", {"weight": lambda name: drawn(1, *shape)}), ("onetrainer", {})):
        made, _ = converted(tmp_path / "diffusers.safetensors", to, **more)
        ends = {key.partition(".")[2] for key in made}
        assert ends == {"lora_down.weight", "lora_up.weight", "alpha", "dora_scale"}, to


@pytest.mark.slow  # it builds both encoders
def test_te2_is_never_te1(tmp_path: Path) -> None:
    """Both encoders have layers of one name; their widths differ, and so do their keys."""
    tensors = {}
    for number, width in ((1, 768), (2, 1280)):
        stem = f"lora_te{number}_text_model_encoder_layers_0_self_attn_q_proj"
        tensors |= {
            f"{stem}.lora_down.weight": drawn(number, 2, width),
            f"{stem}.lora_up.weight": drawn(number + 5, width, 2),
        }
    file = written(tmp_path / "a.safetensors", tensors, {"ss_base_model_version": "sdxl_base_v1-0"})
    made, _ = converted(file, "diffusers")
    wide = {key.partition(".")[0]: t.shape[1] for key, t in made.items() if key.endswith("lora_A.weight")}
    assert wide == {"text_encoder": 768, "text_encoder_2": 1280}
    swapped = {key.replace("te1", "te_").replace("te2", "te1").replace("te_", "te2"): t for key, t in tensors.items()}
    with pytest.raises(UserError, match="do not fit"):
        open_adapter(written(tmp_path / "b.safetensors", swapped, {"ss_base_model_version": "sdxl_base_v1-0"}))
