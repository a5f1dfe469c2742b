"""Every model that the installed diffusers knows is trained by its family, or refused under its own name.

The original names of others' files are those of their conversion scripts in diffusers and of ComfyUI's detection.
"""

from __future__ import annotations

import inspect
import json
import re
from functools import cache
from pathlib import Path

import diffusers
import pytest
from accelerate import init_empty_weights

from tests.unit.models.test_beside import put
from trainer.base.errors import UserError
from trainer.models import FAMILIES
from trainer.models.kinds import CLASSES, PARTS, PIPELINES, TENSORS, TRAINED, kind_of, kind_of_class
from trainer.models.names import Shape
from trainer.models.opening import open_model

REFUSED = r"which is not trained here; give an SDXL model, a Flux model, FLUX\.2 \[klein\], FLUX\.3 \[klein\] or Z-Image"
# Pipelines of weights that a family trains: the others of these libraries' classes are refused.
OWN = {
    "sdxl": r"StableDiffusionXL(?!InstructPix2Pix)\w*|TextToVideoZeroSDXLPipeline",
    "flux": r"Flux(Img2Img|Inpaint|ControlNet\w*|Modular|Kontext(Modular)?|)Pipeline",
    "flux2": r"Flux2Klein(Inpaint|Modular|BaseModular|)Pipeline",
    "flux3": "Flux3ModularPipeline",
    "zimage": r"ZImage(?!Omni)\w*Pipeline",
}
NAMES = {"Flux": "flux", "Flux2": "flux2", "Flux3": "flux3", "ZImage": "zimage"}  # what their classes begin with
PIPELINE_CLASSES = sorted(name for name in dir(diffusers) if name.endswith("Pipeline"))
DENOISERS = sorted(
    name for name in dir(diffusers) if re.search(r"(Transformer\w*Model|DiT\w*Model|UVit2DModel|UNet\w*)$", name)
)


def folder(place: Path, **files: dict) -> str:
    for name, tree in files.items():
        path = place / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(tree))
    return str(place)


def test_every_pipeline_of_the_library_is_its_familys_or_is_refused_by_name(tmp_path: Path) -> None:
    assert len(PIPELINE_CLASSES) > 300
    for name in PIPELINE_CLASSES:
        place = folder(tmp_path / name, model_index={"_class_name": name})
        own = next((family for family, pattern in OWN.items() if re.fullmatch(pattern, name)), None)
        for family in FAMILIES:
            if family == own:
                assert open_model(FAMILIES[family], place).root == Path(place), name
                continue
            with pytest.raises(UserError) as refusal:
                open_model(FAMILIES[family], place)
            if own is not None:
                assert f"set model.family = {own!r}" in str(refusal.value), name
            else:
                assert re.search(REFUSED, str(refusal.value)), name
                kind = kind_of_class(name)
                assert (kind.name if kind else name) in str(refusal.value)


@pytest.mark.parametrize(
    ("pipeline", "said"),
    [
        ("FluxKontextInpaintPipeline", r"FLUX\.1 Kontext"),
        ("FluxFillPipeline", r"FLUX\.1 Fill"), ("FluxControlInpaintPipeline", r"FLUX\.1 Canny or Depth"),
        ("FluxPriorReduxPipeline", r"FLUX\.1 Redux"), ("VisualClozePipeline", "VisualCloze"),
        ("Flux2Pipeline", r"FLUX\.2 \[dev\]"),
        ("StableDiffusionXLInstructPix2PixPipeline", "SDXL InstructPix2Pix"), ("KolorsPAGPipeline", "Kolors"),
        ("ZImageOmniPipeline", "Z-Image-Omni"), ("QwenImageEditPlusPipeline", "Qwen-Image-Edit"),
        ("SomethingOfTomorrowPipeline", "a model of Some"),
        (["my_module", "MyPipeline"], "a model of MyPipeline"),
    ],
)  # fmt: skip
def test_editing_models_and_the_like_are_refused_by_name(tmp_path: Path, pipeline: str, said: str) -> None:
    with pytest.raises(UserError, match=f"is {said}.*{REFUSED}"):
        open_model(FAMILIES["flux"], folder(tmp_path, model_index={"_class_name": pipeline}))


