"""The few operations worth fusing, each twice: plain PyTorch and Triton, with the same signatures (types.Kernels)."""

from __future__ import annotations

import torch

from trainer.errors import UserError
from trainer.types import Kernels


def choose(name: str, device: torch.device) -> Kernels:
    """The kernels of that name; "auto": Triton on a CUDA device, plain PyTorch elsewhere. Never falls back by itself.

    Raises UserError where Triton was asked for and cannot run.
    """
    from trainer.kernels import dora_torch

    if name == "torch" or (name == "auto" and device.type != "cuda"):
        return dora_torch
    if device.type != "cuda":
        raise UserError(
            f"adapter.kernels = 'triton' needs a CUDA device, this run is on {device.type}; use 'auto' or 'torch'"
        )
    try:
        from trainer.kernels import dora_triton
    except ImportError as error:
        raise UserError(
            f"adapter.kernels = {name!r} needs Triton, which cannot be imported ({error}); install the triton package, or "
            "set adapter.kernels = 'torch'"
        ) from error
    return dora_triton
