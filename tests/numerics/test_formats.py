"""Every storage format against the library it comes from, against its own rounding, and through the loader."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.harness import Workbench, built, take_step
from trainer.checkpoint import state
from trainer.kernels import dora_torch
from trainer.plan.run_plan import open_source, resolve
from trainer.quantization import (
    ALL_FORMATS,
    FORMATS,
    Format,
    FrozenLayer,
    formats,
    formats_of,
    freeze_layers,
    storage_of_layers,
)
from trainer.resume.pins import pin_quantization

QUANTISED = [f for f in ALL_FORMATS if f.quantised]
# Whole and partial blocks, odd K, every group size of quanto: K <= 128: the row; 129: the row; then 32, 96, 128, 64.
SHAPES = [(16, 64), (5, 48), (7, 33), (3, 129), (4, 160), (6, 192), (8, 256), (3, 320)]

every_format = pytest.mark.parametrize("format", QUANTISED, ids=lambda f: f.name)


def gaussian(shape: tuple[int, ...], std: float = 0.02, seed: int = 0) -> torch.Tensor:
    return std * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantised(format: Format, w: torch.Tensor) -> dict[str, torch.Tensor]:
    payload = format.empty_payload(w.shape, "cpu")
    format.quantize_into(w, payload)
    return payload


def values(format: Format, w: torch.Tensor) -> torch.Tensor:
    stored = format.stored(quantised(format, w), w.shape)
    return dora_torch.upcast(stored, torch.float32).view(w.shape)


def librarys_own(format: Format, w: torch.Tensor) -> torch.Tensor:
    """What the format's library makes of `w` [N, K] and back, through the calls of its own layers where it can be."""
    if format.backend == "quanto":
        from optimum import quanto
        from optimum.quanto.library.extensions import get_extension

        # The library would compile its unpacking in C++ first.
        get_extension("quanto_cpp")._lib = SimpleNamespace(
            unpack=lambda packed, bits: torch.cat([packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)])
        )
        name = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(format.dtype_name, format.dtype_name)
        layer = quanto.QLinear(w.shape[1], w.shape[0], bias=False, weights=quanto.qtypes[f"q{name}"])
        layer.weight = nn.Parameter(w)
        return layer.qweight.dequantize().detach()
    if format.backend == "bitsandbytes":
        from bitsandbytes import functional

        if format.dtype_name == "int8":
            codes, largest, _ = functional.int8_vectorwise_quant(w)
            return functional.int8_vectorwise_dequant(codes, largest)
        # As one row: on a CPU the library reads an even K wrongly where it is not a multiple of the block.
        with torch.compiler.set_stance("force_eager"):
            return functional.dequantize_4bit(*functional.quantize_4bit(w.flatten(), quant_type=format.dtype_name)).view(
                w.shape
            )
    scale = w.abs().amax(dim=1, keepdim=True) / torch.finfo(format.codes).max
    return (w / scale).to(format.codes).float() * scale


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@every_format
def test_values_are_the_librarys_own(format: Format, shape: tuple[int, int], monkeypatch) -> None:
    w = gaussian(shape)
    expected = librarys_own(format, w)
    # bitsandbytes has code * max * fl(1 / 127), ours code * fl(max / 127): two roundings each and that of 1 / 127.
    rtol = 5 * 2.0**-24 if format.name == "int8 (bitsandbytes)" else 0
    torch.testing.assert_close(values(format, w), expected, rtol=rtol, atol=0)
    monkeypatch.setattr(formats, "PIECE_ELEMENTS", 100)
    torch.testing.assert_close(values(format, w), expected, rtol=rtol, atol=0)


@every_format
def test_payload_is_a_function_of_the_values(format: Format) -> None:
    """Not of the dtype they come in, of their strides, or of chance."""
    w = gaussian((6, 130)).bfloat16()
    payload = quantised(format, w)
    for again in (w, w.float(), w.t().contiguous().t()):
        other = quantised(format, again)
        assert payload.keys() == other.keys()
        for name, tensor in payload.items():
            assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name


