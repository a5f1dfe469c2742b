"""The Triton kernels against their plain twins and against dense fp64.

Without a GPU the tests run under Triton's CPU interpreter, which has to be chosen before Triton is first imported: so
`test_on_the_interpreter` runs this file again in a process of its own, where DEVICE is the CPU. With `-m gpu` the same tests
run on CUDA, compiled, at real sizes too. To see one test: TRITON_INTERPRET=1 python -m pytest tests/numerics/test_kernels.py

Tolerances: u is the unit roundoff, half an ulp of 1. An fp32 operation errs by u of its result, a rounding to the result's
dtype by u of that dtype (or half its smallest subnormal); products of two 16-bit numbers are exact in fp32. Bounds are
relative to sums of absolute values, so that no cancellation in the data is held against the arithmetic.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer.base.types import StoredWeight
from trainer.kernels import dora_torch
from trainer.runtime.precision import prepare_device

ROOT = Path(__file__).resolve().parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
TRITON = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None

U = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SUBNORMAL = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}
U32 = U[torch.float32]
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# bits, elements to a scale (0: a row), whether there is an offset, whether there are levels
PACKED = {
    "int4": (4, 32, True, False),
    "int4_by_row": (4, 0, True, False),
    "int2": (2, 16, True, False),
    "nf4": (4, 64, False, True),
}
KINDS = [*FLOATS, *FP8, "int8", *PACKED]

# Weights [N, K]. An odd K ends rows inside a byte and inside a block. The small shapes are just above one tile.
WEIGHTS = [(37, 131), (21, 96)] + ([] if INTERPRETED else [(641, 259), (3072, 3072)])
# Activations [M, N] and their dtypes: fp32 has smaller tiles.
ACTIVATIONS = [((37, 70), torch.float32), ((67, 139), torch.bfloat16), ((67, 139), torch.float16)]
if not INTERPRETED:
    ACTIVATIONS += [(shape, dtype) for shape in ((100, 641), (512, 3072)) for dtype in FLOATS.values()]
# Queries and keys [B, tokens, heads, size].
HEADS = [(2, 5, 3, 6), (1, 40, 2, 128), (1, 3, 1, 2)] + ([] if INTERPRETED else [(2, 4608, 24, 128)])
RANKS = [(1, "rows"), (3, "columns"), (16, "rows"), (64, "rows"), (128, "columns"), (162, "rows")]
SCALING = 0.7


def on_device(test):
    if INTERPRETED:
        return test
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")(test))


@pytest.fixture
def fused():
    from trainer.kernels import dora_triton

    assert dora_triton.INTERPRETED == INTERPRETED
    if not INTERPRETED:
        prepare_device(torch.device("cuda"), {"bf16"})
    return dora_triton


def generator(*key: object) -> torch.Generator:
    return torch.Generator().manual_seed(sum(map(ord, str(key))))


def fenced(x: torch.Tensor, guard: int = 1 << 13) -> torch.Tensor:
    """x on DEVICE, in the same order of memory, between values that spoil every result they get into."""
    x = x.to(DEVICE)
    raw = torch.full((x.numel() + 2 * guard,), 0x7F, dtype=torch.uint8, device=DEVICE)
    buffer = raw.view(x.dtype) if x.dtype.itemsize == 1 else torch.full(raw.shape, torch.nan, dtype=x.dtype, device=DEVICE)
    view = buffer[guard:-guard].as_strided(x.shape, x.stride(), guard)
    return view.copy_(x) if x.dtype not in FP8.values() else view.view(torch.uint8).copy_(x.view(torch.uint8)).view(x.dtype)


def fence_holds(view: torch.Tensor, guard: int = 1 << 13) -> bool:
    before = view.as_strided((guard,), (1,), 0)
    after = view.as_strided((guard,), (1,), guard + view.numel())
    return bool(before.isnan().all() and after.isnan().all())


def gains(n: int, g: torch.Generator) -> torch.Tensor:
    """g far from 1 on either side, and negative ones, which a magnitude can come to."""
    return fenced(torch.randn(n, generator=g).mul(2).exp().copysign(torch.randn(n, generator=g)))


def make_weight(kind: str, n: int, k: int) -> tuple[StoredWeight, torch.Tensor, torch.Tensor]:
    """A random weight, its exact values (fp64 [N, K]), and |code * scale| + |offset|, what their fp32 rounding errors go by.

    Row 0 is zero or as near as the storage has it, row 1 tiny.
    """
    g = generator(kind, n, k)
    if kind in FLOATS:
        w = torch.randn(n, k, generator=g) / k**0.5
        w[0], w[1] = 0, w[1] * 1e-12
        codes = fenced(w.to(FLOATS[kind]))
        return StoredWeight(codes, (n, k)), codes.double(), codes.double().abs()
    bits, block, shifted, with_levels = PACKED.get(kind, (None, 0, False, False))
    block = block or k
    levels = None
    if kind in FP8:
        codes = torch.randint(0, 256, (n, k), generator=g, dtype=torch.uint8)
        codes[~codes.view(FP8[kind]).float().isfinite()] = 0
        codes = codes.view(FP8[kind])
        numbers = codes.double()
    elif bits is None:
        codes = torch.randint(-128, 128, (n, k), generator=g, dtype=torch.int8)
        numbers = codes.double()
    else:
        number = torch.randint(0, 2**bits, (n * k,), generator=g, dtype=torch.int32)
        padded = torch.cat([number, torch.zeros(-n * k % (8 // bits), dtype=torch.int32)]).view(-1, 8 // bits)
        codes = sum(padded[:, i] << (bits * i) for i in range(8 // bits)).to(torch.uint8)
        levels = torch.randn(16, generator=g) if with_levels else None
        numbers = (number.double() if levels is None else levels.double()[number]).view(n, k)
    blocks = -(-n * k // block)
    scale = (0.5 + torch.rand(blocks, generator=g)) / (numbers.abs().max().float() * k**0.5)
    scale[: -(-k // block)] = 0
    scale[-(-k // block) : -(-2 * k // block)] *= 1e-12
    offset = -(2.0 ** (bits or 0)) * scale * torch.rand(blocks, generator=g) if shifted else None

    def spread(x: torch.Tensor) -> torch.Tensor:
        return x.double().repeat_interleave(block)[: n * k].view(n, k)

    product, shift = numbers * spread(scale), spread(offset) if offset is not None else torch.zeros(1)
    stored = StoredWeight(
        fenced(codes), (n, k), bits, block, fenced(scale), None if offset is None else fenced(offset),
        None if levels is None else levels.to(DEVICE),
    )  # fmt: skip
    return stored, (product + shift).to(DEVICE), (product.abs() + shift.abs()).to(DEVICE)


def near(result: torch.Tensor, exact: torch.Tensor, tolerance: torch.Tensor | float) -> None:
    assert result.isfinite().all()
    excess = ((result.double() - exact).abs() / tolerance).nan_to_num(0).max()  # 0 / 0: exact where it has to be
    assert excess <= 1, f"error is {float(excess):.3g} times its bound"


def rounding(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return U[dtype] * exact.abs() + SUBNORMAL[dtype] / 2


def norm_by(kernels, *given) -> torch.Tensor:
    """Of one layer."""
    return kernels.adapted_norms(*([each] for each in given))[0]


@on_device
@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
@pytest.mark.parametrize("shape", WEIGHTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_upcast(fused, kind, shape, dtype) -> None:
    weight, exact, size = make_weight(kind, *shape)
    far = gains(shape[0], generator(shape))
    for g in (None, far):
        gain = 1.0 if g is None else g.double()[:, None]
        out = fenced(torch.zeros(shape, dtype=dtype))
        result = fused.upcast(weight, dtype, g, out=out)
        twin = dora_torch.upcast(weight, dtype, g)
        assert result is out and fence_holds(out)
        # fp32: the product with the scale, the sum with the offset, the product with g.
        tolerance = 3 * U32 * size * abs(gain) + 1.01 * rounding(exact * gain, dtype)
        near(result, exact * gain, tolerance)
        near(twin, exact * gain, tolerance)
        if weight.offset is None or INTERPRETED:  # a compiled kernel fuses scale and offset into one rounding
            assert torch.equal(result, twin)


@on_device
@pytest.mark.parametrize("kind, shape, rank", [
    *((kind, shape, 3) for kind in KINDS for shape in WEIGHTS),
    *(("fp8_e4m3", WEIGHTS[-1], rank) for rank in (1, 16, 64, 128, 160)),
])  # fmt: skip
def test_norms(fused, kind, shape, rank) -> None:
    (n, k), g = shape, generator(kind, shape, rank)
    weight, exact, size = make_weight(kind, n, k)
    # Rounding of w (3 operations) counts twice in its square; no term of a sum goes through more than 32 additions, of one
    # over K in tiles: K / 512 and 10 within a tile.
    w_sq = exact.square().sum(1)
    tolerance = 48 * U32 * size.square().sum(1)
    squares = fused.row_squares(weight)
    near(squares, w_sq, tolerance)
    near(dora_torch.row_squares(weight), w_sq, tolerance)
    assert squares.dtype == torch.float32

    a = fenced(torch.randn(rank, k, generator=g) / k**0.5)
    b = fenced(torch.randn(n, rank, generator=g))
    c = norm_by(fused, weight, fenced(squares), a, b, SCALING)
    twin = norm_by(dora_torch, weight, squares, a, b, SCALING)
    a64, b64 = a.double(), b.double()
    added = SCALING * b64 @ a64
    added_size = SCALING * b64.abs() @ a64.abs()
    # Products of fp32 in three passes of tf32 err by up to 2^-20 = 16 u; their sums run over K and R.
    tolerance = (64 + (k + rank) ** 0.5) * U32 * (size + added_size).square().sum(1)
    for result in (c, twin):
        near(result.double().square(), (exact + added).square().sum(1), tolerance)
    if rank != 3 or kind == "fp32":
        still = norm_by(fused, weight, fenced(squares), a, fenced(torch.zeros_like(b)), SCALING)
        assert torch.equal(still, squares.double().sqrt().float())


@on_device
@pytest.mark.parametrize("partial_sums", [2**26, 1], ids=["together", "one to a launch"])
def test_a_norm_is_the_same_beside_any_others(fused, monkeypatch, partial_sums: int) -> None:
    """Bit for bit, and near its twin: layers of several shapes, storages, ranks, scalings and alignments, in any order."""
    from trainer.kernels import norm_triton

    rng = generator("company")
    cells = [
        ("fp8_e4m3", (37, 520), 16), ("nf4", (24, 96), 16), ("fp8_e4m3", (37, 520), 16), ("nf4", (24, 96), 16),
        ("bf16", (25, 97), 16), ("nf4", (24, 96), 3), ("int4", (24, 96), 16), ("fp8_e4m3", (37, 520), 16),
    ]  # fmt: skip
    layers = []
    for place, (kind, (n, k), rank) in enumerate(cells):
        weight, *_ = make_weight(kind, n, k)
        shift = place % 3  # how far A lies beyond an address that 16 divides, in elements
        a = fenced(torch.randn(rank * k + shift, generator=rng) / k**0.5)[shift:].view(rank, k)
        scaling = SCALING if place != 3 else 2.0
        layers.append((weight, fused.row_squares(weight), a, fenced(torch.randn(n, rank, generator=rng)), scaling))
    assert {a.data_ptr() % 16 for _, _, a, *_ in layers} > {0}
    alone = [norm_by(fused, *layer) for layer in layers]
    for layer, norm in zip(layers, alone, strict=True):
        twin = norm_by(dora_torch, *layer)
        near(norm, twin.double(), 2.0**-18 * twin.double())
    monkeypatch.setattr(norm_triton, "PARTIAL_SUMS", partial_sums)
    for order in (list(range(8)), [7, 2, 0, 5, 1, 6, 3, 4], [3, 1, 0]):
        together = fused.adapted_norms(*zip(*(layers[place] for place in order), strict=True))
        assert all(torch.equal(norm, alone[place]) for norm, place in zip(together, order, strict=True))
    assert fused.adapted_norms([], [], [], [], []) == []


@on_device
def test_norm_is_not_rounded_to_tf32(fused) -> None:
    # Nothing is representable in 11 bits and all errors have one sign: tf32 would be off by 2^-12 or so.
    n, k, rank = 16, 200, 5
    w, a, b = torch.full((n, k), 1 / 3), torch.full((rank, k), 1 / 7), torch.full((n, rank), 1 / 5)
    weight = StoredWeight(w.to(DEVICE), (n, k))
    c = norm_by(fused, weight, w.square().sum(1).to(DEVICE), a.to(DEVICE), b.to(DEVICE), 1.0)
    exact = (w.double() + b.double() @ a.double()).norm(dim=1)
    near(c.cpu(), exact, 2.0**-19 * exact)


@on_device
def test_norm_of_a_cancelled_row_and_of_nan(fused) -> None:
    g = generator("cancel")
    a, b = torch.randn(3, 40, generator=g), torch.randn(20, 3, generator=g)
    w = -(b @ a)
    w_sq = w.square().sum(1)
    w_sq[7] = torch.nan
    c = norm_by(fused, *(StoredWeight(w.to(DEVICE), (20, 40)), *(x.to(DEVICE) for x in (w_sq, a, b))), 1.0)
    assert c[7].isnan() and c.isnan().sum() == 1
    near(c[:7], torch.zeros_like(c[:7]), (64 * U32 * 4 * w_sq[:7].to(DEVICE)).sqrt())


def activation(g: torch.Generator, m: int, n: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    """[M, N], row-major, or column-major as the rows of one image's convolution are."""
    x = torch.randn(m, n, generator=g).to(dtype)
    return fenced(x if layout == "rows" else x.t().contiguous().t())


