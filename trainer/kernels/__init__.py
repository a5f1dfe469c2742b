"""The few operations worth fusing, each twice: plain PyTorch and Triton, with the same signatures (protocols.Kernels)."""

import torch

from trainer.base.errors import UserError
from trainer.base.protocols import Kernels
from trainer.base.types import StoredWeight
from trainer.kernels import dora_torch

# Compute capability that the Triton kernels need (Ampere), and that float8 products need (Ada).
CAPABILITY, FP8_CAPABILITY = (8, 0), (8, 9)

# Fewest weights and rows for which a float8 product pays. On an H100 it did for all layers of Flux and for SDXL's of
# 1280 x 5120 and more, from 512 rows on (benchmarks/bench_float8.py gives a verdict for each shape). Small layers lose to the
# quantisation of x, which costs as much as a product with some 500 columns gains; few rows lose to launches.
FP8_MIN_WEIGHTS, FP8_MIN_ROWS = 2**22, 512
FP8_ALIGNMENT = 16  # divisor of N and K that the CUDA product requires


def choose(name: str, device: torch.device) -> Kernels:
    """The kernels of that name. "auto": Triton on a CUDA device of compute capability 8.0 or newer, plain PyTorch elsewhere.

    Never falls back by itself: raises UserError if Triton was chosen and cannot run.
    """
    if name == "torch" or (name == "auto" and not _is_cuda(device, CAPABILITY)):
        return dora_torch
    if not _is_cuda(device, CAPABILITY):
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


def planned(name: str) -> Kernels:
    """The kernels of that name on a CUDA device that is not here: "auto" is Triton if it is installed."""
    if name == "torch":
        return dora_torch
    try:
        from trainer.kernels import dora_triton
    except ImportError:
        return dora_torch
    return dora_triton


def scaled_matmul_pays(rows: int, n: int, k: int) -> bool:
    """Whether a layer [N, K] multiplies `rows` rows in float8: alike in forward and backward, which have the same sizes."""
    return rows >= FP8_MIN_ROWS and n * k >= FP8_MIN_WEIGHTS and n % FP8_ALIGNMENT == k % FP8_ALIGNMENT == 0


def multiplies_float8(kernels: Kernels, device: torch.device) -> bool:
    """Whether these kernels multiply float8 natively on that device, tried with a small product.

    If not (a CPU, an older card, the plain kernels), upcast codes give the same numbers, slower than without float8.
    """
    if kernels.name != "triton" or not _is_cuda(device, FP8_CAPABILITY):
        return False
    codes = torch.ones(FP8_ALIGNMENT, FP8_ALIGNMENT, device=device).to(torch.float8_e4m3fn)
    ones = torch.ones(FP8_ALIGNMENT, device=device)
    weight = StoredWeight(codes, (FP8_ALIGNMENT, FP8_ALIGNMENT), block=FP8_ALIGNMENT, scale=ones)
    try:
        # cuBLAS has no float8 product by rows for some cards that Triton suits.
        return bool((kernels.scaled_product(codes, ones, weight, torch.bfloat16) == FP8_ALIGNMENT).all())
    except (RuntimeError, ValueError):  # torch's own checks and cuBLAS raise either
        return False


def _is_cuda(device: torch.device, capability: tuple[int, int]) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= capability
