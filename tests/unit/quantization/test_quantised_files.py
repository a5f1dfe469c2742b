"""Checkpoints that are quantised already: codes as they lie in the file, values as the file's own library has them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tests import quantised_files as files
from trainer.base.errors import UserError
from trainer.base.tensorfile import TensorFile, tensor_sha256
from trainer.base.types import HeldWeight
from trainer.quantization import formats_of
from trainer.quantization.quantised_files import codes_of, recognise, scale_of

Tensors = dict[str, torch.Tensor]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit-equal: float8 has no comparison."""
    return a.dtype == b.dtype and a.shape == b.shape and tensor_sha256(a) == tensor_sha256(b)


def gaussian(*shape: int, seed: int = 0, std: float = 0.05) -> torch.Tensor:
    return std * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def text(said: object) -> torch.Tensor:
    return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)


def payload_of(held: HeldWeight, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> Tensors:
    """Checked to be what the format holds."""
    payload = held.payload({role: tensors[name] for role, name in held.parts.items()}, shape)
    empty = formats_of(held.dtype)[held.backend].empty_payload(torch.Size(shape), "meta")
    assert {n: (t.dtype, t.shape) for n, t in payload.items()} == {n: (t.dtype, t.shape) for n, t in empty.items()}
    assert all(tensor.is_contiguous() for tensor in payload.values())
    return payload


# ----------------------------------------------------------- what the libraries themselves make of a weight in a file


def quantos_own(tensors: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Dequantised by quanto from the file's tensors; scales in fp32, in which it then computes."""
    from optimum import quanto
    from optimum.quanto.library.extensions import get_extension
    from optimum.quanto.tensor import WeightQBitsTensor, WeightQBytesTensor
    from optimum.quanto.tensor.packed import pack_weights

    def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
        codes = torch.cat([packed >> place & 2**bits - 1 for place in range(0, 8, bits)])
        assert torch.equal(pack_weights(codes, bits), packed)
        return codes

    # The library would compile its unpacking in C++ first; its packing is plain.
    get_extension("quanto_cpp")._lib = SimpleNamespace(unpack=unpack)
    state = {key: t.float() if key.endswith(("_scale", "_shift")) else t for key, t in tensors.items()}
    common = dict(axis=0, size=shape, stride=torch.empty(shape, device="meta").stride(), missing_keys=[])
    qtype = quanto.qtypes[{"fp8_e4m3": "qfloat8_e4m3fn", "fp8_e5m2": "qfloat8_e5m2"}.get(dtype, f"q{dtype}")]
    if qtype.bits == 8:
        weight = WeightQBytesTensor.load_from_state_dict(state, f"{name}.", qtype, activation_qtype=None, **common)
    else:
        layer = quanto.QLinear(math.prod(shape[1:]), shape[0], weights=qtype, device="meta")
        weight = WeightQBitsTensor.load_from_state_dict(
            state, f"{name}.", qtype, group_size=layer.weight_group_size, **common
        )
    return weight.dequantize()


def bitsandbytes_own(tensors: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Dequantised by bitsandbytes from the file's tensors, in fp32."""
    from bitsandbytes import functional

    if tensors[name].dtype == torch.int8:
        return functional.int8_vectorwise_dequant(tensors[name], tensors[f"{name.removesuffix('.weight')}.SCB"])
    parts = {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}
    state = functional.QuantState.from_dict(parts, torch.device("cpu"))
    assert state.shape == shape
    # As one row: on a CPU the library reads an even K wrongly where it is not a multiple of the block.
    state.dtype, state.shape = torch.float32, torch.Size((1, math.prod(shape)))
    with torch.compiler.set_stance("force_eager"):
        return functional.dequantize_4bit(tensors[name], state).view(shape)


def check_values(held: HeldWeight, tensors: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...]) -> None:
    payload = payload_of(held, tensors, shape)
    values = held.dequantize(payload, shape)
    assert values.dtype == torch.float32 and values.shape == shape
    # bitsandbytes has code * max * fl(1 / 127), ours code * fl(max / 127): two roundings each and that of 1 / 127.
    rtol = 5 * 2.0**-24 if (held.dtype, held.backend) == ("int8", "bitsandbytes") else 0
    if held.backend == "quanto":
        expected = quantos_own(tensors, name, shape, held.dtype)
    elif held.backend == "bitsandbytes":
        expected = bitsandbytes_own(tensors, name, shape)
    else:
        layer = name.removesuffix(".weight")
        scales = [tensors[f"{layer}.{s}"] for s in ("scale_weight", "weight_scale") if f"{layer}.{s}" in tensors]
        expected = tensors[name].float() * (scales[0].float() if scales else 1.0)
    torch.testing.assert_close(values, expected, rtol=rtol, atol=0)
    if held.dtype in ("fp8_e4m3", "fp8_e5m2", "int8"):
        assert same(payload["weight"], tensors[held.parts["weight"]])


def check_file(path: Path, source: Path, prefix: str = "") -> dict[str, HeldWeight]:
    """Held weights, of those the source has, and plain tensors together are the source's tensors, no more and no less."""
    file, plain = TensorFile(path), TensorFile(source)
    strip = {name: name.removeprefix(prefix) for name in file.entries if name.startswith(prefix)}
    found = recognise({short: file.entries[name] for name, short in strip.items()})
    parts = {part for held in found.weights.values() for part in held.parts.values()}
    assert not parts & found.other
    wanted = {n.removeprefix(prefix): e.shape for n, e in plain.entries.items() if n.startswith(prefix)}
    assert found.weights.keys() | (set(strip.values()) - parts - found.other) == wanted.keys()
    for name, held in found.weights.items():
        assert held.shape in (wanted[name], None)
        tensors = {n: file.read(prefix + n) for n in strip.values() if n.startswith(name.removesuffix(".weight") + ".")}
        check_values(held, tensors | {n: file.read(prefix + n) for n in held.parts.values()}, name, wanted[name])
    return dict(found.weights)


# ----------------------------------------------------------------------------------------------------- written files


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_raw_float8_is_held_and_its_vectors_are_plain(models: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    path = files.float8_file(models / "flux-one.safetensors", tmp_path / "f.safetensors", dtype)
    held = check_file(path, models / "flux-one.safetensors")
    matrices = {name for name, entry in TensorFile(path).entries.items() if len(entry.shape) >= 2}
    assert held.keys() == matrices and any(len(e.shape) == 1 and e.dtype == dtype for e in TensorFile(path).entries.values())
    assert {(h.dtype, h.backend) for h in held.values()} == {("fp8_e4m3" if dtype == E4M3 else "fp8_e5m2", "native")}


def test_raw_float8_without_the_name_weight(models: Path, tmp_path: Path) -> None:
    source, prefix = models / "sdxl-one.safetensors", "conditioner.embedders.1.model."
    held = check_file(files.float8_file(source, tmp_path / "f.safetensors", prefix=prefix), source, prefix)
    assert {"text_projection", "positional_embedding", "transformer.resblocks.0.attn.in_proj_weight"} <= held.keys()


@pytest.mark.parametrize("new", [False, True], ids=["scale_weight", "comfy_quant"])
@pytest.mark.parametrize("family", ["flux", "sdxl"])
def test_comfy_float8(models: Path, tmp_path: Path, family: str, new: bool) -> None:
    source, prefix = models / f"{family}-one.safetensors", "" if family == "flux" else "model.diffusion_model."
    held = check_file(files.comfy_file(source, tmp_path / "f.safetensors", new=new, prefix=prefix), source, prefix)
    assert held and {(h.dtype, h.backend) for h in held.values()} == {("fp8_e4m3", "native")}


def test_a_weight_without_scale_in_a_scaled_file_is_raw(models: Path, tmp_path: Path) -> None:
    raw = {"raw.weight": gaussian(4, 6).to(E4M3), "scaled_fp8": torch.zeros(0, dtype=E4M3)}
    tensors = raw | files.comfy_layer("x", gaussian(4, 6), new=False)
    found = recognise(files.entries(tensors))
    assert found.weights.keys() == {"raw.weight", "x.weight"} and found.other == {"scaled_fp8", "x.scale_input"}
    assert torch.equal(payload_of(found.weights["raw.weight"], tensors, (4, 6))["scale"], torch.ones(4))


@pytest.mark.parametrize("kind", files.BITSANDBYTES)
def test_bitsandbytes_folder(models: Path, tmp_path: Path, kind: str) -> None:
    folder = files.bitsandbytes_folder(models / "flux", tmp_path / "m", kind, ["transformer", "text_encoder"])
    for component, file in (("transformer", "diffusion_pytorch_model"), ("text_encoder", "model")):
        path = f"{component}/{file}.safetensors"
        held = check_file(folder / path, models / "flux" / path)
        assert {(h.dtype, h.backend) for h in held.values()} == {(kind.removesuffix("-double"), "bitsandbytes")}


def test_bitsandbytes_single_file(models: Path, tmp_path: Path) -> None:
    source = models / "flux-one.safetensors"
    held = check_file(files.bitsandbytes_file(source, tmp_path / "f.safetensors", "nf4"), source)
    assert "double_blocks.0.img_attn.qkv.weight" in held


@pytest.mark.parametrize("dtype", files.QUANTO)
def test_quanto_folder(models: Path, tmp_path: Path, dtype: str) -> None:
    folder = files.quanto_folder(models / "flux", tmp_path / "m", dtype, ["transformer"])
    path = "transformer/diffusion_pytorch_model.safetensors"
    held = check_file(folder / path, models / "flux" / path)
    assert {(h.dtype, h.backend) for h in held.values()} == {({"float8": "fp8_e4m3"}.get(dtype, dtype), "quanto")}
    assert TensorFile(folder / path).entries["proj_out.weight._scale"].dtype == torch.bfloat16


def test_quanto_in_bf16_rounds_what_is_ours_in_fp32() -> None:
    """Where the file's scales are bf16, quanto's value is ours rounded to bf16: an int8 code and its product are exact."""
    tensors = files.quanto_layer("x", gaussian(8, 96).bfloat16(), "int8")
    held = recognise(files.entries(tensors)).weights["x.weight"]
    theirs = tensors["x.weight._scale"] * tensors["x.weight._data"]
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(held.dequantize(payload_of(held, tensors, (8, 96)), (8, 96)).bfloat16(), theirs)


# ------------------------------------------------------------------------------------------------------ any shape


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=2, max_size=4).map(tuple),
    new=st.booleans(),
    dtype=st.sampled_from([E4M3, E5M2]),
    scale_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    spread=st.sampled_from(["scalar", "one", "rows", "column"]),
)
def test_comfy_scales_of_any_dtype_and_spread(shape, new, dtype, scale_dtype, spread) -> None:
    tensors = files.comfy_layer("x", gaussian(*shape), new=new, dtype=dtype)
    count = shape[0] if spread in ("rows", "column") else 1
    scale = (gaussian(count).abs() + 1e-3).to(scale_dtype)
    laid = {"scalar": (), "one": (1,), "rows": (count,), "column": (count, *[1] * (len(shape) - 1))}[spread]
    tensors["x.weight_scale" if new else "x.scale_weight"] = scale.view(laid)
    held = recognise(files.entries(tensors)).weights["x.weight"]
    payload = payload_of(held, tensors, shape)
    assert same(payload["weight"], tensors["x.weight"])
    assert torch.equal(payload["scale"], scale.float().expand(shape[0]))
    codes = tensors["x.weight"].float()
    expected = codes * scale.float().expand(shape[0]).view(-1, *[1] * (len(shape) - 1))
    assert torch.equal(held.dequantize(payload, shape), expected)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 200), st.sampled_from(["nf4", "nf4-double", "fp4"]), st.integers(0, 9))
