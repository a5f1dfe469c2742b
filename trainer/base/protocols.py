"""The seams between the rooms: what one may ask of another's objects, and nothing else.

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
    """The operations worth fusing. kernels/dora_torch.py has them plain, kernels/dora_triton.py fused; same signatures.

    Names of arguments as in adapters/dora.py, whose formulas these are. Arithmetic is fp32 (fp64 for fp64 inputs) and
    rounds once, to the dtype of the result; only the plain G^T t of 16-bit tensors leaves its product in 16 bits.
    """

    name: str

    def has_plain_codes(self, weight: StoredWeight) -> bool:
        """Whether StoredWeight.plain may be said of a weight that was just filled; False where that is of no use."""

    def upcast(
        self, weight: StoredWeight, dtype: torch.dtype, g_N: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """W, or g * W row by row (g fp32 [N]): `dtype` [N, K], contiguous, in `out` where one is given."""

    def row_squares(self, weight: StoredWeight) -> Tensor:
        """||W_n||^2: fp32 [N]."""

    def adapted_norms(
        self, weights: Sequence[StoredWeight], w_sq_N: Sequence[Tensor], a_RK: Sequence[Tensor], b_NR: Sequence[Tensor],
        scalings: Sequence[float],
    ) -> list[Tensor]:  # fmt: skip
        """c = ||W + s B A||_row of each layer, fp32 [N], from w_sq = ||W||^2 (fp32 [N]) and fp32 A and B; nothing of W's size
        is made. The same bits come out whichever layers are given together.

        Where the sum cancels below its own rounding, c is at least 2^-12 ||W||.
        """

    def compose(
        self, z_MN: Tensor, t_MR: Tensor, sb_NR: Tensor, g_N: Tensor | None, bias_N: Tensor | None, out_MN: Tensor
    ) -> None:
        """out = g * (z + t (s B)^T) + bias. z, t, s B, out: one dtype; g, bias: fp32 [N] or None, the bias already rounded
        to that dtype. `out` may be z."""

    def adapter_gradients(
        self, dy_MN: Tensor, u_MN: Tensor, t_MR: Tensor, b_NR: Tensor, g_N: Tensor, over_N: Tensor, bias_N: Tensor | None,
        scaling: float, with_z: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """(dB: fp32 [N, R], dm: fp32 [N], s g * B in dy's dtype: [N, R]), reading G = dy and u once.

        D = G^T t, dB = s g * D, dm = (sum over the rows of G * (u - bias) [+ s rowsum(B * D) where with_z]) / over.
        with_z: u is z0, without B's part and a bias, and over is c; else u is the output, and over is m. B, g, over, bias:
        fp32, the bias None or as `compose` added it; |over| is 1e-30 at least.
        """

    def rotate(
        self, q_BSHD: Tensor, k_BSHD: Tensor, cos_SD: Tensor, sin_SD: Tensor, *, back: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys, alike in shape and dtype, each pair of a head's elements turned by the angle of its token: (x1,
        x2) to (x1 cos - x2 sin, x2 cos + x1 sin), as rotary position embeddings have it (arXiv 2104.09864). cos, sin: fp32,
        one for each element.

        Rounded as diffusers' apply_rotary_emb rounds it, with back as its backward pass does, of the gradients of both.
        """

    def quantize_rows(self, x_MK: Tensor, by_K: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x * by, row by row in float8: (e4m3 codes [M, K], row-major, scale fp32 [M] > 0), x * by = codes * scale.

        by: fp32 [K] or None. scale = max |row| / 448, with a floor for rows of zeros. A row with NaN or infinity gets NaN.
        """

    def scaled_product(self, x_codes_MK: Tensor, x_scale_M: Tensor, weight: StoredWeight, dtype: torch.dtype) -> Tensor:
        """x W^T of codes, both sides scaled by row: `dtype` [M, N]. weight: e4m3, one scale a row; N, K: multiples of 16."""

    def scaled_input_grad(self, d_codes_MN: Tensor, d_scale_M: Tensor, weight: StoredWeight, dtype: torch.dtype) -> Tensor:
        """d W of codes, d scaled by row, the scales of W left out (d has them): `dtype` [M, K]. weight as above."""


class BaseLayer(Protocol):
    """The seam between quantisation and adapters: a frozen Linear or Conv2d, a torch module whose storage is its own affair.

    `product` and its gradients are the layer's bias-free operation, a matrix product or a convolution, for any weight of its
    geometry: an adapter's A goes through them too. Rows are the output's pixels or tokens: M of them, whatever its layout.
    """

    compute_dtype: torch.dtype
    weight_shape: torch.Size  # [N, K], or [N, C / groups, kh, kw]
    groups: int  # of a convolution; else 1
    kernels: Kernels
    original_norms: Tensor | None  # fp32 [N], ||W_n|| as it was read; None where it lies in memory as in the file
    merged_weight: Tensor | None  # dense, fp32: set it, and the layer computes with that in place of its own
    qweight: Tensor  # stored bytes of the weight: PEFT asks for their device, under this name
    unread: bool  # whether no backward pass but an adapter's own reads the output (memory.checkpoint_blocks)

    def __call__(self, x: Tensor) -> Tensor: ...  # x W^T + b in compute_dtype

    def row_norms(self) -> Tensor:
        """||W_n|| of each row as W lies in memory, fp32 [N]."""

    def stored(self) -> StoredWeight:
        """The stored weight, for the kernels."""

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight in its own shape, in `dtype`."""

    @property
    def bias_N(self) -> Tensor | None:
        """The bias rounded to compute_dtype, fp32 [N]; None where the layer has none."""

    def matmul(self, x: Tensor, *, again: bool = False) -> Tensor:
        """x W^T without the bias, in a new tensor, of x in compute_dtype. Its gradient is `input_grad`'s affair. again:
        whether that needs W as it is, too."""

    def input_grad(self, dy: Tensor, x_shape: torch.Size, g_N: Tensor | None = None, add_to: Tensor | None = None) -> Tensor:
        """(g * dy) W, the gradient of x, in compute_dtype: a new tensor, or added to `add_to` in place. g: fp32 [N]."""

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """The bias-free operation with `weight` in place of W."""

    def product_input_grad(self, dy: Tensor, weight: Tensor, x_shape: torch.Size, add_to: Tensor | None = None) -> Tensor:
        """The gradient of x: a new tensor, or added to `add_to` in place."""

    def product_weight_grad(self, dy: Tensor, x: Tensor, weight_shape: torch.Size) -> Tensor:
        """The gradient of `product`'s weight."""

    def collapsed(self, x: Tensor) -> Tensor:
        """An input or output with as few dimensions as the products take."""

    def expanded(self, y: Tensor, x_shape: torch.Size) -> Tensor:
        """A collapsed output with the dimensions that it has for an input of `x_shape`."""

    def rows(self, y: Tensor) -> Tensor:
        """[M, features] of an input or output, a view where it can be one."""

    def put_rows(self, y_MN: Tensor, y: Tensor) -> None:
        """Write [M, N] into y, where `rows(y)` gave a copy."""

    def from_rows(self, y_MN: Tensor, like: torch.Size) -> Tensor:
        """A view of [M, features] in the layout of a tensor of shape `like`; the features are those of the rows."""


@runtime_checkable
class WeightOwner(Protocol):
    """The seam between loading and quantisation: a layer that takes a file's weight, and stores it in its own way."""

    def load_weight(self, weight: Tensor) -> None:
        """Take the weight, of the layer's shape and any floating dtype but float8."""

    def load_held(self, held: HeldWeight, payload: Mapping[str, Tensor]) -> None:
        """Take a weight that its file holds quantised. payload: the tensors that `held` gives."""


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
        """The listed files among `names` that are not on this machine."""

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
