"""SDXL: two CLIP text encoders, a UNet, size and crop conditioning.

Conventions (Podell et al. 2023, arXiv 2307.01952, and the released pipeline): the sequence is `hidden_states[-2]` of both
encoders, concatenated; the pooled vector is the second encoder's projection; time ids are (original height, width, crop
top, left, target height, width) in pixels; a dropped caption is the encoding of the empty string. A caption beyond 75 tokens
is cut, or has further chunks (`data.clip_chunks`, shared/clip.py).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import nn

from trainer.base.errors import UserError
from trainer.base.protocols import Kernels
from trainer.base.types import Batch, Conditioning
from trainer.models import base, variants
from trainer.models.base import Markers, Model, SampleRequest, count_prompt_tokens, draw
from trainer.models.sdxl import names
from trainer.models.shared import clip, vae
from trainer.models.shared.attention import Processor, projected
from trainer.objectives import KEYS, Diffusion, Loss, Noise, Times, Weighting, from_choices

DEFAULT_GUIDANCE = 5.0
TOKENIZERS = {"tokenizer": "text_encoder", "tokenizer_2": "text_encoder_2"}
BETAS = {"num_train_timesteps": 1000, "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
# Schedulers that sample a DDPM by its betas: the model predicts the same for all of them.
SCHEDULERS = frozenset(
    f"{name}Scheduler"
    for name in (
        "DDIM", "DDIMParallel", "DDPM", "DDPMParallel", "DEISMultistep", "DPMSolverMultistep", "DPMSolverSDE",
        "DPMSolverSinglestep", "EulerAncestralDiscrete", "EulerDiscrete", "HeunDiscrete", "KDPM2AncestralDiscrete",
        "KDPM2Discrete", "LMSDiscrete", "PNDM", "SASolver", "UniPCMultistep",
    )
)  # fmt: skip
TIMESTEPS = ("uniform", "logit_normal", "power")
# By diffusers' name.
PREDICTIONS: dict[str, Literal["epsilon", "v"]] = {"epsilon": "epsilon", "v_prediction": "v"}
INPUTS = {
    5: "a model for depth maps (latents and depth)",
    8: "a model for editing images (latents and the image's, as InstructPix2Pix and CosXL-Edit)",
    9: "an inpainting model (latents, mask and the masked image's)",
}
TEXTS = {
    "cross_attention_dim": [("text_encoder", "hidden_size"), ("text_encoder_2", "hidden_size")],
    "projection_class_embeddings_input_dim": [("text_encoder_2", "projection_dim")]
    + [("unet", "addition_time_embed_dim")] * 6,
}


class BlockAttention(Processor):
    """A processor for diffusers' `Attention` between linear layers."""

    @classmethod
    def of(cls, layer: nn.Module, attend: Callable[..., torch.Tensor], kernels: Kernels) -> Self | None:
        """None for a layer with norms or a residual of its own."""
        more = ("group_norm", "spatial_norm", "norm_q", "norm_k", "norm_cross", "added_kv_proj_dim")
        has_more = layer.residual_connection or any(getattr(layer, name) is not None for name in more)
        return None if has_more else cls(attend, kernels)

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[B, tokens, width]. encoder_hidden_states: [B, keys, other width] to attend to; None: the tokens."""
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        batch, keys, _ = source.shape
        projections = attn.to_q(hidden_states), attn.to_k(source), attn.to_v(source)
        query, key, value = (each.view(batch, -1, attn.heads, each.shape[-1] // attn.heads) for each in projections)
        if attention_mask is not None:
            attention_mask = attn.prepare_attention_mask(attention_mask, keys, batch)
            attention_mask = attention_mask.view(batch, attn.heads, -1, attention_mask.shape[-1])
        return projected(attn, self.attended(query, key, value, attention_mask)) / attn.rescale_output_factor


def check_objective(scheduler: Mapping[str, Any], markers: Markers) -> None:
    """Refuse a model trained neither on epsilon nor on v over a DDPM's discrete steps."""
    if markers.edm is not None:
        raise UserError(f"{markers.edm}: an EDM model, whose objective is not trained here; use one of SDXL's own kind")
    variants.check_scheduler(scheduler, "sdxl", SCHEDULERS)
    prediction = scheduler.get("prediction_type") or "epsilon"
    if not isinstance(prediction, str) or prediction not in PREDICTIONS:
        raise UserError(
            f"the model's scheduler_config.json has prediction_type = {prediction!r}, which is not trained here; "
            f"use a model with {' or '.join(map(repr, PREDICTIONS))}"
        )
    for key, refused in (("use_flow_sigmas", True), ("timestep_type", "continuous")):
        if scheduler.get(key) == refused:
            raise UserError(
                f"the model's scheduler_config.json has {key} = {refused!r}: flow matching or EDM, which is not trained as "
                "sdxl; use a model of discrete steps"
            )


