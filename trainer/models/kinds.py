"""What a file or a folder is, by what it says of itself: so that a model of another kind is refused under its own name.

A file is told by the names and shapes of the tensors in its header, a folder by its model_index.json or config.json.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError
from trainer.models.config_files import read_json
from trainer.models.names import Shape

SDXL, FLUX, FLUX2 = "sdxl", "flux", "flux2"  # families by name, as in FAMILIES
TRAINED = {SDXL: "an SDXL model", FLUX: "a Flux model", FLUX2: "FLUX.2 [klein]"}
ANY_TRAINED = " or ".join([", ".join(list(TRAINED.values())[:-1]), TRAINED[FLUX2]])


@dataclass(frozen=True)
class ModelKind:
    """A kind of model that people have. name: for people. family: that trains it; None: none. part: where it is one
    without a denoiser, the beginning of the names of its classes."""

    name: str
    family: str | None = None
    part: str = ""


# An ending of a tensor's name, of files that hold no model. The first that fits counts.
ENDINGS = (
    (r"\.(lora_(down|up|A|B|mid)|lora\.(down|up)|hada_w1_[ab]|lokr_w[12](_[ab])?|oft_blocks|dora_scale)(\.\w+)?(\.weight)?",
     "a LoRA or another adapter, not the model that it is for (to start a run from it, set adapter.init_from)"),
    (r"(controlnet_cond_embedding|input_hint_block|controlnet_blocks)\..*", "a ControlNet"),
    (r"(emb_params|string_to_param\..*)", "a textual inversion embedding"),
)  # fmt: skip
# Parts of tensors' names, all of which a file has, before those that look alike.
DENOISERS = (
    (("distilled_guidance_layer.",), ModelKind("Chroma")),
    (("double_stream_modulation_img.", "guidance_in."), ModelKind("FLUX.2 [dev]")),
    (("double_stream_modulation_img.", "guidance_embedder."), ModelKind("FLUX.2 [dev]")),
    (("double_stream_modulation_img.",), ModelKind("FLUX.2 [klein]", FLUX2)),
    (("joint_blocks.0.",), ModelKind("Stable Diffusion 3")),
    (("double_blocks.0.img_attn.",), ModelKind("a Flux model", FLUX)),
    (("single_transformer_blocks.0.attn.",), ModelKind("a Flux model", FLUX)),
)
# By what the beginning of a pipeline's class name says.
PIPELINES = (
    ("StableDiffusionXL", ModelKind("an SDXL model", SDXL)),
    ("StableDiffusion3", ModelKind("Stable Diffusion 3")),
    ("StableDiffusion", ModelKind("Stable Diffusion 1 or 2")),
    ("Flux2KleinKV", ModelKind("FLUX.2 [klein] that keeps keys and values of its references (distilled)")),
    ("Flux2Klein", ModelKind("FLUX.2 [klein]", FLUX2)),
    ("Flux2", ModelKind("FLUX.2 [dev]")),
    ("Flux", ModelKind("a Flux model", FLUX)),
)
# A UNet by the channels of what its cross attention reads.
UNETS = {
    768: ModelKind("Stable Diffusion 1.x (1.4, 1.5 and their fine-tunes)"),
    1024: ModelKind("Stable Diffusion 2.x"),
    1280: ModelKind("the SDXL refiner"),
}
CROSS = re.compile(r"(input_blocks|down_blocks)\..*\.attn2\.to_k\.weight$")
# open_clip's names, those of transformers, and those of transformers since 5.6.
CLIP = re.compile(r"transformer\.resblocks\.0\.|text_model\.encoder\.layers\.0\.|^encoder\.layers\.0\.layer_norm1\.")
INPUT = re.compile(r"(^|\.)(input_blocks\.0\.0|conv_in)\.weight$")
LANGUAGE = re.compile(r"(^|\.)(model\.layers\.0\.|transformer\.h\.0\.|embed_tokens\.weight$|lm_head\.weight$)")


def kind_of(shapes: Mapping[str, Shape]) -> ModelKind | None:
    """The kind of a file with these tensors; None where nothing is known of it."""
    for ending, name in ENDINGS:
        if any(re.search(rf"(^|.*){ending}$", key) for key in shapes):
            return ModelKind(name)
    for parts, kind in DENOISERS:
        if all(any(part in key for key in shapes) for part in parts):
            return kind
    context = next((shape[1] for key, shape in shapes.items() if CROSS.search(key) and len(shape) == 2), None)
    if context is not None:
        sized = any("label_emb." in key or "add_embedding." in key for key in shapes)
        kind = UNETS.get(context) or (ModelKind("an SDXL model", SDXL) if sized else None)
        inputs = next((shape[1] for key, shape in shapes.items() if INPUT.search(key) and len(shape) == 4), 4)
        return ModelKind(f"{kind.name}, for inpainting") if kind and kind.family is None and inputs == 9 else kind
    return _part_of(shapes)


def _part_of(shapes: Mapping[str, Shape]) -> ModelKind | None:
    if any("encoder.block.0.layer.0.SelfAttention." in key for key in shapes):
        return ModelKind("a T5 text encoder alone", part="T5")
    if any(CLIP.search(key) for key in shapes):
        return ModelKind("a CLIP text encoder alone", part="CLIP")
    if any(key.endswith("layers.0.self_attn.q_norm.weight") for key in shapes):
        return ModelKind("a Qwen3 text encoder alone", part="Qwen3")
    if any(LANGUAGE.search(key) for key in shapes):
        return ModelKind("a language model")
    if any("decoder.conv_in.weight" in key for key in shapes):
        return ModelKind("a VAE alone", part="Autoencoder")
    return None


def kind_of_folder(folder: Path) -> ModelKind | None:
    """The kind of a folder with a model_index.json; None where nothing is known of it."""
    index = read_json(folder / "model_index.json")
    pipeline = str(index.get("_class_name"))
    kind = next((kind for start, kind in PIPELINES if pipeline.startswith(start)), None)
    if kind is not None and kind.family == SDXL and index.get("text_encoder") == [None, None]:
        return UNETS[1280]
    if pipeline.startswith("StableDiffusion") and kind is not None and kind.family is None:
        unet = folder / "unet" / "config.json"
        config = read_json(unet) if unet.is_file() else {}
        context = config.get("cross_attention_dim")
        found = UNETS.get(context, kind) if isinstance(context, int) and not pipeline.startswith("StableDiffusion3") else kind
        return ModelKind(f"{found.name}, for inpainting") if config.get("in_channels") == 9 else found
    return kind


class OfAnotherFamily(UserError):
    """A model that another family trains."""


def refuse_other(key: str, family: str, kind: ModelKind | None) -> None:
    """Refuse a model of a kind that is known and is not the family's. key: what names it, with its value."""
    if kind is None or family not in TRAINED or kind.family == family:
        return
    if kind.part:
        raise UserError(
            f"{key} is {kind.name}: it belongs into the path of its own component, for example model.components.vae.path; "
            "model.path names the file with the unet or transformer"
        )
    if kind.family is not None:
        raise OfAnotherFamily(f"{key} is {kind.name}, and model.family = {family!r}; set model.family = {kind.family!r}")
    raise UserError(f"{key} is {kind.name}, which is not trained here; give {ANY_TRAINED}")


def instead_of_a_model(names: Collection[str], config: Callable[[], dict[str, Any]], *, on_the_hub: bool = False) -> str:
    """What a folder or a repository without model_index.json is, and the remedy.

    names: of its files. config: reads its config.json, where there is one.
    """
    if not {"adapter_config.json", "pytorch_lora_weights.safetensors"}.isdisjoint(names):
        return "it holds an adapter; give the model that it is for (to start a run from it, set adapter.init_from)"
    said = config() if "config.json" in names else {}
    if named := said.get("_class_name"):
        return f"it holds one part of a model, {named}; give its folder in model.components.NAME.path, and the model here"
    if isinstance(named := said.get("architectures"), list) and named:
        return f"it holds {named[0]}; give {ANY_TRAINED}"
    files = sorted(name for name in names if name.endswith(".safetensors"))
    if files:
        remedy = "download one, and give the file's path" if on_the_hub else "give the path of the file"
        return f"it holds {', '.join(files[:3])}{' and more' if len(files) > 3 else ''}; {remedy}"
    return "it lacks model_index.json; give a whole diffusers folder, a .safetensors file or a hub id"