@on_device
@pytest.mark.parametrize("rank, layout", RANKS)
@pytest.mark.parametrize("shape, dtype", ACTIVATIONS, ids=str)
def test_compose(fused, dtype, shape, rank, layout) -> None:
    (m, n), rng = shape, generator(dtype, shape, rank)
    z, t = activation(rng, m, n, dtype, layout), activation(rng, m, rank, dtype, layout)
    b = fenced(torch.randn(n, rank, generator=rng).to(dtype))
    gain = gains(n, rng).clamp_(-500, 500)  # the results fit into fp16
    shift = fenced(torch.randn(n, generator=rng).to(dtype).float())
    z64, update = z.double(), t.double() @ b.double().t()
    size = (2 * rank + 6) * U32 * (t.double().abs() @ b.double().abs().t() + z64.abs())
    choices = [(gain, shift), (None, shift), (gain, None), (None, None)]
    for g, bias in [choices[rank % 4]] if INTERPRETED else choices:
        by, plus = 1.0 if g is None else g.double(), 0.0 if bias is None else bias.double()
        exact = by * (z64 + update) + plus
        tolerance = abs(by) * size + U32 * (exact.abs() + abs(plus)) + 1.01 * rounding(exact, dtype)
        for kernels in (fused, dora_torch):
            out, in_place = fenced(torch.zeros_like(z)), fenced(z.clone())
            kernels.compose(z, t, b, g, bias, out)
            kernels.compose(in_place, t, b, g, bias, in_place)
            near(out, exact, tolerance)
            assert torch.equal(out, in_place) and fence_holds(out) and fence_holds(in_place)


