"""Z-Image: Qwen3, read before its last layer, and a rectified-flow transformer with one stream of image and caption.

Conventions of the released pipeline (diffusers' ZImagePipeline): the caption is a chat message with thinking on, of which the
transformer reads the tokens there are, padded to a multiple of 32 by a learned token; latents are Flux's; the caption stands
behind the image, and its padded length moves the image's positions; the transformer takes 1 - t, and gives the negated
velocity.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad, rms_norm, scaled_dot_product_attention

from trainer.base.errors import UserError
from trainer.base.types import Batch, Conditioning
from trainer.kernels import dora_torch
from trainer.models import base, variants
from trainer.models.base import Markers, Model, SampleRequest, draw
from trainer.models.shared import flow, qwen, vae
from trainer.models.shared.attention import Processor, projected, rotated
from trainer.models.zimage import names
from trainer.objectives import Flow

READ = 35  # Qwen3's hidden states after so many layers are read
BASE, DISTILLED = "base", "turbo"
GUIDANCE = {BASE: 4.0, DISTILLED: 0.0}  # added to the prediction with the caption; 0 leaves it alone
SHIFT = {3.0: DISTILLED, 6.0: BASE}  # the published schedulers'


class SelfAttention(Processor):
    """A processor for the attention of diffusers' `ZImageTransformerBlock`."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        freqs_cis: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[B, tokens, width]. freqs_cis: fp32 [B, tokens, 2, size], as `Angles` gives them. attention_mask: bool
        [B, tokens], for captions that differ in length."""
        shape = (*hidden_states.shape[:2], attn.heads, -1)
        query, key, value = (project(hidden_states).view(shape) for project in (attn.to_q, attn.to_k, attn.to_v))
        query, key = attn.norm_q(query), attn.norm_k(key)
        if freqs_cis is not None:
            # Each caption's length moves its image's positions: all captions' tokens become one row, with their own angles.
            rows = query.flatten(0, 1)[None], key.flatten(0, 1)[None]
            turned = rotated(*rows, freqs_cis.flatten(0, 1).unbind(1), self.kernels)
            query, key = (each.view(shape) for each in turned)
        mask = None if attention_mask is None else attention_mask[:, None, None, :]
        return projected(attn, self.attended(query, key, value, mask))


class Angles:
    """Cosines and sines of positions in place of complex numbers, which neither our kernels nor compilers take.

    rope: diffusers' `RopeEmbedder`.
    """

    def __init__(self, rope: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.rope = rope

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """fp32 [tokens, 2, size] of positions [tokens, 3]."""
        return torch.view_as_real(self.rope(ids)).transpose(1, 2).repeat_interleave(2, dim=2)


def objective(scheduler: Mapping[str, Any], markers: Markers, *, allow_distilled: bool = False, **choices: Any) -> Flow:
    """Times of a sigmoid without a shift by default; all others are shifted as the model's scheduler shifts."""
    if markers.distillation is None:
        raise UserError(
            "no name says whether this Z-Image is the base model or Turbo, the distilled one; set model.variant = "
            f"{BASE!r} or {DISTILLED!r}"
        )
    turbo = SHIFT.get(scheduler.get("shift")) == DISTILLED
    if not allow_distilled and (turbo or markers.distillation == DISTILLED):
        source = "its name or model.variant" if markers.distillation == DISTILLED else "its scheduler's shift, 3,"
        raise UserError(
            f"this Z-Image is Turbo, the distilled model (8 steps, no guidance), as {source} says: trained as it is, it "
            "loses that and blurs. Train on Z-Image, the base model, or over an adapter that undoes it (adapter.under); "
            "model.allow_distilled = true trains it all the same, and what was made of Turbo without distillation (De-Turbo)"
        )
    return flow.objective(scheduler, "zimage", "sigmoid", scheduled=True, **choices)


def distillation(name: str) -> str | None:
    """The variant of a file or repository, by its name; None if the name does not say."""
    name = name.lower().rpartition("/")[2]
    if re.search(r"de[-_ ]?turbo|de[-_ ]?distil|un[-_ ]?distil|z[-_ ]?image[-_ ]?base|(?<![a-z])zib(?![a-z])", name):
        return BASE
    if re.search(r"(?<![a-z])(turbo|zit)(?![a-z])", name):
        return DISTILLED
    return BASE if re.fullmatch(r"z[-_ ]?image([-_ ](bf16|fp32|fp8)\w*)?", name) else None


