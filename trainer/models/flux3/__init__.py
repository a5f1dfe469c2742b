"""FLUX.3 [klein]: the language model of Qwen3-VL, read at eight of its layers, and a rectified-flow transformer whose kinds
of tokens have blocks of their own before those that all share.

Conventions of the released pipeline (diffusers' Flux3ModularPipeline): the caption is a chat message, padded to a multiple of
80 tokens, of which the transformer reads all, without a mask; latents are FLUX.2's; rows and columns count half; text and
references are at time 0; the transformer takes t in [0, 1], and no guidance.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from trainer.base.errors import UserError
from trainer.base.types import Batch, Conditioning, ReferenceRule
from trainer.models import base, variants
from trainer.models.base import Markers, Model, SampleRequest
from trainer.models.flux3 import names
from trainer.models.names import ComponentConfig
from trainer.models.shared import flow, patched_vae, qwen
from trainer.models.shared.attention import Processor, Rotation, projected, rotated
from trainer.objectives import Flow

GUIDANCE = 3.5
HALF = 0.5  # factor of the positions of rows and columns of latents
WINDOW, LONGEST = 80, 8192  # tokens: a caption is padded to a multiple of the first; the most that are read
PADDING_AT = 1  # the position of padding in Qwen3-VL: transformers 4.57 gave it this one when the model was trained
MOST_REFERENCES = 10
# The pipeline makes its scheduler itself, so that a folder need not have one.
SCHEDULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 6.93}


class PreciseAttention(Processor):
    """A processor for diffusers' `Flux3Attention`: queries and keys are normed and turned in fp32, and rounded once."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotation | None = None,
    ) -> torch.Tensor:
        """[B, tokens, width]."""
        projections = (attn.to_q, attn.to_k, attn.to_v)
        query, key, value = (project(hidden_states).unflatten(-1, (attn.heads, -1)) for project in projections)
        query, key = attn.norm_q(query.float()), attn.norm_k(key.float())
        query, key = rotated(query, key, image_rotary_emb, self.kernels)
        return projected(attn, self.attended(query.to(value.dtype), key.to(value.dtype), value, attention_mask))


def objective(scheduler: Mapping[str, Any], markers: Markers, **choices: Any) -> Flow:
    """Times of a sigmoid without a shift by default; all others are shifted as the model's scheduler shifts."""
    return flow.objective(scheduler, "flux3", "sigmoid", scheduled=True, **choices)