def objective(
    scheduler: Mapping[str, Any],
    markers: Markers,
    *,
    prediction: Literal["auto", "epsilon", "v"],
    zero_terminal_snr: Literal["auto"] | bool,
    timesteps: str = "auto",
    stratified: bool = False,
    **choices: Any,
) -> Diffusion:
    """Epsilon or v: by the choice, else by the marker tensors, else by the scheduler's config."""
    check_objective(scheduler, markers)
    if prediction == "auto":
        prediction = "v" if markers.v_prediction else PREDICTIONS[scheduler.get("prediction_type") or "epsilon"]
    if zero_terminal_snr == "auto":
        zero_terminal_snr = markers.zero_terminal_snr or bool(scheduler.get("rescale_betas_zero_snr"))
    return Diffusion.from_scheduler(
        scheduler,
        prediction=prediction,
        zero_terminal_snr=zero_terminal_snr,
        published=BETAS,
        weighting=from_choices(Weighting, choices),
        times=from_choices(Times, choices, timesteps=TIMESTEPS[0] if timesteps == "auto" else timesteps),
        loss=from_choices(Loss, choices),
        noise=from_choices(Noise, choices),
        stratified=stratified,
    )


def encode_images(model: Model, pixels: torch.Tensor) -> torch.Tensor:
    """Latents [B, 4, H/8, W/8] of pixels [B, 3, H, W] from -1 to 1: the posterior's mean, scaled."""
    module = model.modules["vae"]
    return vae.posterior_mean(module, pixels.to(model.device)) * module.config.scaling_factor


def tokens(model: Model, encoder: str, captions: Sequence[str]) -> Sequence[torch.Tensor]:
    """The ids of each caption, int64 [chunks, 77]; with weights fp32 [chunks, 2, 77]."""
    # Both tokenizers together decide how many chunks a caption has.
    tokenizers, chunks = [model.tokenizers[name] for name in TOKENIZERS], model.options.get("clip_chunks", 1)
    ids = clip.chunked_ids(tokenizers, captions, chunks, weighted=model.options.get("weighted_captions", False))
    return dict(zip(TOKENIZERS.values(), ids, strict=True))[encoder]


