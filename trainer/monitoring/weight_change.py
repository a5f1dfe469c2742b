"""Did it take? What the adapter changed, by block, after training."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from trainer.adapters import Adapter
from trainer.adapters.change import LayerChange, change
from trainer.base.console import wrapped
from trainer.base.progress import QUIET, Phases
from trainer.kernels.dora_torch import TINY

# Of the median layer's root mean square: a layer of smaller weights is measured against this share of it. Else a layer that
# a model's makers left next to zero would speak for the whole run.
FLOOR = 0.1


@dataclass(frozen=True)
class BlockChange:
    """The change of one block: how many of its layers are measured, the largest and the median ||dW|| / ||W|| of a layer (of
    very small weights ||W|| is FLOOR's), the largest drift of a row's magnitude, |m / m_0 - 1| (LoRA: 0), and how many layers
    have rows whose dm is lost (is_lost in adapters/dora.py)."""

    layers: int
    largest: float
    median: float
    drift: float
    lost: int = 0


def weight_change(
    adapter: Adapter, start: Mapping[str, torch.Tensor] | None = None, phases: Phases = QUIET
) -> dict[str, BlockChange]:
    """How far each block of an adapter has moved, by its name. start: the weights that the run started from
    (Adapter.state_dict); None: it started anew. A layer of zeros is left out, unless its change is not finite."""
    layers: dict[str, tuple[LayerChange, int]] = {}
    with phases("measuring the adapter", total=len(adapter.layers), unit="layer") as phase:
        for name, layer in adapter.layers.items():
            began = None if start is None else adapter.kind.values(start, name)
            norms = change(layer, began)
            layers[name] = norms, math.prod(layer.get_base_layer().weight_shape)
            phase.advance()
    rms = [norms.size / math.sqrt(numbers) for norms, numbers in layers.values() if norms.size > 0]
    floor = FLOOR * median(rms) if rms else 0.0
    blocks: dict[str, list[tuple[float, float, bool]]] = {}
    for name, (norms, numbers) in layers.items():
        if norms.size != 0 or not math.isfinite(norms.moved):
            size = max(norms.size, floor * math.sqrt(numbers), TINY)
            blocks.setdefault(block_of(name), []).append((norms.moved / size, norms.drift, norms.lost > 0))
    changes = {}
    for block, measured in blocks.items():
        moves, drifts, lost = zip(*measured, strict=True)
        changes[block] = BlockChange(len(measured), largest(moves), median(moves), largest(drifts), sum(lost))
    return changes


def block_of(layer: str) -> str:
    """The layer's name up to the first index that follows a container of blocks: 'unet.down_blocks.1'."""
    match = re.match(r"(.*?(?:blocks|layers|block)\.\d+|.*?mid_block)\.", layer)
    return match[1] if match else layer


def largest(numbers: Iterable[float]) -> float:
    """The largest of some numbers, NaN where one of them is that, for `max` would depend on their order; of none 0."""
    numbers = list(numbers)
    return math.nan if any(map(math.isnan, numbers)) else max(numbers, default=0.0)


def render(sections: Mapping[str, Mapping[str, Any]], columns: int) -> str:
    """The sections as plain text in lines of at most `columns` characters: aligned, or where that is too wide in words."""
    lines = []
    for title, section in sections.items():
        table = [[str(cell) for cell in row] for row in (section["columns"], *section["rows"])]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines.append(title)
        if sum(widths) + 2 * len(widths) <= columns:
            aligned = ("".join(f"  {cell:<{w}}" for cell, w in zip(row, widths, strict=True)) for row in table)
            lines += [line.rstrip() for line in aligned]
            continue
        head, *rows = table
        for first, *others in rows:
            lines += wrapped(f"  {first}", columns)
            text = ", ".join(f"{name} {cell}" for name, cell in zip(head[1:], others, strict=True))
            lines += wrapped(f"    {text}", columns)
    return "\n".join(lines)