@on_device
@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
def test_compose_at_initialisation_is_the_base(fused, dtype) -> None:
    rng = generator("start", dtype)
    z, t, b = activation(rng, 67, 139, dtype, "rows"), activation(rng, 67, 3, dtype, "rows"), torch.zeros(139, 3)
    ones, bias = torch.ones(139, device=DEVICE), torch.randn(139, generator=rng).to(dtype).float().to(DEVICE)
    for g in (ones, None):
        out = torch.empty_like(z)
        fused.compose(z, t, b.to(DEVICE, dtype), g, None, out)
        assert torch.equal(out, z)
        fused.compose(z, t, b.to(DEVICE, dtype), g, bias, out)
        assert torch.equal(out, (z.float() + bias).to(dtype))


# What the gradient of m is read from. The interpreter is slow: there not all of them meet, but each rank meets fp32 and one
# of the 16-bit dtypes, and each of these all three.
OF = ("z0", "output", "output with bias")
GRADIENTS = [
    (shape, dtype, rank, layout, of)
    for row, (shape, dtype) in enumerate([*ACTIVATIONS, ((1, 70), torch.float32)])
    for column, (rank, layout) in enumerate(RANKS)
    for of in (OF[(row + column) % 3 :][:1] if INTERPRETED else OF)
    if not INTERPRETED or row == 0 or (row < 3 and column % 2 == row % 2) or (row == 3 and column in (0, 5))
]