def rows(count: int) -> int:
    """The rows of a caption of so many tokens: padded to a multiple of 32."""
    return -(-count // names.MULTIPLE) * names.MULTIPLE


def encode_text(model: Model, encoder: str, tokens: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Qwen3's hidden states before its last layer: "sequence" [B, L, D], padded to a multiple of 32, and "mask" bool [B, L],
    False for padding. Qwen3 reads as many rows as in the pipeline, whatever the captions' lengths."""
    length = rows(qwen.text_length(model))
    ids = torch.stack([pad(each, (0, length - len(each))) for each in tokens])
    present = torch.stack([pad(torch.ones_like(each, dtype=torch.bool), (0, length - len(each))) for each in tokens])
    sequence = qwen.hidden_states(model, encoder, ids, present)[READ]
    longest = rows(max(map(len, tokens)))
    return {"sequence": sequence[:, :longest].to(model.compute[encoder]), "mask": present[:, :longest]}


@contextmanager
def padded(transformer: nn.Module, *masks: torch.Tensor) -> Iterator[None]:
    """A block in which the transformer replaces the captions' padding by its learned token. masks: bool, False for padding,
    of the captions in their order; a forward may take the first of them alone."""
    absent = ~torch.cat([mask.flatten() for mask in masks])[:, None]

    def replace_padding(module: nn.Module, args: Any, embedded: torch.Tensor) -> torch.Tensor:
        return torch.where(absent[: len(embedded)], transformer.cap_pad_token.to(embedded.dtype), embedded)

    hook = transformer.cap_embedder.register_forward_hook(replace_padding)
    try:
        yield
    finally:
        hook.remove()


def predict(model: Model, noised: torch.Tensor, time: torch.Tensor, conditioning: Conditioning, batch: Batch) -> torch.Tensor:
    """The predicted velocity, noise - latents: [B, 16, h, w]. Captions of one padded length go through the transformer
    together: others beside them would need a mask, and change their last bits."""
    transformer = model.modules["transformer"]

    def forward(length: int, pick: flow.Pick) -> Sequence[torch.Tensor]:
        text, mask = pick(conditioning.sequence)[:, :length], pick(conditioning.mask)[:, :length]
        with padded(transformer, mask):
            images, texts = list(pick(noised).unsqueeze(2)), list(text)
            return transformer(images, 1 - pick(time), texts, return_dict=False)[0]

    return -flow.by_length(conditioning, forward).squeeze(2)


def sample(model: Model, request: SampleRequest, conditioning: Conditioning, negative: Conditioning):
    """An image by diffusers' own pipeline."""
    embedded = {"prompt_embeds": list(conditioning.sequence), "negative_prompt_embeds": list(negative.sequence)}
    guidance = GUIDANCE[model.options.get("distillation") or BASE]
    with padded(model.modules["transformer"], conditioning.mask, negative.mask):
        # A truncation at 1, the default, truncates nothing, and reads the times for it.
        return draw(flow.pipeline(model, request, "ZImagePipeline"), request, guidance, cfg_truncation=None, **embedded)


def check(configs: Mapping[str, Mapping[str, Any]], inputs: int) -> None:
    """Refuse Z-Image-Omni, a text encoder that is too short, and parts that do not belong together."""
    if size := configs["transformer"].get("siglip_feat_dim"):
        raise UserError(
            f"the transformer's config.json has siglip_feat_dim = {size}: it is Z-Image-Omni, which is not trained here; use "
            "Z-Image"
        )
    qwen.check_depth(configs["text_encoder"], READ + 1, f"layer {READ}, before its last")
    texts = {"cap_feat_dim": [("text_encoder", "hidden_size")]}
    variants.check_latents(configs, inputs, fold=1, shifted=True, texts=texts)


def adjust(component: str, module: nn.Module) -> None:
    """Give the transformer real angles, its time embedding fp32 times whatever its weights are stored in, its padding the
    dtype of the tokens beside it, which all blocks would take from it, and fused norms, of which less is saved; leave out the
    text encoder's last norm."""
    qwen.leave_out_last_norm(component, module)
    if component == "transformer":
        module.rope_embedder, times = Angles(module.rope_embedder), module.t_embedder
        times.forward = lambda t: times.mlp(times.timestep_embedding(t, times.frequency_embedding_size))
        prepare = module._prepare_sequence
        module._prepare_sequence = lambda tokens, ids, absent, token, *rest: prepare(
            tokens, ids, absent, token.to(tokens[0].dtype), *rest
        )
        for layer in module.modules():
            if hasattr(layer, "set_processor"):
                layer.set_processor(SelfAttention(scaled_dot_product_attention, dora_torch))
            elif type(layer).__name__ == "RMSNorm":
                layer.forward = partial(_normed, layer)


def _normed(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """diffusers' `RMSNorm` in one operator."""
    return rms_norm(x, norm.dim, norm.weight.to(x.dtype), norm.eps)


_ATTENTION = ("layers.*.attention.to_?", "layers.*.attention.to_out.0")
_MLP = ("layers.*.feed_forward.w?",)
_REFINERS = ("*_refiner.*.attention.to_?", "*_refiner.*.attention.to_out.0", "*_refiner.*.feed_forward.w?")
_MODULATION = ("*.adaLN_modulation.?",)
_OUTSIDE = ("all_x_embedder.*", "all_final_layer.*.linear", "t_embedder.mlp.?", "cap_embedder.1")  # outside the blocks
_LINEAR = (*_ATTENTION, *_MLP, *_REFINERS, *_MODULATION, *_OUTSIDE)

FAMILY = base.Family(
    name="zimage",
    components=(
        qwen.component(READ),
        flow.transformer("ZImageTransformer2DModel", names, (*_OUTSIDE, *_MODULATION)),
        vae.component("vae.", "ae.safetensors"),
    ),
    reads=(*flow.READS, "data.text_length", "model.allow_distilled", "validation.samples.*.negative"),
    text=base.TextPart(qwen.tokens, encode_text, qwen.count_tokens, collate=flow.collate, rows=rows),
    images=base.ImagePart(objective, vae.encode_images, predict, sample, flow.beginning_with("sigmoid"), adjust=adjust),
    files=base.FilePart(
        chat_templates=("tokenizer",), check=check, harmless=names.HARMLESS,
        published=lambda tensors, variant=None: "zimage-turbo" if variant == DISTILLED else "zimage",  # for their schedulers
        hub_ids={"Tongyi-MAI/Z-Image": "zimage", "Tongyi-MAI/Z-Image-Turbo": "zimage-turbo"},
    ),
    variants=base.VariantPart((BASE, DISTILLED), distillation),
    memory=base.MemoryPart(
        # A norm reads each product of a block: none can be left out where blocks are recomputed.
        blocks=("noise_refiner.*", "context_refiner.*", "layers.*"), compiled=("layers.*",), attention=SelfAttention.of,
        shared_inputs={
            "transformer": (
                ("attention.to_q", "attention.to_k", "attention.to_v"), ("feed_forward.w1", "feed_forward.w3"),
            ),
            "text_encoder": qwen.SHARED_INPUTS,
        },
        no_fp16={
            "transformer": "the inputs of feed_forward.w2 reach 344,064, and fp16 ends at 65,504: images turn black, and "
            "losses NaN (musubi-tuner #795)"
        },
    ),
    adapters=base.AdapterPart(
        presets={"attention": _ATTENTION, "attention+mlp": (*_ATTENTION, *_MLP), "linear": _LINEAR, "all": _LINEAR},
        kohya={"text_encoder": qwen.prefix}, peft={"text_encoder": "model."},
        key_styles=(base.KeyStyle("ai-toolkit", "transformer", "diffusion_model."), *qwen.KEY_STYLES),
        metadata=lambda config, prediction: flow.metadata(
            "Z-Image", "Tongyi-MAI/Z-Image", "zimage", "networks.lora_zimage"
        ),
        in_diffusers=("lora", "dora", "lokr"),
    ),
)  # fmt: skip
