"""Flux (dev, schnell without guidance embedding, Kontext): CLIP and T5 text encoders, a rectified-flow transformer.

Conventions of the released pipelines: latents = (z - shift) * scale, packed 2 x 2; image ids are row and column, text ids
zero; no attention mask for T5; CLIP gives only the pooled vector; the transformer takes t in [0, 1]. Kontext's tensors are
dev's; it is shown a reference, whose tokens follow the noised ones, with a 1 on the first axis of their ids.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from trainer.base.errors import UserError
from trainer.base.types import Batch, Conditioning, ReferenceRule
from trainer.models import base, variants
from trainer.models.base import Markers, Model, SampleRequest, count_prompt_tokens, draw
from trainer.models.flux import names
from trainer.models.names import ComponentConfig
from trainer.models.shared import clip, flow, vae
from trainer.models.shared.attention import JointAttention
from trainer.objectives import Flow

DEFAULT_GUIDANCE, KONTEXT_GUIDANCE = 3.5, 2.5  # the latter from the examples of its pipeline
T5_LENGTH_DEV, T5_LENGTH_SCHNELL = 512, 256
DEV, SCHNELL, KONTEXT = "dev", "schnell", "kontext"
# (width, height): FluxKontextPipeline resizes a reference to the one of the nearest aspect ratio.
REFERENCE_SIZES = (
    (672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184), (944, 1104), (1024, 1024),
    (1104, 944), (1184, 880), (1248, 832), (1328, 800), (1392, 752), (1456, 720), (1504, 688), (1568, 672),
)  # fmt: skip
# Names of either model, and of models made from it without distillation, in lower case.
NAMED_DEV = re.compile(r"(?<![a-z])(flux)?[-_. \d]*dev(?![a-z])|dev2pro|de[-_ ]?distil|un[-_ ]?distil")
NAMED_SCHNELL = re.compile(r"schnell|libre[-_ ]?flux|open[-_ ]?flux")
INPUTS = {
    128: "a Control model (Canny or Depth: latents and the control image's)",
    384: "Flux Fill (latents, the masked image's and the mask)",
}
TEXTS = {"pooled_projection_dim": [("text_encoder", "hidden_size")], "joint_attention_dim": [("text_encoder_2", "d_model")]}


def objective(scheduler: ComponentConfig, markers: Markers, **choices: Any) -> Flow:
    """Shifted by the resolution, unless the times are "sigmoid" or a shift is given."""
    return flow.objective(scheduler, "flux", "logit_normal", **choices)


def distillation(name: str) -> str | None:
    """The variant that a model's name says it is, or is made of; None for neither, both, or Kontext."""
    if "kontext" in (name := name.lower()):
        return None
    dev = NAMED_DEV.search(name)
    if NAMED_SCHNELL.search(name):
        return None if dev and "distil" not in dev[0] else SCHNELL
    return DEV if dev else None


def follows(variant: str, options: Mapping[str, Any]) -> str:
    """The variant's effects, for people."""
    tokens = options.get("text_length") or (T5_LENGTH_SCHNELL if variant == SCHNELL else T5_LENGTH_DEV)
    return f"T5 reads up to {tokens} tokens of a caption (data.text_length), and adapter files say flux-1-{variant}"


def published(tensors: set[str], variant: str | None = SCHNELL) -> str:
    """The folder of embedded configs for a single file. dev alone has a guidance embedding."""
    guided = any("guidance_in." in name or "guidance_embedder." in name for name in tensors)
    return "flux-dev" if guided or variant != SCHNELL else "flux-schnell"


def t5_length(model: Model) -> int:
    """The tokens that T5 reads: data.text_length, else 512 (dev) or 256 (schnell). Raises UserError for too many."""
    length, longest = model.options.get("text_length"), model.tokenizers["tokenizer_2"].model_max_length
    if length and length > longest:
        raise UserError(f"data.text_length = {length} is more than the model's T5 tokenizer takes; use at most {longest}")
    dev = model.configs["transformer"].get("guidance_embeds", False) or model.options.get("distillation") in (DEV, KONTEXT)
    return min(length or (T5_LENGTH_DEV if dev else T5_LENGTH_SCHNELL), longest)


