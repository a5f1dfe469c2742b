"""Attention processors of diffusers that call any function of query, key and value."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainer.base.protocols import Kernels

Rotation = tuple[Tensor, Tensor]  # cosines and sines, fp32 [tokens, size]


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, cos, sin, kernels):
        ctx.angles, ctx.kernels = (cos, sin), kernels
        return kernels.rotate(query, key, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys):
        return *ctx.kernels.rotate(*dys, *ctx.angles, back=True), None, None, None


def rotated(query: Tensor, key: Tensor, angles: Rotation | None, kernels: Kernels) -> tuple[Tensor, Tensor]:
    """Query and key [B, tokens, heads, size], rotated by their positions' angles; None: as they are."""
    if angles is None:
        return query, key
    if torch.compiler.is_compiling():  # which makes one kernel of the pieces by itself
        from diffusers.models.embeddings import apply_rotary_emb

        return tuple(apply_rotary_emb(each, angles, sequence_dim=1) for each in (query, key))
    if torch.is_grad_enabled():
        return _Rotated.apply(query, key, *angles, kernels)
    return kernels.rotate(query, key, *angles)


class Processor:
    """Base of the processors. attend: a function like torch's scaled_dot_product_attention."""

    def __init__(self, attend: Callable[..., Tensor], kernels: Kernels) -> None:
        self.attend, self.kernels = attend, kernels

    @classmethod
    def of(cls, layer: nn.Module, attend: Callable[..., Tensor], kernels: Kernels) -> Self | None:
        """The processor of a layer; None: the layer keeps diffusers' own."""
        return cls(attend, kernels)

    def attended(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """[B, tokens, heads * size] from query, key and value [B, tokens, heads, size]."""
        out = self.attend(*(each.transpose(1, 2) for each in (query, key, value)), mask)
        return out.transpose(1, 2).flatten(2)


def projected(attn: Any, out: Tensor) -> Tensor:
    """The attention output through the layer's output projection and dropout."""
    projection, dropout = attn.to_out
    return dropout(projection(out))


class JointAttention(Processor):
    """A processor for diffusers' `FluxAttention` and `Flux2Attention`."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Rotation | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """[B, tokens, width] of the image; with encoder_hidden_states [B, text tokens, width] (image, text)."""
        size, joint = attn.head_dim, encoder_hidden_states is not None
        query, key, value = _heads(hidden_states, size, attn.to_q, attn.to_k, attn.to_v, attn.norm_q, attn.norm_k)
        if joint:
            projections = attn.add_q_proj, attn.add_k_proj, attn.add_v_proj
            text = _heads(encoder_hidden_states, size, *projections, attn.norm_added_q, attn.norm_added_k)
            query, key, value = map(torch.cat, zip(text, (query, key, value), strict=True), (1, 1, 1))
        out = self.attended(*rotated(query, key, image_rotary_emb, self.kernels), value, attention_mask)
        if not joint:
            return out
        texts = encoder_hidden_states.shape[1]
        text, image = out.split_with_sizes([texts, out.shape[1] - texts], dim=1)
        return projected(attn, image.contiguous()), attn.to_add_out(text.contiguous())


def _heads(x: Tensor, size: int, to_q: Any, to_k: Any, to_v: Any, norm_q: Any, norm_k: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(query, key, value), [B, tokens, heads, size] each."""
    query, key, value = (project(x).unflatten(-1, (-1, size)) for project in (to_q, to_k, to_v))
    query = norm_q(query)
    return query, norm_k(key), value
