"""CLIP as a text encoder: tokenisation, chunks and weights of captions, names in original files."""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from trainer.base.types import Conditioning
from trainer.models.base import Component
from trainer.models.names import ComponentConfig, Names, Shape, how_many

BLOCKS = ("*encoder.layers.*",)
SHARED_INPUTS = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),)
# Defaults of the classes for keys missing from config.json.
CLIP_DEFAULTS = {
    "hidden_size": 512, "intermediate_size": 2048, "max_position_embeddings": 77, "num_hidden_layers": 12,
    "vocab_size": 49408,
}  # fmt: skip
MARKS = re.compile(r"\\[\\()\[\]]?|[()\[\]]|:([+-]?(?:\d+\.?\d*|\.\d+))\)|[^\\()\[\]:]+|:")
STRONGER = 1.1  # a pair of round brackets
OPEN_CLIP_DEFAULTS = {**CLIP_DEFAULTS, "projection_dim": 512}


def component(prefix: str, defaults: ComponentConfig = {}) -> Component:
    """CLIP's smaller text encoder as a component. prefix: before its names in a single file."""
    return Component(
        "text_encoder", "transformers", "CLIPTextModel", "text_encoder",
        defaults=defaults, infer=infer_clip, prefixes=(prefix,), file="clip_l.safetensors", blocks=BLOCKS,
    )  # fmt: skip