def tokens(model: Model, encoder: str, captions: Sequence[str]) -> Sequence[torch.Tensor]:
    """The ids of each caption, int64 [1, L]."""
    name, length = ("tokenizer", None) if encoder == "text_encoder" else ("tokenizer_2", t5_length(model))
    return clip.clip_ids(model.tokenizers[name], captions, length).split(1)


def encode_text(model: Model, encoder: str, tokens: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """One encoder's output for the captions: "pooled" [B, P] from CLIP, "sequence" [B, L, D] from T5."""
    output = model.modules[encoder](torch.cat(list(tokens)))
    if encoder == "text_encoder":
        return {"pooled": output.pooler_output.to(model.compute[encoder])}
    return {"sequence": output[0].to(model.compute[encoder])}


def count_tokens(model: Model, captions: Sequence[str]) -> dict[str, tuple[list[int], int]]:
    """(tokens of each caption, tokens that are read) by tokenizer."""
    counts = count_prompt_tokens(model, captions)
    return counts | {"tokenizer_2": (counts["tokenizer_2"][0], t5_length(model))}


def pack(latents: torch.Tensor) -> torch.Tensor:
    """[B, C, H, W] -> [B, (H/2)(W/2), 4C], each token a 2 x 2 patch, channel-major."""
    batch, channels, height, width = latents.shape
    patches = latents.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, (height // 2) * (width // 2), channels * 4)


def unpack(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The inverse of `pack` for latents of `height` x `width`."""
    batch, _, packed = tokens.shape
    patches = tokens.view(batch, height // 2, width // 2, packed // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(batch, packed // 4, height, width)


def predict(model: Model, noised: torch.Tensor, time: torch.Tensor, conditioning: Conditioning, batch: Batch) -> torch.Tensor:
    """The predicted velocity, noise - latents: [B, 16, h, w]. A reference's tokens follow the noised ones, as image 1."""
    transformer = model.modules["transformer"]
    height, width = noised.shape[-2:]
    guidance = None
    if transformer.config.guidance_embeds:
        guidance = torch.full((noised.shape[0],), float(model.options["guidance"]), device=noised.device)
    image_tokens, ids = pack(noised), flow.positions(0, height // 2, width // 2, device=noised.device)
    for index, reference in enumerate(batch.references, 1):
        its_ids = flow.positions(index, reference.shape[-2] // 2, reference.shape[-1] // 2, device=noised.device)
        image_tokens, ids = torch.cat([image_tokens, pack(reference.to(noised))], dim=1), torch.cat([ids, its_ids])
    tokens = transformer(
        hidden_states=image_tokens,
        encoder_hidden_states=conditioning.sequence,
        pooled_projections=conditioning.pooled,
        timestep=time,
        guidance=guidance,
        img_ids=ids,
        txt_ids=torch.zeros(conditioning.sequence.shape[1], 3, device=noised.device),
        return_dict=False,
    )[0]
    return unpack(tokens[:, : height * width // 4] if batch.references else tokens, height, width)


def arguments(variant: str | None, request: SampleRequest) -> dict[str, Any]:
    """Further arguments of the pipeline. Kontext's draws a million pixels unless it is given an area."""
    options = {} if request.cfg is None else {"true_cfg_scale": request.cfg}
    if variant != KONTEXT:
        return options
    options |= {"max_area": request.width * request.height}
    return options | ({"guidance_scale": KONTEXT_GUIDANCE} if request.guidance is None else {})


def sample(model: Model, request: SampleRequest, conditioning: Conditioning, negative: Conditioning):
    """An image by diffusers' own pipeline."""
    variant = model.options.get("distillation")
    options = arguments(variant, request)
    options |= {"prompt_embeds": conditioning.sequence, "pooled_prompt_embeds": conditioning.pooled}
    if request.cfg is not None:
        options |= {"negative_prompt_embeds": negative.sequence, "negative_pooled_prompt_embeds": negative.pooled}
    if variant == KONTEXT:
        options["image"] = list(request.images) or None
    name = "FluxKontextPipeline" if variant == KONTEXT else "FluxPipeline"
    pipeline = flow.pipeline(model, request, name, text_encoder_2=None, tokenizer_2=None)
    return draw(pipeline, request, options.pop("guidance_scale", DEFAULT_GUIDANCE), **options)


def metadata(config: dict, prediction: str) -> dict[str, str]:
    """The family's entries in an adapter file's metadata."""
    variant = config.get("_variant") or SCHNELL
    variant = DEV if config.get("guidance_embeds") and variant != KONTEXT else variant
    return flow.metadata(f"flux-1-{variant}", "black-forest-labs/flux", "flux1", "networks.lora_flux")


_ATTENTION = ("*.attn.to_?", "*.attn.to_out.0", "*.attn.add_?_proj", "*.attn.to_add_out")
_MLP = ("*.ff.net.0.proj", "*.ff.net.2", "*.ff_context.net.0.proj", "*.ff_context.net.2",
        "single_transformer_blocks.*.proj_mlp", "single_transformer_blocks.*.proj_out")  # fmt: skip
_OUTSIDE = ("x_embedder", "context_embedder", "time_text_embed.*", "norm_out.linear", "proj_out")  # outside the blocks
_LINEAR = (*_ATTENTION, *_MLP, "*.norm*.linear", *_OUTSIDE)

FAMILY = base.Family(
    name="flux",
    components=(
        # The prefixes are those of all-in-one files; a component's own file has none.
        clip.component("text_encoders.clip_l.transformer."),
        base.Component(
            "text_encoder_2", "transformers", "T5EncoderModel", "text_encoder",
            infer=names.infer_t5, prefixes=("text_encoders.t5xxl.transformer.",), file="t5xxl_fp16.safetensors",
            blocks=("encoder.block.*",),
        ),
        flow.transformer("FluxTransformer2DModel", names, _OUTSIDE),
        vae.component("vae.", "ae.safetensors"),
    ),
    reads=(*flow.READS, "objective.guidance", "data.text_length", "data.sources.*.references",
           "validation.samples.*.references", "validation.samples.*.negative", "validation.samples.*.cfg"),
    text=base.TextPart(tokens, encode_text, count_tokens),
    images=base.ImagePart(
        objective, vae.encode_images, predict, sample, flow.TIMESTEPS, arguments=arguments,
        references=ReferenceRule(REFERENCE_SIZES, most=1),
        adjust=lambda name, module: flow.keep_time_exact(module, module.time_text_embed) if name == "transformer" else None,
    ),
    files=base.FilePart(
        tokenizers={"tokenizer": "text_encoder", "tokenizer_2": "text_encoder_2"},
        input_layer="x_embedder.weight", harmless=names.HARMLESS, published=published,
        check=partial(variants.check_latents, fold=4, kinds=INPUTS, texts=TEXTS, shifted=True),
        hub_ids={"black-forest-labs/FLUX.1-dev": "flux-dev", "black-forest-labs/FLUX.1-schnell": "flux-schnell"},
    ),
    variants=base.VariantPart(
        (DEV, SCHNELL), distillation, lambda config: DEV if config.get("guidance_embeds") else None, SCHNELL, follows,
        editing=KONTEXT, editing_pipeline="FluxKontextPipeline",
    ),
    memory=base.MemoryPart(
        blocks=("transformer_blocks.*", "single_transformer_blocks.*"), attention=JointAttention.of,
        unread=("*.ff.net.2", "*.ff_context.net.2", "single_transformer_blocks.*.proj_out"),
        gates=("text_encoder.*", "transformer.time_text_embed.*", "transformer.*.norm*.linear"),
        shared_inputs={
            "transformer": (
                ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),  # of a single block, whose parts start from one norm
                ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
            ),
            "text_encoder": clip.SHARED_INPUTS,
            "text_encoder_2": (("SelfAttention.q", "SelfAttention.k", "SelfAttention.v"), ("wi_0", "wi_1")),
        },
    ),
    adapters=base.AdapterPart(
        presets={"attention": _ATTENTION, "attention+mlp": (*_ATTENTION, *_MLP), "linear": _LINEAR, "all": _LINEAR},
        kohya={"text_encoder": "lora_te1_text_model", "text_encoder_2": "lora_te3"}, key_styles=names.KEY_STYLES,
        # networks/lora_flux.py: modules within the two kinds of blocks, the embedders, and the layers of CLIP and T5.
        not_in_sd_scripts=("transformer.norm_out.*", "transformer.proj_out"), metadata=metadata,
    ),
)  # fmt: skip
