"""Attention of the transformer's blocks."""

from collections.abc import Callable
from typing import Any

import torch

from trainer.models.shared.attention import Processor, projected, rotated


class SelfAttention(Processor):
    """A processor for the attention of diffusers' `ZImageTransformerBlock`."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        freqs_cis: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[B, tokens, width]. freqs_cis: fp32 [B, tokens, 2, size], as `Angles` gives them. attention_mask: bool
        [B, tokens], of captions that differ in length."""
        shape = (*hidden_states.shape[:2], attn.heads, -1)
        query, key, value = (project(hidden_states).view(shape) for project in (attn.to_q, attn.to_k, attn.to_v))
        query, key = attn.norm_q(query), attn.norm_k(key)
        if freqs_cis is not None:
            # Each caption's length moves its image's positions: the tokens of all are rows of one, with angles of their own.
            turned = rotated(
                *(each.flatten(0, 1)[None] for each in (query, key)), freqs_cis.flatten(0, 1).unbind(1), self.kernels
            )
            query, key = (each.view(shape) for each in turned)
        mask = None if attention_mask is None else attention_mask[:, None, None, :]
        return projected(attn, self.attended(query, key, value, mask))


class Angles:
    """Cosines and sines of positions in place of complex numbers, which neither our kernels nor compilers take.

    rope: diffusers' `RopeEmbedder`.
    """

    def __init__(self, rope: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.rope = rope

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """fp32 [tokens, 2, size] of positions [tokens, 3]."""
        return torch.view_as_real(self.rope(ids)).transpose(1, 2).repeat_interleave(2, dim=2)
