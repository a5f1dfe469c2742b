"""Qwen3 and Qwen3-VL as text encoders: chat messages, ids, hidden states, names in files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from trainer.base.errors import UserError
from trainer.base.types import KeyStyle
from trainer.models.base import Component, Model, count_prompt_tokens
from trainer.models.names import ComponentConfig, Shape, how_many

TEXT_LENGTH = 512  # tokens read of a caption's chat message; Qwen3's tokenizer takes many more
DEFAULTS = {"hidden_size": 4096, "num_hidden_layers": 32}  # of the class, for keys missing from config.json
# ComfyUI's name of the text encoder, by its width.
NAMES = {2560: "qwen3_4b", 4096: "qwen3_8b"}
VISION_PREFIX = "text_encoders.qwen3vl_4b.transformer.model."  # `prefix` of Qwen3-VL
SHARED_INPUTS = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))


def prefix(config: ComponentConfig) -> str:
    """Prefix of the text encoder's layers in ComfyUI's adapter files (comfy/lora.py, "generic lora format")."""
    return f"text_encoders.{NAMES.get(config['hidden_size'], 'qwen3_4b')}.transformer.model."


KEY_STYLES = (
    KeyStyle("OneTrainer", "transformer", "lora_transformer_", flat=True),
    *(KeyStyle("ComfyUI generic", "text_encoder", prefix({"hidden_size": width})) for width in NAMES),
    KeyStyle("kohya", "text_encoder", "lora_te_", flat=True),
    KeyStyle("PEFT of a whole Qwen3", "text_encoder", "base_model.model.model."),
)


def component(layers: int) -> Component:
    """Qwen3 as a component. layers: how many are built; the family reads nothing after them."""
    return Component(
        "text_encoder", "transformers", "Qwen3Model", "text_encoder",
        defaults=DEFAULTS, infer=infer, shorten=lambda config: first_layers(config, layers),
        prefixes=tuple(f"text_encoders.{name}.transformer." for name in NAMES.values()),
        file="qwen_3_4b.safetensors", blocks=("layers.*",),
    )  # fmt: skip


def vision_component(layers: int) -> Component:
    """Qwen3-VL's language model alone, in place of Qwen3 (`component`)."""
    name, start = "Qwen3VLTextModel", VISION_PREFIX.removesuffix("model.")
    return replace(component(layers), class_name=name, prefixes=(start,), file="qwen3vl_4b_bf16.safetensors")


def infer(shapes: Mapping[str, Shape], base: dict) -> dict:
    """Config values of Qwen3 from the shapes of its tensors, which files name as the library does."""
    starts = ("model.language_model.", "model.", "")
    start = next((start for start in starts if f"{start}embed_tokens.weight" in shapes), "")
    if f"{start}layers.0.self_attn.q_norm.weight" not in shapes:
        return {}
    attention = f"{start}layers.0.self_attn"
    (head,) = shapes[f"{attention}.q_norm.weight"]
    vocabulary, width = shapes[f"{start}embed_tokens.weight"]
    layers = how_many(shapes, f"{start}layers.")
    return {
        "head_dim": head,
        "hidden_size": width,
        "intermediate_size": shapes[f"{start}layers.0.mlp.gate_proj.weight"][0],
        "layer_types": ["full_attention"] * layers,
        "num_attention_heads": shapes[f"{attention}.q_proj.weight"][0] // head,
        "num_hidden_layers": layers,
        "num_key_value_heads": shapes[f"{attention}.k_proj.weight"][0] // head,
        "vocab_size": vocabulary,
    }


def first_layers(config: ComponentConfig, count: int) -> dict:
    """The config of Qwen3's first `count` layers."""
    count = min(config["num_hidden_layers"], count)
    types = {"layer_types": list(config["layer_types"])[:count]} if config.get("layer_types") else {}
    return {**config, "num_hidden_layers": count, **types}


def chat(tokenizer: Any, caption: str, *, thinking: bool) -> str:
    """A caption as a chat message, by Qwen3's template, which adds an empty think block if thinking is off."""
    message = [{"role": "user", "content": caption}]
    return tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, enable_thinking=thinking)


def text_length(model: Model) -> int:
    """The tokens read of a caption: data.text_length, else 512."""
    return model.options.get("text_length") or TEXT_LENGTH


def count_tokens(
    model: Model, captions: Sequence[str], *, thinking: bool = True, length: Callable[[Model], int] = text_length
) -> dict[str, tuple[list[int], int]]:
    """(tokens of each caption's chat message, tokens that are read: `length`)."""
    texts = [chat(model.tokenizers["tokenizer"], caption, thinking=thinking) for caption in captions]
    return {"tokenizer": (count_prompt_tokens(model, texts)["tokenizer"][0], length(model))}


def tokens(
    model: Model, encoder: str, captions: Sequence[str], *, length: Callable[[Model], int] = text_length
) -> list[torch.Tensor]:
    """The ids of each caption's chat message with thinking on, at most `length`, without padding: int64 [L]."""
    tokenizer = model.tokenizers["tokenizer"]
    texts = [chat(tokenizer, caption, thinking=True) for caption in captions]
    return [torch.tensor(ids) for ids in tokenizer(texts, max_length=length(model), truncation=True).input_ids]


def check_depth(encoder: ComponentConfig, least: int, after: str, name: str = "Qwen3") -> None:
    """Refuse a known text encoder of fewer layers than `least`. after: the layers whose outputs are read, for the message."""
    if encoder["num_hidden_layers"] < least and not encoder.get("_assumed"):
        raise UserError(
            f"the text_encoder has {encoder['num_hidden_layers']} layers, and the text is read after {after}; use the "
            f"{name} of this model"
        )


def hidden_states(
    model: Model, encoder: str, ids: torch.Tensor, present: torch.Tensor, positions: torch.Tensor | None = None
) -> Sequence[torch.Tensor]:
    """The embeddings and each layer's output, [B, L, D]. ids: [B, L]. present: bool [B, L], False for padding. positions:
    [B, L]; None: 0, 1, ..."""
    length = ids.shape[1]
    # The library's own mask would depend on whether there is any padding.
    causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
    mask = causal & present[:, None, None, :]
    options = {"use_cache": False, "output_hidden_states": True} | ({} if positions is None else {"position_ids": positions})
    return model.modules[encoder](ids, attention_mask=mask, **options).hidden_states


def leave_out_last_norm(component: str, module: nn.Module) -> None:
    """`ImagePart.adjust`: the text is read before the norm that follows the last layer."""
    if component == "text_encoder":
        module.norm = nn.Identity()
