"""Attention of the transformer's blocks."""

from typing import Any

import torch

from trainer.models.shared.attention import Processor, projected, rotated


class PreciseAttention(Processor):
    """A processor for diffusers' `Flux3Attention`: queries and keys are normed and turned in fp32, and rounded once."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """[B, tokens, width]."""
        projections = (attn.to_q, attn.to_k, attn.to_v)
        query, key, value = (project(hidden_states).unflatten(-1, (attn.heads, -1)) for project in projections)
        query, key = attn.norm_q(query.float()), attn.norm_k(key.float())
        query, key = rotated(query, key, image_rotary_emb, self.kernels)
        return projected(attn, self.attended(query.to(value.dtype), key.to(value.dtype), value, attention_mask))
