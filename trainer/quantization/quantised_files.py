"""Model files that are quantised already: recognised by their headers, read into the payloads of formats.py. And ComfyUI's
scaled float8, written.

Codes keep the file's bits; scales become fp32, one for each row or block. X is a layer, N its rows.

    raw float8            X.weight float8 and no scale: the codes are the values. Any name, from two dimensions on.
    ComfyUI float8        X.weight float8, X.scale_weight or (newer, with X.comfy_quant: JSON) X.weight_scale of any 16- or
                          32-bit dtype, one or one a row. Beside them: scaled_fp8, X.scale_input, X.input_scale.
    bitsandbytes 4-bit    X.weight bytes, X.weight.absmax, X.weight.quant_map, X.weight.quant_state.bitsandbytes__nf4 or
                          fp4 (JSON); absmax quantised once more: X.weight.nested_absmax, X.weight.nested_quant_map
    bitsandbytes 8-bit    X.weight int8, X.SCB fp32 [N], X.weight_format
    optimum-quanto        X.weight._data, X.weight._scale; of 4 and 2 bits X.weight._data._data and X.weight._shift.
                          Beside them: X.input_scale, X.output_scale (activations, which are not quantised here).

Sources: ComfyUI's comfy/ops.py, comfy/quant_ops.py, comfy/utils.py and comfy/model_detection.py; the libraries' own state
dicts. The value is always code * scale (+ offset) in fp32; quanto itself multiplies in bf16 if a file's scales are bf16.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from typing import Any

import torch

from trainer.base.errors import UserError
from trainer.base.tensorfile import NAMES, TensorEntry
from trainer.base.types import HeldWeight, Recognised
from trainer.kernels import dora_torch
from trainer.quantization.formats import pack
from trainer.quantization.table import bitsandbytes_block, first_code_low, formats_of, quanto_group

Entries = Mapping[str, TensorEntry]
Tensors = Mapping[str, torch.Tensor]
Payload = dict[str, torch.Tensor]
Shape = tuple[int, ...]
Decode, Checker = Callable[[Tensors, Shape], Payload], Callable[[Tensors, Shape], None]

FLOAT8 = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}
COMFY_FORMATS = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}
EXACT_IN_FP32 = (torch.float32, torch.bfloat16, torch.float16)
# The dtypes of a scaled float8 file: of its weights, and of everything but the denoiser's Linears.
SCALED_CODES, SCALED_OTHER = torch.float8_e4m3fn, torch.bfloat16

# Conventions that are not read, by the ending of a tensor's name that only they have; the first match names it.
UNSUPPORTED = {
    ".weight_scale_inv": "float8 in blocks of 128 x 128 (weight_scale_inv)",
    ".weight_scale_2": "nvfp4",
    ".pre_quant_scale": "float8 or nvfp4 with smoothed activations (pre_quant_scale)",
    ".wscales": "SVDQuant",
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".W_q": "HQQ",
    ".weight_packed": "compressed-tensors",
    "._weight_qdata": "torchao",
}
# Parts of a few bytes that describe a weight.
DESCRIPTIONS = ("comfy_quant", "quant_state", "weight_format")
OTHER = (".scale_input", ".input_scale", ".output_scale")  # scales of activations: they belong to no weight


def declared(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """(dtype, backend) of a component's quantised files, by its config.json; None if that declares none."""
    entry = config.get("quantization_config") or {}
    method = entry.get("quant_method")
    if method == "bitsandbytes":
        return entry.get("bnb_4bit_quant_type", "fp4") if entry.get("load_in_4bit") else "int8", "bitsandbytes"
    if method == "quanto":
        name = entry.get("weights_dtype") or entry.get("weights")
        return {"float8": "fp8_e4m3"}.get(name, name), "quanto"
    if method is not None:
        raise UserError(
            f"the model's config says quant_method = {method!r}, which is not supported; use the 16-bit model, or one "
            "quantised with bitsandbytes or quanto"
        )
    return None


def recognise(entries: Entries) -> Recognised:
    """The quantised weights among a component's tensors (header entries by their names without its prefix).

    Raises UserError for a convention that is not supported, and for a weight with missing parts.
    """
    for ending, convention in UNSUPPORTED.items():
        for name in entries:
            if name.endswith(ending):
                raise _unsupported(convention, name)
    weights = dict(_scaled(entries))
    other = {name for name in entries if name.endswith(OTHER) or name.rpartition(".")[2] == "scaled_fp8"}
    claimed = other.union(*(weight.parts.values() for weight in weights.values()))
    for name, entry in entries.items():
        if name in claimed:
            continue
        if entry.dtype in FLOAT8 and len(entry.shape) >= 2:
            read = partial(_float8_rows, entry.dtype)
            weights[name] = _held_weight(FLOAT8[entry.dtype], "native", {"weight": name}, entry.shape, read)
        elif name.endswith(".weight") and not entry.dtype.is_floating_point:
            raise _unsupported(f"a format of {NAMES[entry.dtype]} codes without the scales of a known one", name)
    return Recognised(weights, frozenset(other))


