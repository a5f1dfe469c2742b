"""What a CPU decodes stored weights by: integer arithmetic for float8, look-ups and shifts for few bits. Bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.numerics.test_adapted_layers import LargestAllocation
from trainer.base.types import StoredWeight
from trainer.kernels import decode, dora_torch
from trainer.quantization import ALL_FORMATS, FORMATS, FrozenLinear

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LOW_BIT = [format for format in ALL_FORMATS if getattr(format, "bits", None)]


def finite_codes(dtype: torch.dtype) -> torch.Tensor:
    codes = torch.arange(256).to(torch.uint8).view(dtype)
    return codes.view(torch.uint8)[torch.isfinite(codes.float())].view(dtype)


def bits(tensor: torch.Tensor) -> list[int]:
    """Of every element, so that 0 and -0, and one NaN and another, are told apart."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]).flatten().tolist()


@pytest.mark.parametrize("codes_dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@settings(max_examples=60, deadline=None)
@given(scale=st.floats(2.0**-126, 100, width=32), g=st.none() | st.floats(-4, 4, width=32, allow_subnormal=False))
def test_every_finite_float8_code_is_exact(codes_dtype: torch.dtype, out: torch.dtype, scale: float, g: float | None) -> None:
    codes = finite_codes(codes_dtype)[None]
    assert codes.numel() == (254 if codes_dtype == torch.float8_e4m3fn else 248)
    weight = StoredWeight(codes, (1, codes.shape[1]), block=codes.shape[1], scale=torch.tensor([scale]))
    assert decode.has_plain_codes(weight)
    g_N = None if g is None else torch.tensor([g])
    expected = codes.float() * torch.tensor([[scale]])
    expected = (expected if g is None else expected * g_N[:, None]).to(out)
    plain = StoredWeight(weight.codes, weight.shape, block=weight.block, scale=weight.scale, plain=True)
    assert bits(dora_torch.upcast(plain, out, g_N)) == bits(expected)
    assert bits(dora_torch.upcast(weight, out, g_N)) == bits(expected)  # whose codes were not looked at


@pytest.mark.parametrize("codes_dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("bad", ["code", "scale"])
def test_what_integer_arithmetic_would_get_wrong_is_found_at_filling(codes_dtype: torch.dtype, bad: str) -> None:
    name = "fp8_e4m3" if codes_dtype == torch.float8_e4m3fn else "fp8_e5m2"
    layer = FrozenLinear(8, 3, bias=False, format=FORMATS[name], compute_dtype=torch.float32, kernels=dora_torch)
    layer.load_weight(torch.randn(3, 8, generator=torch.Generator().manual_seed(0)))
    assert layer.stored().plain
    payload = {key: tensor.clone() for key, tensor in layer.payload().items()}
    if bad == "code":
        payload["weight"].view(torch.uint8)[1, 2] = 0xFF
    else:
        payload["scale"][1] = 2.0**126
    layer.load_payload(payload)
    assert not layer.stored().plain
    expected = payload["weight"].float() * payload["scale"][:, None]
    assert bits(layer.dequantize(torch.float32)) == bits(expected)
    assert not torch.isfinite(expected).all()


def test_subnormal_codes_are_exact_where_a_library_flushes_subnormal_numbers() -> None:
    layer = FrozenLinear(8, 1, bias=False, format=FORMATS["fp8_e4m3"], compute_dtype=torch.float32, kernels=dora_torch)
    payload = {"weight": torch.arange(8).to(torch.uint8).view(torch.float8_e4m3fn), "scale": torch.ones(1)}
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no such mode")
    try:
        layer.load_payload(payload)
        found = layer.dequantize(torch.float32)
    finally:
        torch.set_flush_denormal(False)
    assert found.tolist() == [[k * 2.0**-9 for k in range(8)]]


@pytest.mark.parametrize("format", LOW_BIT, ids=lambda format: format.name)
@pytest.mark.parametrize("shape", [(16, 64), (6, 192), (7, 33), (64, 96), (24, 128)], ids=str)
def test_few_bits_are_those_that_each_element_looks_up(format, shape: tuple[int, int], monkeypatch) -> None:
    layer = FrozenLinear(shape[1], shape[0], bias=False, format=format, compute_dtype=torch.float32, kernels=dora_torch)
    layer.load_weight(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    weight = layer.stored()
    one_by_one = torch.empty(shape)
    for row in range(shape[0]):
        decode._element_by_element(weight, row * shape[1], (row + 1) * shape[1], one_by_one[row])
    assert bits(dora_torch.upcast(weight, torch.float32)) == bits(one_by_one)
    monkeypatch.setattr(decode, "PIECE", 3 * shape[1])  # pieces that would end within a block, were they not moved
    assert bits(dora_torch.upcast(weight, torch.float32)) == bits(one_by_one)
    pieces = [piece.clone() for _, piece in decode.decoded(weight)]
    assert bits(torch.cat(pieces)) == bits(one_by_one)


@pytest.mark.parametrize("format", ALL_FORMATS[1:], ids=lambda format: format.name)
def test_an_upcast_makes_no_temporary(format) -> None:
    n, k = 1024, 1024
    layer = FrozenLinear(k, n, bias=False, format=format, compute_dtype=torch.bfloat16, kernels=dora_torch)
    layer.load_weight(torch.randn(n, k, generator=torch.Generator().manual_seed(2)))
    g_N, out = torch.rand(n), torch.empty(n, k, dtype=torch.float16)
    for _ in range(2):  # the first makes the buffers that stay
        with LargestAllocation() as allocations:
            dora_torch.upcast(layer.stored(), torch.float16, g_N, out)
            dora_torch.row_squares(layer.stored())
    assert allocations.largest <= n * k // 32  # scales of a piece: one for 32 elements


class Casts(TorchDispatchMode):
    """The dtypes from which operators made tensors of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.made_from: set[torch.dtype] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if torch.is_tensor(result):
            given = {a.dtype for a in (*args, *(kwargs or {}).values()) if torch.is_tensor(a)}
            if function.overloadpacket is not torch.ops.aten.view:  # which looks at the same bytes
                self.made_from |= given - {result.dtype}
        return result


@pytest.mark.parametrize("codes_dtype", FLOAT8, ids=str)
def test_torchs_cast_of_float8_is_not_used(codes_dtype: torch.dtype) -> None:
    """It has a tenth of the rate of copies and shifts of integers (benchmarks/bench_kernels.py --casts)."""
    codes = finite_codes(codes_dtype)[:240].view(4, 60)
    for plain in (True, False):
        weight = StoredWeight(codes, (4, 60), block=60, scale=torch.ones(4), plain=plain)
        with Casts() as casts:
            dora_torch.upcast(weight, torch.bfloat16)
        assert (codes_dtype in casts.made_from) == (not plain)
        assert plain == (torch.int8 in casts.made_from)