def clip_ids(tokenizer: Any, captions: Sequence[str], length: int | None = None) -> torch.Tensor:
    """int64 [B, L], padded and truncated to `length`; None: the tokenizer's own (CLIP's: 77)."""
    length = length or tokenizer.model_max_length
    return tokenizer(list(captions), padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids


def weighted_parts(caption: str) -> list[tuple[str, float]]:
    """The texts of a caption and their weights, as sd-scripts and A1111's web UI read them.

    (word) is STRONGER, [word] weaker by as much, (word:1.3) has that weight; nested weights multiply. An unclosed bracket
    reaches to the end, and a backslash makes a bracket a character.
    """
    parts: list[tuple[str, float]] = []
    opened: dict[str, list[int]] = {"(": [], "[": []}

    def close(bracket: str, factor: float) -> None:
        first = opened[bracket].pop()
        parts[first:] = [(text, weight * factor) for text, weight in parts[first:]]

    for match in MARKS.finditer(caption):
        mark, weight = match[0], match[1]
        if mark in opened:
            opened[mark].append(len(parts))
        elif opened["("] and (weight or mark == ")"):
            close("(", float(weight or STRONGER))
        elif opened["["] and mark == "]":
            close("[", 1 / STRONGER)
        else:
            parts.append((mark[1:] if mark[0] == "\\" else mark, 1.0))
    for bracket, factor in (("(", STRONGER), ("[", 1 / STRONGER)):
        while opened[bracket]:
            close(bracket, factor)
    # Neighbours of one weight are joined: an escaped bracket may stand inside a word.
    runs = groupby(parts, key=lambda part: part[1])
    return [("".join(text for text, _ in run), weight) for weight, run in runs] or [("", 1.0)]


def weighted_ids(tokenizer: Any, captions: Sequence[str], *, weighted: bool = True) -> list[list[tuple[int, float]]]:
    """The tokens of each caption and their weights, without start and end. weighted: False: brackets are words."""
    parts = [weighted_parts(caption) if weighted else [(caption, 1.0)] for caption in captions]
    texts = [text for each in parts for text, _ in each]
    ids = iter(tokenizer(texts, truncation=False, verbose=False).input_ids)
    return [[(token, weight) for _, weight in each for token in next(ids)[1:-1]] for each in parts]


def chunked_ids(
    tokenizers: Sequence[Any], captions: Sequence[str], chunks: int, *, weighted: bool = False
) -> list[list[torch.Tensor]]:
    """Each caption's ids, by tokenizer: int64 [rows, L], up to `chunks` rows of 75 tokens; weighted: fp32 [rows, 2, L], ids
    and weights.

    Source: ComfyUI's way with a prompt without weights (its brackets are words here), comfy/sd1_clip.py,
    `tokenize_with_weights` and `encode_token_weights`, read at commit 443393b.
    - The text's tokens are cut every 75, wherever a word stands, as ComfyUI does if the text has 8 tokens or more.
    - Every chunk is a row of its own: start token, its tokens, end token, then padding up to 77 with the encoder's own
      padding: the end token, 0 for SDXL's second encoder (comfy/sdxl_clip.py).
    - A chunk without tokens arises only from a text without any: 75 tokens are one chunk, 76 are two.
    - Each row is encoded as if it stood alone (positions begin anew), and a caption's rows are put one after the other:
      [1, 77 * rows, D]. The pooled vector is the first row's. Without a limit of its own, ComfyUI takes any number of rows.
    - Where two encoders give different numbers of rows, the surplus is cut: `cut_to` in comfy/sdxl_clip.py.
    """
    if chunks == 1 and not weighted:
        return [list(clip_ids(tokenizer, captions).split(1)) for tokenizer in tokenizers]
    texts = [weighted_ids(tokenizer, captions, weighted=weighted) for tokenizer in tokenizers]
    rooms = [tokenizer.model_max_length - 2 for tokenizer in tokenizers]
    rows = [
        max(1, min(chunks, *(math.ceil(len(ids) / room) for ids, room in zip(each, rooms, strict=True))))
        for each in zip(*texts, strict=True)
    ]
    tensors = [
        [torch.tensor([_row(tokenizer, ids, k * room) for k in range(count)]) for ids, count in zip(text, rows, strict=True)]
        for tokenizer, text, room in zip(tokenizers, texts, rooms, strict=True)
    ]
    return tensors if weighted else [[rows[:, 0].long() for rows in captions] for captions in tensors]


def _row(tokenizer: Any, tokens: list[tuple[int, float]], start: int) -> list[list[float]]:
    """A row's ids, and their weights. Both are exact in fp32, which is sd-scripts' for weights."""
    length = tokenizer.model_max_length
    row = [(tokenizer.bos_token_id, 1.0), *tokens[start : start + length - 2], (tokenizer.eos_token_id, 1.0)]
    row += [(tokenizer.pad_token_id, 1.0)] * (length - len(row))
    return [list(map(float, each)) for each in zip(*row, strict=True)]


def rows_joined(hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """All rows [N, L, D] -> [B, L * rows, D], each caption's rows in a line."""
    if len(rows) == len(hidden):
        return hidden
    return repeated([states.flatten(0, 1).unsqueeze(0) for states in hidden.split(list(rows))])


def first_rows(pooled: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """All rows' [N, P] -> [B, P]: each caption's first."""
    return pooled if len(rows) == len(pooled) else torch.stack([vectors[0] for vectors in pooled.split(list(rows))])


def repeated(sequences: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sequences [b, L, D] of different L -> [B, least common multiple of all L, D].

    Repeating all tokens of a sequence changes no attention to them: every weight is shared by its copies. So ComfyUI puts
    prompts of different lengths side by side (comfy/conds.py, `CONDCrossAttn.concat`).
    """
    length = math.lcm(*(sequence.shape[1] for sequence in sequences))
    return torch.cat([s if s.shape[1] == length else s.repeat(1, length // s.shape[1], 1) for s in sequences])


def collate(parts: Sequence[Conditioning]) -> Conditioning:
    """Several captions' conditioning side by side; sequences of fewer rows are `repeated`."""
    pooled = None if parts[0].pooled is None else torch.cat([part.pooled for part in parts])
    return Conditioning(repeated([part.sequence for part in parts]), pooled=pooled)


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
    """Config values from the tensors' shapes, by the library's names; {} for tensors of something else."""
    embeddings = "text_model.embeddings"
    tables = (f"{embeddings}.position_embedding.weight", f"{embeddings}.token_embedding.weight")
    return _inferred(shapes, base, *tables, "text_model.encoder.layers.", "mlp.fc1")


def infer_open_clip(shapes: Mapping[str, Shape], base: dict) -> dict:
    """`infer_clip`, by OpenCLIP's names."""
    tables = ("positional_embedding", "token_embedding.weight")
    config = _inferred(shapes, base, *tables, "transformer.resblocks.", "mlp.c_fc")
    return config | {"projection_dim": shapes["text_projection"][1]} if config else {}


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