def _scaled(entries: Entries) -> Iterator[tuple[str, HeldWeight]]:
    for name in entries:
        if ending := next(filter(name.endswith, CONVENTIONS), None):
            end, read = CONVENTIONS[ending]
            weight = name.removesuffix(ending) + end
            yield weight, read(weight, name, entries)


# ------------------------------------------------------------------- headers: (weight, label, entries) -> HeldWeight


def _comfy(weight: str, label: str, entries: Entries) -> HeldWeight:
    layer, ending = weight.removesuffix(".weight"), label.rpartition(".")[2]
    scale = f"{layer}.scale_weight" if ending == "scale_weight" else f"{layer}.weight_scale"
    parts = _all_there(entries, label, {"weight": weight})
    entry = entries[weight]
    if entry.dtype not in FLOAT8:
        raise _unsupported(f"ComfyUI does {NAMES[entry.dtype]} codes ({ending})", weight)
    parts |= _all_there(entries, label, {"scale": scale})
    if entries[scale].dtype == torch.uint8:
        raise _unsupported("mxfp8", weight)
    if f"{layer}.comfy_quant" in entries:
        parts["comfy_quant"] = f"{layer}.comfy_quant"
    read, check = partial(_float8_rows, entry.dtype), partial(_check_comfy_quant, entry.dtype)
    return _held_weight(FLOAT8[entry.dtype], "native", parts, entry.shape, read, check)


def _bitsandbytes_4bit(weight: str, label: str, entries: Entries) -> HeldWeight:
    def beside(*roles: str) -> dict[str, str]:
        return _all_there(entries, label, {role: f"{weight}.{role}" for role in roles})

    parts = _all_there(entries, label, {"weight": weight}) | {"quant_state": label} | beside("absmax", "quant_map")
    if entries[parts["absmax"]].dtype == torch.uint8:
        parts |= beside("nested_absmax", "nested_quant_map")
    kind = label[-3:]
    return _held_weight(kind, "bitsandbytes", parts, None, _bitsandbytes_blocks, partial(_check_quant_state, kind))


def _bitsandbytes_8bit(weight: str, label: str, entries: Entries) -> HeldWeight:
    parts = _all_there(entries, label, {"weight": weight, "scale": label})
    if f"{weight}_format" in entries:
        parts["weight_format"] = f"{weight}_format"
    return _held_weight("int8", "bitsandbytes", parts, entries[weight].shape, _bitsandbytes_rows, _check_weight_format)


def _quanto_8bit(weight: str, label: str, entries: Entries) -> HeldWeight:
    parts = _all_there(entries, label, {"weight": label, "scale": f"{weight}._scale"})
    codes = entries[label].dtype
    dtype = (FLOAT8 | {torch.int8: "int8"}).get(codes)
    if dtype is None:
        raise _unsupported(f"optimum-quanto with codes of {NAMES[codes]}", label)
    return _held_weight(dtype, "quanto", parts, entries[label].shape, partial(_quanto_rows, codes))


