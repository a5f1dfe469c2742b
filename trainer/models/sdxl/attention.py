"""Attention of the UNet's transformer blocks, as a processor of diffusers that takes any function of query, key and value."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainer.base.protocols import Kernels


class BlockAttention:
    """A processor for diffusers' `Attention` between linear layers. attend: as torch's scaled_dot_product_attention."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        self.attend = attend

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
        query, key, value = (
            each.view(batch, -1, attn.heads, each.shape[-1] // attn.heads).transpose(1, 2)
            for each in (attn.to_q(hidden_states), attn.to_k(told), attn.to_v(told))
        )
        if attention_mask is not None:
            attention_mask = attn.prepare_attention_mask(attention_mask, keys, batch)
            attention_mask = attention_mask.view(batch, attn.heads, -1, attention_mask.shape[-1])
        out = self.attend(query, key, value, attention_mask).transpose(1, 2).flatten(2)
        projection, dropout = attn.to_out
        return dropout(projection(out)) / attn.rescale_output_factor


def processor(layer: nn.Module, attend: Callable[..., torch.Tensor], kernels: Kernels) -> BlockAttention | None:
    """A processor for this layer; None for one with norms or a residual of its own, which keeps diffusers' processor."""
    more = ("group_norm", "spatial_norm", "norm_q", "norm_k", "norm_cross", "added_kv_proj_dim")
    has_more = layer.residual_connection or any(getattr(layer, name) is not None for name in more)
    return None if has_more else BlockAttention(attend)
