"""How far the adapter changed the model's weights, by block."""

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

# A layer's ||W|| counts as at least this share of the median layer's root mean square. Else a layer that a model's makers
# left next to zero would dominate the whole run's change.
FLOOR = 0.1


@dataclass(frozen=True)
class BlockChange:
    """The change of one block. layers: how many are measured. largest, median: of the layers' ||dW|| / ||W|| (see FLOOR).
    drift: the largest |m / m_0 - 1| of a row's magnitude; 0 for a LoRA. lost_layers: those with rows whose dm is lost
    (is_lost in adapters/dora.py)."""

    layers: int
    largest: float
    median: float
    drift: float
    lost_layers: int = 0


def weight_change(
    adapter: Adapter, start: Mapping[str, torch.Tensor] | None = None, phases: Phases = QUIET
) -> dict[str, BlockChange]:
    """The change of each block of an adapter, by the block's name. start: the weights that the run started from
    (Adapter.state_dict); None: a new adapter's. A layer of zeros is left out, unless its change is not finite."""
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
    for block, values in blocks.items():
        moves, drifts, are_lost = zip(*values, strict=True)
        changes[block] = BlockChange(len(values), largest(moves), median(moves), largest(drifts), sum(are_lost))
    return changes


def block_of(layer: str) -> str:
    """The layer's name up to the first index that follows a container of blocks: 'unet.down_blocks.1'."""
    match = re.match(r"(.*?(?:blocks|layers|block)\.\d+|.*?mid_block)\.", layer)
    return match[1] if match else layer


def largest(numbers: Iterable[float]) -> float:
    """The largest number; 0 without any. NaN if one is NaN: `max` would depend on the order."""
    numbers = list(numbers)
    return math.nan if any(map(math.isnan, numbers)) else max(numbers, default=0.0)


def render(sections: Mapping[str, Mapping[str, Any]], columns: int) -> str:
    """The sections as plain text in lines of at most `columns` characters: aligned tables, or sentences if too wide."""
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
