"""Attention over few tokens on a CPU: in fp32, where the denoiser computes in 16 bits.

There torch's attention of 16-bit tensors takes up to 8 times as long as copies in fp32 and attention of these (torch 2.13;
docs/precision.md has the figures). Over many tokens the copies cost memory and, in bf16, more time than they save. An
accelerator computes as torch has it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Queries up to which fp32 was the faster at every head size, forward and backward.
FEW = 128


def few_tokens_in_fp32(denoiser: nn.Module, processor: Callable[[nn.Module, Callable], Any], device: torch.device) -> None:
    """Give the attention layers of a denoiser on a CPU a processor that computes so: for training, for samples, and in a
    recomputation.

    processor: as `Family.attention` of the models. device: where the denoiser computes; on any but a CPU nothing is done.
    """
    if device.type != "cpu":
        return
    for layer in denoiser.modules():
        if hasattr(layer, "set_processor") and (ours := processor(layer, attention)) is not None:
            layer.set_processor(ours)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, **keys: Any
) -> torch.Tensor:
    """torch's scaled_dot_product_attention of [..., tokens, head size], in the query's dtype.

    Of up to FEW queries in 16 bits it is computed in fp32 and rounded once.
    """
    theirs = nn.functional.scaled_dot_product_attention
    if query.shape[-2] > FEW or query.itemsize != 2:
        return theirs(query, key, value, attn_mask, **keys)
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.float()
    return theirs(query.float(), key.float(), value.float(), attn_mask, **keys).to(query.dtype)
