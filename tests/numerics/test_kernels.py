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
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer.kernels import dora_torch
from trainer.types import StoredWeight

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
    c = fused.adapted_norm(weight, fenced(squares), a, b, SCALING)
    twin = dora_torch.adapted_norm(weight, squares, a, b, SCALING)
    a64, b64 = a.double(), b.double()
    added = SCALING * b64 @ a64
    added_size = SCALING * b64.abs() @ a64.abs()
    # Products of fp32 in three passes of tf32 err by up to 2^-20 = 16 u; their sums run over K and R.
    tolerance = (64 + (k + rank) ** 0.5) * U32 * (size + added_size).square().sum(1)
    for result in (c, twin):
        near(result.double().square(), (exact + added).square().sum(1), tolerance)
    if rank != 3 or kind == "fp32":
        still = fused.adapted_norm(weight, fenced(squares), a, fenced(torch.zeros_like(b)), SCALING)
        assert torch.equal(still, squares.double().sqrt().float())


@on_device
def test_norm_is_not_rounded_to_tf32(fused) -> None:
    # Nothing is representable in 11 bits and all errors have one sign: tf32 would be off by 2^-12 or so.
    n, k, rank = 16, 200, 5
    w, a, b = torch.full((n, k), 1 / 3), torch.full((rank, k), 1 / 7), torch.full((n, rank), 1 / 5)
    weight = StoredWeight(w.to(DEVICE), (n, k))
    c = fused.adapted_norm(weight, w.square().sum(1).to(DEVICE), a.to(DEVICE), b.to(DEVICE), 1.0)
    exact = (w.double() + b.double() @ a.double()).norm(dim=1)
    near(c.cpu(), exact, 2.0**-19 * exact)


@on_device
def test_norm_of_a_cancelled_row_and_of_nan(fused) -> None:
    g = generator("cancel")
    a, b = torch.randn(3, 40, generator=g), torch.randn(20, 3, generator=g)
    w = -(b @ a)
    w_sq = w.square().sum(1)
    w_sq[7] = torch.nan
    c = fused.adapted_norm(*(StoredWeight(w.to(DEVICE), (20, 40)), *(x.to(DEVICE) for x in (w_sq, a, b))), 1.0)
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
    gain, shift = gains(n, rng), fenced(torch.randn(n, generator=rng))
    z64, update = z.double(), SCALING * t.double() @ b.double().t()
    size = (2 * rank + 6) * U32 * (SCALING * t.double().abs() @ b.double().abs().t() + z64.abs())
    choices = [(gain, shift), (None, shift), (gain, None), (None, None)]
    for g, bias in [choices[rank % 4]] if INTERPRETED else choices:
        by, plus = 1.0 if g is None else g.double(), 0.0 if bias is None else bias.double()
        exact = by * (z64 + update) + plus
        tolerance = abs(by) * size + U32 * (exact.abs() + abs(plus)) + 1.01 * rounding(exact, dtype)
        for kernels in (fused, dora_torch):
            out, in_place = fenced(torch.zeros_like(z)), fenced(z.clone())
            kernels.compose(z, t, b, SCALING, g, bias, out)
            kernels.compose(in_place, t, b, SCALING, g, bias, in_place)
            near(out, exact, tolerance)
            assert torch.equal(out, in_place) and fence_holds(out) and fence_holds(in_place)


@on_device
@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
def test_compose_at_initialisation_is_the_base(fused, dtype) -> None:
    rng = generator("start", dtype)
    z, t, b = activation(rng, 67, 139, dtype, "rows"), activation(rng, 67, 3, dtype, "rows"), torch.zeros(139, 3)
    ones, bias = torch.ones(139, device=DEVICE), torch.randn(139, generator=rng).to(DEVICE)
    for g in (ones, None):
        out = torch.empty_like(z)
        fused.compose(z, t, b.to(DEVICE, dtype), SCALING, g, None, out)
        assert torch.equal(out, z)
        fused.compose(z, t, b.to(DEVICE, dtype), SCALING, g, bias, out)
        assert torch.equal(out, (z.float() + bias).to(dtype))


@on_device
@pytest.mark.parametrize("rank, layout", RANKS)
@pytest.mark.parametrize("shape, dtype", [*ACTIVATIONS, ((1, 70), torch.float32)], ids=str)
def test_row_gradients(fused, dtype, shape, rank, layout) -> None:
    (m, n), rng = shape, generator(dtype, shape, rank)
    dy, u = activation(rng, m, n, dtype, layout), activation(rng, m, n, dtype, "rows")
    t = activation(rng, m, rank, dtype, layout)
    dy64, u64, t64 = dy.double(), u.double(), t.double()
    # Tensor cores truncate after each 8 rows or more; additions that round to nearest add up like sqrt(M), which is less.
    steps = (m / 8 + 16) * 2 * U32
    db, du = fused.row_gradients(dy, u, t)
    near(db, dy64.t() @ t64, steps * (dy64.abs().t() @ t64.abs()))
    near(du, (dy64 * u64).sum(0), steps * (dy64 * u64).abs().sum(0))
    assert db.dtype == du.dtype == torch.float32
    twin_db, twin_du = dora_torch.row_gradients(dy, u, t)
    near(twin_db, dy64.t() @ t64, steps * (dy64.abs().t() @ t64.abs()) + 1.01 * rounding(dy64.t() @ t64, dtype))
    near(twin_du, (dy64 * u64).sum(0), steps * (dy64 * u64).abs().sum(0))
    if rank == 16:
        again = fused.row_gradients(dy, u, t)
        assert torch.equal(db, again[0]) and torch.equal(du, again[1])


