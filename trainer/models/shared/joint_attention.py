"""Attention over text and image, as a processor of diffusers that takes any function of query, key and value."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from trainer.base.protocols import Kernels


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, cos, sin, kernels):
        ctx.angles, ctx.kernels = (cos, sin), kernels
        return kernels.rotate(query, key, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys):
        return *ctx.kernels.rotate(*dys, *ctx.angles, back=True), None, None, None


def rotated(
    query: torch.Tensor, key: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], kernels: Kernels
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key [B, tokens, heads, size] at their positions. angles: cosines and sines, fp32 [tokens, size]."""
    if torch.compiler.is_compiling():  # which makes one kernel of the pieces by itself
        from diffusers.models.embeddings import apply_rotary_emb

        return tuple(apply_rotary_emb(each, angles, sequence_dim=1) for each in (query, key))
    if torch.is_grad_enabled():
        return _Rotated.apply(query, key, *angles, kernels)
    return kernels.rotate(query, key, *angles)


class JointAttention:
    """A processor for diffusers' `FluxAttention` and `Flux2Attention`. attend: as torch's scaled_dot_product_attention."""

    def __init__(self, attend: Callable[..., torch.Tensor], kernels: Kernels) -> None:
        self.attend, self.kernels = attend, kernels

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """[B, tokens, width] of the image; with encoder_hidden_states [B, text tokens, width] (image, text)."""
        size, joint = attn.head_dim, encoder_hidden_states is not None
        query, key, value = _heads(hidden_states, size, attn.to_q, attn.to_k, attn.to_v, attn.norm_q, attn.norm_k)
        if joint:
            projections = attn.add_q_proj, attn.add_k_proj, attn.add_v_proj
            text = _heads(encoder_hidden_states, size, *projections, attn.norm_added_q, attn.norm_added_k)
            query, key, value = map(torch.cat, zip(text, (query, key, value), strict=True), (1, 1, 1))
        if image_rotary_emb is not None:
            query, key = rotated(query, key, image_rotary_emb, self.kernels)
        out = self.attend(*(each.transpose(1, 2) for each in (query, key, value)), attention_mask)
        out = out.transpose(1, 2).flatten(2)
        if not joint:
            return out
        texts = encoder_hidden_states.shape[1]
        text, image = out.split_with_sizes([texts, out.shape[1] - texts], dim=1)
        projection, dropout = attn.to_out
        return dropout(projection(image.contiguous())), attn.to_add_out(text.contiguous())


_Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _heads(x: torch.Tensor, size: int, to_q: Any, to_k: Any, to_v: Any, norm_q: Any, norm_k: Any) -> _Heads:
    """(query, key, value), [B, tokens, heads, size] each."""
    query, key, value = (project(x).unflatten(-1, (-1, size)) for project in (to_q, to_k, to_v))
    query = norm_q(query)
    return query, norm_k(key), value


def processor(layer: nn.Module, attend: Callable[..., torch.Tensor], kernels: Kernels) -> JointAttention:
    """A processor for this layer."""
    return JointAttention(attend, kernels)