@example(131, 130, "nf4-double", 0)  # two nested blocks, the last one short
def test_bitsandbytes_4bit_of_any_shape(rows: int, columns: int, kind: str, seed: int) -> None:
    assume(rows * columns % 2 == 0)
    tensors = files.bitsandbytes_layer("x", gaussian(rows, columns, seed=seed).bfloat16(), kind)
    held = recognise(files.entries(tensors)).weights["x.weight"]
    check_values(held, tensors, "x.weight", (rows, columns))
    ours = payload_of(held, tensors, (rows, columns))["weight"]
    theirs = tensors["x.weight"].flatten()
    assert torch.equal(ours & 15, theirs >> 4) and torch.equal(ours >> 4, theirs & 15)


@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (6, 128)], ids=str)
def test_bitsandbytes_8bit(shape: tuple[int, int]) -> None:
    tensors = files.bitsandbytes_layer("x", gaussian(*shape), "int8")
    held = recognise(files.entries(tensors)).weights["x.weight"]
    check_values(held, tensors, "x.weight", shape)
    del tensors["x.weight_format"]  # files of old versions have none
    check_values(recognise(files.entries(tensors)).weights["x.weight"], tensors, "x.weight", shape)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(3, 20),
    st.integers(1, 300) | st.sampled_from([32, 96, 128, 160, 192, 256, 320]),
    st.sampled_from(["int4", "int2", "int8", "float8_e4m3fn", "float8_e5m2"]),
    st.integers(0, 9),
)
def test_quanto_of_any_shape(rows: int, columns: int, dtype: str, seed: int) -> None:
    tensors = files.quanto_layer("x", gaussian(rows, columns, seed=seed), dtype)
    found = recognise(files.entries(tensors))
    check_values(found.weights["x.weight"], tensors, "x.weight", (rows, columns))
    assert found.other == {"x.input_scale", "x.output_scale"}