# Half the widest gap between neighbouring values, relative to the largest of a row or block; affine formats span at most
# from minus to plus the largest in 2 ** bits - 1 gaps.
HALF_GAP = {
    "fp8_e4m3": 16 / 448, "fp8_e5m2": 4096 / 57344, "int8": 0.5 / 127, "int4": 1 / 15, "int2": 1 / 3,
    "nf4": (1 - 0.6961928) / 2, "fp4": (1 - 2 / 3) / 2,
}  # fmt: skip


@pytest.mark.parametrize("exponent", [-140, -134, -126, 0, 120])
@every_format
def test_error_is_half_a_gap_at_any_magnitude(format: Format, exponent: int) -> None:
    w = gaussian((40, 70), std=1.0) * 2.0**exponent
    w[1], w[2], w[3, :64] = 0, w[2, 0], 0
    back = values(format, w)
    assert torch.isfinite(back).all()
    # Blocks of the 4-bit formats reach into neighbouring rows.
    largest = w.abs().amax() if format.dtype_name in ("nf4", "fp4") else w.abs().amax(dim=1, keepdim=True)
    tiny = 2.0**-121  # below it fp32 has no room for scales and reciprocals
    assert ((back - w).abs() <= largest * HALF_GAP[format.dtype_name] * (1 + 1e-5) + tiny).all()
    assert (back[1] == 0).all() or format.dtype_name in ("nf4", "fp4")
    assert torch.equal(back[2], w[2]) or format.dtype_name not in ("int4", "int2"), "one value in a group is exact"


@pytest.mark.parametrize(
    ("dtype", "percent", "bits"),
    [
        ("fp8_e4m3", 2.65, 8), ("fp8_e5m2", 5.3, 8), ("int8", 0.85, 8), ("int4", 10.0, 4.5), ("int2", 50.0, 2.5),
        ("nf4", 9.2, 4.5), ("fp4", 12.2, 4.5),
    ],
)  # fmt: skip
def test_error_and_size_of_a_gaussian_weight(dtype: str, percent: float, bits: float) -> None:
    w = gaussian((256, 3072))
    for format in formats_of(dtype).values():
        error = float((values(format, w) - w).norm() / w.norm())
        assert error == pytest.approx(percent / 100, rel=0.03), format.name
        size = sum(t.numel() * t.itemsize for t in quantised(format, w).values())
        assert 8 * size / w.numel() == pytest.approx(bits, rel=2e-3), format.name


def test_first_code_lies_in_the_lowest_bits() -> None:
    assert formats.pack(torch.tensor([1, 2, 3], dtype=torch.uint8), 4).tolist() == [0x21, 0x03]
    assert formats.pack(torch.tensor([1, 2, 3, 0, 2], dtype=torch.uint8), 2).tolist() == [0b00111001, 0b10]


def test_a_single_row_has_one_scale_a_group() -> None:
    """quanto's own call takes one group for no axis, and stores two numbers for each element."""
    for columns, groups in ((100, 1), (128, 1), (256, 2)):
        w = gaussian((1, columns))
        for dtype in ("int4", "int8"):
            format = formats_of(dtype)["quanto"]
            assert quantised(format, w)["scale"].numel() == (groups if dtype == "int4" else 1)
            assert float((values(format, w) - w).norm() / w.norm()) < 0.15