@on_device
@pytest.mark.parametrize("shape, dtype, rank, layout, of", GRADIENTS, ids=str)
def test_adapter_gradients(fused, dtype, shape, rank, layout, of) -> None:
    (m, n), rng, with_z = shape, generator(dtype, shape, rank), of == "z0"
    dy, u = activation(rng, m, n, dtype, layout), activation(rng, m, n, dtype, "rows")
    t, b, g = activation(rng, m, rank, dtype, layout), fenced(torch.randn(n, rank, generator=rng)), gains(n, rng)
    over = gains(n, rng)
    bias = fenced(60 * torch.randn(n, generator=rng)) if of == "output with bias" else None
    dy64, u64, t64, b64, sg = dy.double(), u.double(), t.double(), b.double(), SCALING * g.double()[:, None]
    # Tensor cores truncate after each 8 rows or more; additions that round to nearest add up like sqrt(M), which is less.
    steps = (m / 8 + 16) * 2 * U32
    d, d_size = dy64.t() @ t64, dy64.abs().t() @ t64.abs()
    if bias is not None:
        u64 = u64 - bias.double()  # rounded once more
    du, du_size = (dy64 * u64).sum(0), (dy64 * u64).abs().sum(0)
    by = 1 / over.double()
    for kernels, d_error in (fused, steps * d_size), (dora_torch, steps * d_size + 1.01 * rounding(d, dtype)):
        db, dm, sb = kernels.adapter_gradients(dy, u, t, b, g, over, bias, SCALING, with_z)
        near(db, sg * d, abs(sg) * (d_error + 3 * U32 * abs(d)))
        exact, error = du, steps * du_size
        if with_z:
            with_b, with_b_error = SCALING * (b64 * d).sum(1), SCALING * (b64.abs() * (d_error + steps * d_size)).sum(1)
            exact, error = du + with_b, error + with_b_error + (rank + 4) * U32 * SCALING * (b64.abs() * d.abs()).sum(1)
        near(dm, exact * by, abs(by) * (error + 3 * U32 * abs(exact)))
        near(sb, sg * b64, 3 * U32 * abs(sg * b64) + 1.01 * rounding(sg * b64, dtype))
        assert db.dtype == dm.dtype == torch.float32 and sb.dtype == dtype
        again = kernels.adapter_gradients(dy, u, t, b, g, over, bias, SCALING, with_z)
        assert all(map(torch.equal, (db, dm, sb), again))


QUANTISED = [((5, 48), torch.float32), ((7, 300), torch.bfloat16), ((7, 300), torch.float16)]
if not INTERPRETED:
    QUANTISED += [((4608, 3072), torch.bfloat16), ((512, 15360), torch.bfloat16), ((64, 18432), torch.float32)]


@on_device
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("dtype", FLOATS.values(), ids=str)
@pytest.mark.parametrize(
    "shape", [(2, 5, 3, 6), (1, 40, 2, 128), (1, 3, 1, 2)] + [(2, 4608, 24, 128)] * (not INTERPRETED), ids=str
)
def test_rotate(fused, shape, dtype, back) -> None:
    """The twin's bits, of a head of any even size, strided or not."""
    _, tokens, heads, size = shape
    rng = generator(shape, dtype)
    q, k = (fenced((torch.randn(shape, generator=rng) * torch.randn(shape, generator=rng).exp()).to(dtype)) for _ in "qk")
    cos, sin = (fenced(torch.randn(tokens, size, generator=rng)) for _ in range(2))
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    expected = dora_torch.rotate(q, k, cos, sin, back=back)
    for each in (q, strided):
        assert all(map(torch.equal, fused.rotate(each, k, cos, sin, back=back), expected))


@on_device
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("with_factor", [False, True])
@pytest.mark.parametrize("shape, dtype", QUANTISED, ids=str)
def test_quantize_rows(fused, monkeypatch, shape, dtype, with_factor, layout) -> None:
    """Codes and scales equal the twin's bit for bit (but for the sign of zeros); rows of zeros, tiny and with an outlier."""
    from trainer.kernels import fp8_triton

    (m, k), rng = shape, generator(shape, dtype)
    x = torch.randn(m, k, generator=rng) * torch.randn(m, k, generator=rng).exp()
    x[0], x[1, 3] = 0, 1e4
    if dtype != torch.float16:
        x[2], x[3] = x[2] * 1e-30, x[3] * 1e30
        # Under the scale's floor. No smaller numbers: the interpreter misreads subnormals of bf16.
        x[4] = x[4] if with_factor else x[4].sign() * 1e-36
    x = fenced((x if layout == "rows" else x.t().contiguous().t()).to(dtype))
    by = gains(k, rng) if with_factor else None
    twin_codes, twin_scale = dora_torch.quantize_rows(x, by)
    for longest in (fp8_triton.LONGEST_ROW, 32):  # in one go, and in pieces
        monkeypatch.setattr(fp8_triton, "LONGEST_ROW", longest)
        codes, scale = fused.quantize_rows(x, by)
        assert codes.is_contiguous() and codes.dtype == torch.float8_e4m3fn
        assert torch.equal(codes.float(), twin_codes.float()) and torch.equal(scale, twin_scale)
    exact = x.double() * (1 if by is None else by.double())
    # Half a step of a mantissa of 3 bits, or of the smallest code's 2^-9; three fp32 roundings before it.
    near(codes.double() * scale[:, None].double(), exact, 1.01 * (2.0**-4 * exact.abs() + 2.0**-10 * scale[:, None]))
    assert not codes[0].float().any() and scale.min() > 0


