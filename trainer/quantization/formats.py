"""Storage formats of frozen weights: what is stored for a weight, and how it becomes a weight again.

A format works on the weight flattened to [N, K] (N output rows) and stores plain tensors: quantised values in the
weight's own shape under "weight", and one fp32 scale per output row under "scale" where it has one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Rows are converted in pieces of about this many elements, so that the fp32 copy stays small beside the weight.
PIECE_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Format:
    """One storage dtype. `scaled` formats keep one fp32 scale per output row."""

    name: str
    dtype: torch.dtype
    scaled: bool = False

    @property
    def quantised(self) -> bool:
        return self.scaled

    def empty_payload(self, shape: torch.Size, device: torch.device | str) -> dict[str, torch.Tensor]:
        payload = {"weight": torch.empty(shape, dtype=self.dtype, device=device)}
        if self.scaled:
            payload["scale"] = torch.empty(shape[0], dtype=torch.float32, device=device)
        return payload

    def quantize_into(self, weight: torch.Tensor, payload: dict[str, torch.Tensor]) -> None:
        """Convert `weight` (any floating dtype but float8, shape [N, ...]) into `payload`, in place.

        Scaled: scale_n = max_k |W_nk| / max(dtype), payload = W / scale rounded to nearest; an all-zero row has scale 1.
        """
        if not self.scaled:
            payload["weight"].copy_(weight)
            return
        w_NK, q_NK = weight.reshape(weight.shape[0], -1), payload["weight"].view(weight.shape[0], -1)
        largest = torch.finfo(self.dtype).max
        rows = max(1, PIECE_ELEMENTS // max(1, w_NK.shape[1]))
        for start in range(0, w_NK.shape[0], rows):
            piece = w_NK[start : start + rows].float()
            scale = piece.abs().amax(dim=1) / largest
            # A row of zeros, or so small that its scale underflows, is stored with scale 1.
            scale = torch.where(scale > 0, scale, torch.ones_like(scale))
            # Dividing can round past the largest value by one ulp; e4m3fn has no infinity, so that would be NaN.
            q_NK[start : start + rows].copy_((piece / scale[:, None]).clamp_(-largest, largest))
            payload["scale"][start : start + rows].copy_(scale)

    def dequantize(self, payload: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The weight in its own shape; scaled formats multiply in fp32 before the one rounding to `dtype`."""
        weight = payload["weight"]
        if not self.scaled:
            return weight.to(dtype)
        scale = payload["scale"].view(-1, *([1] * (weight.dim() - 1)))
        return weight.to(torch.float32).mul_(scale).to(dtype)


FORMATS = {
    "fp32": Format("fp32", torch.float32),
    "bf16": Format("bf16", torch.bfloat16),
    "fp16": Format("fp16", torch.float16),
    "fp8_e4m3": Format("fp8_e4m3", torch.float8_e4m3fn, scaled=True),
}