def rows(count: int) -> int:
    """The rows of a caption of so many tokens: its window."""
    return min(-(-count // WINDOW) * WINDOW, LONGEST)


def text_length(model: Model) -> int:
    """The tokens read of a caption: data.text_length, else 8192, as in the pipeline. Raises UserError for more."""
    if (length := model.options.get("text_length") or LONGEST) > LONGEST:
        raise UserError(f"data.text_length = {length} is more than FLUX.3 takes; use at most {LONGEST}")
    return length


def encode_text(model: Model, encoder: str, tokens: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Qwen3-VL's hidden states after 4, 8, ..., 32 layers, side by side: "sequence" [B, L, 8 D]. Each caption is read alone,
    in its own window, as the pipeline reads it; behind a shorter window are zeros, which nothing reads."""
    alone = [_window(model, encoder, ids) for ids in tokens]
    longest = max(each.shape[1] for each in alone)
    sequence = torch.cat([pad(each, (0, 0, 0, longest - each.shape[1])) for each in alone])
    return {"sequence": sequence.to(model.compute[encoder])}


def _window(model: Model, encoder: str, ids: torch.Tensor) -> torch.Tensor:
    """The hidden states [1, L, 8 D] of one caption's ids."""
    absent = rows(len(ids)) - len(ids)
    padded = pad(ids, (0, absent), value=model.tokenizers["tokenizer"].pad_token_id)[None]
    present = pad(torch.ones_like(ids, dtype=torch.bool), (0, absent))[None]
    places = pad(torch.arange(len(ids), device=ids.device), (0, absent), value=PADDING_AT)[None]
    states = qwen.hidden_states(model, encoder, padded, present, places)
    return torch.cat([states[layer] for layer in names.LAYERS], dim=-1)


def positions(latents: torch.Tensor, image: int) -> torch.Tensor:
    """fp32 [h * w, 4] of latents [B, C, h, w]: (0, row / 2, column / 2, image) of every token of an image."""
    ids = flow.positions(0, *latents.shape[-2:], 1, device=latents.device)
    ids[:, 1:3] *= HALF
    ids[:, 3] = image
    return ids


def text_positions(count: int, device: torch.device) -> torch.Tensor:
    """fp32 [count, 4]: (0, 0, 0, place) of every token of a caption."""
    return pad(torch.arange(count, device=device).float()[:, None], (3, 0))


def predict(model: Model, noised: torch.Tensor, time: torch.Tensor, conditioning: Conditioning, batch: Batch) -> torch.Tensor:
    """The predicted velocity, noise - latents: [B, 128, h, w]."""
    return velocity(model, noised, time, conditioning, [each.to(noised) for each in batch.references])


def velocity(
    model: Model, noised: torch.Tensor, time: torch.Tensor, conditioning: Conditioning, references: Sequence[torch.Tensor]
) -> torch.Tensor:
    """`predict` with the references' latents (images -1, -2, ...). Captions of one window go through together."""
    options = {}
    if references:
        options["image_cond_ids"] = torch.cat([positions(each, -number) for number, each in enumerate(references, 1)])

    def forward(length: int, pick: flow.Pick) -> torch.Tensor:
        if references:
            options["image_cond_hidden_states"] = torch.cat([_packed(pick(each)) for each in references], dim=1)
        return model.modules["transformer"](
            hidden_states=_packed(pick(noised)),
            encoder_hidden_states=pick(conditioning.sequence)[:, :length],
            timestep=pick(time),
            img_ids=positions(noised, 0),
            txt_ids=text_positions(length, noised.device),
            return_dict=False,
            **options,
        )[0]

    return flow.by_length(conditioning, forward).transpose(1, 2).unflatten(2, noised.shape[-2:])


def _packed(latents: torch.Tensor) -> torch.Tensor:
    """[B, C, h, w] -> [B, h * w, C]."""
    return latents.flatten(2).transpose(1, 2)


def sample(model: Model, request: SampleRequest, conditioning: Conditioning, negative: Conditioning):
    """An image as by diffusers' modular pipeline without its prompt upsampler. The pipeline's own blocks would compute in the
    dtype of a weight."""
    import numpy as np
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.modular_pipelines.flux3.image_processor import Flux3ImageProcessor

    processor, scheduler = Flux3ImageProcessor(), FlowMatchEulerDiscreteScheduler.from_config(dict(model.scheduler))
    mode = "fill" if len(request.images) == 1 else "crop"
    images = (processor.preprocess(image, resize_mode=mode)[0] for image in request.images)
    references = [patched_vae.encode_images(model, image) for image in images]
    size = (model.configs["transformer"]["in_channels"], request.height // 16, request.width // 16)
    latents = torch.randn(1, *size, generator=torch.Generator("cpu").manual_seed(request.seed)).to(model.device)
    guidance = GUIDANCE if request.guidance is None else request.guidance
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / request.steps, request.steps), device=model.device)
    scheduler.set_begin_index(0)
    for time in scheduler.timesteps:
        t = (time / 1000).expand(1)
        predicted = velocity(model, latents, t, conditioning, references)
        if guidance != 1:
            unguided = velocity(model, latents, t, negative, references)
            predicted = unguided + guidance * (predicted - unguided)
        latents = scheduler.step(predicted, time, latents, return_dict=False)[0]
    return processor.postprocess(patched_vae.decode(model, latents))[0]


def check(configs: Mapping[str, Mapping[str, Any]], inputs: int) -> None:
    """Refuse the distilled model, a text encoder that is too short, and parts that do not belong together."""
    if configs["transformer"].get("flow_map"):
        raise UserError(
            "the transformer is that of the distilled FLUX.3 klein (flow_map = true): it learned where each step lands "
            "(target_timestep), for which there is no objective here; train on flux-3-image-klein-base"
        )
    qwen.check_depth(configs["text_encoder"], names.LAYERS[-1], f"layers {', '.join(map(str, names.LAYERS))}", "Qwen3-VL")
    texts = {"joint_attention_dim": [("text_encoder", "hidden_size")] * len(names.LAYERS)}
    variants.check_latents(configs, inputs, fold=4, texts=texts)


def no_gradient(component: str, config: ComponentConfig, references: bool) -> tuple[str, ...]:
    """The layers that references alone pass through, if there are none."""
    return () if references or component != "transformer" else (f"*.{names.REFERENCES}", f"*.{names.REFERENCES}.*")


_ATTENTION = ("*.attn.to_?", "*.attn.to_out.0")
_MLP = ("*.ff.linear_in", "*.ff.linear_out")
_OUTSIDE = ("x_embedders.*", "context_embedder", "timestep_embedder.*", "norm_out.linear", "proj_out")  # outside the blocks
_MODULATION = ("*_stream_modulations.*.linear",)
_LINEAR = (*_ATTENTION, *_MLP, *_MODULATION, *_OUTSIDE)

FAMILY = base.Family(
    name="flux3",
    components=(
        qwen.vision_component(names.LAYERS[-1]),
        flow.transformer("Flux3Transformer2DModel", names, (*_OUTSIDE, *_MODULATION)),
        patched_vae.COMPONENT,
    ),
    reads=(*flow.READS, "data.text_length", "validation.samples.*.negative",
           "data.sources.*.references", "validation.samples.*.references"),
    text=base.TextPart(
        partial(qwen.tokens, length=text_length), encode_text, partial(qwen.count_tokens, length=text_length),
        collate=flow.collate, rows=rows,
    ),
    images=base.ImagePart(
        objective, patched_vae.encode_images, predict, sample, flow.beginning_with("sigmoid"), latent_side=16,
        adjust=qwen.leave_out_last_norm,
        references=ReferenceRule(most=MOST_REFERENCES, whole=True), modular="Flux3AutoBlocks",
    ),
    files=base.FilePart(
        chat_templates=("tokenizer",), input_layer="x_embedders.image.weight", check=check, harmless=names.HARMLESS,
        published=lambda tensors, variant=None: "flux3-klein-base", scheduler=SCHEDULER,
        hub_ids={"black-forest-labs/flux-3-image-klein-base": "flux3-klein-base"},
    ),
    memory=base.MemoryPart(
        blocks=("txt_mode_blocks.*", "mode_blocks.*", "single_transformer_blocks.*"),
        block_order=lambda name: ("txt", "mode", "single").index(name.partition("_")[0]), attention=PreciseAttention.of,
        unread=("*.attn.to_out.0", "*.ff.linear_out"), clips=False,
        gates=("transformer.timestep_embedder.*", "transformer.*_stream_modulations.*.linear"),
        shared_inputs={
            "transformer": (("attn.to_q", "attn.to_k", "attn.to_v", "ff.linear_in"),), "text_encoder": qwen.SHARED_INPUTS,
        },
    ),
    adapters=base.AdapterPart(
        presets={"attention": _ATTENTION, "attention+mlp": (*_ATTENTION, *_MLP), "linear": _LINEAR, "all": _LINEAR},
        no_gradient=no_gradient, kohya={"text_encoder": lambda config: qwen.VISION_PREFIX},
        peft={"text_encoder": "model.language_model."},
        key_styles=(
            base.KeyStyle("ComfyUI generic", "text_encoder", qwen.VISION_PREFIX),
            base.KeyStyle("PEFT of a whole Qwen3-VL", "text_encoder", "base_model.model.model.language_model."),
        ),
        metadata=lambda config, prediction: flow.metadata(
            "flux-3-image-klein", "black-forest-labs/flux-3-image-klein", "flux3"
        ),
    ),
)  # fmt: skip