@on_device
def test_every_code_is_reached_and_ties_go_to_even(fused) -> None:
    """A row whose scale is 1: the grid of codes, the middles between them, and both sides of each."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    x = torch.cat([codes, middles, middles * (1 - 2.0**-20), middles * (1 + 2.0**-20)]).view(1, -1)
    result, scale = fused.quantize_rows(torch.cat([x, -x]).to(DEVICE))
    assert torch.equal(scale, torch.ones_like(scale))
    # By count: code 2i + 1 is odd, so the middle above it goes up and the one below it goes down.
    upper = torch.arange(1, 127)
    even = torch.where(upper % 2 == 0, upper, upper - 1)
    expected = torch.cat([torch.arange(127), even, upper - 1, upper]).to(torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(result.float().cpu(), torch.stack([expected, -expected]))


@on_device
# On the device in bf16 only, which is what runs ask for: not every build of cuBLAS gives other dtypes for scales by row.
@pytest.mark.parametrize("dtype", FLOATS.values() if INTERPRETED else [torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [(19, 48, 32)] + ([] if INTERPRETED else [(77, 1280, 640), (512, 3072, 12288), (4096, 1280, 1280)]), ids=str
)
def test_scaled_products(fused, shape, dtype) -> None:
    """Product and input gradient of given codes, against fp64 and the twin."""
    (m, n, k), rng = shape, generator(shape, dtype)
    weight = StoredWeight(
        fenced(torch.randn(n, k, generator=rng).to(torch.float8_e4m3fn)), (n, k), None, k,
        fenced((0.5 + torch.rand(n, generator=rng)) / k**0.5),
    )  # fmt: skip
    w = weight.codes.double() * weight.scale[:, None].double()
    x, x_scale = fused.quantize_rows(fenced(torch.randn(m, k, generator=rng).to(dtype)))
    d, d_scale = fused.quantize_rows(fenced(torch.randn(m, n, generator=rng).to(dtype)), weight.scale)
    x64, d64 = x.double() * x_scale[:, None].double(), d.double() * d_scale[:, None].double()
    # Hopper's tensor cores keep some 13 bits of a sum below its largest term, and hand sums of 128 terms on to fp32.
    unit = 2.0**-13 if not INTERPRETED else (k + n) ** 0.5 * U32
    for kernels in (fused, dora_torch):
        z = kernels.scaled_product(x, x_scale, weight, dtype)
        near(z, x64 @ w.t(), unit * (x64.abs() @ w.abs().t()) + 1.01 * rounding(x64 @ w.t(), dtype))
        dx = kernels.scaled_input_grad(d, d_scale, weight, dtype)
        exact = d64 @ weight.codes.double()
        near(dx, exact, unit * (d64.abs() @ weight.codes.double().abs()) + 1.01 * rounding(exact, dtype))
        assert z.dtype == dx.dtype == dtype and z.is_contiguous() and dx.is_contiguous()


@on_device
@pytest.mark.parametrize("shape", [(130, 70), (16, 300)] + ([] if INTERPRETED else [(12288, 3072)]), ids=str)
def test_transpose(fused, shape) -> None:
    from trainer.kernels import fp8_triton

    w = fenced(torch.randint(0, 256, shape, generator=generator(shape), dtype=torch.uint8))
    out = torch.zeros(shape[::-1], dtype=torch.uint8, device=DEVICE)
    fp8_triton._transpose(w, out)
    assert torch.equal(out, w.t())


@on_device
def test_no_rows(fused) -> None:
    z, t, b = torch.empty(0, 5, device=DEVICE), torch.empty(0, 2, device=DEVICE), torch.ones(5, 2, device=DEVICE)
    fused.compose(z, t, b, None, None, z)
    db, dm, sb = fused.adapter_gradients(z, z, t, b, b[:, 0], b[:, 1], None, 2.0, True)
    assert torch.equal(db, torch.zeros_like(b)) and torch.equal(dm, torch.zeros_like(b[:, 0])) and torch.equal(sb, 2 * b)
    codes, scale = fused.quantize_rows(z)
    assert codes.shape == (0, 5) and scale.shape == (0,)


@on_device
def test_fp64_is_refused(fused) -> None:
    x = torch.ones(4, 4, dtype=torch.float64, device=DEVICE)
    dense = StoredWeight(x.float(), (4, 4))
    with pytest.raises(ValueError, match="float64"):
        fused.upcast(dense, torch.float64)
    with pytest.raises(ValueError, match="float64"):
        fused.row_squares(StoredWeight(x, (4, 4)))
    with pytest.raises(ValueError, match="float64"):
        norm_by(fused, dense, x[0].float(), x, x.float(), 1.0)
    with pytest.raises(ValueError, match="float64"):
        fused.compose(x.float(), x.float(), x, None, None, x.float())
    with pytest.raises(ValueError, match="float64"):
        fused.adapter_gradients(x, x, x, x.float(), x[0].float(), x[0].float(), None, 1.0, True)
    with pytest.raises(ValueError, match="float64"):
        fused.adapter_gradients(x.float(), x.float(), x.float(), x, x[0].float(), x[0].float(), None, 1.0, True)
    with pytest.raises(ValueError, match="float64"):
        fused.adapter_gradients(*[x.float()] * 4, x[0].float(), x[0].float(), x[0], 1.0, False)
    with pytest.raises(ValueError, match="float64"):
        fused.quantize_rows(x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_compiled_equals_eager(fused) -> None:
    rng = generator("compile")
    weight, _, _ = make_weight("fp8_e4m3", 640, 320)
    m, n, k, rank = 300, 640, 320, 16
    z, t, b = (activation(rng, *s, torch.bfloat16, "rows") for s in ((m, n), (m, rank), (n, rank)))
    a, g = torch.randn(rank, k, generator=rng).cuda(), torch.rand(n, generator=rng).cuda()

    def everything(codes, scale, z, t, b, a, g):
        stored = StoredWeight(codes, (n, k), None, k, scale)
        squares = fused.row_squares(stored)
        y = z.clone()
        fused.compose(y, t, b, g, None, y)
        norm = norm_by(fused, stored, squares, a, b.float(), SCALING)
        product = fused.scaled_product(*fused.quantize_rows(z[:, :k].contiguous()), stored, torch.bfloat16)
        dx = fused.scaled_input_grad(*fused.quantize_rows(z, scale * g), stored, torch.bfloat16)
        upcast = fused.upcast(stored, torch.bfloat16, g)
        gradients = fused.adapter_gradients(y, z, t, b.float(), g, norm, g, SCALING, False)
        return squares, upcast, norm, y, product, dx, *gradients

    arguments = (weight.codes, weight.scale, z, t, b, a, g)
    compiled = torch.compile(everything, fullgraph=True)(*arguments)
    for ours, eager in zip(compiled, everything(*arguments), strict=True):
        assert torch.equal(ours, eager)


@pytest.mark.skipif(not TRITON, reason="needs Triton")
def test_a_launch_is_kept_for_tensors_that_triton_compiles_alike() -> None:
    """Two tensors that `compiled_for` tells alike are alike to Triton's own rule. Numbers are kept as they are."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import native_specialize_impl

    from trainer.kernels.operators_triton import compiled_for

    backend = make_backend(GPUTarget("cuda", 90, 32))
    raw = torch.zeros(1 << 12, dtype=torch.uint8)
    dtypes = (*FLOATS.values(), *FP8.values())
    tensors = [raw[at : at + 256].view(dtype) for at in range(0, 64, 4) for dtype in dtypes]
    theirs: dict[tuple[object, ...], object] = {}
    for tensor in tensors:
        rule = native_specialize_impl(backend, tensor, False, True, True)
        assert theirs.setdefault(tuple(compiled_for((tensor,))), rule) == rule
    assert len(theirs) < len(tensors)
    assert compiled_for((raw[:32],)) == compiled_for((raw[64:],))


