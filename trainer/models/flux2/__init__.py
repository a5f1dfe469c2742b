"""FLUX.2 [klein]: Qwen3, read at three of its layers, and a rectified-flow transformer over 128-channel latents.

Conventions of the released pipeline (diffusers' Flux2KleinPipeline): the caption is a chat message with thinking off, padded
to 512 tokens, of which the transformer reads all, without a mask; latents are 2 x 2 patches, normalised by the VAE's stored
statistics; positions have four axes (image, row, column, text); the transformer takes t in [0, 1], and no guidance.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from trainer.base.errors import UserError
from trainer.base.types import Batch, Conditioning
from trainer.models import base, variants
from trainer.models.base import Markers, Model, SampleRequest, draw
from trainer.models.flux2 import attention, names
from trainer.models.shared import flow, patched_vae, qwen
from trainer.objectives import Flow

BASE, DISTILLED = "base", "distilled"
GUIDANCE = {BASE: 4.0, DISTILLED: 1.0}
APART = 10  # between the numbers of two images, on the first axis of positions
SIZES = {3072: "4b", 4096: "9b"}  # by the transformer's width


def objective(scheduler: Mapping[str, Any], markers: Markers, *, allow_distilled: bool = False, **choices: Any) -> Flow:
    """Uniform times without a shift, if not asked otherwise; all others but "sigmoid" are shifted by the resolution."""
    if markers.distillation is None:
        raise UserError(
            "neither this FLUX.2 klein's model_index.json (is_distilled) nor its name says whether it is the base model or "
            f"the distilled one; set model.variant = {BASE!r} or {DISTILLED!r}"
        )
    if markers.distillation == DISTILLED and not allow_distilled:
        raise UserError(
            "this FLUX.2 klein is the distilled model (4 steps, no guidance), and training it collapses: images turn grey or "
            "alike. Train on FLUX.2-klein-base, or over an adapter that undoes it (adapter.under). Where its name is wrong, "
            "set model.variant = 'base'; model.allow_distilled = true trains it all the same"
        )
    return flow.objective(scheduler, "flux2", "uniform", unshifted=("uniform", "sigmoid"), **choices)


def distillation(name: str) -> str | None:
    """The one that a file or repository of this name is, as the publisher names them; None where the name does not say."""
    if "klein" in name.lower() and re.search(r"(?<![a-z])base(?![a-z])", name.lower()):
        return BASE
    return DISTILLED if re.search(r"klein[-_ ]?[49]b(?![a-z])", name.lower()) else None


def tokens(model: Model, encoder: str, captions: Sequence[str]) -> Sequence[torch.Tensor]:
    """The ids of each caption, and which of them are no padding: int64 [2, L]."""
    tokenizer = model.tokenizers["tokenizer"]
    texts = [qwen.chat(tokenizer, caption, thinking=False) for caption in captions]
    read = tokenizer(texts, padding="max_length", max_length=qwen.text_length(model), truncation=True, return_tensors="pt")
    return torch.stack([read.input_ids, read.attention_mask], dim=1).unbind()


def encode_text(model: Model, encoder: str, tokens: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What Qwen3 has after 9, 18 and 27 of its layers, side by side: "sequence" [B, L, 3 D]. Rows of padding are read."""
    ids, present = torch.stack(list(tokens)).unbind(1)
    states = qwen.hidden_states(model, encoder, ids, present.bool())
    sequence = torch.cat([states[layer] for layer in names.LAYERS], dim=-1)
    return {"sequence": sequence.to(model.compute[encoder])}


def predict(model: Model, noised: torch.Tensor, time: torch.Tensor, conditioning: Conditioning, batch: Batch) -> torch.Tensor:
    """The predicted velocity, noise - latents: [B, 128, h, w]. References follow the noised tokens, as images 10, 20, ..."""
    (height, width), device = noised.shape[-2:], noised.device
    shown = (noised, *batch.references)
    ids = [flow.positions(APART * index, *each.shape[-2:], 1, device=device) for index, each in enumerate(shown)]
    tokens = model.modules["transformer"](
        hidden_states=torch.cat([each.to(noised).flatten(2).transpose(1, 2) for each in shown], dim=1),
        encoder_hidden_states=conditioning.sequence,
        timestep=time,
        img_ids=torch.cat(ids),
        txt_ids=flow.positions(0, 1, 1, conditioning.sequence.shape[1], device=device),
        return_dict=False,
    )[0]
    return tokens[:, : height * width].transpose(1, 2).unflatten(2, (height, width))


def sample(model: Model, request: SampleRequest, conditioning: Conditioning, negative: Conditioning):
    """An image by diffusers' own pipeline."""
    kind = model.options.get("distillation") or BASE
    drawing = flow.pipeline(model, request, "Flux2KleinPipeline", is_distilled=kind == DISTILLED)
    embedded = {"prompt_embeds": conditioning.sequence, "negative_prompt_embeds": negative.sequence}
    return draw(drawing, request, GUIDANCE[kind], image=list(request.images) or None, **embedded)


