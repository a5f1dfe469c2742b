"""The few operations worth fusing, each twice: plain PyTorch and Triton, with the same signatures (types.Kernels)."""

from __future__ import annotations

import torch

from trainer.errors import UserError
from trainer.types import Kernels

# Of the card that Triton reads float8 e4m3 on: Ada and Hopper.
CAPABILITY = (8, 9)


def choose(name: str, device: torch.device) -> Kernels:
    """The kernels of that name. "auto": Triton on a CUDA device of compute capability 8.9 or newer, plain PyTorch elsewhere.

    Never falls back by itself: raises UserError where Triton was chosen and cannot run.
    """
    from trainer.kernels import dora_torch

    if name == "torch" or (name == "auto" and not _suits_triton(device)):
        return dora_torch
    if not _suits_triton(device):
        here = str(device) if device.type != "cuda" else torch.cuda.get_device_name(device)
        raise UserError(
            f"adapter.kernels = 'triton' needs a CUDA device of compute capability {'.'.join(map(str, CAPABILITY))} or "
            f"newer, this run is on {here}; use 'auto' or 'torch'"
        )
    try:
        from trainer.kernels import dora_triton
    except ImportError as error:
        raise UserError(
            f"adapter.kernels = {name!r} needs Triton, which cannot be imported ({error}); install the triton package, or "
            "set adapter.kernels = 'torch'"
        ) from error
    return dora_triton


def _suits_triton(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY
