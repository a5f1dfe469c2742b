"""What stands beside a pocket model: a contact sheet of what it draws beside the truth, and a card with its figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from scripts.pocket import draw, icons

SHOWN = 100  # subjects on the sheet
COLUMNS = 10


def asked() -> list[tuple[str, str]]:
    """(subject, style) of the sheet: every sixth subject, the trained styles in turn, none that is left out of its style."""
    chosen = []
    for number, name in enumerate(icons.SUBJECTS[::6]):
        style = icons.TRAINED_STYLES[number % len(icons.TRAINED_STYLES)]
        if name not in icons.left_out(style):
            chosen.append((name, style))
    return chosen[:SHOWN]


def truths(rendered: Mapping[str, torch.Tensor], chosen: list[tuple[str, str]]) -> torch.Tensor:
    """fp32 [N, 3, H, W] in [-1, 1]. rendered: style -> uint8 [subjects, 4, H, W]."""
    return torch.cat([icons.on_white(rendered[style][[icons.SUBJECTS.index(name)]]) for name, style in chosen])


def contact_sheet(drawn: torch.Tensor, truth: torch.Tensor, path: Path) -> None:
    """Pairs: what was drawn, and to its right the truth."""
    pairs = torch.cat([drawn.clamp(-1, 1), truth], dim=3)
    blank = torch.ones(-len(pairs) % COLUMNS, *pairs.shape[1:])
    pairs = torch.cat([pairs, blank])
    draw.sheet([pairs[start : start + COLUMNS] for start in range(0, len(pairs), COLUMNS)], path)


def figures(drawn: torch.Tensor, truth: torch.Tensor, encode) -> dict[str, float]:
    """Means of the distances to the truth and to the next one's truth, and how many are nearer to their own."""
    result: dict[str, float] = {}
    others = truth.roll(1, 0)
    for name, own, other in (
        ("pixels", draw.distances(drawn, truth), draw.distances(drawn, others)),
        ("features", draw.feature_distances(drawn, truth, encode), draw.feature_distances(drawn, others, encode)),
    ):
        result |= {
            name: own.mean().item(),
            f"{name}_shuffled": other.mean().item(),
            f"{name}_nearer": int((own < other).sum()),
        }
    return result
