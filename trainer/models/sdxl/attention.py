"""Attention of the UNet's transformer blocks."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from trainer.base.protocols import Kernels
from trainer.models.shared.attention import Processor, projected


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
        told = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        batch, keys, _ = told.shape
        projections = attn.to_q(hidden_states), attn.to_k(told), attn.to_v(told)
        query, key, value = (each.view(batch, -1, attn.heads, each.shape[-1] // attn.heads) for each in projections)
        if attention_mask is not None:
            attention_mask = attn.prepare_attention_mask(attention_mask, keys, batch)
            attention_mask = attention_mask.view(batch, attn.heads, -1, attention_mask.shape[-1])
        return projected(attn, self.attended(query, key, value, attention_mask)) / attn.rescale_output_factor
