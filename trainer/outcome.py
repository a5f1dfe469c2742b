"""Did it take? What the adapter changed, by block, after training."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from trainer.adapters import ADAPTER_NAME, Adapter
from trainer.phases import QUIET, Phases
from trainer.tensorfile import TensorFile

# Of a layer's own weights. An adapter that works moves a layer by thousandths to tenths; where the change is as large as the
# weight itself, what the layer had learnt is drowned.
TOO_FAR = 1.0


@torch.no_grad()
def weight_change(adapter: Adapter, phases: Phases = QUIET) -> dict[str, Any]:
    """Table: for each block the largest and median ||dW|| / ||W|| and, for DoRA, the largest |m / m_0 - 1|."""
    blocks: dict[str, list[tuple[float, float]]] = {}
    with phases("measuring the adapter", total=len(adapter.layers), unit="layer") as phase:
        for name, layer in adapter.layers.items():
            moved, size = layer.change(ADAPTER_NAME)
            change = moved / max(size, 1e-30)
            drift = 0.0
            if adapter.dora:
                start = layer.base_norm_sq.sqrt().clamp_min(1e-30)
                drift = float((layer.lora_magnitude_vector[ADAPTER_NAME].weight / start - 1).abs().max())
            blocks.setdefault(block_of(name), []).append((change, drift))
            phase.advance()
    columns = ["block", "layers", "largest ||dW||/||W||", "median"] + (["magnitude drift"] if adapter.dora else [])
    rows = []
    for block, pairs in blocks.items():
        changes = [change for change, _ in pairs]
        row = [block, len(pairs), f"{max(changes):.3%}", f"{median(changes):.3%}"]
        rows.append(row + ([f"{max(drift for _, drift in pairs):.3%}"] if adapter.dora else []))
    return {"columns": columns, "rows": rows}


def too_far(table: Mapping[str, Any]) -> str | None:
    """A sentence where a block of `weight_change`'s table moved beyond TOO_FAR, or to no finite number; else None."""
    columns = [i for i, column in enumerate(table["columns"]) if column in ("largest ||dW||/||W||", "magnitude drift")]
    worst = {row[0]: max((_share(row[i]) for i in columns), key=_rank) for row in table["rows"]}
    beyond = [block for block, share in worst.items() if not share <= TOO_FAR]
    if not beyond:
        return None
    block = max(beyond, key=lambda name: _rank(worst[name]))
    return (
        f"the training has probably diverged: {len(beyond)} of {len(worst)} blocks changed by more than {TOO_FAR:.0%} of "
        f"their own weights, {block} by {worst[block]:.0%}; look at the samples, and train again with a lower optimizer.lr"
    )


def _share(cell: str) -> float:
    return float(cell.removesuffix("%")) / 100


def _rank(share: float) -> float:
    return math.inf if math.isnan(share) else share


def did_nothing(adapter: Adapter) -> bool:
    """Whether every B is zero: the adapter is still the identity but for a magnitude."""
    return not any(layer.lora_B[ADAPTER_NAME].weight.any() for layer in adapter.layers.values())


def block_of(layer: str) -> str:
    """The layer's name up to the first index that follows a container of blocks: 'unet.down_blocks.1'."""
    match = re.match(r"(.*?(?:blocks|layers|block)\.\d+|.*?mid_block)\.", layer)
    return match[1] if match else layer


def read_back(
    path: Path, live: Mapping[str, torch.Tensor], advance: Callable[[int], object] = lambda count: None
) -> str:
    """'equal' where the exported file, read back, holds the live tensors bit for bit; else the first difference.

    advance: gets every number of bytes that was read; may raise.
    """
    file = TensorFile(path)
    if file.entries.keys() != live.keys():
        return f"keys differ: {sorted(file.entries.keys() ^ live.keys())[0]}"
    for name, tensor in live.items():
        if not torch.equal(file.read(name, advance), tensor.cpu()):
            return f"{name} differs"
    return "equal"


def render(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """The sections as aligned plain text."""
    lines = []
    for title, section in sections.items():
        table: Sequence[Sequence[Any]] = [section["columns"], *section["rows"]]
        widths = [max(len(str(row[i])) for row in table) for i in range(len(section["columns"]))]
        lines.append(title)
        lines += ["  " + "  ".join(str(cell).ljust(w) for cell, w in zip(row, widths, strict=True)) for row in table]
    return "\n".join(lines)
