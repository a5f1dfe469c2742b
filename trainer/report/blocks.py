"""How far each block of the adapter has moved its layers, as a heat map."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

# ||dW|| / ||W|| of a block's layer that moved most: from these on, a darker tile.
SHADES = (0.0005, 0.002, 0.01, 0.03, 0.1, 0.3)


def heat_map(changes: Mapping[str, float | None], when: str) -> str:
    """changes: by block, in order. A row for each container of blocks ("unet.down_blocks"), a tile for each block."""
    if not changes:
        return ""
    rows: dict[str, list[tuple[str, float | None]]] = {}
    for block, change in changes.items():
        container, _, last = block.rpartition(".")
        group, name = (container, last) if last.isdigit() else (container or block, last or block)
        rows.setdefault(group, []).append((name, change))
    drawn = [
        f'<div class="row"><h4>{escape(group)}</h4><div class="tiles">'
        + "".join(_tile(group, *tile) for tile in tiles)
        + "</div></div>"
        for group, tiles in rows.items()
    ]
    legend = "".join(f'<span><i class="h{place}"></i>{_legend(place)}</span>' for place in range(len(SHADES) + 1))
    about = f"Of each block the layer that moved most: its change in its own weights, ||dW|| / ||W||, {when}."
    return (
        f'<div class="heat"><p class="soft">{escape(about)}</p>{"".join(drawn)}'
        f'<p class="legend" aria-label="shades">{legend}</p></div>'
    )


def _tile(group: str, name: str, change: float | None) -> str:
    said = "not finite" if change is None or not math.isfinite(change) else percent(change)
    return (
        f'<div class="tile h{shade(change)}" title="{escape(f"{group}.{name}: {said}")}"><small>{escape(name)}</small>'
        f"<b>{said}</b></div>"
    )


def shade(change: float | None) -> int:
    if change is None or not math.isfinite(change):
        return len(SHADES)
    return sum(change >= edge for edge in SHADES)


def percent(change: float) -> str:
    share = 100 * change
    return f"{share:.0f}%" if share >= 10 else f"{share:.1f}%" if share >= 1 else f"{share:.2f}%"


def _legend(place: int) -> str:
    if place == 0:
        return f"below {100 * SHADES[0]:g}%"
    return f"{100 * SHADES[place - 1]:g}%" + (" and more" if place == len(SHADES) else "")
