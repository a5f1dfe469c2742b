"""What stands beside a pocket model: a contact sheet of what it draws beside the truth, and a card with its figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from examples.pocket import credits, data, draw, flux, flux2, icons

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
    return torch.cat([icons.on_white(rendered[style][[icons.drawn_in(style).index(name)]]) for name, style in chosen])


def contact_sheet(drawn: torch.Tensor, truth: torch.Tensor, path: Path) -> None:
    """Pairs: what was drawn, and to its right the truth."""
    pairs = torch.cat([drawn.clamp(-1, 1), truth], dim=3)
    blank = torch.ones(-len(pairs) % COLUMNS, *pairs.shape[1:])
    pairs = torch.cat([pairs, blank])
    draw.sheet([pairs[start : start + COLUMNS] for start in range(0, len(pairs), COLUMNS)], path)


def figures(drawn: torch.Tensor, truth: torch.Tensor, encode) -> dict[str, float]:
    """Mean distances to each truth, of what its caption draws and of what the next one draws; how often the first is less."""
    result: dict[str, float] = {}
    others = drawn.roll(1, 0)
    for name, own, other in (
        ("pixels", draw.distances(drawn, truth), draw.distances(others, truth)),
        ("features", draw.feature_distances(drawn, truth, encode), draw.feature_distances(others, truth, encode)),
    ):
        result |= {
            name: own.mean().item(),
            f"{name}_shuffled": other.mean().item(),
            f"{name}_nearer": int((own < other).sum()),
        }
    return result


NAMES = {"sdxl": "SDXL", "flux": "Flux dev", "flux2": "FLUX.2 klein"}
MORE = {
    "sdxl": {},
    "flux": {"max_sequence_length": flux.T5_LENGTH},
    "flux2": {"max_sequence_length": flux2.TEXT_LENGTH},
}  # what its pipeline is told beside steps and guidance


def page(family: str, measured: Mapping[str, float], logs: Mapping[str, Path], parts: Sequence[str]) -> str:
    """The model card. logs: what was trained -> its log."""
    told = {"num_inference_steps": draw.STEPS, "guidance_scale": f"{draw.GUIDANCE:g}", **MORE[family]}
    arguments = ", ".join(f"{name}={value}" for name, value in told.items())
    return credits.render(
        "card.md",
        name=NAMES[family],
        family=family,
        size=icons.SIZE,
        arguments=arguments,
        styles=", ".join(f'"{style} style"' for style in icons.TRAINED_STYLES),
        subjects=len(icons.SUBJECTS),
        sets=credits.table(icons.SETS[style] for style in icons.TRAINED_STYLES),
        new_style=icons.NEW_STYLE,
        holders=["Microsoft Corporation.", "2021 OpenAI"],
        parts=" ".join(parts),
        trained={what: json.loads(log.read_text().splitlines()[-1]) for what, log in logs.items()},
        shown=SHOWN,
        **measured,
    )


def write(
    family: str, folder: Path, rendered: Mapping[str, torch.Tensor], logs: Mapping[str, Path], parts: Sequence[str]
) -> None:
    """Draw the sheet with the folder's own pipeline, and write sheet and card into the folder."""
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(folder)
    chosen = asked()
    captions = [icons.caption(name, style) for name, style in chosen]
    drawn, truth = draw.draw(pipeline, captions, seed=0, **MORE[family]), truths(rendered, chosen)
    contact_sheet(drawn, truth, folder / "contact_sheet.png")
    config = pipeline.vae.config
    scale, shift = config.get("scaling_factor", 1.0), config.get("shift_factor") or 0.0
    measured = figures(drawn, truth, lambda values: (data.encode(pipeline.vae, values) - shift) * scale)
    (folder / "README.md").write_text(page(family, measured, logs, parts), encoding="utf-8")
