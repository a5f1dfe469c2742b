"""bitsandbytes' weight formats. Scales and codes are the library's, from fp32; storage and use are ours.

Its dequantisation is not used: on a CPU (0.50.2) it is wrong for an even K that is not a multiple of the block.
"""

import torch


def quantize_rows(w_NK: torch.Tensor, codes: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """int8, value = code * max_k |W_nk| / 127."""
    from bitsandbytes import functional

    # On the CPU: the library's CUDA kernel takes fp16 only.
    codes_NK, largest_N, _ = functional.int8_vectorwise_quant(w_NK.cpu())
    return codes_NK, largest_N / 127


def block_size(columns: int) -> int:
    """Blocks run over the flat weight and do not end with a row."""
    return 64


def quantize_blocks(flat: torch.Tensor, block: int, dtype_name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """nf4 or fp4: value = levels[code] * max |block|. Returns packed codes, the largest of each block, levels."""
    from bitsandbytes import functional

    packed, state = functional.quantize_4bit(flat, blocksize=block, quant_type=dtype_name)
    packed = packed.flatten()
    # The library has the first code in the high bits.
    return (packed >> 4) | (packed << 4), state.absmax, state.code