@pytest.mark.slow
@pytest.mark.skipif(not TRITON or os.environ.get("TRITON_INTERPRET") == "1", reason="needs Triton, not its interpreter")
def test_a_launch_is_made_anew_for_what_decides_it(monkeypatch) -> None:
    """Calls of every kernel, shapes and storages mixed: with the launches of earlier calls kept, each is launched as it is
    alone. Nothing runs."""
    from triton.runtime.jit import JITFunction

    from trainer.kernels import dora_triton, fp8_triton, operators_triton

    told: list[tuple[object, ...]] = []

    def form(argument: object) -> object:
        return (argument.shape, argument.dtype) if isinstance(argument, torch.Tensor) else argument

    class Compiled:
        def __init__(self, name: str, num_warps: int) -> None:
            self.name, self.num_warps = name, num_warps

        def __getitem__(self, grid: tuple[int, ...]):
            return lambda *arguments: told.append((self.name, self.num_warps, grid, *map(form, arguments)))

    def run(kernel, *arguments, grid, num_warps, warmup, **constants) -> Compiled:
        compiled = Compiled(kernel.__name__, num_warps)
        values = (constants[name] for name in kernel.arg_names[len(arguments) :])
        compiled[grid + (1,) * (3 - len(grid))](*arguments, *values)
        return compiled

    monkeypatch.setattr(JITFunction, "run", run)
    kept: dict = {}
    rng, seen, kernels = random.Random(0), 0, set()
    for _ in range(400):
        n, k, m, rank = (rng.choice(sizes) for sizes in ((1, 16, 48), (1, 16, 64, 4096), (1, 5, 64), (1, 16, 130)))
        dtype, per_row = rng.choice(list(FLOATS.values())), torch.empty(n)
        g, bias, scale, offset = (rng.choice((None, per_row)) for _ in range(4))
        codes = torch.empty(n, k, dtype=rng.choice((torch.int8, torch.bfloat16, torch.float8_e4m3fn)))
        weight = StoredWeight(codes, (n, k), None, k, scale, offset)
        a, b, y = torch.empty(rank, k), torch.empty(n, rank), torch.empty(m, n, dtype=dtype)
        t = rng.choice((torch.empty(m, rank, dtype=dtype), torch.empty(rank, m, dtype=dtype).t()))
        scaling, with_z, count = rng.choice((0.5, 1.0)), rng.random() < 0.5, rng.choice((1, 3))
        each: list[list[tuple[object, ...]]] = []
        for launches in (kept, {}):
            monkeypatch.setattr(operators_triton, "_compiled", launches)
            told.clear()
            dora_triton.upcast(weight, dtype, g)
            dora_triton.row_squares(weight)
            dora_triton.compose(y, t, b.to(dtype), g, bias, y)
            dora_triton.adapter_gradients(y, y, t, b, per_row, per_row, bias, scaling, with_z)
            dora_triton.quantize_rows(y, g)
            heads = y[None, :, :, None].expand(-1, -1, -1, 2)
            dora_triton.rotate(heads, heads, torch.empty(m, 2), torch.empty(m, 2), back=with_z)
            fp8_triton._transpose(codes.view(torch.uint8)[:, :k], torch.empty(k, n, dtype=torch.uint8))
            dora_triton.adapted_norms(*([given] * count for given in (weight, per_row, a, b, scaling)))
            each.append(list(told))
        assert each[0] == each[1]
        seen += len(told)
        kernels |= {name for name, *_ in told}
    assert len(kernels) == 10 and 100 < len(kept) < seen / 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_kept_launch_gives_the_same_as_a_first_one(fused) -> None:
    """One kernel for tensors at odd addresses and at even ones, sizes of 1 and of multiples of 16, in turn, twice."""
    from trainer.kernels import operators_triton

    rng = generator("kept")
    calls = []
    for m, n, rank, shift in ((64, 128, 16, 0), (64, 128, 16, 1), (1, 128, 16, 0), (33, 7, 1, 0), (48, 640, 16, 0)):
        z = torch.randn(m * n + shift, generator=rng).bfloat16().cuda()[shift:].view(m, n)
        t, b = (torch.randn(rows, rank, generator=rng).bfloat16().cuda() for rows in (m, n))
        calls.append((z, t, b, torch.rand(n, generator=rng).cuda(), None))
    results = []
    for _ in range(2):
        for call in calls:
            results.append(torch.empty_like(call[0]))
            fused.compose(*call, results[-1])
    for result, call in zip(results, calls * 2, strict=True):
        operators_triton._compiled.clear()
        fresh = torch.empty_like(result)
        fused.compose(*call, fresh)
        assert torch.equal(fresh, result)


