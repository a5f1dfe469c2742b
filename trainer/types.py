"""What the rooms share: what a batch holds, and the seam between quantisation and adapters.

Legend of the shape letters: B batch, C latent channels, H and W latent height and width, L tokens, D token width,
P pooled width, M rows of an activation (tokens), K input features, N output features, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

    def describe(self) -> str:
        """Its bucket and samples, for a message."""
        height, width = self.target_size[0].tolist()
        names = ", ".join(occurrence.sample for occurrence in self.occurrences)
        return f"{len(self.occurrences)} photo(s) of {width}x{height} ({names})"


@dataclass(frozen=True)
class StoredWeight:
    """A frozen weight [N, K] (a convolution's kernel flattened) as it lies in memory, row by row.

    Its value, in fp32: levels[code] * scale + offset.

    codes: [N, K] of any float dtype, float8 or int8; or, with `bits` 4 or 2, uint8 [ceil(N * K * bits / 8)]: the codes of
      consecutive elements, the first in the lowest bits.
    scale: fp32, one for each `block` consecutive elements (block = K: one for each row); None: 1.
    offset: fp32 like scale; None: 0.
    levels: fp32 [2 ** bits], the number a code stands for; None: the code itself.
    plain: whether float8 codes are known to be finite, with scales of an ordinary size (kernels/dora_torch.has_plain_codes).
    """

    codes: torch.Tensor
    shape: tuple[int, int]
    bits: int | None = None
    block: int = 0
    scale: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    levels: torch.Tensor | None = None
    plain: bool = False

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def is_dense(self, dtype: torch.dtype) -> bool:
        """Whether the codes are the weight in `dtype`, with nothing to convert."""
        return self.codes.dtype == dtype and self.scale is None


@dataclass(frozen=True)
class HeldWeight:
    """A weight that a file holds quantised already: several of its tensors that stand for one.

    dtype, backend: the storage format, as in the config.
    parts: names of the file's tensors, by the role under which `payload` takes them.
    shape: the weight's; None where only the tensors' contents say it.
    payload: (tensors by role, the weight's shape) -> the format's payload (quantization/formats.py): the file's codes bit
      for bit, scales spread to one a row or block. Raises ValueError, saying what, where they disagree with the shape.
    dequantize: (payload, shape) -> the weight, fp32.
    """

    dtype: str
    backend: str
    parts: Mapping[str, str]
    shape: tuple[int, ...] | None
    payload: Callable[[Mapping[str, torch.Tensor], tuple[int, ...]], dict[str, torch.Tensor]]
    described: tuple[str, ...]
    check: Callable[[Mapping[str, torch.Tensor], tuple[int, ...]], None]
    dequantize: Callable[[Mapping[str, torch.Tensor], tuple[int, ...]], torch.Tensor]


@dataclass(frozen=True)
class Recognised:
    """What a component's files hold quantised. weights: by the name that each would have unquantised.

    other: names of tensors that belong to the convention but to no weight (markers, scales of activations).
    """

    weights: Mapping[str, HeldWeight]
    other: frozenset[str]


class Kernels(Protocol):
    """The operations worth fusing. kernels/dora_torch.py has them plain, kernels/dora_triton.py fused; same signatures.

    Names of arguments as in adapters/dora.py, whose formulas these are. Arithmetic is fp32 (fp64 for fp64 inputs) and
    rounds once, to the dtype of the result; only the plain G^T t of 16-bit tensors leaves its product in 16 bits.
    """

    name: str

    def upcast(
        self, weight: StoredWeight, dtype: torch.dtype, g_N: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """W, or g * W row by row (g fp32 [N]): `dtype` [N, K], contiguous, in `out` where one is given."""
        ...

    def row_squares(self, weight: StoredWeight) -> torch.Tensor:
        """||W_n||^2: fp32 [N]."""
        ...

    def adapted_norm(
        self, weight: StoredWeight, w_sq_N: torch.Tensor, a_RK: torch.Tensor, b_NR: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """c = ||W + s B A||_row, fp32 [N], from w_sq = ||W||^2 (fp32 [N]) and fp32 A and B; nothing of W's size is made.

        Where the sum cancels below its own rounding, c is at least 2^-12 ||W||.
        """
        ...

    def compose(
        self, z_MN: torch.Tensor, t_MR: torch.Tensor, b_NR: torch.Tensor, scaling: float, g_N: torch.Tensor | None,
        bias_N: torch.Tensor | None, out_MN: torch.Tensor,
    ) -> None:  # fmt: skip
        """out = g * (z + s t B^T) + bias. z, t, B, out: one dtype; g, bias: fp32 [N] or None. `out` may be z."""
        ...

    def row_gradients(
        self, dy_MN: torch.Tensor, u_MN: torch.Tensor, t_MR: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(G^T t: fp32 [N, R], sum over the rows of G * u: fp32 [N]), reading G = dy once."""
        ...

    def quantize_rows(self, x_MK: torch.Tensor, by_K: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """x * by, row by row in float8: (e4m3 codes [M, K], row-major, scale fp32 [M] > 0), x * by = codes * scale.

        by: fp32 [K] or None. scale = max |row| / 448, with a floor for rows of zeros. A row with NaN or infinity gets NaN.
        """
        ...

    def scaled_product(
        self, x_codes_MK: torch.Tensor, x_scale_M: torch.Tensor, weight: StoredWeight, dtype: torch.dtype
    ) -> torch.Tensor:
        """x W^T of codes, both sides scaled by row: `dtype` [M, N]. weight: e4m3, one scale a row; N, K: multiples of 16."""
        ...

    def scaled_input_grad(
        self, d_codes_MN: torch.Tensor, d_scale_M: torch.Tensor, weight: StoredWeight, dtype: torch.dtype
    ) -> torch.Tensor:
        """d W of codes, d scaled by row, the scales of W left out (d has them): `dtype` [M, K]. weight as above."""
        ...


class BaseLayer(Protocol):
    """The seam between quantisation and adapters: a frozen Linear or Conv2d whose storage is its own affair.

    `product` and its gradients are the layer's bias-free operation, a matrix product or a convolution, for any weight of its
    geometry: an adapter's A goes through them too. Rows are the output's pixels or tokens: M of them, whatever its layout.
    """

    compute_dtype: torch.dtype
    bias: torch.Tensor | None
    kernels: Kernels
    original_norms: torch.Tensor | None  # fp32 [N], ||W_n|| as it was read; None where it lies in memory as in the file

    def row_norms(self) -> torch.Tensor: ...  # fp32 [N], ||W_n|| as it lies in memory

    def stored(self) -> StoredWeight: ...

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor: ...  # the weight in its own shape

    @property
    def bias_N(self) -> torch.Tensor | None: ...  # fp32 [N], rounded to compute_dtype

    def matmul(self, x: torch.Tensor) -> torch.Tensor: ...  # x W^T in compute_dtype, a new tensor

    def input_grad(
        self, dy: torch.Tensor, x_shape: torch.Size, g_N: torch.Tensor | None = None, add_to: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(g * dy) W, the gradient of x, in compute_dtype: a new tensor, or added to `add_to` in place. g: fp32 [N]."""
        ...

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...

    def product_input_grad(
        self, dy: torch.Tensor, weight: torch.Tensor, x_shape: torch.Size, add_to: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The gradient of x: a new tensor, or added to `add_to` in place."""
        ...

    def product_weight_grad(self, dy: torch.Tensor, x: torch.Tensor, weight_shape: torch.Size) -> torch.Tensor: ...

    def rows(self, y: torch.Tensor) -> torch.Tensor: ...  # [M, features] of an input or output, a view where it can be

    def put_rows(self, y_MN: torch.Tensor, y: torch.Tensor) -> None: ...  # into y, where `rows(y)` gave a copy

    def from_rows(self, y_MN: torch.Tensor, like: torch.Size) -> torch.Tensor: ...  # a view, features as the rows have
