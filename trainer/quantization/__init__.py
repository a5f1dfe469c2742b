"""How frozen weights are stored: one entry point that swaps a component's layers, and the record of what was stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import version

import torch
from torch import nn

from trainer.kernels import dora_torch
from trainer.quantization import bitsandbytes, quanto
from trainer.quantization.formats import Dense, Format, Packed, PerRow, scaled_float8
from trainer.quantization.layers import FrozenConv2d, FrozenLayer, FrozenLinear
from trainer.tensorfile import NAMES, tensor_sha256
from trainer.types import Kernels

__all__ = [
    "ALL_FORMATS", "FORMATS", "Format", "FrozenConv2d", "FrozenLayer", "FrozenLinear", "formats_of", "freeze_layers",
    "record",
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
    PerRow("int8", "bitsandbytes", torch.int8, bitsandbytes.quantize_rows),
    Packed("int4", "quanto", 4, quanto.group_size, quanto.quantize_groups, "offset"),
    Packed("int2", "quanto", 2, quanto.group_size, quanto.quantize_groups, "offset"),
    Packed("nf4", "bitsandbytes", 4, bitsandbytes.block_size, bitsandbytes.quantize_blocks, "levels"),
    Packed("fp4", "bitsandbytes", 4, bitsandbytes.block_size, bitsandbytes.quantize_blocks, "levels"),
)

# By the config's dtype, with its default backend.
FORMATS: dict[str, Format] = {format.dtype_name: format for format in reversed(ALL_FORMATS)}

# What computes the codes.
DISTRIBUTIONS = {"native": "torch", "quanto": "optimum-quanto", "bitsandbytes": "bitsandbytes"}


def formats_of(dtype: str) -> dict[str, Format]:
    """The formats of a config's dtype by backend, the default first."""
    return {format.backend: format for format in ALL_FORMATS if format.dtype_name == dtype}


def freeze_layers(
    module: nn.Module,
    *,
    format: Format,
    compute: torch.dtype,
    unquantised: torch.dtype,
    keep: Sequence[str] = (),
    keep_fp32: Sequence[str] = (),
    kernels: Kernels = dora_torch,
) -> None:
    """Replace every Linear and Conv2d of `module` (on the meta device) by its frozen counterpart, in place.

    format: storage of the layers; compute: their compute dtype.
    unquantised: storage of what `format` quantises not: layers that match a pattern of `keep` (fnmatch), and
      convolutions where the format has none.
    keep_fp32: name parts a model class wants stored and computed in fp32 (`_keep_in_fp32_modules`), honoured when the
      storage or the compute dtype is fp16, as in transformers.
    kernels: what converts the weights and computes the adapters on top of them.
    Other parameters stay what they are; the loader places them as fp32.
    """
    for name, child in list(module.named_modules()):
        if not isinstance(child, (nn.Linear, nn.Conv2d)):
            continue
        chosen, chosen_compute = format, compute
        kept = any(fnmatchcase(name, pattern) for pattern in keep)
        if format.quantised and (kept or (isinstance(child, nn.Conv2d) and not format.convolutions)):
            chosen = next(f for f in FORMATS.values() if f.dtype == unquantised)
        if torch.float16 in (format.dtype, compute) and any(part in name.split(".") for part in keep_fp32):
            chosen, chosen_compute = FORMATS["fp32"], torch.float32
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
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, frozen)


def record(components: Iterable[tuple[str, nn.Module]]) -> dict[str, dict[str, object]]:
    """What `quantization.json` says: for every quantised layer its format and the SHA-256 of each payload tensor.

    Deterministic: the same checkpoint, config and device type give the same record, which a resume is checked against.
    """
    layers: dict[str, dict[str, object]] = {}
    for component, module in components:
        for name, layer in module.named_modules():
            if isinstance(layer, FrozenLayer) and layer.format.quantised:
                layers[f"{component}.{name}"] = {
                    "format": layer.format.dtype_name,
                    "backend": layer.format.backend,
                    "library": _library(layer.format.backend),
                    "shape": list(layer.weight_shape),
                    "payload": {
                        key: {"dtype": NAMES[t.dtype], "sha256": tensor_sha256(t)} for key, t in layer.payload().items()
                    },
                }
    return layers


@cache
def _library(backend: str) -> str:
    return f"{DISTRIBUTIONS[backend]} {version(DISTRIBUTIONS[backend])}"
