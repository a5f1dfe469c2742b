"""ComfyUI's scaled float8, written (quantised_files.py reads it): X.weight in e4m3, X.scale_weight one fp32 number.

The value is code * scale, with scale = max |W| / 448: the largest code. ComfyUI (comfy/model_detection.py, comfy/ops.py)
knows such a file by a tensor `scaled_fp8` of the denoiser; with two elements its Linears compute with the widened weight.
It takes every Linear of the denoiser for scaled, so every one is.
"""

import torch

CODES = torch.float8_e4m3fn
BESIDE = torch.bfloat16  # what such a file holds that is no Linear of the denoiser


def marker() -> torch.Tensor:
    """The value of `scaled_fp8`."""
    return torch.zeros(2).to(CODES)


def scale_of(weight: torch.Tensor) -> torch.Tensor:
    """fp32 []; 1 of a weight of zeros."""
    largest = weight.abs().max().float()
    return torch.where(largest > 0, largest / torch.finfo(CODES).max, torch.ones(()))


def codes_of(weight: torch.Tensor) -> torch.Tensor:
    """The codes of a weight, in its shape."""
    return (weight / scale_of(weight)).to(CODES)
