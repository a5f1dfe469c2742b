"""Storage formats of frozen weights: the plain tensors that stand for a weight, and their description for the kernels.

A weight is [N, ...] with N output rows, flattened to [N, K]. Its payload, by layout:

    Dense     weight: the weight's own shape, in `dtype`
    PerRow    weight: 8-bit codes in the weight's own shape;  scale: fp32 [N]
    Packed    weight: uint8 [ceil(N * K * bits / 8)];  scale: fp32, one for each block;  offset: fp32 like scale,
              or levels: fp32 [2 ** bits]

`stored` describes a payload as types.StoredWeight, from which every other room computes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
import torch.nn.functional as F

from trainer.base.types import StoredWeight
from trainer.kernels.decode import pieces, values

PIECE_ELEMENTS = 1 << 22  # converted at a time, about: the fp32 copies stay small beside the weight


class Format:
    """One way to store a weight.

    dtype_name, backend: the config's words. dtype: the payload's torch dtype; None if it is quantised.
    convolutions: whether Conv2d are stored so too; else they keep the unquantised dtype.
    """

    dtype_name: str
    backend: str
    dtype: torch.dtype | None
    convolutions: bool

    @property
    def name(self) -> str:
        """The format for logs: "bf16", "fp8_e4m3", "int4 (quanto)"."""
        return self.dtype_name if self.backend == "native" else f"{self.dtype_name} ({self.backend})"

    @property
    def quantised(self) -> bool:
        """Whether the weight is stored in codes."""
        return self.dtype is None

    def empty_payload(self, shape: torch.Size, device: torch.device | str) -> dict[str, torch.Tensor]:
        """Tensors for a weight of that shape, their values undefined."""
        raise NotImplementedError

    def quantize_into(self, weight: torch.Tensor, payload: dict[str, torch.Tensor]) -> None:
        """Convert `weight` (any floating dtype but float8, shape [N, ...]) into `payload`, in place."""
        raise NotImplementedError

    def stored(self, payload: dict[str, torch.Tensor], shape: torch.Size) -> StoredWeight:
        """The payload's description for the kernels. shape: the weight's own, or flattened to [N, K]."""
        raise NotImplementedError


@dataclass(frozen=True)
class Dense(Format):
    """The weight in a torch dtype."""

    dtype_name: str
    dtype: torch.dtype
    backend = "native"
    convolutions = True

    def empty_payload(self, shape, device):
        return {"weight": torch.empty(shape, dtype=self.dtype, device=device)}

    def quantize_into(self, weight, payload):
        payload["weight"].copy_(weight)

    def stored(self, payload, shape):
        flat = _flat(shape)
        return StoredWeight(payload["weight"].view(flat), flat)


@dataclass(frozen=True)
class PerRow(Format):
    """value = code * scale, one scale for each output row; codes of 8 bits.

    quantize_rows: (fp32 [rows, K], dtype of the codes) -> (codes [rows, K], scale fp32 [rows]).
    """

    dtype_name: str
    backend: str
    codes: torch.dtype
    quantize_rows: Callable[[torch.Tensor, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
    convolutions: bool = True
    dtype = None

    def empty_payload(self, shape, device):
        return {
            "weight": torch.empty(shape, dtype=self.codes, device=device),
            "scale": torch.empty(shape[0], dtype=torch.float32, device=device),
        }

    def quantize_into(self, weight, payload):
        flat = _flat(weight.shape)
        w_NK, codes_NK = weight.reshape(flat), payload["weight"].view(flat)
        for rows in pieces(flat, weight.device):
            codes, scale = self.quantize_rows(w_NK[rows].float(), self.codes)
            codes_NK[rows].copy_(codes)
            payload["scale"][rows].copy_(scale)

    def stored(self, payload, shape):
        flat = _flat(shape)
        return StoredWeight(payload["weight"].view(flat), flat, block=flat[1], scale=payload["scale"])


@dataclass(frozen=True)
class Packed(Format):
    """Codes of `bits` bits over blocks of the flat weight: code * scale + offset, or levels[code] * scale.

    block: K -> number of consecutive elements that share a scale; the weight's last block may be shorter.
    quantize_blocks: (fp32 [elements], block, dtype_name) -> (codes packed by `pack`, scale fp32 [blocks], and by `second`
      offset fp32 [blocks] or levels fp32 [2 ** bits]).
    """

    dtype_name: str
    backend: str
    bits: int
    block: Callable[[int], int]
    quantize_blocks: Callable[[torch.Tensor, int, str], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    second: Literal["offset", "levels"]
    dtype = None
    convolutions = False

    def empty_payload(self, shape, device):
        rows, columns = _flat(shape)
        blocks = -(-rows * columns // self.block(columns))
        return {
            "weight": torch.empty(-(-rows * columns * self.bits // 8), dtype=torch.uint8, device=device),
            "scale": torch.empty(blocks, dtype=torch.float32, device=device),
            self.second: torch.empty(blocks if self.second == "offset" else 2**self.bits, dtype=torch.float32, device=device),
        }

    def quantize_into(self, weight, payload):
        flat, block = weight.reshape(-1), self.block(_flat(weight.shape)[1])
        # Pieces of whole blocks and whole bytes give the same as the whole weight at once.
        blocks = 8 * max(1, PIECE_ELEMENTS // (8 * block))
        for first in range(0, -(-flat.numel() // block), blocks):
            start = first * block
            packed, scale, second = self.quantize_blocks(flat[start : start + blocks * block].float(), block, self.dtype_name)
            byte = start * self.bits // 8
            payload["weight"][byte : byte + packed.numel()].copy_(packed)
            payload["scale"][first : first + blocks].copy_(scale)
            (payload["levels"] if self.second == "levels" else payload["offset"][first : first + blocks]).copy_(second)

    def stored(self, payload, shape):
        flat = _flat(shape)
        second = {self.second: payload[self.second]}
        return StoredWeight(payload["weight"], flat, self.bits, self.block(flat[1]), payload["scale"], **second)


def relative_error(weight: torch.Tensor, stored: StoredWeight) -> float:
    """||stored - W|| / ||W|| over 16 runs of 16 rows, evenly spaced, or all rows: cheap enough for every load."""
    w_NK = weight.reshape(stored.shape)
    rows = w_NK.shape[0]
    # fp64 sums on the weight's device; one transfer at the end.
    sums = torch.zeros(2, dtype=torch.float64, device=weight.device)
    for start in range(0, rows, max(16, rows // 16)):
        run = slice(start, min(start + 16, rows))
        exact = w_NK[run].float()
        sums += torch.stack([(values(stored, run) - exact).square().sum(), exact.square().sum()])
    difference, total = sums.sqrt().tolist()
    return difference / total if total else 0.0


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [n], each below 2 ** bits -> uint8 [ceil(n * bits / 8)], the first code in the lowest bits."""
    per_byte = 8 // bits
    bytes_BC = F.pad(codes, (0, -codes.numel() % per_byte)).view(-1, per_byte)
    packed = bytes_BC[:, 0].clone()
    for place in range(1, per_byte):
        packed |= bytes_BC[:, place] << (bits * place)
    return packed


def scaled_float8(w_NK: torch.Tensor, codes: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """scale_n = max_k |W_nk| / max(codes), W / scale rounded to nearest."""
    # Divide by a tensor: CUDA divides by a number by multiplying by its inverse, and the codes would differ from a CPU's.
    scale = nonzero(w_NK.abs().amax(dim=1) / w_NK.new_tensor(torch.finfo(codes).max))
    return (w_NK / scale[:, None]).to(codes), scale


def nonzero(scale: torch.Tensor) -> torch.Tensor:
    """`scale` with fp32's smallest normal number for 0: for a row of zeros, or one so small that its scale underflows.

    0 / 0 in float8 would stay NaN; and a large number would drown the other rows when a gradient is multiplied by the scales
    (layers.FrozenLinear).
    """
    return scale.clamp_min(torch.finfo(torch.float32).tiny)


def _flat(shape: torch.Size) -> tuple[int, int]:
    return shape[0], prod(shape[1:])