def check(configs: Mapping[str, Mapping[str, Any]], inputs: int) -> None:
    """Refuse FLUX.2 [dev], a text encoder that is too short, and parts that do not belong together."""
    if configs["transformer"].get("guidance_embeds"):
        raise UserError(
            "the transformer's config.json has guidance_embeds = true: it is FLUX.2 [dev], which is not trained here; use "
            "FLUX.2 [klein]"
        )
    qwen.check_depth(configs["text_encoder"], names.LAYERS[-1], f"layers {', '.join(map(str, names.LAYERS))}")
    texts = {"joint_attention_dim": [("text_encoder", "hidden_size")] * len(names.LAYERS)}
    variants.check_latents(configs, inputs, fold=4, texts=texts)


def adjust(component: str, module: nn.Module) -> None:
    """Keep the transformer's times exact, and Qwen3's last layer that is read without the norm that follows all of them."""
    if component == "transformer":
        flow.keep_time_exact(module, module.time_guidance_embed)
    elif component == "text_encoder":
        module.norm = nn.Identity()


def published(tensors: set[str], variant: str | None = None) -> str:
    """The folder of embedded configs for a file: klein 9B has 8 double blocks, 4B has 5."""
    eighth = re.compile(r"(^|\.)(double_blocks|transformer_blocks)\.7\.")
    return "flux2-klein-9b" if any(map(eighth.search, tensors)) else "flux2-klein-4b"


def metadata(config: dict, prediction: str) -> dict[str, str]:
    """What adapter files say of the family."""
    size = SIZES.get(config["num_attention_heads"] * config["attention_head_dim"], "4b")
    return flow.metadata(f"flux-2-klein-{size}", "black-forest-labs/flux2", "flux2", "networks.lora_flux_2")


_ATTENTION = ("*.attn.to_?", "*.attn.to_out.0", "*.attn.add_?_proj", "*.attn.to_add_out",
              "single_transformer_blocks.*.attn.to_qkv_mlp_proj", "single_transformer_blocks.*.attn.to_out")  # fmt: skip
_MLP = ("*.ff.linear_in", "*.ff.linear_out", "*.ff_context.linear_in", "*.ff_context.linear_out")
_OUTSIDE = ("x_embedder", "context_embedder", "time_guidance_embed.*", "norm_out.linear", "proj_out")  # of the blocks
_MODULATION = ("*_modulation*.linear",)
_LINEAR = (*_ATTENTION, *_MLP, *_MODULATION, *_OUTSIDE)
_GATES = ("transformer.time_guidance_embed.*", "transformer.*_modulation*.linear")

FAMILY = base.Family(
    name="flux2",
    components=(
        qwen.component(names.LAYERS[-1]),
        base.Component(
            "transformer", "diffusers", "Flux2Transformer2DModel", "denoiser",
            sensitive=(*_OUTSIDE, *_MODULATION), names=names.transformer_names, defaults=names.DEFAULTS,
            infer=names.infer_transformer, prefixes=("model.diffusion_model.",),
        ),
        patched_vae.COMPONENT,
    ),
    reads=(*flow.READS, "data.text_length", "model.allow_distilled", "validation.samples.*.negative",
           "data.sources.*.references", "validation.samples.*.references"),
    text=base.TextPart(tokens, encode_text, partial(qwen.count_tokens, thinking=False)),
    images=base.ImagePart(
        objective, patched_vae.encode_images, predict, sample, flow.beginning_with("uniform"), latent_side=16, adjust=adjust,
        negative_text=False,
    ),
    files=base.FilePart(
        chat_templates=("tokenizer",), input_layer="x_embedder.weight", check=check,
        harmless=names.HARMLESS, published=published,
        hub_ids={
            f"black-forest-labs/FLUX.2-klein-{kind}{size.upper()}": f"flux2-klein-{size}"
            for size in SIZES.values() for kind in ("base-", "")
        },
    ),
    variants=base.VariantPart((BASE, DISTILLED), distillation),
    memory=base.MemoryPart(
        blocks=("transformer_blocks.*", "single_transformer_blocks.*"), attention=attention.processor,
        unread=("*.ff.linear_out", "*.ff_context.linear_out", "single_transformer_blocks.*.attn.to_out"),
        gates=_GATES,
        shared_inputs={
            "transformer": (
                ("attn.to_q", "attn.to_k", "attn.to_v"), ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
            ),
            "text_encoder": qwen.SHARED_INPUTS,
        },
        no_fp16={"transformer": "its activations leave the range of fp16, and NaN is reported (musubi-tuner #897)"},
    ),
    adapters=base.AdapterPart(
        presets={"attention": _ATTENTION, "attention+mlp": (*_ATTENTION, *_MLP), "linear": _LINEAR, "all": _LINEAR},
        kohya={"text_encoder": qwen.prefix}, peft={"text_encoder": "model."}, key_styles=qwen.KEY_STYLES,
        metadata=metadata, in_diffusers=("lora", "dora", "lokr"), not_behind_lycoris=_GATES,
    ),
)  # fmt: skip
