"""DoRA's norm in Triton: c = ||W + s B A||_row of a weight as it is stored (formula: adapters/dora.py).

Three launches serve all layers of one shape and storage: 2 s W A^T and s^2 A A^T, both by one kernel, in splits along K, so
that layers of few rows occupy the whole card; and the rest for each row. The kernels find a layer's tensors in a table of
addresses. Tiles and splits are constants of the shape, and a program works for one layer: a norm has the same bits whichever
layers are computed together.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.base.types import StoredWeight
from trainer.kernels.dora_torch import NORM_FLOOR
from trainer.kernels.operators_triton import LaunchConfig, ceil_div, launch, next_power_of_2, operator
from trainer.kernels.upcast_triton import Weight, flat, rank_block, splits_of, sum_of_splits, weight_tile

PROGRAMS = 528  # most programs that read one weight: four for each of the 132 SMs of an H100 or H200
GRAM_COLUMNS = 1024  # fewest columns of A that one program multiplies for A A^T: each program of the rows reads its splits
PARTIAL_SUMS = 2**26  # most bytes of partial sums in one launch of several layers

# The columns of a table of addresses: one row for each layer, int64.
AT_CODES, AT_SCALE, AT_OFFSET, AT_LEVELS, AT_A, AT_B, AT_W_SQ, FIELDS = map(tl.constexpr, range(8))


@triton.jit
def address(table_ptr, layer, FIELD: tl.constexpr, like, ALIGNED: tl.constexpr):
    """The address of a layer's tensor, as a pointer of the type of `like`. ALIGNED: a divisor of it, bytes."""
    return tl.multiple_of(tl.load(table_ptr + layer * FIELDS + FIELD).to(like.dtype), ALIGNED)


@triton.jit
def weight_product_kernel(
    table_ptr, codes_like, fp32_like, out_ptr, factor, N, K, columns, tiles_R, R: tl.constexpr, WEIGHT: tl.constexpr,
    ALIGNED: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, SHIFTED: tl.constexpr,
    LEVELS: tl.constexpr, E4M3: tl.constexpr, STEP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """out_lsnr = factor sum_k w_nk a_rk of the l-th layer,  k in the s-th `columns` columns.

    WEIGHT: the field of w: AT_CODES, or AT_A for A A^T. `columns` is a multiple of BLOCK_K. W is read once up to rank 128.

    Grid: (tiles of N, splits s of K, layers x tiles of R).
    """
    n, split = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1)
    layer, tile_R = tl.program_id(2) // tiles_R, tl.program_id(2) % tiles_R
    r = tile_R * BLOCK_R + tl.arange(0, BLOCK_R)
    codes_ptr = address(table_ptr, layer, WEIGHT, codes_like, ALIGNED)
    a_ptr = address(table_ptr, layer, AT_A, fp32_like, ALIGNED)
    scale_ptr = address(table_ptr, layer, AT_SCALE, fp32_like, ALIGNED)
    offset_ptr = address(table_ptr, layer, AT_OFFSET, fp32_like, ALIGNED)
    levels_ptr = address(table_ptr, layer, AT_LEVELS, fp32_like, ALIGNED)
    factor = tl.cast(factor, tl.float32)  # a compiler passes numbers as fp64
    wa_NR = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    # No prefetch: packed codes and their scales are many small loads, which took 5 times as long (H100).
    for start in tl.range(split * columns, tl.minimum(split * columns + columns, K), BLOCK_K, num_stages=1):
        start = tl.cast(start, tl.int32)
        k = start + tl.arange(0, BLOCK_K)
        w_NK = weight_tile(
            codes_ptr, scale_ptr, offset_ptr, levels_ptr, n, start, N, K, BLOCK_K, BITS,
            BLOCK, SCALED, SHIFTED, LEVELS, E4M3, STEP,
        )  # fmt: skip
        a_KR = tl.load(a_ptr + r[None, :] * K + k[:, None], mask=(r[None, :] < R) & (k[:, None] < K), other=0.0)
        # A tensor core rounds its sums toward zero, so long sums must be made outside of it. The factor ensures that: were
        # it applied after the loop, the compiler would sum inside.
        wa_NR += factor * tl.dot(w_NK, a_KR, input_precision="tf32x3")
    place = layer.to(tl.int64) * tl.num_programs(1) + split
    tl.store(out_ptr + place * N * R + (n[:, None] * R + r[None, :]), wa_NR, mask=(n[:, None] < N) & (r[None, :] < R))


