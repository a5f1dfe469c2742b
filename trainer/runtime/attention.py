"""Attention over few tokens on a CPU: in fp32, where the denoiser computes in 16 bits.

There torch's attention of 16-bit tensors takes up to 8 times as long as copies in fp32 and attention of these (torch 2.13;
docs/precision.md has the figures). Over many tokens the copies cost memory and, in bf16, more time than they save. An
accelerator computes as torch has it.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

# Queries up to which fp32 was the faster at every head size, forward and backward.
FEW = 128
DEVICE = "cpu"  # A rehearsal of a CPU has another (dry_run.without_values).


def few_tokens_in_fp32(denoiser: nn.Module, device: torch.device) -> None:
    """Make the attention layers of a denoiser compute so, in place: for training, for samples, and in a recomputation.

    They are the modules with a processor, as diffusers has them. These call torch's attention by its name, which stands for
    another function while their forward runs. device: of the denoiser. Nothing is done for one that is no CPU.
    """
    if device.type != DEVICE:
        return
    for layer in denoiser.modules():
        if hasattr(layer, "get_processor"):
            layer.forward = _replacing(layer.forward)


def _replacing(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def replacing(*args: Any, **keys: Any) -> Any:
        theirs = nn.functional.scaled_dot_product_attention
        nn.functional.scaled_dot_product_attention = partial(attention, theirs)
        try:
            return forward(*args, **keys)
        finally:
            nn.functional.scaled_dot_product_attention = theirs

    return replacing


def attention(
    theirs: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *args: Any,
    **keys: Any,
) -> torch.Tensor:
    """theirs: torch's scaled_dot_product_attention, whose other arguments these are. [..., tokens, head size], in the query's
    dtype: of up to FEW queries in 16 bits it is computed in fp32 and rounded once."""
    if query.shape[-2] > FEW or query.itemsize != 2:
        return theirs(query, key, value, attn_mask, *args, **keys)
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.float()
    return theirs(query.float(), key.float(), value.float(), attn_mask, *args, **keys).to(query.dtype)