def _quanto_few_bits(weight: str, label: str, entries: Entries) -> HeldWeight:
    parts = _all_there(entries, label, {"weight": label, "scale": f"{weight}._scale", "shift": f"{weight}._shift"})
    shapes = {role: entries[name].shape for role, name in parts.items()}
    lines, groups = (prod(shapes[role][:1]) for role in ("weight", "scale"))
    fitting = [bits for bits in (4, 2) if lines == -(-groups * bits // 8)]
    if len(fitting) != 1:
        raise UserError(
            f"tensor {label!r} of optimum-quanto has {lines} lines for {groups} scales, which is "
            f"{'both 4 and 2 bits' if fitting else 'neither 4 nor 2 bits'} a code; use the 16-bit file"
        )
    bits, check = fitting[0], partial(_check_groups, shapes)
    return _held_weight(f"int{bits}", "quanto", parts, None, partial(_quanto_groups, bits), check)


# Ending of the tensor that identifies a convention -> (what replaces the ending in the weight's name, reader).
CONVENTIONS: dict[str, tuple[str, Callable[[str, str, Entries], HeldWeight]]] = {
    ".scale_weight": (".weight", _comfy),
    ".weight_scale": (".weight", _comfy),
    ".comfy_quant": (".weight", _comfy),
    ".quant_state.bitsandbytes__nf4": ("", _bitsandbytes_4bit),
    ".quant_state.bitsandbytes__fp4": ("", _bitsandbytes_4bit),
    ".SCB": (".weight", _bitsandbytes_8bit),
    "._data._data": ("", _quanto_few_bits),
    "._data": ("", _quanto_8bit),
}


def _all_there(entries: Entries, label: str, parts: dict[str, str]) -> dict[str, str]:
    for name in parts.values():
        if name not in entries:
            raise UserError(
                f"tensor {name!r} is missing beside {label!r}: a quantised weight is incomplete. "
                "Download or copy the file again, or use the 16-bit file"
            )
    return parts


def _unsupported(convention: str, name: str) -> UserError:
    return UserError(
        f"tensor {name!r} is quantised as {convention}, which is not supported; "
        "use the 16-bit file, which can be quantised while loading"
    )


def _held_weight(
    dtype: str, backend: str, parts: dict[str, str], shape: Shape | None, read: Decode, check: Checker = lambda *_: None
) -> HeldWeight:
    def payload(tensors: Tensors, shape: Shape) -> Payload:
        check(tensors, shape)
        return read(tensors, shape)

    def dequantize(payload: Tensors, shape: Shape) -> torch.Tensor:
        stored = formats_of(dtype)[backend].stored(dict(payload), torch.Size(shape))
        return dora_torch.upcast(stored, torch.float32).view(shape)

    described = tuple(role for role in DESCRIPTIONS if role in parts)
    return HeldWeight(dtype, backend, parts, shape, payload, described, check, dequantize)


# ------------------------------------------------------------------- contents: (tensors by role, shape) -> payload


def _float8_rows(dtype: torch.dtype, tensors: Tensors, shape: Shape) -> Payload:
    codes = _checked(tensors, "weight", shape, dtype)
    if "scale" not in tensors:
        return {"weight": codes, "scale": torch.ones(shape[0])}
    scale = tensors["scale"]
    if scale.numel() == 1:
        scale = scale.flatten().expand(shape[0])
    return {"weight": codes, "scale": _one_a_row(scale, shape).contiguous()}


def _check_comfy_quant(dtype: torch.dtype, tensors: Tensors, shape: Shape) -> None:
    if "comfy_quant" in tensors:
        form = _json(tensors, "comfy_quant").get("format")
        if form != COMFY_FORMATS[dtype]:
            raise ValueError(f"comfy_quant says format = {form!r}, the codes are {COMFY_FORMATS[dtype]!r}")


def _bitsandbytes_blocks(tensors: Tensors, shape: Shape) -> Payload:
    count, block = prod(shape), bitsandbytes_block(prod(shape[1:]))
    blocks = -(-count // block)
    # Any dtype: quant_storage packs the same bytes into wider elements.
    packed = tensors["weight"].contiguous().flatten().view(torch.uint8)
    if packed.numel() * 2 != count:
        raise ValueError(f"weight has {packed.numel()} bytes, {count} codes of 4 bits take {count // 2}")
    if "nested_absmax" in tensors:
        scale = _nested_absmax(tensors, blocks)
    else:
        scale = _fp32(_checked(tensors, "absmax", (blocks,), *EXACT_IN_FP32), "absmax")
    return {"weight": first_code_low(packed), "scale": scale, "levels": _checked(tensors, "quant_map", (16,), torch.float32)}


def _check_quant_state(kind: str, tensors: Tensors, shape: Shape) -> None:
    state = _json(tensors, "quant_state")
    block = bitsandbytes_block(prod(shape[1:]))
    for key, expected in {"quant_type": kind, "shape": list(shape), "blocksize": block}.items():
        if state.get(key) != expected:
            raise ValueError(f"quant_state says {key} = {state.get(key)!r}, only {expected!r} can be read here")
    if prod(shape) % 2:
        raise ValueError(f"an odd number of elements, {prod(shape)}, does not fill its bytes")


def _nested_absmax(tensors: Tensors, blocks: int) -> torch.Tensor:
    """fp32 [blocks]: nested_quant_map[code] * nested_absmax of its block + nested_offset, each step rounded."""
    state = _json(tensors, "quant_state")
    size, offset, dtype = (state.get(f"nested_{key}") for key in ("blocksize", "offset", "dtype"))
    if type(size) is not int or size < 1 or type(offset) is not float or dtype != "float32":
        raise ValueError(
            f"quant_state says nested_blocksize = {size!r}, nested_offset = {offset!r}, nested_dtype = {dtype!r}; "
            "absmax cannot be read by that"
        )
    codes = _checked(tensors, "absmax", (blocks,), torch.uint8)
    largest = _checked(tensors, "nested_absmax", (-(-blocks // size),), torch.float32)
    levels = _checked(tensors, "nested_quant_map", (256,), torch.float32)
    return levels[codes.int()] * largest.repeat_interleave(size)[:blocks] + offset


def _bitsandbytes_rows(tensors: Tensors, shape: Shape) -> Payload:
    largest = _checked(tensors, "scale", shape[:1], torch.float32)
    return {"weight": _checked(tensors, "weight", shape, torch.int8), "scale": largest / 127}


def _check_weight_format(tensors: Tensors, shape: Shape) -> None:
    if "weight_format" in tensors and tensors["weight_format"].flatten().tolist() != [0]:
        raise ValueError(f"weight_format is {tensors['weight_format'].tolist()}, only 0 (row by row) can be read")


def _quanto_rows(dtype: torch.dtype, tensors: Tensors, shape: Shape) -> Payload:
    return {"weight": _checked(tensors, "weight", shape, dtype), "scale": _one_a_row(tensors["scale"], shape)}


def _check_groups(shapes: Mapping[str, Shape], tensors: Tensors, shape: Shape) -> None:
    count, group = prod(shape), quanto_group(prod(shape[1:]))
    for role in ("scale", "shift"):
        if prod(shapes[role]) != count // group or shapes[role][:1] != (count // group,):
            raise ValueError(f"{role} has shape {shapes[role]}; {count} elements in groups of {group} take {count // group}")


def _quanto_groups(bits: int, tensors: Tensors, shape: Shape) -> Payload:
    group, packed = quanto_group(prod(shape[1:])), tensors["weight"]
    groups = prod(shape) // group
    lines = -(-groups * bits // 8)
    if packed.dtype != torch.uint8 or packed.numel() != lines * group:
        raise ValueError(
            f"_data is {NAMES[packed.dtype]} of shape {tuple(packed.shape)}; {groups} groups of {group} take {lines} "
            "lines of bytes"
        )
    # Groups are lines, and the library packs lines that lie far apart: the first of them in the lowest bits.
    codes = torch.cat([packed >> place & 2**bits - 1 for place in range(0, 8, bits)])[:groups]
    return {
        "weight": pack(codes.flatten(), bits),
        "scale": _fp32(tensors["scale"], "scale").flatten(),
        "offset": -_fp32(tensors["shift"], "shift").flatten(),
    }


def _checked(tensors: Tensors, role: str, shape: Shape, *dtypes: torch.dtype) -> torch.Tensor:
    tensor = tensors[role]
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype not in dtypes:
        allowed = " or ".join(NAMES[dtype] for dtype in dtypes)
        raise ValueError(
            f"{role} is {NAMES[tensor.dtype]} of shape {tuple(tensor.shape)}, wanted {allowed} of shape {tuple(shape)}"
        )
    return tensor


def _one_a_row(scale: torch.Tensor, shape: Shape) -> torch.Tensor:
    """[N] or [N, 1, ...] -> fp32 [N]."""
    if scale.numel() != shape[0] or scale.shape[:1] != shape[:1]:
        raise ValueError(f"scale has shape {tuple(scale.shape)}, wanted one for each of the {shape[0]} rows")
    return _fp32(scale, "scale").flatten()


def _fp32(tensor: torch.Tensor, role: str) -> torch.Tensor:
    if tensor.dtype not in EXACT_IN_FP32:
        raise ValueError(f"{role} is {NAMES[tensor.dtype]}, wanted {' or '.join(NAMES[d] for d in EXACT_IN_FP32)}")
    return tensor.float()


def _json(tensors: Tensors, role: str) -> dict:
    try:
        value = json.loads(bytes(tensors[role].flatten().view(torch.uint8).tolist()))
    except ValueError as error:
        raise ValueError(f"{role} is not JSON") from error
    if not isinstance(value, dict):
        raise ValueError(f"{role} is not a JSON object")
    return value


# ------------------------------------------------------------------------------------------------ scaled float8, written


def scaled_marker() -> torch.Tensor:
    """The value of a denoiser's tensor `scaled_fp8`, which marks such a file to ComfyUI: with two elements, ComfyUI's Linears
    compute with the widened weight. ComfyUI takes every Linear of the denoiser for scaled, so every one has to be."""
    return torch.zeros(2).to(SCALED_CODES)


def scale_of(weight: torch.Tensor) -> torch.Tensor:
    """max |W| / 448, the largest code: fp32 []; 1 for a weight of zeros. The value is code * scale."""
    largest = weight.abs().max().float()
    return torch.where(largest > 0, largest / torch.finfo(SCALED_CODES).max, torch.ones(()))


def codes_of(weight: torch.Tensor) -> torch.Tensor:
    """The codes of a weight, in its shape."""
    return (weight / scale_of(weight)).to(SCALED_CODES)