QUANTISED = [((5, 48), torch.float32), ((7, 300), torch.bfloat16), ((7, 300), torch.float16)]
if not INTERPRETED:
    QUANTISED += [((4608, 3072), torch.bfloat16), ((512, 15360), torch.bfloat16), ((64, 18432), torch.float32)]


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
    fp8_triton._launch_transpose(fp8_triton.transpose_kernel, w, out)
    assert torch.equal(out, w.t())


@on_device
def test_no_rows(fused) -> None:
    z, t, b = torch.empty(0, 5, device=DEVICE), torch.empty(0, 2, device=DEVICE), torch.ones(5, 2, device=DEVICE)
    fused.compose(z, t, b, 1.0, None, None, z)
    db, du = fused.row_gradients(z, z, t)
    assert torch.equal(db, torch.zeros_like(b)) and torch.equal(du, torch.zeros_like(b[:, 0]))
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
        fused.adapted_norm(dense, x[0].float(), x, x.float(), 1.0)
    with pytest.raises(ValueError, match="float64"):
        fused.compose(x.float(), x.float(), x, 1.0, None, None, x.float())
    with pytest.raises(ValueError, match="float64"):
        fused.row_gradients(x, x, x)
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
        fused.compose(y, t, b, SCALING, g, None, y)
        norm = fused.adapted_norm(stored, squares, a, b.float(), SCALING)
        product = fused.scaled_product(*fused.quantize_rows(z[:, :k].contiguous()), stored, torch.bfloat16)
        dx = fused.scaled_input_grad(*fused.quantize_rows(z, scale * g), stored, torch.bfloat16)
        upcast = fused.upcast(stored, torch.bfloat16, g)
        return squares, upcast, norm, y, product, dx, *fused.row_gradients(y, z, t)

    arguments = (weight.codes, weight.scale, z, t, b, a, g)
    compiled = torch.compile(everything, fullgraph=True)(*arguments)
    *same, db, du = zip(compiled, everything(*arguments), strict=True)
    for ours, eager in same:
        assert torch.equal(ours, eager)
    for ours, eager in (db, du):
        # The compiler may sum the few partial sums in another order.
        assert (ours - eager).norm() <= 8 * U32 * eager.norm()


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
        c = kernels.adapted_norm(stored, squares, a.to(DEVICE), b.to(DEVICE), 1.0)
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
@pytest.mark.slow
def test_compiles_for_hopper(interpreter, monkeypatch) -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    from trainer.kernels import dora_triton, fp8_triton

    class Absent:
        """A driver for a GPU to compile for, not to run on."""

        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    compiled = []
    launch = triton.runtime.jit.JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        compiled.append(launch(self, *args, grid=grid, warmup=True, **kwargs))

    monkeypatch.setattr(triton.runtime.driver, "_active", Absent())
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", compile_only)
    x, a, b = torch.zeros(64, 128), torch.zeros(128, 128), torch.zeros(64, 128)
    dora_triton.upcast(StoredWeight(torch.zeros(4096, dtype=torch.uint8), (64, 128), 4, 64, a[0], None, a[0]), x.dtype)
    fp8 = StoredWeight(x.to(torch.float8_e4m3fn), (64, 128), None, 128, x[:, 0].contiguous())
    dora_triton.row_squares(fp8)
    dora_triton.adapted_norm(fp8, x[:, 0].contiguous(), a, b, 1.0)
    for dtype in (torch.float32, torch.bfloat16):
        y = x.to(dtype)
        dora_triton.compose(y, y, a.to(dtype), 1.0, a[0], a[0], y)
        dora_triton.row_gradients(y, y, y)
        dora_triton.quantize_rows(y, a[0])
    fp8_triton._launch_quantize_rows(
        fp8_triton.quantize_rows_kernel, x.new_zeros(2, 20000), None, codes := x.to(torch.float8_e4m3fn), x[:, 0]
    )
    fp8_triton._launch_transpose(fp8_triton.transpose_kernel, codes.view(torch.uint8), codes.view(torch.uint8))
    assert len(compiled) == 11
    # What one block may have on Ampere and Ada too, where Hopper has 227 KiB.
    assert max(kernel.metadata.shared for kernel in compiled) <= 99 * 1024


@pytest.mark.skipif(INTERPRETED or not TRITON, reason="starts the interpreter's process, needs Triton")
@pytest.mark.skipif((TRITON or "").startswith("3.6."), reason="its interpreter cannot loop with NumPy 2.4: int() of [1]")
def test_on_the_interpreter(interpreter) -> None:
    process, output = interpreter
    assert process.wait(timeout=600) == 0, output.read_text()[-8000:]
