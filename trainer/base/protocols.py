"""Interfaces between packages.

Legend of the shape letters: M rows of an activation (tokens), K input features, N output features, R rank.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from trainer.base.errors import UserError
from trainer.base.progress import QUIET, Phases
from trainer.base.types import HeldWeight, StoredWeight


class Kernels(Protocol):
    """Operations worth fusing: plain in kernels/dora_torch.py, fused in kernels/dora_triton.py, with the same signatures.

    The formulas and argument names are those of adapters/dora.py. Arithmetic is fp32 (fp64 for fp64 inputs), rounded once to
    the dtype of the result; only the plain G^T t of 16-bit tensors rounds its product to 16 bits.
    """

    name: str

    def has_plain_codes(self, weight: StoredWeight) -> bool:
        """Whether `StoredWeight.plain` holds for a weight just filled; False if these kernels have no use for it."""

    def upcast(
        self, weight: StoredWeight, dtype: torch.dtype, g_N: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """W, or g * W by rows (g: fp32 [N]), as contiguous `dtype` [N, K]; written to `out` if given."""

    def row_squares(self, weight: StoredWeight) -> Tensor:
        """||W_n||^2: fp32 [N]."""

    def adapted_norms(
        self, weights: Sequence[StoredWeight], w_sq_N: Sequence[Tensor], a_RK: Sequence[Tensor], b_NR: Sequence[Tensor],
        scalings: Sequence[float],
    ) -> list[Tensor]:  # fmt: skip
        """c = ||W + s B A||_row of each layer, fp32 [N], from w_sq = ||W||^2 (fp32 [N]) and fp32 A and B, without temporaries
        of W's size. The bits do not depend on which layers are given together. c is at least 2^-12 ||W||, since the sum may
        cancel below its own rounding."""

    def compose(
        self, z_MN: Tensor, t_MR: Tensor, sb_NR: Tensor, g_N: Tensor | None, bias_N: Tensor | None, out_MN: Tensor
    ) -> None:
        """out = g * (z + t (s B)^T) + bias. z, t, s B, out: one dtype; g, bias: fp32 [N] or None, the bias already rounded
        to that dtype. out: may be z."""

    def adapter_gradients(
        self, dy_MN: Tensor, u_MN: Tensor, t_MR: Tensor, b_NR: Tensor, g_N: Tensor, over_N: Tensor, bias_N: Tensor | None,
        scaling: float, with_z: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """(dB: fp32 [N, R], dm: fp32 [N], s g * B: [N, R] in dy's dtype), reading G = dy and u once.

        D = G^T t, dB = s g * D, dm = (sum over the rows of G * (u - bias) [+ s rowsum(B * D) if with_z]) / over.
        with_z: u is z0, without B's part and the bias, and over is c; else u is the output, and over is m. B, g, over: fp32;
        |over| >= 1e-30. bias: fp32 as `compose` added it, or None.
        """

    def rotate(
        self, q_BSHD: Tensor, k_BSHD: Tensor, cos_SD: Tensor, sin_SD: Tensor, *, back: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Rotary position embedding (arXiv 2104.09864) of queries and keys of one shape and dtype: each pair (x1, x2) of a
        head's elements becomes (x1 cos - x2 sin, x2 cos + x1 sin). cos, sin: fp32, one per element. Rounding is that of
        diffusers' apply_rotary_emb. back: rotate the gradients of both instead, rounded as in its backward pass."""

    def quantize_rows(self, x_MK: Tensor, by_K: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x * by quantised by rows: (e4m3 codes [M, K], row-major, scale fp32 [M] > 0) with x * by = codes * scale. by: fp32
        [K] or None. scale = max |row| / 448, with a floor for rows of zeros; a row with NaN or infinity becomes NaN."""

    def scaled_product(self, x_codes_MK: Tensor, x_scale_M: Tensor, weight: StoredWeight, dtype: torch.dtype) -> Tensor:
        """x W^T of row-scaled codes: `dtype` [M, N]. weight: e4m3, one scale per row; N, K: multiples of 16."""

    def scaled_input_grad(self, d_codes_MN: Tensor, d_scale_M: Tensor, weight: StoredWeight, dtype: torch.dtype) -> Tensor:
        """d W of row-scaled codes d, which include the scales of W: `dtype` [M, K]. weight: see `scaled_product`."""


class BaseLayer(Protocol):
    """The interface between quantisation and adapters: a frozen Linear or Conv2d, with any storage of its weight.

    `product` and its gradients are the layer's bias-free operation (matrix product or convolution) for any weight of its
    geometry, so an adapter's A uses them too. Rows are the M pixels or tokens of the output, whatever its layout.
    """

    compute_dtype: torch.dtype
    weight_shape: torch.Size  # [N, K], or [N, C / groups, kh, kw]
    groups: int  # of the convolution; 1 for a Linear
    kernels: Kernels
    original_norms: Tensor | None  # fp32 [N], ||W_n|| in the file; None if memory has the same values
    merged_weight: Tensor | None  # dense, fp32; if set, the layer computes with it instead of its own
    qweight: Tensor  # stored bytes of the weight; PEFT reads their device under this name
    unread: bool  # whether only the adapter's own backward reads the output (memory.checkpoint_blocks)

    def __call__(self, x: Tensor) -> Tensor: ...  # x W^T + b in compute_dtype

    def row_norms(self) -> Tensor:
        """||W_n|| of each row of W as stored in memory, fp32 [N]."""

    def stored(self) -> StoredWeight:
        """The stored weight, for the kernels."""

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight in `dtype`, in its own shape."""

    @property
    def bias_N(self) -> Tensor | None:
        """The bias rounded to compute_dtype, fp32 [N], or None."""

    def matmul(self, x: Tensor, *, again: bool = False) -> Tensor:
        """x W^T without the bias, a new tensor; x in compute_dtype. Autograd is left to `input_grad`. again: whether that
        reads the unscaled W, too."""

    def input_grad(self, dy: Tensor, x_shape: torch.Size, g_N: Tensor | None = None, add_to: Tensor | None = None) -> Tensor:
        """(g * dy) W, the gradient of x in compute_dtype: a new tensor, or added in place to `add_to`. g: fp32 [N]."""

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """The bias-free operation with `weight` in place of W."""

    def product_input_grad(self, dy: Tensor, weight: Tensor, x_shape: torch.Size, add_to: Tensor | None = None) -> Tensor:
        """The gradient of `product`'s x: a new tensor, or added in place to `add_to`."""

    def product_weight_grad(self, dy: Tensor, x: Tensor, weight_shape: torch.Size) -> Tensor:
        """The gradient of `product`'s weight."""

    def collapsed(self, x: Tensor) -> Tensor:
        """An input or output collapsed to the dimensions that the products take."""

    def expanded(self, y: Tensor, x_shape: torch.Size) -> Tensor:
        """The inverse of `collapsed` for the output of an input of `x_shape`."""

    def rows(self, y: Tensor) -> Tensor:
        """An input or output as [M, features], a view if possible."""

    def put_rows(self, y_MN: Tensor, y: Tensor) -> None:
        """Write [M, N] back into y if `rows(y)` was a copy."""

    def from_rows(self, y_MN: Tensor, like: torch.Size) -> Tensor:
        """A view of [M, features] in the layout of a tensor of shape `like`, with the rows' number of features."""


@runtime_checkable
class WeightOwner(Protocol):
    """The interface between loading and quantisation: a layer that takes a file's weight and stores it in its own way."""

    def load_weight(self, weight: Tensor) -> None:
        """Take the weight, of the layer's shape and any floating dtype except float8."""

    def load_held(self, held: HeldWeight, payload: Mapping[str, Tensor]) -> None:
        """Take a weight that its file stores quantised. payload: the tensors from `held.payload`."""


class Repository(Protocol):
    """A model repository on a hub, as it is listed now; if the hub is unreachable, as it is cached."""

    @property
    def hub_id(self) -> str:
        """OWNER/NAME."""

    @property
    def files(self) -> Mapping[str, object]:
        """The listed files, by path."""

    @property
    def snapshot(self) -> Path:
        """Folder of its files on this machine, as far as they are downloaded."""

    @property
    def blobs(self) -> Path:
        """The cache's folder that downloads fill."""

    @property
    def unreachable(self) -> str | None:
        """Why the hub could not be asked; None if it was."""

    def listing(self, folder: str) -> dict[str, int]:
        """Bytes of the files directly in one of its folders, by name."""

    def missing(self, names: Collection[str]) -> list[str]:
        """The listed files among `names` that are not on this machine, or have another size here."""

    def to_fetch(self, names: Collection[str]) -> int:
        """Bytes that fetching `names` would still download."""

    def refusal(self) -> UserError:
        """The error that says why files are not available."""

    def fetch(self, names: Collection[str], *, phases: Phases = QUIET) -> Path:
        """Download what is missing; returns the files' folder. Raises UserError, or OSError if the disk fails."""


class Hub(Protocol):
    """Lists model repositories. The core opens no connection: whoever opens a run gives it one (artifacts/ports.py)."""

    def list_repository(self, hub_id: str, revision: str | None = None) -> Repository:
        """List a repository at a branch, tag or commit. Raises UserError for an invalid name, and an unknown revision."""
