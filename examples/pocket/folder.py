"""A trained pocket model as an ordinary diffusers folder in bf16."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM, Qwen3RMSNorm

from examples.pocket import flux, flux2, sdxl, vae
from scripts.make_model import clip_tokenizer_files, to_json, write_texts
from trainer.models.tokenizers import END, embedded_merges

PUBLISHED = Path(__file__).resolve().parents[2] / "trainer" / "models" / "published"


def write_sdxl(out: Path, module: sdxl.Denoiser, autoencoder: AutoencoderKL, scale: float) -> None:
    """The pipeline, without its card."""
    vae_with_scale(autoencoder, quant_convs=True, scaling_factor=scale).to(torch.bfloat16).save_pretrained(out / "vae")
    module.unet.to(torch.bfloat16).save_pretrained(out / "unet")
    write_text_encoders(out, module)
    merges = list(embedded_merges())
    texts = {f"tokenizer/{name}": text for name, text in clip_tokenizer_files(merges, END).items()}
    texts |= {f"tokenizer_2/{name}": text for name, text in clip_tokenizer_files(merges, "!").items()}
    texts["scheduler/scheduler_config.json"] = to_json({"_class_name": "EulerDiscreteScheduler", **sdxl.SCHEDULER})
    texts["model_index.json"] = (PUBLISHED / "sdxl" / "model_index.json").read_text()
    write_texts(out, texts)


def write_flux(out: Path, module: flux.Denoiser, autoencoder: AutoencoderKL, scale: float, shift: float) -> None:
    """The pipeline, without its card."""
    copy = vae_with_scale(autoencoder, quant_convs=False, scaling_factor=scale, shift_factor=shift)
    copy.to(torch.bfloat16).save_pretrained(out / "vae")
    module.transformer.to(torch.bfloat16).save_pretrained(out / "transformer")
    write_text_encoders(out, module)
    texts = {f"tokenizer/{name}": text for name, text in clip_tokenizer_files(list(embedded_merges()), END).items()}
    texts |= {f"tokenizer_2/{name}": text for name, text in flux.t5_files().items()}
    texts["scheduler/scheduler_config.json"] = to_json({"_class_name": "FlowMatchEulerDiscreteScheduler", **flux.SCHEDULER})
    texts["model_index.json"] = (PUBLISHED / "flux-dev" / "model_index.json").read_text()
    write_texts(out, texts)


def write_flux2(out: Path, module: flux2.Denoiser, autoencoder: AutoencoderKLFlux2) -> None:
    """The pipeline, without its card."""
    autoencoder.to(torch.bfloat16).save_pretrained(out / "vae")
    module.transformer.to(torch.bfloat16).save_pretrained(out / "transformer")
    module.text_encoder = with_a_last_layer(module.text_encoder)
    write_text_encoders(out, module, ("text_encoder",))
    texts = {f"tokenizer/{name}": text for name, text in flux2.tokenizer_files().items()}
    scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler", **flux2.SCHEDULER}
    texts["scheduler/scheduler_config.json"] = to_json(scheduler)
    texts["model_index.json"] = (PUBLISHED / "flux2-klein-4b" / "model_index.json").read_text()
    write_texts(out, texts)


def with_a_last_layer(encoder: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """The Qwen3 with the norm that the whole class has, and with a layer before it, both of which are not read.

    transformers gives what the last layer makes behind the norm, so a reader of hidden states needs a layer behind the
    last one that was trained with.
    """
    config = encoder.config
    config.num_hidden_layers, config.layer_types = config.num_hidden_layers + 1, [*config.layer_types, config.layer_types[-1]]
    encoder.model.layers.append(copy.deepcopy(encoder.model.layers[-1]))
    encoder.model.norm = Qwen3RMSNorm(config.hidden_size)
    return encoder


def write_text_encoders(
    out: Path,
    module: sdxl.Denoiser | flux.Denoiser | flux2.Denoiser,
    names: Sequence[str] = ("text_encoder", "text_encoder_2"),
) -> None:
    """In bf16, to be loaded as fp32: where nobody says a dtype, transformers takes the file's and diffusers fp32."""
    for name in names:
        getattr(module, name).to(torch.bfloat16).save_pretrained(out / name)
        config = read_json(out / name / "config.json")
        write_texts(out / name, {"config.json": to_json(config | {"dtype": "float32"})})


def vae_with_scale(autoencoder: AutoencoderKL, *, quant_convs: bool, **factors: float) -> AutoencoderKL:
    """The same autoencoder, as a family wants it: SDXL's has two 1 x 1 convolutions more, which change nothing here."""
    config = {**vae.CONFIG, "use_quant_conv": quant_convs, "use_post_quant_conv": quant_convs, **factors}
    copy = AutoencoderKL(**config)
    weights = dict(autoencoder.state_dict())
    if quant_convs:
        for name, width in (("quant_conv", 2 * vae.LATENTS), ("post_quant_conv", vae.LATENTS)):
            weights[f"{name}.weight"] = torch.eye(width)[:, :, None, None]
            weights[f"{name}.bias"] = torch.zeros(width)
    copy.load_state_dict(weights)
    return copy


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))