@every_format
def test_which_layers_are_quantised(format: Format) -> None:
    def frozen(compute=torch.bfloat16, keep=(), keep_fp32=()) -> dict[str, str]:
        with torch.device("meta"):
            module = nn.ModuleDict({"a": nn.Linear(6, 4), "wo": nn.Linear(4, 6), "conv": nn.Conv2d(3, 5, 3)})
        freeze_layers(
            module,
            storage_of_layers(format=format, compute=compute, unquantised=torch.bfloat16, keep=keep, keep_fp32=keep_fp32),
            dora_torch,
        )
        return {name: layer.format.name for name, layer in module.named_modules() if isinstance(layer, FrozenLayer)}

    by_row = format.backend == "native" or (format.backend == "quanto" and format.dtype_name not in ("int4", "int2"))
    convolution = format.name if by_row else "bf16"
    assert frozen() == {"a": format.name, "wo": format.name, "conv": convolution}
    assert frozen(keep=("a",)) == {"a": "bf16", "wo": format.name, "conv": convolution}
    assert frozen(keep_fp32=("wo",))["wo"] == format.name
    assert frozen(keep_fp32=("wo",), compute=torch.float16)["wo"] == "fp32"


def test_backends_of_the_config(bench: Workbench) -> None:
    def resolved(**component: str) -> tuple[str | None, str | None]:
        config = bench.config(model__components={"unet": component})
        component = resolve(config, open_source(config)).model.components["unet"]
        return component.dtype, component.backend

    assert resolved() == ("bf16", "native")
    assert resolved(dtype="fp8_e5m2") == ("fp8_e5m2", "native")
    assert resolved(dtype="fp8_e4m3", backend="quanto") == ("fp8_e4m3", "quanto")
    assert [resolved(dtype=d)[1] for d in ("int8", "int4", "int2")] == ["quanto"] * 3
    assert resolved(dtype="int8", backend="bitsandbytes") == ("int8", "bitsandbytes")
    assert [resolved(dtype=d)[1] for d in ("nf4", "fp4")] == ["bitsandbytes"] * 2
    assert all(FORMATS[f.dtype_name] is next(iter(formats_of(f.dtype_name).values())) for f in ALL_FORMATS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "components", "expected"),
    [
        ("sdxl", {"unet": {"dtype": "int4"}, "text_encoder": {"dtype": "int8"}}, {"int4 quanto", "int8 quanto"}),
        (
            "flux",
            {"transformer": {"dtype": "nf4"}, "text_encoder_2": {"dtype": "int8", "backend": "bitsandbytes"}},
            {"nf4 bitsandbytes", "int8 bitsandbytes"},
        ),
    ],
)
def test_quantised_components_load_and_are_recorded(bench: Workbench, family, components, expected) -> None:
    config = bench.config(family, model__components=components, data__cache_text=False, adapter__type="dora")
    with built(config) as training:
        record = json.loads(b"".join(map(bytes, training.pieces.pack()[state.QUANTIZATION])))
        loss = take_step(training, 1, next(training.updates())).loss
    dense = ("fp32", "bf16", "fp16", None)
    quantised = {name: layer for name, layer in record.items() if layer.get("format") not in dense}
    assert {f"{layer['format']} {layer['backend']}" for layer in quantised.values()} == expected
    assert {layer["library"].split()[0] for layer in quantised.values()} == {
        "optimum-quanto" if family == "sdxl" else "bitsandbytes"
    }
    for name, component in components.items():
        assert {v["format"] for k, v in quantised.items() if k.startswith(f"{name}.")} == {component["dtype"]}
        tensors = {f"{name}.{key}" for key in training.model.modules[name].state_dict() if "lora" not in key}
        recorded = {f"{layer}.{key}" for layer, entry in record.items() for key in entry["tensors"]}
        assert {t.replace("base_layer.", "").replace("payload_", "") for t in tensors} <= recorded, "every frozen tensor"
    assert 0 < float(loss) < 10
    newer = {name: layer | {"library": "another 9.9"} for name, layer in record.items()}
    pin_quantization(newer).load_state_dict(record)
    first = min(quantised)
    newer[first] = newer[first] | {"tensors": {}}
    with pytest.raises(ValueError, match=f"{first} has other bytes now.*another 9.9 now"):
        pin_quantization(newer).load_state_dict(record)