@triton.jit
def adapted_norm_kernel(
    table_ptr, wa_ptr, gram_ptr, c_ptr, N, splits, gram_splits, R: tl.constexpr, FLOOR: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, GRAM_S: tl.constexpr,
):  # fmt: skip
    """c_n = sqrt(max(FLOOR w_sq_n, w_sq_n + sum_r b_nr (sum_s wa_snr + (B gram)_nr))),  gram = s^2 A A^T,  wa = 2 s W A^T.

    Grid: (BLOCK_N rows for each program, layers). gram is in splits too.
    """
    n, layer = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1).to(tl.int64)
    w_sq_ptr, b_ptr = address(table_ptr, layer, AT_W_SQ, c_ptr, 1), address(table_ptr, layer, AT_B, c_ptr, 1)
    wa_ptr += layer * splits * N * R
    gram_ptr += layer * gram_splits * R * R
    w_sq = tl.load(w_sq_ptr + n, mask=n < N, other=0.0)
    c_sq = w_sq
    for first in range(0, R, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        added = sum_of_splits(wa_ptr, n, r, N, splits, R, BLOCK_N, BLOCK_R, BLOCK_S)
        for start in range(0, R, BLOCK_R):
            q = start + tl.arange(0, BLOCK_R)
            b_NQ = tl.load(b_ptr + n[:, None] * R + q[None, :], mask=(n[:, None] < N) & (q[None, :] < R), other=0.0)
            gram_QR = sum_of_splits(gram_ptr, q, r, R, gram_splits, R, BLOCK_R, BLOCK_R, GRAM_S)
            added += tl.dot(b_NQ, gram_QR, input_precision="tf32x3")
        b_NR = tl.load(b_ptr + n[:, None] * R + r[None, :], mask=(n[:, None] < N) & (r[None, :] < R), other=0.0)
        c_sq += tl.sum(b_NR * added, 1)
    c_sq = tl.where(c_sq < w_sq * FLOOR, w_sq * FLOOR, c_sq)  # not maximum, which would hide a NaN
    tl.store(c_ptr + layer * N + n, tl.sqrt_rn(c_sq), mask=n < N)


class Tiles(NamedTuple):
    """The division of W A^T, or A A^T, among programs: a constant of the shape, and with it the order of each sum."""

    block_n: int
    block_k: int
    splits: int
    columns: int  # of each split
    warps: int


def _tiles(rows: int, columns: int, rank: int) -> tuple[Tiles, Tiles]:
    """The tiles of W A^T, and of A A^T."""
    block_r = rank_block(rank, 128)
    # Hopper's tensor cores take 64 rows at once. Shared memory holds two halves of each fp32 operand.
    block_n, block_k = 64, 64 if block_r <= 32 else 32
    # Partial sums are written and read again: at most a quarter of the weight's elements.
    most = max(1, columns // (4 * rank))
    splits = splits_of(columns, block_k, min(most, PROGRAMS // ceil_div(rows, block_n)))
    gram_splits = splits_of(columns, block_k, columns // GRAM_COLUMNS)
    product = Tiles(block_n, block_k, *splits, 4 if rank <= 64 else 8)
    return product, Tiles(min(block_n, block_r), block_k, *gram_splits, 4)


@lru_cache(maxsize=4096)  # the addresses stay the same from update to update
def _table(device: torch.device, addresses: tuple[tuple[int, ...], ...]) -> Tensor:
    """The table on the device, int64 [layers, FIELDS], copied without waiting."""
    # A recorded graph would copy it again, from host memory that is reused by then.
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), "a table is made before it is recorded"
    rows = torch.tensor(addresses, dtype=torch.int64, pin_memory=device.type == "cuda")
    return rows.to(device, non_blocking=True)


@operator("wa_LSNR", "gram_LSRR", "c_LN")
def _adapted_norms(
    c_LN: Tensor, wa_LSNR: Tensor, gram_LSRR: Tensor, codes: list[Tensor], scale: list[Tensor], offset: list[Tensor],
    levels: list[Tensor], columns: int, bits: int, block: int, w_sq_N: list[Tensor], a_RK: list[Tensor], b_NR: list[Tensor],
    scaling: float,
) -> None:  # fmt: skip
    """The norms of layers of one shape, rank and storage. scale, offset, levels: one for each layer, or empty."""
    (count, rows), rank, block_r = c_LN.shape, a_RK[0].shape[0], rank_block(a_RK[0].shape[0], 128)
    # The codes stand in for absent tensors, and are not read there.
    fields = [codes, scale or codes, offset or codes, levels or codes, a_RK, b_NR, w_sq_N]
    addresses = tuple(zip(*([tensor.data_ptr() for tensor in field] for field in fields), strict=True))
    table = _table(c_LN.device, addresses)
    aligned = 16 if all(address % 16 == 0 for layer in addresses for address in layer) else 1
    weight = Weight(codes[0], *(each[0] if each else None for each in (scale, offset, levels)), rows, columns, bits, block)
    (product, gram), tiles_r = _tiles(rows, columns, rank), ceil_div(rank, block_r)
    dense = Weight(a_RK[0], None, None, None, rank, columns, 8, columns)
    for stored, tiles, field, out, factor in (
        (weight, product, AT_CODES, wa_LSNR, 2 * scaling), (dense, gram, AT_A, gram_LSRR, scaling**2),
    ):  # fmt: skip
        constants = dict(
            R=rank, WEIGHT=field.value, ALIGNED=aligned, **stored.layout(), BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k,
            BLOCK_R=block_r,
        )  # fmt: skip
        grid = ceil_div(stored.rows, tiles.block_n), tiles.splits, count * tiles_r
        config = LaunchConfig(grid, constants, tiles.warps)
        numbers = float(factor), stored.rows, columns, tiles.columns, tiles_r
        tensors = table, stored.codes, a_RK[0], out
        launch(weight_product_kernel, lambda config=config: config, tensors, numbers, (grid, *constants.values()))
    block_n, block_r = 16, min(block_r, 64)
    constants = dict(
        R=rank, FLOOR=NORM_FLOOR, BLOCK_N=block_n, BLOCK_R=block_r, BLOCK_S=min(8, next_power_of_2(product.splits)),
        GRAM_S=min(8 if block_r <= 32 else 1, next_power_of_2(gram.splits)),
    )  # fmt: skip
    config = LaunchConfig((ceil_div(rows, block_n), count), constants)
    tensors = table, wa_LSNR, gram_LSRR, c_LN
    launch(adapted_norm_kernel, lambda: config, tensors, (rows, product.splits, gram.splits), (rank, count))


def adapted_norms(
    weights: Sequence[StoredWeight], w_sq_N: Sequence[Tensor], a_RK: Sequence[Tensor], b_NR: Sequence[Tensor],
    scalings: Sequence[float],
) -> list[Tensor]:  # fmt: skip
    """The norms; layers of one shape and storage are computed together, as far as their partial sums stay small."""
    for tensor in (*w_sq_N, *a_RK, *b_NR):
        if tensor.dtype != torch.float32:
            raise ValueError(f"the norm takes fp32 A, B and squares, not {tensor.dtype}")
    stored = [flat(weight) for weight in weights]
    alike: dict[tuple[object, ...], list[int]] = {}
    for place, (weight, a, scaling) in enumerate(zip(stored, a_RK, scalings, strict=True)):
        kind = weight.codes.dtype, weight.codes.device, *(each is None for each in weight[1:4]), *weight[4:], len(a), scaling
        alike.setdefault(kind, []).append(place)
    norms: dict[int, Tensor] = {}
    for places in alike.values():
        like, rank = stored[places[0]], len(a_RK[places[0]])
        splits, gram_splits = (tiles.splits for tiles in _tiles(like.rows, like.columns, rank))
        most = max(1, PARTIAL_SUMS // (4 * splits * like.rows * rank))
        for first in range(0, len(places), most):
            batch = places[first : first + most]
            c_LN, wa_LSNR, gram_LSRR = (
                torch.empty(len(batch), *shape, dtype=torch.float32, device=like.codes.device)
                for shape in ((like.rows,), (splits, like.rows, rank), (gram_splits, rank, rank))
            )
            stacked = zip(*(stored[place][:4] for place in batch), strict=True)
            fields = ([tensor for tensor in tensors if tensor is not None] for tensors in stacked)
            factors = ([tensors[place].contiguous() for place in batch] for tensors in (w_sq_N, a_RK, b_NR))
            _adapted_norms(
                c_LN, wa_LSNR, gram_LSRR, *fields, like.columns, like.bits, like.block, *factors, scalings[batch[0]]
            )
            norms |= zip(batch, c_LN.unbind(), strict=True)
    return [norms[place] for place in range(len(weights))]
