"""Attention of the transformer's blocks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainer.base.protocols import Kernels
from trainer.models.shared.attention import JointAttention, Processor, rotated


class ParallelAttention(Processor):
    """A processor for diffusers' `Flux2ParallelSelfAttention`, whose one projection gives query, key, value and both halves
    of the feed-forward."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """[B, tokens, width] of text and image."""
        parts = [3 * attn.inner_dim, attn.mlp_mult_factor * attn.mlp_hidden_dim]
        attended, feed = attn.to_qkv_mlp_proj(hidden_states).split(parts, dim=-1)
        query, key, value = (part.unflatten(-1, (-1, attn.head_dim)) for part in attended.chunk(3, dim=-1))
        query, key = rotated(attn.norm_q(query), attn.norm_k(key), image_rotary_emb, self.kernels)
        out = self.attended(query, key, value, attention_mask)
        return attn.to_out(torch.cat([out, attn.mlp_act_fn(feed)], dim=-1))


def processor(layer: nn.Module, attend: Callable[..., torch.Tensor], kernels: Kernels) -> Processor:
    """A processor for this layer."""
    return (ParallelAttention if hasattr(layer, "to_qkv_mlp_proj") else JointAttention)(attend, kernels)
