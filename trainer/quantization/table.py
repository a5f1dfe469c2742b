"""The table of storage formats, by what a config calls them."""

import torch

from trainer.quantization import bitsandbytes, quanto
from trainer.quantization.formats import Dense, Format, Packed, PerRow, scaled_float8

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


def dense(dtype: torch.dtype) -> Format:
    """The format of a torch dtype; of fp64, which no format stores, fp32."""
    wanted = torch.float32 if dtype == torch.float64 else dtype
    return next(format for format in FORMATS.values() if format.dtype == wanted)