@pytest.mark.parametrize("shape", [(5, 3, 3, 3), (6, 32, 2, 2), (7, 40, 3, 3)], ids=str)
@pytest.mark.parametrize("dtype", ["int4", "int2", "int8", "float8_e4m3fn"])
def test_quantos_convolutions(shape: tuple[int, ...], dtype: str) -> None:
    tensors = files.quanto_layer("x", gaussian(*shape), dtype)
    check_values(recognise(files.entries(tensors)).weights["x.weight"], tensors, "x.weight", shape)


def test_bitsandbytes_bytes_in_wider_elements() -> None:
    """quant_storage: the same bytes, seen as another dtype."""
    tensors = files.bitsandbytes_layer("x", gaussian(6, 128), "nf4")
    plain = payload_of(recognise(files.entries(tensors)).weights["x.weight"], tensors, (6, 128))
    tensors["x.weight"] = tensors["x.weight"].flatten().view(torch.bfloat16)[:, None]
    wide = payload_of(recognise(files.entries(tensors)).weights["x.weight"], tensors, (6, 128))
    assert plain.keys() == wide.keys() and all(same(plain[key], wide[key]) for key in plain)


# ------------------------------------------------------------------------------------------- damaged and unsupported


def edited(tensors: Tensors, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    return tensors | {name: change(tensors[name])}


def state_says(tensors: Tensors, **said: object) -> Tensors:
    (name,) = (name for name in tensors if ".quant_state." in name)
    return tensors | {name: text({**json.loads(bytes(tensors[name].tolist())), **said})}


def nf4() -> Tensors:
    return files.bitsandbytes_layer("x", gaussian(6, 128), "nf4")


def double() -> Tensors:
    return files.bitsandbytes_layer("x", gaussian(6, 128), "nf4-double")


def comfy() -> Tensors:
    return files.comfy_layer("x", gaussian(6, 128), new=True)


def int4(**other: torch.Tensor) -> Tensors:
    return files.quanto_layer("x", gaussian(6, 256), "int4") | other


QS = "x.weight.quant_state.bitsandbytes__nf4"

# (the file's tensors, the weight's shape, what the error says)
DISAGREE: dict[str, tuple[Callable[[], Tensors], tuple[int, ...], str]] = {
    "raw: shape": (lambda: {"x.weight": gaussian(6, 4).to(E4M3)}, (4, 6), r"shape \(6, 4\), wanted F8_E4M3 of shape"),
    "comfy: shape": (comfy, (6, 127), r"weight is F8_E4M3 of shape \(6, 128\)"),
    "comfy: scales of blocks": (
        lambda: edited(comfy(), "x.weight_scale", lambda s: s.expand(2, 4)), (6, 128), r"scale has shape \(2, 4\)"
    ),
    "comfy: scales of columns": (
        lambda: edited(comfy(), "x.weight_scale", lambda s: s.expand(1, 6)), (6, 128), "one for each of the 6 rows"
    ),
    "comfy: integer scale": (lambda: edited(comfy(), "x.weight_scale", lambda s: s.long()), (6, 128), "scale is I64"),
    "comfy: format": (
        lambda: comfy() | {"x.comfy_quant": text({"format": "mxfp8"})}, (6, 128), "format = 'mxfp8'.*'float8_e4m3fn'"
    ),
    "comfy: other float8": (
        lambda: comfy() | {"x.comfy_quant": text({"format": "float8_e5m2"})}, (6, 128), "format = 'float8_e5m2'"
    ),
    "comfy: not JSON": (
        lambda: edited(comfy(), "x.comfy_quant", lambda t: t[:-1]), (6, 128), "comfy_quant is not JSON"
    ),
    "comfy: JSON of no object": (lambda: comfy() | {"x.comfy_quant": text([1])}, (6, 128), "not a JSON object"),
    "nf4: shape": (nf4, (128, 6), r"shape = \[6, 128\], only \[128, 6\]"),
    "nf4: block": (lambda: state_says(nf4(), blocksize=128), (6, 128), "blocksize = 128, only 64"),
    "nf4: type": (lambda: state_says(nf4(), quant_type="fp4"), (6, 128), "quant_type = 'fp4', only 'nf4'"),
    "nf4: odd": (
        lambda: files.bitsandbytes_layer("x", gaussian(3, 67), "nf4"), (3, 67), "odd number of elements, 201"
    ),
    "nf4: not JSON": (lambda: edited(nf4(), QS, lambda t: t + 99), (6, 128), "quant_state is not JSON"),
    "nf4: bytes": (lambda: edited(nf4(), "x.weight", lambda w: w[1:]), (6, 128), "383 bytes, 768 codes"),
    "nf4: absmax": (lambda: edited(nf4(), "x.weight.absmax", lambda a: a[1:]), (6, 128), r"absmax.*\(11,\).*\(12,\)"),
    "nf4: rounded map": (
        lambda: edited(nf4(), "x.weight.quant_map", lambda m: m.bfloat16()), (6, 128), "quant_map is BF16"
    ),
    "double: offset": (lambda: state_says(double(), nested_offset=None), (6, 128), "nested_offset = None"),
    "double: dtype": (lambda: state_says(double(), nested_dtype="float16"), (6, 128), "nested_dtype = 'float16'"),
    "double: block": (lambda: state_says(double(), nested_blocksize=0), (6, 128), "nested_blocksize = 0"),
    "double: absmax": (
        lambda: edited(double(), "x.weight.absmax", lambda a: a[1:]), (6, 128), r"absmax is U8 of shape \(11,\)"
    ),
    "double: nested absmax": (
        lambda: edited(double(), "x.weight.nested_absmax", lambda a: a.repeat(2)), (6, 128), r"nested_absmax.*\(2,\)"
    ),
    "double: nested map": (
        lambda: edited(double(), "x.weight.nested_quant_map", lambda m: m[1:]), (6, 128), r"nested_quant_map.*\(255,\)"
    ),
    "int8: layout": (
        lambda: files.bitsandbytes_layer("x", gaussian(6, 8), "int8") | {"x.weight_format": torch.tensor(2)}, (6, 8),
        "weight_format is 2, only 0",
    ),
    "int8: scales": (
        lambda: edited(files.bitsandbytes_layer("x", gaussian(6, 8), "int8"), "x.SCB", lambda s: s[1:]), (6, 8),
        r"scale.*\(5,\)",
    ),
    "int8: shape": (lambda: files.bitsandbytes_layer("x", gaussian(6, 8), "int8"), (6, 4), r"I8 of shape \(6, 8\)"),
    "qint8: shape": (lambda: files.quanto_layer("x", gaussian(6, 8), "int8"), (6, 4), r"I8 of shape \(6, 8\)"),
    "qint8: scales": (
        lambda: edited(files.quanto_layer("x", gaussian(6, 8), "int8"), "x.weight._scale", lambda s: s.t()), (6, 8),
        "one for each of the 6 rows",
    ),
    "qint4: shape": (int4, (6, 128), r"scale has shape \(12, 1\).*groups of 128 take 6"),
    "qint4: other axis": (
        lambda: edited(int4(), "x.weight._shift", lambda s: s.t()), (6, 256), r"shift has shape \(1, 12\)"
    ),
    "qint4: zero points": (
        lambda: edited(int4(), "x.weight._shift", lambda s: s.to(torch.int8)), (6, 256), "shift is I8"
    ),
    "qint4: data": (
        lambda: edited(int4(), "x.weight._data._data", lambda d: d[:, 1:]), (6, 256), r"_data is U8 of shape \(6, 127\)"
    ),
    "qint4: signed data": (
        lambda: edited(int4(), "x.weight._data._data", lambda d: d.view(torch.int8)), (6, 256), "_data is I8 of shape"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DISAGREE)
def test_parts_that_disagree(case: str) -> None:
    build, shape, says = DISAGREE[case]
    tensors = build()
    held = recognise(files.entries(tensors)).weights["x.weight"]
    with pytest.raises(ValueError, match=says):
        held.payload({role: tensors[name] for role, name in held.parts.items()}, shape)


# A complete weight, and the part without which it is not one.
INCOMPLETE = {
    "comfy scale": (comfy, "x.weight_scale"),
    "comfy codes": (comfy, "x.weight"),
    "nf4 codes": (nf4, "x.weight"),
    "nf4 absmax": (nf4, "x.weight.absmax"),
    "nf4 map": (nf4, "x.weight.quant_map"),
    "nf4 state": (nf4, QS),
    "double absmax": (double, "x.weight.nested_absmax"),
    "double map": (double, "x.weight.nested_quant_map"),
    "int8 scales": (lambda: files.bitsandbytes_layer("x", gaussian(6, 8), "int8"), "x.SCB"),
    "qint8 scales": (lambda: files.quanto_layer("x", gaussian(6, 8), "int8"), "x.weight._scale"),
    "qint4 scales": (int4, "x.weight._scale"),
    "qint4 shifts": (int4, "x.weight._shift"),
}


@pytest.mark.parametrize("case", INCOMPLETE)
def test_a_missing_part(case: str) -> None:
    build, name = INCOMPLETE[case]
    tensors = build()
    del tensors[name]
    # Codes of which nothing tells how to read them are named themselves.
    named = "'x.weight'" if name in (QS, "x.SCB") else f"{name!r} is missing"
    with pytest.raises(UserError, match=named):
        recognise(files.entries(tensors))


I8, U8, I32 = (torch.zeros(6, 8, dtype=dtype) for dtype in (torch.int8, torch.uint8, torch.int32))
F8 = torch.zeros(6, 32).to(E4M3)
UNSUPPORTED = {
    "weight_scale_inv": {"x.weight": F8, "x.weight_scale_inv": torch.ones(1, 1)},
    "nvfp4": {"x.weight": U8, "x.weight_scale": F8, "x.weight_scale_2": torch.ones(()), "x.comfy_quant": text({})},
    "mxfp8": {"x.weight": F8, "x.weight_scale": torch.zeros(6, 1, dtype=torch.uint8)},
    "pre_quant_scale": {"x.weight": F8, "x.weight_scale": torch.ones(()), "x.pre_quant_scale": torch.ones(32)},
    "ComfyUI does I8 codes": {"x.weight": I8, "x.weight_scale": torch.ones(6, 1), "x.comfy_quant": text({})},
    "ComfyUI does U8 codes": {"x.weight": U8, "x.weight_scale": torch.ones(())},
    "ComfyUI does BF16 codes": {"x.weight": torch.ones(6, 8).bfloat16(), "x.scale_weight": torch.ones(())},
    "SVDQuant": {"x.qweight": I8, "x.wscales": torch.ones(2, 6), "x.smooth": torch.ones(6)},
    "GPTQ or AWQ": {"x.qweight": I32, "x.qzeros": I32, "x.scales": torch.ones(2, 6)},
    "HQQ": {"x.W_q": U8},
    "torchao": {"x._weight_qdata": I8, "x._weight_scale": torch.ones(6)},
    "compressed-tensors": {"x.weight_packed": I32, "x.weight_scale": torch.ones(6, 1)},
    "optimum-quanto with codes of U8": {"x.weight._data": U8, "x.weight._scale": torch.ones(6, 1)},
    "I8 codes without the scales of a known one": {"x.weight": I8},
    "U8 codes without the scales of a known one": {"x.weight": U8, "x.scales": torch.ones(6)},
}


@pytest.mark.parametrize("convention", UNSUPPORTED)
def test_an_unsupported_convention_is_named(convention: str) -> None:
    with pytest.raises(UserError, match=f"'x.*{convention}.*use the 16-bit file"):
        recognise(files.entries({"y.weight": torch.ones(2, 2)} | UNSUPPORTED[convention]))


@pytest.mark.parametrize(("rows", "says"), [(1, "both 4 and 2 bits"), (2, "both 4 and 2 bits")])
def test_quantos_bits_are_not_guessed(rows: int, says: str) -> None:
    """One line of bytes holds one or two lines of codes of 4 bits, and up to four of 2 bits."""
    for dtype in ("int4", "int2"):
        tensors = files.quanto_layer("x", gaussian(rows, 100), dtype)
        with pytest.raises(UserError, match=says):
            recognise(files.entries(tensors))
    with pytest.raises(UserError, match="neither 4 nor 2 bits"):
        recognise(files.entries(edited(int4(), "x.weight._data._data", lambda d: d[1:])))


def test_an_unquantised_file_holds_nothing(models: Path) -> None:
    for name in ("flux-one", "sdxl-one"):
        found = recognise(TensorFile(models / f"{name}.safetensors").entries)
        assert not found.weights and not found.other


def test_the_largest_weight_has_the_largest_code_and_zeros_stay_zeros() -> None:
    weight = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    codes, scale = codes_of(weight), scale_of(weight)
    assert codes.dtype == torch.float8_e4m3fn and codes.float().abs().max() == 448
    assert ((codes.float() * scale - weight).abs() <= weight.abs() / 16 + float(scale) * 2**-9).all()
    zeros = torch.zeros(2, 3)
    assert scale_of(zeros) == 1 and torch.equal(codes_of(zeros).float(), zeros)
