from __future__ import annotations

import torch

from trainer.quantization.quantised_files import codes_of, scale_of


def test_the_largest_weight_has_the_largest_code_and_zeros_stay_zeros() -> None:
    weight = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    codes, scale = codes_of(weight), scale_of(weight)
    assert codes.dtype == torch.float8_e4m3fn and codes.float().abs().max() == 448
    assert ((codes.float() * scale - weight).abs() <= weight.abs() / 16 + float(scale) * 2**-9).all()
    zeros = torch.zeros(2, 3)
    assert scale_of(zeros) == 1 and torch.equal(codes_of(zeros).float(), zeros)
