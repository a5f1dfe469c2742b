"""The few operations worth fusing, each twice: plain PyTorch and Triton, with the same signatures (protocols.Kernels)."""

import torch

from trainer.errors import UserError
from trainer.protocols import Kernels
from trainer.types import StoredWeight

# Of the card that Triton reads float8 e4m3 on, and that multiplies float8: Ada and Hopper.
CAPABILITY = (8, 9)

# From which shape on a float8 product pays. Estimates, both, not measured: scripts/bench/bench_step.py gives a verdict for
# each layer shape of Flux and SDXL, from which to set them. Narrow layers lose to the quantisation of x, which costs as much
# as a product with some 500 columns gains; few rows lose to the launches.
FP8_MIN_SIDE, FP8_MIN_ROWS = 1280, 512
FP8_ALIGNMENT = 16  # of N and K: what the CUDA product wants


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


def scaled_matmul_pays(rows: int, n: int, k: int) -> bool:
    """Whether a layer [N, K] multiplies `rows` rows in float8: forward and backward alike, of the same three sizes."""
    return rows >= FP8_MIN_ROWS and min(n, k) >= FP8_MIN_SIDE and n % FP8_ALIGNMENT == k % FP8_ALIGNMENT == 0


def multiplies_float8(kernels: Kernels, device: torch.device) -> bool:
    """Whether these kernels multiply float8 as such on that device, tried with a small product.

    Elsewhere (a CPU, an older card, the plain kernels) the same numbers come out of upcast codes, slower than without float8.
    """
    if kernels.name != "triton" or not _suits_triton(device):
        return False
    codes = torch.ones(FP8_ALIGNMENT, FP8_ALIGNMENT, device=device).to(torch.float8_e4m3fn)
    ones = torch.ones(FP8_ALIGNMENT, device=device)
    weight = StoredWeight(codes, (FP8_ALIGNMENT, FP8_ALIGNMENT), block=FP8_ALIGNMENT, scale=ones)
    try:
        # cuBLAS has no float8 product by rows for some cards that Triton suits.
        return bool((kernels.scaled_product(codes, ones, weight, torch.bfloat16) == FP8_ALIGNMENT).all())
    except (RuntimeError, ValueError):  # torch's own checks and cuBLAS raise either
        return False


def _suits_triton(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY
