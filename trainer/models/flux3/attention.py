"""Attention of the transformer's blocks, as a processor of diffusers that takes any function of query, key and value."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainer.base.protocols import Kernels
from trainer.models.shared.joint_attention import rotated


class PreciseAttention:
    """A processor for diffusers' `Flux3Attention`: queries and keys are normed and turned in fp32, and rounded once. attend:
    as torch's scaled_dot_product_attention."""

    def __init__(self, attend: Callable[..., torch.Tensor], kernels: Kernels) -> None:
        self.attend, self.kernels = attend, kernels

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
        if image_rotary_emb is not None:
            query, key = rotated(query, key, image_rotary_emb, self.kernels)
        query, key = query.to(value.dtype), key.to(value.dtype)
        out = self.attend(*(each.transpose(1, 2) for each in (query, key, value)), attention_mask)
        projection, dropout = attn.to_out
        return dropout(projection(out.transpose(1, 2).flatten(2)))


def processor(layer: nn.Module, attend: Callable[..., torch.Tensor], kernels: Kernels) -> PreciseAttention:
    """A processor for this layer."""
    return PreciseAttention(attend, kernels)
