"""What the families share about CLIP: tokenisation, and which layers read one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

SHARED_INPUTS = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),)


def clip_ids(tokenizer: Any, captions: Sequence[str]) -> torch.Tensor:
    """int64 [B, L], padded and truncated to the tokenizer's length (77), with its own padding token."""
    encoded = tokenizer(
        list(captions),
        padding="max_length",
        max_length=tokenizer.model_max_length,
        truncation=True,
        return_tensors="pt",
    )
    return encoded.input_ids


def count_tokens(tokenizer: Any, caption: str) -> int:
    """Tokens of a caption, special ones counted, before truncation."""
    return len(tokenizer(caption, truncation=False, verbose=False).input_ids)


def count_clip_tokens(model: Any, caption: str) -> dict[str, tuple[int, int]]:
    """For every tokenizer (tokens of the caption, tokens it may have)."""
    return {name: (count_tokens(t, caption), t.model_max_length) for name, t in model.tokenizers.items()}
