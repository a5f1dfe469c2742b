"""The pictures that are shipped: what an adapter of the new style learns from, what it is examined on, and Zib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from PIL import Image

from examples.pocket import credits, icons, mascot


def write(rendered: Mapping[str, torch.Tensor], out: Path) -> None:
    """PNGs with their captions beside them, and whose they are. rendered: style -> uint8 [subjects, 4, SIZE, SIZE].

    icons/lessons: the 12 icons of the new style that the demo trains on. icons/exams: 60 more of it, which it is asked for.
    icons/trained/STYLE: the same 60 subjects in the styles that the models know. zib/lessons: eight pictures of one
    character. zib/exams: four more.
    """
    for name in icons.LESSONS:
        save(rendered, icons.NEW_STYLE, name, out / "icons" / "lessons")
    for name in icons.EXAMS:
        save(rendered, icons.NEW_STYLE, name, out / "icons" / "exams")
        for style in icons.TRAINED_STYLES:
            save(rendered, style, name, out / "icons" / "trained" / style.replace(" ", "_"))
    for folder, scenes in (("lessons", mascot.SCENES), ("exams", mascot.EXAMS)):
        for number, scene in enumerate(scenes, 1):
            picture = Image.fromarray(icons.render(mascot.svg(scene)))
            write_pair(picture, out / "zib" / folder / f"{number:02d}.png", scene.caption)
    (out / "icons" / "ATTRIBUTION.md").write_text(attribution(), encoding="utf-8")


def attribution() -> str:
    folders = {style: f"trained/{style.replace(' ', '_')}" for style in icons.TRAINED_STYLES}
    return credits.render(
        "attribution.md",
        size=icons.SIZE,
        new=icons.NEW_STYLE,
        table=credits.table(icons.SETS.values(), folders | {icons.NEW_STYLE: "lessons, exams"}),
        holders=["Microsoft Corporation."],
    )


def save(rendered: Mapping[str, torch.Tensor], style: str, name: str, folder: Path) -> None:
    values = icons.on_white(rendered[style][[icons.drawn_in(style).index(name)]])[0]
    pixels = ((values + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).numpy()
    write_pair(Image.fromarray(pixels), folder / f"{name}.png", icons.caption(name, style))


def write_pair(picture: Image.Image, path: Path, caption: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.convert("RGB").save(path, optimize=True)
    path.with_suffix(".txt").write_text(caption + "\n", encoding="utf-8")
