"""A file or folder that is no model of the family is refused under its own name, with the remedy, by its header alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.unit.models.test_beside import LABELS, put, shapes_of
from trainer.base.errors import UserError
from trainer.models import FAMILIES
from trainer.models.config_files import PUBLISHED
from trainer.models.kinds import kind_of, named_kinds
from trainer.models.names import Shape
from trainer.models.opening import open_model

PREFIX = "model.diffusion_model."
# Tensors that each kind of file has, with their true names and sizes.
FILES: Mapping[str, Mapping[str, Shape]] = {
    "Stable Diffusion 1.x (1.4, 1.5 and their fine-tunes)": {
        f"{PREFIX}input_blocks.0.0.weight": (320, 4, 3, 3),
        f"{PREFIX}input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": (320, 768),
        "cond_stage_model.transformer.text_model.encoder.layers.0.mlp.fc1.weight": (3072, 768),
        "first_stage_model.decoder.conv_in.weight": (512, 4, 3, 3),
    },
    "Stable Diffusion 1.x (1.4, 1.5 and their fine-tunes), for inpainting": {
        f"{PREFIX}input_blocks.0.0.weight": (320, 9, 3, 3),
        f"{PREFIX}input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": (320, 768),
    },
    "Stable Diffusion 2.x": {
        f"{PREFIX}input_blocks.0.0.weight": (320, 4, 3, 3),
        f"{PREFIX}input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": (320, 1024),
        "cond_stage_model.model.transformer.resblocks.0.attn.in_proj_weight": (3072, 1024),
    },
    "the SDXL refiner": {
        f"{PREFIX}label_emb.0.0.weight": (1536, 2560),
        f"{PREFIX}input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight": (768, 1280),
        "conditioner.embedders.0.model.transformer.resblocks.0.attn.in_proj_weight": (3840, 1280),
    },
    "Stable Diffusion 3": {"model.diffusion_model.joint_blocks.0.x_block.attn.qkv.weight": (4608, 1536)},
    "Chroma": {"distilled_guidance_layer.in_proj.weight": (5120, 64), "double_blocks.0.img_attn.qkv.weight": (9216, 3072)},
    "FLUX.2 [dev]": {
        "double_stream_modulation_img.lin.weight": (36864, 6144), "double_blocks.0.img_attn.qkv.weight": (18432, 6144),
        "guidance_in.in_layer.weight": (6144, 256),
    },
    "a language model": {
        "model.embed_tokens.weight": (32000, 4096), "model.layers.0.self_attn.q_proj.weight": (4096, 4096),
        "lm_head.weight": (32000, 4096),
    },
    "a ControlNet": {"controlnet_cond_embedding.conv_in.weight": (16, 3, 3, 3), "conv_in.weight": (320, 4, 3, 3)},
    "a textual inversion embedding": {"emb_params": (4, 768)},
}  # fmt: skip
ADAPTERS = {
    "kohya": {"lora_unet_input_blocks_1_1_proj_in.lora_down.weight": (4, 320), "lora_unet_x.alpha": ()},
    "kohya of Flux": {"lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight": (9216, 4)},
    "diffusers": {"unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k.lora_A.weight": (4, 2048)},
    "PEFT": {"base_model.model.transformer_blocks.0.attn.to_q.lora_B.default.weight": (3072, 4)},
    "old diffusers": {"unet.mid_block.attentions.0.proj_in.lora.down.weight": (4, 1280)},
    "LoHa": {"lora_unet_mid_block_attentions_0_proj_in.hada_w1_a": (1280, 4)},
    "LoKr": {"lycoris_mid_block_attentions_0_proj_in.lokr_w1": (16, 16)},
}


@pytest.mark.parametrize("family", ["sdxl", "flux"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_kind_is_named(tmp_path: Path, name: str, family: str) -> None:
    path = put(tmp_path / "model.safetensors", FILES[name])
    with pytest.raises(UserError, match="which is not trained here; give an SDXL model, a Flux model, FLUX") as refusal:
        open_model(FAMILIES[family], str(path))
    assert f"model.path = {str(path)!r} is {name}, which" in str(refusal.value)


@pytest.mark.parametrize("shapes", ADAPTERS.values(), ids=ADAPTERS)
def test_an_adapter_is_no_model(tmp_path: Path, shapes: Mapping[str, Shape]) -> None:
    path = put(tmp_path / "adapter.safetensors", shapes)
    with pytest.raises(UserError, match="is a LoRA or another adapter, not the model .*set adapter.init_from"):
        open_model(FAMILIES["flux"], str(path))


@pytest.mark.parametrize(("own", "component"), [("sdxl", "unet"), ("flux", "transformer"), ("flux2", "transformer")])
@pytest.mark.parametrize("layout", ["original", "prefixed", "diffusers"])
def test_a_model_of_the_other_family_is_named(tmp_path: Path, own: str, component: str, layout: str) -> None:
    shapes, known = shapes_of(own, component), FAMILIES[own].component(component)
    if layout == "prefixed":
        shapes = {PREFIX + name: shape for name, shape in shapes.items()}
    elif layout == "diffusers":
        config = json.loads((PUBLISHED / LABELS[own] / component / "config.json").read_text())
        shapes = known.names(config).shapes
    path = put(tmp_path / "model.safetensors", shapes)
    assert open_model(FAMILIES[own], str(path)).single_file is not None
    for other in FAMILIES.keys() - {own}:
        said = rf"is (an SDXL model|a Flux model|FLUX\.2 \[klein\]), and model.family = '{other}'; set model.family = '{own}'"
        with pytest.raises(UserError, match=said):
            open_model(FAMILIES[other], str(path))


@pytest.mark.parametrize(
    ("family", "component", "name"),
    [("flux", "vae", "a VAE"), ("sdxl", "vae", "a VAE"), ("flux", "text_encoder_2", "a T5 text encoder"),
     ("flux", "text_encoder", "a CLIP text encoder"), ("sdxl", "text_encoder_2", "a CLIP text encoder"),
     ("flux2", "text_encoder", "a Qwen3 text encoder"), ("flux2", "vae", "a VAE")],
)  # fmt: skip
def test_a_part_alone_is_named(tmp_path: Path, family: str, component: str, name: str) -> None:
    path = put(tmp_path / "part.safetensors", shapes_of(family, component))
    for asked in FAMILIES.values():
        with pytest.raises(UserError, match=f"is {name} alone: it belongs into the path of its own component"):
            open_model(asked, str(path))


def test_an_encoder_as_transformers_saves_it_since_5_6_is_named() -> None:
    kind = kind_of({name.removeprefix("text_model."): shape for name, shape in shapes_of("flux", "text_encoder").items()})
    assert kind is not None and kind.name == "a CLIP text encoder alone"


def test_of_a_file_that_nobody_knows_nothing_is_said() -> None:
    assert kind_of({}) is None and kind_of({"weight": (4, 4), "blocks.0.attn.qkv.weight": (12, 4)}) is None


def folder(place: Path, **files: Any) -> str:
    for name, tree in files.items():
        path = place / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(tree))
    return str(place)


@pytest.mark.parametrize(
    ("pipeline", "unet", "said"),
    [
        ("FluxPipeline", None, "is a Flux model, and model.family = 'sdxl'; set model.family = 'flux'"),
        ("StableDiffusionPipeline", {"cross_attention_dim": 768}, r"is Stable Diffusion 1\.x \(1\.4"),
        (
            "StableDiffusionInpaintPipeline",
            {"cross_attention_dim": 768, "in_channels": 9},
            r"Diffusion 1\.x .*for inpainting",
        ),
        ("StableDiffusionPipeline", {"cross_attention_dim": 1024}, r"is Stable Diffusion 2\.x"),
        ("StableDiffusionPipeline", None, "is Stable Diffusion 1 or 2"),
        ("StableDiffusion3Pipeline", None, "is Stable Diffusion 3"),
        ("Flux2Pipeline", None, r"is FLUX\.2 \[dev\]"),
        ("Flux2KleinPipeline", None, r"is FLUX\.2 \[klein\], and model.family = 'sdxl'; set model.family = 'flux2'"),
    ],
)
def test_a_folder_of_another_kind_is_named(tmp_path: Path, pipeline: str, unet: dict | None, said: str) -> None:
    files = {"model_index": {"_class_name": pipeline}} | ({"unet__config": unet} if unet else {})
    with pytest.raises(UserError, match=said):
        open_model(FAMILIES["sdxl"], folder(tmp_path / "model", **files))


def test_the_refiners_folder_is_named(tmp_path: Path) -> None:
    index = {"_class_name": "StableDiffusionXLImg2ImgPipeline", "text_encoder": [None, None]}
    with pytest.raises(UserError, match="is the SDXL refiner, which is not trained here"):
        open_model(FAMILIES["sdxl"], folder(tmp_path / "model", model_index=index))
    whole = folder(tmp_path / "whole", model_index=index | {"text_encoder": ["transformers", "CLIPTextModel"]})
    assert open_model(FAMILIES["sdxl"], whole).root == Path(whole)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"config": {"architectures": ["LlamaForCausalLM"]}},
            "it holds LlamaForCausalLM; give an SDXL model, a Flux model, FLUX",
        ),
        ({"adapter_config": {"r": 4}}, "it holds an adapter; .* set adapter.init_from"),
        (
            {"config": {"_class_name": "UNet2DConditionModel"}},
            "it holds one part of a model, UNet2DConditionModel; .*components.NAME",
        ),
        ({}, "it lacks model_index.json; give a whole diffusers folder"),
    ],
)
def test_a_folder_that_is_no_model_says_what_it_is(tmp_path: Path, files: dict[str, Any], said: str) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match=rf"is not a diffusers folder \(no model_index.json\); {said}"):
        open_model(FAMILIES["sdxl"], folder(tmp_path / "model", **files))


def test_a_path_that_is_not_there_is_told_what_lies_beside_it(tmp_path: Path) -> None:
    for name in "fedcba":
        (tmp_path / name).touch()
    with pytest.raises(UserError, match="does not exist; the folder .* holds a, b, c, d, e and 1 more$"):
        open_model(FAMILIES["sdxl"], str(tmp_path / "sdxl.safetensors"))
    with pytest.raises(UserError, match="does not exist; give a diffusers folder, a .safetensors file or a hub id$"):
        open_model(FAMILIES["sdxl"], str(tmp_path / "nowhere" / "sdxl.safetensors"))


def test_a_folder_of_files_names_them(tmp_path: Path) -> None:
    put(tmp_path / "flux1-dev.safetensors", {"x": (1,)})
    with pytest.raises(UserError, match="it holds flux1-dev.safetensors; give the path of the file"):
        open_model(FAMILIES["flux"], str(tmp_path))


@pytest.mark.parametrize(
    ("family", "name", "word"),
    [
        ("sdxl", "noobaiXLNAIXL_vPred10Version", "predicts v"), ("sdxl", "NoobAI-XL-Vpred-v1.0", "predicts v"),
        ("sdxl", "Laxhar/noobai-XL-v_prediction", "predicts v"), ("sdxl", "dreamshaperXL_v21TurboDPMSDE", "distilled"),
        ("sdxl", "juggernautXL_v9Rdphoto2Lightning", "distilled"), ("sdxl", "Hyper-SDXL-8steps", "distilled"),
        ("sdxl", "sdxlturbo", "distilled"), ("sdxl", "model_DMD2", "distilled"), ("sdxl", "lcmXL", "distilled"),
        ("sdxl", "sd_xl_refiner_1.0", "refiner"), ("sdxl", "juggernautXL-inpainting", "inpainting"),
        ("sdxl", "hyperrealisticXL", None), ("sdxl", "turbonator_v3", None), ("sdxl", "vpreds", None),
        ("sdxl", "turbo/base", None), ("flux", "flux1-kontext-dev", "Kontext"), ("flux", "fluxFill_v1", "Fill"),
        ("flux", "flux1-canny-dev", "control"), ("flux", "FLUX.1-Redux-dev", "Redux"), ("flux", "flux-depth-of-field", None),
        ("flux", "controlled-dev", None), ("flux", "refill", None), ("flux2", "klein-turbo", None),
    ],
)  # fmt: skip
def test_words_of_a_name_say_another_kind_as_people_write_them(family: str, name: str, word: str | None) -> None:
    said = named_kinds(family, name)
    assert word in said[0][0] if word else not said
