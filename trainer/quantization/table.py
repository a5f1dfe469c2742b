"""The table of storage formats by their names in a config, and the conversions of bitsandbytes and optimum-quanto in it.

Scales, shifts and codes are the libraries', from fp32; storage and use are ours. bitsandbytes' dequantisation is not used: on
a CPU (0.50.2) it is wrong for an even K that is not a multiple of the block.
"""

import torch

from trainer.quantization.formats import Dense, Format, Packed, PerRow, nonzero, pack, scaled_float8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
QTYPES = {torch.int8: "qint8", E4M3: "qfloat8_e4m3fn", E5M2: "qfloat8_e5m2"}


def bitsandbytes_rows(w_NK: torch.Tensor, codes: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """int8, value = code * max_k |W_nk| / 127."""
    from bitsandbytes import functional

    # On the CPU: the library's CUDA kernel takes fp16 only.
    codes_NK, largest_N, _ = functional.int8_vectorwise_quant(w_NK.cpu())
    return codes_NK, largest_N / 127


def bitsandbytes_block(columns: int) -> int:
    """The block size. Blocks run over the flat weight and do not end with a row."""
    return 64


def bitsandbytes_blocks(flat: torch.Tensor, block: int, dtype_name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """nf4 or fp4: value = levels[code] * max |block|. Returns packed codes, the largest of each block, levels."""
    from bitsandbytes import functional

    packed, state = functional.quantize_4bit(flat, blocksize=block, quant_type=dtype_name)
    return first_code_low(packed.flatten()), state.absmax, state.code


def first_code_low(packed: torch.Tensor) -> torch.Tensor:
    """Bytes of two codes with the first code in the low bits; bitsandbytes has it in the high ones."""
    return (packed >> 4) | (packed << 4)


def quanto_rows(w_NK: torch.Tensor, codes: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric, scale_n = max_k |W_nk| / max(codes). The library gives a row of zeros scale 0, which in float8 is NaN."""
    from optimum import quanto

    qtype = quanto.qtypes[QTYPES[codes]]
    scale = nonzero(quanto.AbsmaxOptimizer()(w_NK, qtype, axis=0))
    quantised = quanto.quantize_weight(w_NK, qtype, axis=0, scale=scale, optimized=False)
    return quantised._data, scale.flatten()


def quanto_group(columns: int) -> int:
    """The elements of a row that share a scale, by the rule of the library's layers: 128, else 96, 64 or 32, else the row."""
    return next((size for size in (128, 96, 64, 32) if columns % size == 0), columns)


def quanto_groups(flat: torch.Tensor, group: int, dtype_name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Affine with a float shift: scale = (max - min) / (2 ** bits - 1), value = code * scale - shift, shift = -min.

    flat: whole groups. Returns packed codes, scale and offset = -shift.
    """
    from optimum import quanto

    qtype = quanto.qtypes[f"q{dtype_name}"]
    w_BG = flat.view(-1, group)
    # MaxOptimizer() itself would give every element a scale if there is one group only.
    scale, shift = quanto.MaxOptimizer().optimize(w_BG, qtype, axis=0)
    # A group of one value has scale 0: whatever its codes are, its values are exact.
    codes = torch.ops.quanto.quantize_affine(w_BG, bits=qtype.bits, axis=0, group_size=None, scale=scale, shift=shift)
    return pack(codes.flatten(), qtype.bits), scale.flatten(), -shift.flatten()


# The first format of a dtype is its default.
ALL_FORMATS: tuple[Format, ...] = (
    Dense("fp32", torch.float32),
    Dense("bf16", torch.bfloat16),
    Dense("fp16", torch.float16),
    PerRow("fp8_e4m3", "native", E4M3, scaled_float8),
    PerRow("fp8_e4m3", "quanto", E4M3, quanto_rows),
    PerRow("fp8_e5m2", "native", E5M2, scaled_float8),
    PerRow("fp8_e5m2", "quanto", E5M2, quanto_rows),
    PerRow("int8", "quanto", torch.int8, quanto_rows),
    PerRow("int8", "bitsandbytes", torch.int8, bitsandbytes_rows, convolutions=False),
    Packed("int4", "quanto", 4, quanto_group, quanto_groups, "offset"),
    Packed("int2", "quanto", 2, quanto_group, quanto_groups, "offset"),
    Packed("nf4", "bitsandbytes", 4, bitsandbytes_block, bitsandbytes_blocks, "levels"),
    Packed("fp4", "bitsandbytes", 4, bitsandbytes_block, bitsandbytes_blocks, "levels"),
)

FORMATS: dict[str, Format] = {format.dtype_name: format for format in reversed(ALL_FORMATS)}  # a dtype's default


def formats_of(dtype: str) -> dict[str, Format]:
    """The formats of a config's dtype by backend, the default first."""
    return {format.backend: format for format in ALL_FORMATS if format.dtype_name == dtype}


def dense(dtype: torch.dtype) -> Format:
    """The format of a torch dtype; fp32 for fp64, which no format stores."""
    stored = torch.float32 if dtype == torch.float64 else dtype
    return next(format for format in FORMATS.values() if format.dtype == stored)
