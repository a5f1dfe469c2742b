"""FLUX.2 [klein]: Qwen3, read at three of its layers, and a rectified-flow transformer over 128-channel latents.

Conventions of the released pipeline (diffusers' Flux2KleinPipeline): the caption is a chat message with thinking off, padded
to 512 tokens, of which the transformer reads all, without a mask; latents are 2 x 2 patches, normalised by the VAE's stored
statistics; positions have four axes (image, row, column, text); the transformer takes t in [0, 1], and no guidance.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from trainer.base.errors import UserError
from trainer.base.protocols import Kernels
from trainer.base.types import Batch, Conditioning
from trainer.models import base, variants
from trainer.models.base import Markers, Model, SampleRequest, draw
from trainer.models.flux2 import names
from trainer.models.shared import flow, patched_vae, qwen
from trainer.models.shared.attention import JointAttention, Processor, Rotation, rotated
from trainer.objectives import Flow

BASE, DISTILLED = "base", "distilled"
GUIDANCE = {BASE: 4.0, DISTILLED: 1.0}
APART = 10  # distance of two images' numbers, on the first axis of positions
SIZES = {3072: "4b", 4096: "9b"}  # by the transformer's width


class ParallelAttention(Processor):
    """A processor for diffusers' `Flux2ParallelSelfAttention`, whose one projection gives query, key, value and both halves
    of the feed-forward."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotation | None = None,
    ) -> torch.Tensor:
        """[B, tokens, width] of text and image."""
        parts = [3 * attn.inner_dim, attn.mlp_mult_factor * attn.mlp_hidden_dim]
        attended, feed = attn.to_qkv_mlp_proj(hidden_states).split(parts, dim=-1)
        query, key, value = (part.unflatten(-1, (-1, attn.head_dim)) for part in attended.chunk(3, dim=-1))
        query, key = rotated(attn.norm_q(query), attn.norm_k(key), image_rotary_emb, self.kernels)
        out = self.attended(query, key, value, attention_mask)
        return attn.to_out(torch.cat([out, attn.mlp_act_fn(feed)], dim=-1))


def processor(layer: nn.Module, attend: Callable[..., torch.Tensor], kernels: Kernels) -> Processor:
    """The attention processor of a layer."""
    return (ParallelAttention if hasattr(layer, "to_qkv_mlp_proj") else JointAttention)(attend, kernels)


def objective(scheduler: Mapping[str, Any], markers: Markers, *, allow_distilled: bool = False, **choices: Any) -> Flow:
    """Uniform times without a shift by default; all others but "sigmoid" are shifted by the resolution."""
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
    """The variant of a file or repository, by the publisher's names; None if the name does not say."""
    if "klein" in name.lower() and re.search(r"(?<![a-z])base(?![a-z])", name.lower()):
        return BASE
    return DISTILLED if re.search(r"klein[-_ ]?[49]b(?![a-z])", name.lower()) else None


def tokens(model: Model, encoder: str, captions: Sequence[str]) -> Sequence[torch.Tensor]:
    """Each caption's ids and attention mask: int64 [2, L]."""
    tokenizer = model.tokenizers["tokenizer"]
    texts = [qwen.chat(tokenizer, caption, thinking=False) for caption in captions]
    batch = tokenizer(texts, padding="max_length", max_length=qwen.text_length(model), truncation=True, return_tensors="pt")
    return torch.stack([batch.input_ids, batch.attention_mask], dim=1).unbind()


def encode_text(model: Model, encoder: str, tokens: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Qwen3's hidden states after 9, 18 and 27 layers, side by side: "sequence" [B, L, 3 D], rows of padding included."""
    ids, present = torch.stack(list(tokens)).unbind(1)
    states = qwen.hidden_states(model, encoder, ids, present.bool())
    sequence = torch.cat([states[layer] for layer in names.LAYERS], dim=-1)
    return {"sequence": sequence.to(model.compute[encoder])}


def predict(model: Model, noised: torch.Tensor, time: torch.Tensor, conditioning: Conditioning, batch: Batch) -> torch.Tensor:
    """The predicted velocity, noise - latents: [B, 128, h, w]. References' tokens follow, as images 10, 20, ..."""
    (height, width), device = noised.shape[-2:], noised.device
    images = (noised, *batch.references)
    ids = [flow.positions(APART * index, *each.shape[-2:], 1, device=device) for index, each in enumerate(images)]
    tokens = model.modules["transformer"](
        hidden_states=torch.cat([each.to(noised).flatten(2).transpose(1, 2) for each in images], dim=1),
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
    pipeline = flow.pipeline(model, request, "Flux2KleinPipeline", is_distilled=kind == DISTILLED)
    embedded = {"prompt_embeds": conditioning.sequence, "negative_prompt_embeds": negative.sequence}
    return draw(pipeline, request, GUIDANCE[kind], image=list(request.images) or None, **embedded)


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
    """Keep the transformer's times exact, and leave out the text encoder's last norm."""
    if component == "transformer":
        flow.keep_time_exact(module, module.time_guidance_embed)
    qwen.leave_out_last_norm(component, module)


def published(tensors: set[str], variant: str | None = None) -> str:
    """The folder of embedded configs for a single file: klein 9B has 8 double blocks, 4B has 5."""
    eighth = re.compile(r"(^|\.)(double_blocks|transformer_blocks)\.7\.")
    return "flux2-klein-9b" if any(map(eighth.search, tensors)) else "flux2-klein-4b"


def metadata(config: dict, prediction: str) -> dict[str, str]:
    """The family's entries in an adapter file's metadata."""
    size = SIZES.get(config["num_attention_heads"] * config["attention_head_dim"], "4b")
    return flow.metadata(f"flux-2-klein-{size}", "black-forest-labs/flux2", "flux2", "networks.lora_flux_2")


_ATTENTION = ("*.attn.to_?", "*.attn.to_out.0", "*.attn.add_?_proj", "*.attn.to_add_out",
              "single_transformer_blocks.*.attn.to_qkv_mlp_proj", "single_transformer_blocks.*.attn.to_out")  # fmt: skip
_MLP = ("*.ff.linear_in", "*.ff.linear_out", "*.ff_context.linear_in", "*.ff_context.linear_out")
_OUTSIDE = ("x_embedder", "context_embedder", "time_guidance_embed.*", "norm_out.linear", "proj_out")  # outside the blocks
_MODULATION = ("*_modulation*.linear",)
_LINEAR = (*_ATTENTION, *_MLP, *_MODULATION, *_OUTSIDE)
_GATES = ("transformer.time_guidance_embed.*", "transformer.*_modulation*.linear")

FAMILY = base.Family(
    name="flux2",
    components=(
        qwen.component(names.LAYERS[-1]),
        flow.transformer("Flux2Transformer2DModel", names, (*_OUTSIDE, *_MODULATION)),
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
        blocks=("transformer_blocks.*", "single_transformer_blocks.*"), attention=processor,
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
