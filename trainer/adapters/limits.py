"""What is left of an adapter for a micro-batch, and how large it may become after an update."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from trainer.adapters.dora import Part
from trainer.base import draws


def drawn_rows(
    ranks: Mapping[str, int], *, rank_dropout: float, module_dropout: float, seed: int, step: int, micro_batch: int
) -> dict[str, torch.Tensor]:
    """What multiplies, layer by layer, the rows of its A in this micro-batch: fp32 [R], on the CPU. ranks: by layer.

    A row is dropped with probability `rank_dropout`, a layer with `module_dropout`, each by a draw of its own; what is kept
    is divided by the probability that it is, so that the expected update is the whole one.
    """
    rows = {}
    for layer, rank in ranks.items():
        u_module, *u_rank = draws.uniforms(1 + rank, seed, "layer_dropout", step, micro_batch, layer)
        kept = torch.tensor(u_rank, dtype=torch.float64) >= rank_dropout
        share = (1 - rank_dropout) * (1 - module_dropout)
        rows[layer] = (kept.double() * (u_module >= module_dropout) / share).float()
    return rows


def thinned(part: Part, rows_R: torch.Tensor) -> Part:
    """A LoRA's part with the rows of A multiplied; gradients go to the whole A and B."""
    return Part(part.base, part.a * rows_R.view(-1, *[1] * (part.a.dim() - 1)), part.b, part.scaling)


@torch.no_grad()
def limit_norms(layers: Iterable[Any], limit: float) -> torch.Tensor:
    """Multiply A and B alike where ||s B A|| (Frobenius) is above `limit`, so that it equals it: kohya's
    --scale_weight_norms.

    Returns how many layers were scaled, int64 []. The norm is made without B A: ||B A||^2 = sum of (B^T B) * (A A^T).
    """
    tensors, ratios, above = [], [], []
    for layer in layers:
        _, a, b, *_ = layer.active()
        scaling = layer.scaling[layer.active_adapters[0]]
        a_RK, b_NR = a.weight.flatten(1), b.weight.flatten(1)
        norm = scaling * (b_NR.t() @ b_NR).mul_(a_RK @ a_RK.t()).sum().clamp_min(0).sqrt()
        is_above = norm > limit
        ratio = torch.where(is_above, (limit / norm).sqrt(), 1.0)  # times 1 is no change of any bit
        tensors += [a.weight, b.weight]
        ratios += [ratio, ratio]
        above.append(is_above)
    if tensors:
        torch._foreach_mul_(tensors, ratios)
    return torch.stack(above).sum() if above else torch.zeros((), dtype=torch.int64)