@on_device
def test_operators_are_seen_by_compilers_and_need_no_values(fused) -> None:
    """Traced whole, each is one operator and gives what it gives eagerly; on fake tensors nothing runs, shapes are right."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    rng = generator("operators")
    weight, _, _ = make_weight("int8", 16, 32)
    z, t, b = (torch.randn(*shape, generator=rng).to(DEVICE) for shape in ((5, 16), (5, 3), (16, 3)))
    a, g = torch.randn(3, 32, generator=rng).to(DEVICE), torch.rand(16, generator=rng).to(DEVICE)
    seen = []

    def everything(codes, scale, z, t, b, a, g):
        stored, y = StoredWeight(codes, (16, 32), None, 32, scale), torch.empty_like(z)
        fused.compose(z, t, b, g, None, y)
        norm = norm_by(fused, stored, fused.row_squares(stored), a, b, SCALING)
        return y, norm, fused.upcast(stored, z.dtype, g), *fused.adapter_gradients(y, z, t, b, g, norm, g, SCALING, False)

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if "trainer" in str(node.target))
        return graph

    arguments = (weight.codes, weight.scale, z, t, b, a, g)
    eager = everything(*arguments)
    for ours, traced in zip(eager, torch.compile(everything, fullgraph=True, backend=backend)(*arguments), strict=True):
        assert torch.equal(ours, traced)
    assert len(seen) == len(set(seen)) == 5
    with FakeTensorMode() as mode:
        for ours, fake in zip(eager, everything(*map(mode.from_tensor, arguments)), strict=True):
            assert (ours.shape, ours.dtype, ours.device) == (fake.shape, fake.dtype, fake.device)


@on_device
def test_a_norm_that_cancels_is_not_zero(fused) -> None:
    """W + s B A = 0 exactly: c is 2^-12 ||W||, what the factored sum can resolve, in both; a row of zeros stays at zero."""
    w = torch.zeros(2, 32)
    w[0, 0] = 3.0
    a, b = torch.zeros(1, 32), torch.zeros(2, 1)
    a[0, 0], b[0, 0] = 1.0, -3.0
    stored = StoredWeight(w.to(DEVICE), (2, 32))
    squares = torch.tensor([9.0, 0.0], device=DEVICE)
    for kernels in (fused, dora_torch):
        c = norm_by(kernels, stored, squares, a.to(DEVICE), b.to(DEVICE), 1.0)
        assert c.tolist() == [3.0 * 2**-12, 0.0]


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory):
    """This file under the interpreter, at work beside whoever asks for it: the process and the file of its output."""
    output = tmp_path_factory.mktemp("interpreter") / "output.txt"
    command = [sys.executable, "-m", "pytest", __file__, "--noconftest", "-p", "no:cacheprovider"]
    with open(output, "w") as stream:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, stdout=stream, stderr=subprocess.STDOUT
        )
    yield process, output
    process.kill()


@pytest.mark.skipif(INTERPRETED or not TRITON or torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize(
    "capability",
    # The oldest, which reads float8 e4m3 by its bits, and one that converts it.
    [
        *(pytest.param(each, marks=pytest.mark.slow) for each in (80, 90)),
        *(pytest.param(each, marks=pytest.mark.proof) for each in (86, 89, 100, 120)),
    ],
)
def test_compiles_for_every_card(monkeypatch, capability: int) -> None:
    """Each kernel, for every storage, at layers of SDXL and Flux, of rank 16 and of the widest blocks (rank 128)."""
    import triton
    from triton.backends.compiler import GPUTarget

    from trainer.kernels import dora_triton, operators_triton, upcast_triton

    class Absent:
        """A driver for a GPU to compile for, not to run on."""

        def get_current_target(self):
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return capability  # Triton keeps the target of each device that it met

        def get_current_stream(self, device: int) -> int:
            return 0

    class Forgetful(dict):
        def __setitem__(self, key, value) -> None:
            """No launch is a second one, which would run."""

    compiled = {}
    launch = triton.runtime.jit.JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.setdefault(self.__name__, []).append(kernel)
        return kernel

    monkeypatch.setattr(triton.runtime.driver, "_active", Absent())
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", compile_only)
    monkeypatch.setattr(operators_triton, "_compiled", Forgetful())
    monkeypatch.setattr(upcast_triton, "converts_e4m3", lambda device: capability >= 89)
    for n, k in ((640, 2560), (12288, 3072)):
        codes, packed = torch.empty(n, k, dtype=torch.int8), torch.empty(n * k // 2, dtype=torch.uint8)
        by_row, by_block = torch.empty(n), torch.empty(n * k // 64)
        weights = [
            StoredWeight(codes.view(torch.float8_e4m3fn), (n, k), None, k, by_row),
            StoredWeight(codes.view(torch.float8_e5m2), (n, k), None, k, by_row),
            StoredWeight(codes, (n, k), None, k, by_row),
            StoredWeight(packed, (n, k), 4, 64, by_block, by_block),
            StoredWeight(packed, (n, k), 4, 64, by_block, None, torch.empty(16)),
            *(StoredWeight(torch.empty(n, k, dtype=dtype), (n, k)) for dtype in (torch.float32, torch.bfloat16)),
        ]
        for weight in weights:
            dora_triton.upcast(weight, torch.bfloat16, by_row)
            dora_triton.row_squares(weight)
            for rank, count in ((16, 1), (16, 3), (128, 1)):
                a, b = torch.empty(rank, k), torch.empty(n, rank)
                dora_triton.adapted_norms(*([given] * count for given in (weight, by_row, a, b, 1.0)))
        for dtype, rank in ((torch.float32, 16), (torch.bfloat16, 16), (torch.bfloat16, 128)):
            y, t, b = torch.empty(512, n, dtype=dtype), torch.empty(512, rank, dtype=dtype), torch.empty(n, rank)
            dora_triton.compose(y, t, b.to(dtype), by_row, by_row, y)
            dora_triton.adapter_gradients(y, y, t, b, by_row, by_row, None, 1.0, True)
            dora_triton.adapter_gradients(y, y, t, b, by_row, by_row, by_row, 1.0, False)
            if capability >= 89:  # where float8 is multiplied
                dora_triton.quantize_rows(y, by_row)
            for back in (False, True):
                heads, angle = y.view(1, 512, -1, 128), torch.empty(512, 128)
                dora_triton.rotate(heads, heads, angle, angle, back=back)
    assert len(compiled) == (9 if capability >= 89 else 8)
    # Of fp32 alone: cards before 90 add two bf16 numbers by one times the first plus the second, which rounds once.
    contracted = {name: any("fma.rn.f32" in kernel.asm["ptx"] for kernel in kernels) for name, kernels in compiled.items()}
    assert not contracted["rotate_kernel"] and contracted["compose_kernel"], "its roundings are those of separate operators"
    # What one block may have on Ampere's and Ada's small cards, where Hopper has 227 KiB.
    assert max(kernel.metadata.shared for kernels in compiled.values() for kernel in kernels) <= 99 * 1024


@on_device
def test_e4m3_is_read_by_its_bits_where_triton_has_no_conversion(fused, monkeypatch) -> None:
    """Every code but the NaNs, exactly; and a NaN stays one. A weight goes through every kernel that reads one."""
    from trainer.kernels import upcast_triton

    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(16, 16)
    weight = StoredWeight(codes.to(DEVICE), (16, 16))
    random, *_ = make_weight("fp8_e4m3", 37, 131)
    squares = fused.row_squares(random)
    arguments = (squares, torch.randn(3, 131).to(DEVICE), torch.randn(37, 3).to(DEVICE), 1.0)
    norm = norm_by(fused, random, *arguments)
    monkeypatch.setattr(upcast_triton, "converts_e4m3", lambda device: False)
    by_bits = fused.upcast(weight, torch.float32)
    assert torch.equal(by_bits.cpu().nan_to_num(1e9), codes.float().nan_to_num(1e9))
    assert torch.equal(by_bits.isnan().cpu(), codes.float().isnan())
    assert torch.equal(fused.row_squares(random), squares) and torch.equal(norm_by(fused, random, *arguments), norm)


@pytest.mark.skipif(INTERPRETED or not TRITON, reason="starts the interpreter's process, needs Triton")
@pytest.mark.skipif((TRITON or "").startswith("3.6."), reason="its interpreter cannot loop with NumPy 2.4: int() of [1]")
@pytest.mark.slow
def test_on_the_interpreter(interpreter) -> None:
    process, output = interpreter
    assert process.wait(timeout=600) == 0, output.read_text()[-8000:]
