"""How frozen weights are stored: the formats, and the one entry point that swaps a component's layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from trainer.errors import UserError
from trainer.kernels import dora_torch
from trainer.protocols import Kernels
from trainer.quantization import bitsandbytes, quanto
from trainer.quantization.cache import ConvertedWeights
from trainer.quantization.formats import Dense, Format, Packed, PerRow, scaled_float8
from trainer.quantization.layers import FrozenConv2d, FrozenLayer, FrozenLinear
from trainer.quantization.quantised_files import recognise
from trainer.quantization.record import REPORT_COLUMNS, Stored, library, record, scaled_layers, stored_as
from trainer.types import HeldWeight

__all__ = [
    "ALL_FORMATS", "FORMATS", "REPORT_COLUMNS", "ConvertedWeights", "Format", "FrozenConv2d", "FrozenLayer",
    "FrozenLinear", "Stored", "declared", "formats_of", "freeze_layers", "library", "recognise", "record", "scaled_layers",
    "stored_as",
]  # fmt: skip

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# Of the formats of one dtype, the first is the default.
ALL_FORMATS: tuple[Format, ...] = (
    Dense("fp32", torch.float32),
    Dense("bf16", torch.bfloat16),
    Dense("fp16", torch.float16),
    PerRow("fp8_e4m3", "native", E4M3, scaled_float8),
    PerRow("fp8_e4m3", "quanto", E4M3, quanto.quantize_rows),
    PerRow("fp8_e5m2", "native", E5M2, scaled_float8),
    PerRow("fp8_e5m2", "quanto", E5M2, quanto.quantize_rows),
    PerRow("int8", "quanto", torch.int8, quanto.quantize_rows),
    PerRow("int8", "bitsandbytes", torch.int8, bitsandbytes.quantize_rows, convolutions=False),
    Packed("int4", "quanto", 4, quanto.group_size, quanto.quantize_groups, "offset"),
    Packed("int2", "quanto", 2, quanto.group_size, quanto.quantize_groups, "offset"),
    Packed("nf4", "bitsandbytes", 4, bitsandbytes.block_size, bitsandbytes.quantize_blocks, "levels"),
    Packed("fp4", "bitsandbytes", 4, bitsandbytes.block_size, bitsandbytes.quantize_blocks, "levels"),
)

# By the config's dtype, with its default backend.
FORMATS: dict[str, Format] = {format.dtype_name: format for format in reversed(ALL_FORMATS)}


def formats_of(dtype: str) -> dict[str, Format]:
    """The formats of a config's dtype by backend, the default first."""
    return {format.backend: format for format in ALL_FORMATS if format.dtype_name == dtype}


def declared(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """(dtype, backend) that a component's config.json says its files hold quantised; None where it says nothing of it."""
    said = config.get("quantization_config") or {}
    method = said.get("quant_method")
    if method == "bitsandbytes":
        return said.get("bnb_4bit_quant_type", "fp4") if said.get("load_in_4bit") else "int8", "bitsandbytes"
    if method == "quanto":
        name = said.get("weights_dtype") or said.get("weights")
        return {"float8": "fp8_e4m3"}.get(name, name), "quanto"
    if method is not None:
        raise UserError(
            f"the model's config says quant_method = {method!r}, which is not supported; use the 16-bit model, or one "
            "quantised with bitsandbytes or quanto"
        )
    return None


def freeze_layers(
    module: nn.Module,
    *,
    format: Format,
    compute: torch.dtype,
    unquantised: torch.dtype,
    keep: Sequence[str] = (),
    keep_fp32: Sequence[str] = (),
    held: Mapping[str, HeldWeight | torch.dtype] = {},
    scaled_matmul: bool = False,
    kernels: Kernels = dora_torch,
) -> None:
    """Replace every Linear and Conv2d of `module` (on the meta device) by its frozen counterpart, in place.

    format: storage of the layers; compute: their compute dtype.
    unquantised: storage of what `format` quantises not: layers that match a pattern of `keep` (fnmatch), and
      convolutions where the format has none.
    keep_fp32: name parts a model class wants stored and computed in fp32 (`_keep_in_fp32_modules`), honoured when the
      storage or the compute dtype is fp16, as in transformers.
    held: what the model's files hold of each layer, where they hold quantised weights. Under a quantised `format`, which is
      then theirs, every layer is stored as it lies there, `keep` or not: what was lost stays lost.
    scaled_matmul: multiply float8 Linears as float8 (precision.matmul = "fp8").
    kernels: what converts the weights and computes the adapters on top of them.
    Other parameters stay what they are; the loader places them as fp32.
    """
    for name, child in list(module.named_modules()):
        if not isinstance(child, (nn.Linear, nn.Conv2d)):
            continue
        chosen, chosen_compute = format, compute
        kept = any(fnmatchcase(name, pattern) for pattern in keep)
        if format.quantised and held:
            chosen = _held_format(held[name])
        elif format.quantised and (kept or (isinstance(child, nn.Conv2d) and not format.convolutions)):
            chosen = _dense(unquantised)
        if torch.float16 in (format.dtype, compute) and any(part in name.split(".") for part in keep_fp32):
            chosen, chosen_compute = chosen if chosen.quantised and held else FORMATS["fp32"], torch.float32
        common = dict(
            bias=child.bias is not None, format=chosen, compute_dtype=chosen_compute, device=child.weight.device
        )  # fmt: skip
        if isinstance(child, nn.Linear):
            frozen: FrozenLayer = FrozenLinear(child.in_features, child.out_features, **common)
        else:
            assert child.padding_mode == "zeros", name
            frozen = FrozenConv2d(
                child.in_channels, child.out_channels, child.kernel_size, stride=child.stride, padding=child.padding,
                dilation=child.dilation, groups=child.groups, **common,
            )  # fmt: skip
        frozen.kernels = kernels
        frozen.scaled_matmul = scaled_matmul and isinstance(frozen, FrozenLinear)
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, frozen)


def _held_format(held: HeldWeight | torch.dtype) -> Format:
    return _dense(held) if isinstance(held, torch.dtype) else formats_of(held.dtype)[held.backend]


def _dense(dtype: torch.dtype) -> Format:
    """The format of a torch dtype; of fp64, which no format stores, fp32."""
    return next(
        format for format in FORMATS.values() if format.dtype == (torch.float32 if dtype == torch.float64 else dtype)
    )
