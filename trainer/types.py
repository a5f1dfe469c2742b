"""What the rooms share: what a batch holds, and the seam between quantisation and adapters.

Legend of the shape letters: B batch, C latent channels, H and W latent height and width, L tokens, D token width,
P pooled width, M rows of an activation (tokens), K input features, N output features, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(frozen=True)
class Conditioning:
    """What a denoiser is told besides the noised latents.

    sequence: [B, L, D] token features.  mask: [B, L] bool, or None where the model attends to every token.
    pooled: [B, P], or None.  extras: whatever else a family needs, by name, batch first.
    """

    sequence: torch.Tensor
    mask: torch.Tensor | None = None
    pooled: torch.Tensor | None = None
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name, as they are cached on disk; `from_tensors` is the inverse."""
        named: dict[str, torch.Tensor | None] = {"sequence": self.sequence, "mask": self.mask, "pooled": self.pooled}
        named |= {f"extras.{name}": value for name, value in self.extras.items()}
        return {name: value for name, value in named.items() if value is not None}

    @staticmethod
    def from_tensors(tensors: Mapping[str, torch.Tensor]) -> Conditioning:
        extras = {name.removeprefix("extras."): t for name, t in tensors.items() if name.startswith("extras.")}
        return Conditioning(tensors["sequence"], tensors.get("mask"), tensors.get("pooled"), extras)

    def to(self, device: torch.device | str) -> Conditioning:
        return Conditioning.from_tensors({name: t.to(device) for name, t in self.tensors().items()})


@dataclass(frozen=True)
class Occurrence:
    """One appearance of a training image in an epoch: the key of every random draw made for it.

    sample: the image's path relative to its source, prefixed by the source's index ("0/03.jpg").
    position: index in the global order of the epoch, for stratified draws.
    """

    epoch: int
    sample: str
    repeat: int
    position: int


@dataclass(frozen=True)
class Batch:
    """One micro-batch, all of one bucket, on the CPU until the step moves it.

    latents: fp32 [B, C, H, W], already normalised by the family.
    captions: the text each sample trains on ("" where the caption was dropped).
    conditioning: cached encodings of `captions`, or None when they are encoded live.
    original_size, crop_top_left, target_size: int64 [B, 2] as (height, width) or (top, left), in pixels.
    references: latents of control images, one tuple of [C, H, W] per reference; empty for plain text-to-image.
    """

    occurrences: tuple[Occurrence, ...]
    latents: torch.Tensor
    captions: tuple[str, ...]
    conditioning: Conditioning | None
    original_size: torch.Tensor
    crop_top_left: torch.Tensor
    target_size: torch.Tensor
    references: tuple[torch.Tensor, ...] = ()


class BaseLayer(Protocol):
    """The seam between quantisation and adapters: a frozen Linear or Conv2d whose storage is its own affair.

    `matmul` is the bias-free product (or convolution) in `compute_dtype`, with an input gradient.
    Everything an adapter needs of the weight goes through this protocol, so that no adapter touches a payload.
    """

    compute_dtype: torch.dtype
    bias: torch.Tensor | None

    @property
    def compute_bias(self) -> torch.Tensor | None: ...  # in compute_dtype, shaped to broadcast over the output

    def payload(self) -> dict[str, torch.Tensor]: ...  # plain tensors, the stored form

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor: ...  # the weight in its own shape

    def matmul(self, x: torch.Tensor) -> torch.Tensor: ...

    def input_grad(self, dy: torch.Tensor) -> torch.Tensor: ...  # Linear only: dy W, [M, N] -> [M, K]

    def row_norms(self) -> torch.Tensor: ...  # fp32 [N], of the dequantised weight

    def skinny(self, a_RK: torch.Tensor) -> torch.Tensor: ...  # fp32 [N, R] = W A^T, W flattened to [N, K]