def encode_text(model: Model, encoder: str, tokens: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """One encoder's hidden states before its last layer, "sequence" [B, L, D]; of the second also "pooled" [B, P]. A weight
    multiplies its token's state, as in sd-scripts, and leaves the pooled vector."""
    rows, ids, weights = list(map(len, tokens)), torch.cat(list(tokens)), None
    if ids.dim() > 2:
        ids, weights = ids[:, 0].long(), ids[:, 1].unsqueeze(2)
    output = model.modules[encoder](ids, output_hidden_states=True)
    states = output.hidden_states[-2] if weights is None else output.hidden_states[-2] * weights
    part = {"sequence": clip.rows_joined(states.to(model.compute[encoder]), rows)}
    if encoder == "text_encoder_2":
        part["pooled"] = clip.first_rows(output.text_embeds, rows)
    return part


def join(parts: Sequence[Mapping[str, torch.Tensor]]) -> Conditioning:
    """Both encoders' features, side by side."""
    first, second = parts
    wide = torch.promote_types(first["sequence"].dtype, second["sequence"].dtype)
    return Conditioning(torch.cat([part["sequence"].to(wide) for part in parts], dim=-1), pooled=second["pooled"])


def count_tokens(model: Model, captions: Sequence[str]) -> dict[str, tuple[list[int], int]]:
    """(tokens of each caption, tokens that are read) by tokenizer; all chunks' start and end tokens count as two."""
    chunks = model.options.get("clip_chunks", 1)
    counts = count_prompt_tokens(model, captions)
    if model.options.get("weighted_captions"):
        for name, (_, length) in counts.items():
            counts[name] = [len(each) + 2 for each in clip.weighted_ids(model.tokenizers[name], captions)], length
    return {name: (tokens, chunks * (length - 2) + 2) for name, (tokens, length) in counts.items()}


def time_ids(batch: Batch) -> torch.Tensor:
    """fp32 [B, 6]."""
    return torch.cat([batch.original_size, batch.crop_top_left, batch.target_size], dim=1).float()


def predict(model: Model, noised: torch.Tensor, time: torch.Tensor, conditioning: Conditioning, batch: Batch) -> torch.Tensor:
    """The UNet's prediction, epsilon or v: [B, 4, h, w]."""
    added = {"text_embeds": conditioning.pooled, "time_ids": time_ids(batch)}
    return model.modules["unet"](noised, time, conditioning.sequence, added_cond_kwargs=added, return_dict=False)[0]


def sample(model: Model, request: SampleRequest, conditioning: Conditioning, negative: Conditioning):
    """An image by diffusers' own pipeline."""
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline

    objective: Diffusion = model.options["objective"]
    scheduler = EulerDiscreteScheduler.from_config(
        dict(model.scheduler),
        prediction_type="v_prediction" if objective.prediction == "v" else "epsilon",
        rescale_betas_zero_snr=objective.zero_terminal_snr,
        timestep_spacing="trailing" if objective.zero_terminal_snr else model.scheduler.get("timestep_spacing", "leading"),
    )
    parts = {"unet": model.modules["unet"], "vae": vae.for_size(model.modules["vae"], request.width, request.height)}
    absent = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    pipeline = StableDiffusionXLPipeline(scheduler=scheduler, **parts, **absent, add_watermarker=False)
    positive, opposite = clip.repeated([conditioning.sequence, negative.sequence]).chunk(2)
    embedded = {"prompt_embeds": positive, "pooled_prompt_embeds": conditioning.pooled}
    embedded |= {"negative_prompt_embeds": opposite, "negative_pooled_prompt_embeds": negative.pooled}
    return draw(pipeline, request, DEFAULT_GUIDANCE, **embedded)


def no_gradient(component: str, config: dict, references: bool) -> tuple[str, ...]:
    """The first encoder is read before its last layer, whose output goes nowhere; the second's pooled vector uses all."""
    return (f"*layers.{config['num_hidden_layers'] - 1}.*",) if component == "text_encoder" else ()


def metadata(config: dict, prediction: str) -> dict[str, str]:
    """The family's entries in an adapter file's metadata."""
    return {
        "modelspec.architecture": "stable-diffusion-xl-v1-base/lora",
        "modelspec.implementation": "https://github.com/Stability-AI/generative-models",
        "modelspec.prediction_type": prediction,
        "ss_base_model_version": "sdxl_base_v1-0",
        "ss_network_module": "networks.lora",
        "ss_v2": "False",
    }


_ATTENTION = ("*attn?.to_q", "*attn?.to_k", "*attn?.to_v", "*attn?.to_out.0")
_MLP = ("*.ff.net.0.proj", "*.ff.net.2")
_BOTH = (*_ATTENTION, *_MLP)
_LINEAR = (*_BOTH, "*.proj_in", "*.proj_out", "*.time_emb_proj", "time_embedding.*", "add_embedding.*")
_CONV = ("*.conv?", "*.conv_shortcut", "*samplers.0.conv", "conv_in", "conv_out")

FAMILY = base.Family(
    name="sdxl",
    components=(
        base.Component(
            "unet", "diffusers", "UNet2DConditionModel", "denoiser",
            sensitive=("conv_in", "conv_out", "time_embedding.*", "add_embedding.*"),
            names=names.unet_names, defaults=names.DEFAULTS, infer=names.infer_unet, prefixes=("model.diffusion_model.",),
        ),
        clip.component("conditioner.embedders.0.transformer.", clip.CLIP_DEFAULTS),
        base.Component(
            "text_encoder_2", "transformers", "CLIPTextModelWithProjection", "text_encoder",
            sensitive=("text_projection",), names=clip.open_clip_names,
            defaults=clip.OPEN_CLIP_DEFAULTS, infer=clip.infer_open_clip,
            prefixes=("conditioner.embedders.1.model.",), file="clip_g.safetensors", blocks=clip.BLOCKS,
        ),
        vae.component("first_stage_model.", "sdxl_vae.safetensors"),
    ),
    reads=(
        "model.prediction", "model.zero_terminal_snr", *KEYS, "objective.weighting", "objective.min_snr_gamma",
        "objective.p2_gamma", "objective.p2_k", "objective.noise_offset", "objective.multires_noise_iterations",
        "objective.multires_noise_discount", "validation.samples.*.negative", "data.clip_chunks",
        "data.weighted_captions",
    ),
    text=base.TextPart(tokens, encode_text, count_tokens, join, clip.collate),
    images=base.ImagePart(objective, encode_images, predict, sample, TIMESTEPS, size_multiple=8),
    files=base.FilePart(
        tokenizers=TOKENIZERS, input_layer="conv_in.weight", harmless=names.HARMLESS,
        published=lambda tensors, variant=None: "sdxl", hub_ids={"stabilityai/stable-diffusion-xl-base-1.0": "sdxl"},
        check=partial(variants.check_latents, denoiser="unet", fold=1, kinds=INPUTS, texts=TEXTS),
    ),
    memory=base.MemoryPart(
        blocks=("*resnets.*", "*.transformer_blocks.*"), block_order=names.block_order,
        unread=("*.ff.net.2", "*resnets.*.conv2", "*resnets.*.conv_shortcut"), clips=False,
        skipped=("*resnets.*",), compiled=("*.transformer_blocks.*",), attention=BlockAttention.of,
        shared_inputs={
            "unet": (("attn1.to_q", "attn1.to_k", "attn1.to_v"), ("attn2.to_k", "attn2.to_v")),
            "text_encoder": clip.SHARED_INPUTS, "text_encoder_2": clip.SHARED_INPUTS,
        },
    ),
    adapters=base.AdapterPart(
        presets={"attention": _ATTENTION, "attention+mlp": _BOTH, "linear": _LINEAR, "all": (*_LINEAR, *_CONV)},
        no_gradient=no_gradient,
        # The names in kohya's files are the original CLIP's, and those of transformers for the second one.
        kohya={"text_encoder": "lora_te1_text_model"}, key_styles=names.KEY_STYLES, metadata=metadata,
        # networks/lora.py: modules within Transformer2DModel, ResnetBlock2D and the two samplers, and within CLIP's layers.
        not_in_sd_scripts=(
            "unet.conv_in", "unet.conv_out", "unet.time_embedding.*", "unet.add_embedding.*",
            "text_encoder_2.text_projection",
        ),
    ),
)  # fmt: skip