def test_the_denoisers_class_counts_where_it_is_anothers(tmp_path: Path) -> None:
    index = {"_class_name": "FluxPipeline", "transformer": ["diffusers", "ChromaTransformer2DModel"]}
    with pytest.raises(UserError, match=f"is Chroma, {REFUSED}"):
        open_model(FAMILIES["flux"], folder(tmp_path / "index", model_index=index))
    with pytest.raises(UserError, match=f"is AnimateDiff, {REFUSED}"):
        config = {"_class_name": "UNetMotionModel"}
        place = folder(tmp_path / "own", model_index={"_class_name": PIPELINES["sdxl"]}, unet__config=config)
        open_model(FAMILIES["sdxl"], place)
    index = {"_class_name": "OfTheCommunity", "transformer": ["diffusers", "FluxTransformer2DModel"]}
    assert open_model(FAMILIES["flux"], folder(tmp_path / "community", model_index=index))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"modular_model_index": {"_class_name": "Flux3DistilledModularPipeline"}}, "no objective here.*not trained"),
        ({"modular_model_index": {"_class_name": "FluxModularPipeline"}}, "pipeline, FluxModularPipeline, without all"),
        ({"config": {"_class_name": "QwenImageTransformer2DModel"}}, "it holds Qwen-Image .*which is not trained here"),
        ({"config": {"_class_name": "FluxControlNetModel"}}, "it holds a ControlNet .*which is not trained here"),
    ],
)  # fmt: skip
def test_a_folder_without_an_index_is_named_by_its_class(tmp_path: Path, files: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        open_model(FAMILIES["flux"], folder(tmp_path, **files))


def test_every_denoiser_class_of_the_library_is_known_or_neutral() -> None:
    own = {name: kind.family for name in DENOISERS if (kind := kind_of_class(name)) and kind.family}
    assert own == {f"{name}Transformer2DModel": family for name, family in NAMES.items()}


@cache
def small(name: str) -> dict[str, Shape] | None:
    """The tensors of a model of the class, of one layer where that can be asked for; None where it has no usual sizes."""
    cls = getattr(diffusers, name)
    sizes = inspect.signature(cls.__init__).parameters.values()
    layers = {p.name: 1 for p in sizes if re.search(r"num_.*layers|^n_layers|depth$", p.name) and type(p.default) is int}
    for given in (layers, {}):
        try:
            with init_empty_weights():
                return {key: tuple(tensor.shape) for key, tensor in cls(**given).state_dict().items()}
        except (TypeError, ValueError, AssertionError, ZeroDivisionError, IndexError):
            continue
    return None


@pytest.mark.slow
def test_no_file_under_the_librarys_names_is_taken_for_anothers() -> None:
    """Whatever the class, with each prefix; of most of them the name is known."""
    known = []
    for name in DENOISERS:
        shapes = small(name)
        if shapes is None or name == "UNet2DConditionModel":  # that one is every UNet's, told by its sizes
            continue
        kinds = {kind_of({prefix + key: shape for key, shape in shapes.items()}) for prefix in ("", "transformer.", "net.")}
        assert len(kinds) == 1, name
        kind, own = kinds.pop(), kind_of_class(name)
        family = "FLUX.2 [dev]" if name == "Flux2Transformer2DModel" else own.family if own else None
        assert (kind.family if kind else None) == (None if family == "FLUX.2 [dev]" else family), (name, kind)
        known.append(kind is not None and not kind.part)
    assert sum(known) > 50


ORIGINAL = {
    "Z-Image-Omni (an editing model)": ("siglip_embedder.1.weight", "noise_refiner.0.adaLN_modulation.0.weight"),
    "Zeta-Chroma (Z-Image in pixel space)": ("__x0__", "dec_net.cond_embed.weight", "noise_refiner.0.attention.out.weight"),
    "Krea 2": ("first.weight", "txtfusion.projector.weight", "blocks.0.attn.wq.weight"),
    "Qwen-Image": ("img_in.weight", "txt_norm.weight", "transformer_blocks.0.img_mod.1.weight"),
    "Qwen-Image 2.1": ("txt_in.text_norm.weight", "modulation.1.weight", "transformer_blocks.0.img_mlp.proj.weight"),
    "Lumina 2": ("cap_embedder.1.weight", "noise_refiner.0.adaLN_modulation.1.weight", "context_refiner.0.ffn_norm1.weight"),
    "Stable Diffusion 3": ("joint_blocks.0.context_block.attn.qkv.weight", "x_embedder.proj.weight"),
    "HunyuanVideo": ("txt_in.individual_token_refiner.blocks.0.norm1.weight", "vector_in.in_layer.weight"),
    "HunyuanImage": ("txt_in.individual_token_refiner.blocks.0.norm1.weight", "byt5_in.fc1.weight"),
    "Wan, or a model made of it": ("head.modulation", "patch_embedding.weight", "blocks.0.cross_attn.q.weight"),
    "AuraFlow": ("double_layers.0.attn.w1q.weight", "cond_seq_linear.weight"),
    "Chroma": ("distilled_guidance_layer.in_proj.weight", "double_blocks.0.img_attn.qkv.weight"),
    CLASSES["Flux3Distilled"]: ("early_stream_modulations.image.lin.weight", "ref_time_in.in_layer.weight"),
    "PixArt": ("t_block.1.weight", "y_embedder.y_embedding", "blocks.0.attn.qkv.weight"),
    "Anima": ("llm_adapter.blocks.0.cross_attn.q_proj.weight", "blocks.0.mlp.layer1.weight", "x_embedder.proj.1.weight"),
    "Cosmos": ("blocks.0.mlp.layer1.weight", "x_embedder.proj.1.weight"),
    "LTX-Video": ("patchify_proj.weight", "adaln_single.emb.timestep_embedder.linear_1.bias"),
    "a model with Flux's blocks and other inputs (as LongCat-Image, Ovis-Image and Bria have)": (
        "double_blocks.0.img_attn.qkv.weight", "double_blocks.0.img_mlp.gate_proj.weight", "img_in.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "net."])
def test_files_under_original_names_are_refused_by_name(tmp_path: Path, prefix: str) -> None:
    for name, keys in ORIGINAL.items():
        path = put(tmp_path / "model.safetensors", {prefix + key: (2, 2) for key in keys})
        for family in FAMILIES.values():
            with pytest.raises(UserError, match=f"is {re.escape(name)}, {REFUSED}"):
                open_model(family, str(path))


SDXL_UNET = {
    "label_emb.0.0.weight": (1280, 2816), "middle_block.1.transformer_blocks.0.attn2.to_k.weight": (1280, 2048),
    "input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight": (640, 2048),
    "output_blocks.3.1.transformer_blocks.0.attn2.to_k.weight": (640, 2048),
}  # fmt: skip


def test_models_made_of_sdxl_are_told_from_it() -> None:
    assert kind_of(SDXL_UNET).family == "sdxl"
    pruned = {key: shape for key, shape in SDXL_UNET.items() if not key.startswith("middle_block.1.")}
    assert kind_of(pruned).name.startswith("a pruned SDXL (as SSD-1B")
    assert kind_of(SDXL_UNET | {"encoder_hid_proj.weight": (2048, 4096)}).name == "Kolors"


def test_no_kind_stands_behind_another_that_always_fits_first() -> None:
    """The catalogue is whole: every entry names someone, and is reached."""
    texts = [[part for part in parts if not re.search(r"[*|$^!\\]", part)] for _, *parts in TENSORS]
    for index, (kind, *parts) in enumerate(TENSORS):
        if len(texts[index]) < len(parts):
            continue
        found = kind_of({f"{part}weight": (1, 1) for part in parts})
        assert found is not None and found.name == TRAINED.get(kind, kind), kind
    assert all(CLASSES.values()) and {len(entry) for entry in PARTS} == {3}
    assert {kind for kind in CLASSES.values() if kind in TRAINED} == set(TRAINED)
