"""optimum-quanto's weight formats. Scales, shifts and codes are the library's, from fp32; storage and use are ours."""

import torch

from trainer.quantization.formats import nonzero, pack

QTYPES = {torch.int8: "qint8", torch.float8_e4m3fn: "qfloat8_e4m3fn", torch.float8_e5m2: "qfloat8_e5m2"}


def quantize_rows(w_NK: torch.Tensor, codes: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric, scale_n = max_k |W_nk| / max(codes). The library gives a row of zeros scale 0, which in float8 is NaN."""
    from optimum import quanto

    qtype = quanto.qtypes[QTYPES[codes]]
    scale = nonzero(quanto.AbsmaxOptimizer()(w_NK, qtype, axis=0))
    quantised = quanto.quantize_weight(w_NK, qtype, axis=0, scale=scale, optimized=False)
    return quantised._data, scale.flatten()


def group_size(columns: int) -> int:
    """How many elements of a row share a scale, by the rule of the library's layers: 128, else 96, 64 or 32, else the row."""
    return next((size for size in (128, 96, 64, 32) if columns % size == 0), columns)


def quantize_groups(flat: torch.Tensor, group: int, dtype_name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Affine with a float shift: scale = (max - min) / (2 ** bits - 1), value = code * scale - shift, shift = -min.

    flat: whole groups. Returns packed codes, scale and offset = -shift.
    """
    from optimum import quanto

    qtype = quanto.qtypes[f"q{dtype_name}"]
    w_BG = flat.view(-1, group)
    # Not MaxOptimizer(): where there is one group only, that would give every element a scale.
    scale, shift = quanto.MaxOptimizer().optimize(w_BG, qtype, axis=0)
    # A group of one value has scale 0: whatever its codes are, its values are exact.
    codes = torch.ops.quanto.quantize_affine(w_BG, bits=qtype.bits, axis=0, group_size=None, scale=scale, shift=shift)
    return pack(codes.flatten(), qtype.bits), scale.flatten(), -shift.flatten()
