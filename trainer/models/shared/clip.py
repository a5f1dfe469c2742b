"""What the families share about CLIP: tokenisation, which layers read one tensor, the names in original files."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainer.models.names import ComponentConfig, Names, Shape, how_many

SHARED_INPUTS = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),)
# What a config.json leaves out, as the classes take it.
CLIP_DEFAULTS = {
    "hidden_size": 512, "intermediate_size": 2048, "max_position_embeddings": 77, "num_hidden_layers": 12,
    "vocab_size": 49408,
}  # fmt: skip
OPEN_CLIP_DEFAULTS = {**CLIP_DEFAULTS, "projection_dim": 512}


def clip_ids(tokenizer: Any, captions: Sequence[str]) -> torch.Tensor:
    """int64 [B, L], padded and truncated to the tokenizer's length (77), with its own padding token."""
    encoded = tokenizer(
        list(captions), padding="max_length", max_length=tokenizer.model_max_length, truncation=True, return_tensors="pt"
    )
    return encoded.input_ids


def open_clip_names(config: ComponentConfig) -> Names:
    """CLIPTextModelWithProjection."""
    names = Names()
    width, hidden = config["hidden_size"], config["intermediate_size"]
    embeddings = "text_model.embeddings"
    names.layer("token_embedding", f"{embeddings}.token_embedding", (config["vocab_size"], width), bias=False)
    positions = (config["max_position_embeddings"], width)
    names.add("positional_embedding", {f"{embeddings}.position_embedding.weight": positions})
    for i in range(config["num_hidden_layers"]):
        original, part = f"transformer.resblocks.{i}", f"text_model.encoder.layers.{i}"
        attention = f"{original}.attn"
        outputs = {f"{part}.self_attn.{name}_proj": width for name in "qkv"}
        names.fused(f"{attention}.in_proj_weight", f"{attention}.in_proj_bias", outputs, width)
        names.layer(f"{attention}.out_proj", f"{part}.self_attn.out_proj", (width, width))
        names.layer(f"{original}.ln_1", f"{part}.layer_norm1", (width,))
        names.layer(f"{original}.ln_2", f"{part}.layer_norm2", (width,))
        names.layer(f"{original}.mlp.c_fc", f"{part}.mlp.fc1", (hidden, width))
        names.layer(f"{original}.mlp.c_proj", f"{part}.mlp.fc2", (width, hidden))
    names.layer("ln_final", "text_model.final_layer_norm", (width,))
    names.add("text_projection", {"text_projection.weight": (config["projection_dim"], width)}, "transpose")
    return names


def infer_clip(shapes: Mapping[str, Shape], base: dict) -> dict:
    embeddings = "text_model.embeddings"
    tables = (f"{embeddings}.position_embedding.weight", f"{embeddings}.token_embedding.weight")
    return _inferred(shapes, base, *tables, "text_model.encoder.layers.", "mlp.fc1")


def infer_open_clip(shapes: Mapping[str, Shape], base: dict) -> dict:
    tables = ("positional_embedding", "token_embedding.weight")
    found = _inferred(shapes, base, *tables, "transformer.resblocks.", "mlp.c_fc")
    return found | {"projection_dim": shapes["text_projection"][1]} if found else {}


def _inferred(shapes: Mapping[str, Shape], base: dict, positions: str, tokens: str, layers: str, hidden: str) -> dict:
    if positions not in shapes:
        return {}
    length, width = shapes[positions]
    return {
        "hidden_size": width,
        "intermediate_size": shapes[f"{layers}0.{hidden}.weight"][0],
        "max_position_embeddings": length,
        "num_attention_heads": max(1, width * base["num_attention_heads"] // base["hidden_size"]),
        "num_hidden_layers": how_many(shapes, layers),
        "vocab_size": shapes[tokens][0],
    }
