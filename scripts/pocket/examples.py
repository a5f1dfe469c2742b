"""The pictures that are shipped: what an adapter of the new style learns from, what it is examined on, and Zib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from PIL import Image

from scripts.pocket import icons, mascot


def write(rendered: Mapping[str, torch.Tensor], out: Path) -> None:
    """PNGs with their captions beside them. rendered: style -> uint8 [subjects, 4, SIZE, SIZE].

    icons/lessons: the 12 icons of the new style that the demo trains on. icons/exams: 60 more of it, which it is asked for.
    icons/trained/STYLE: the same 60 subjects in the styles that the models know. zib: eight pictures of one character.
    """
    for name in icons.LESSONS:
        save(rendered, icons.NEW_STYLE, name, out / "icons" / "lessons")
    for name in icons.EXAMS:
        save(rendered, icons.NEW_STYLE, name, out / "icons" / "exams")
        for style in icons.TRAINED_STYLES:
            save(rendered, style, name, out / "icons" / "trained" / style.replace(" ", "_"))
    for number, scene in enumerate(mascot.SCENES, 1):
        write_pair(Image.fromarray(icons.render(mascot.svg(scene))), out / "zib" / f"{number:02d}.png", scene.caption)


def save(rendered: Mapping[str, torch.Tensor], style: str, name: str, folder: Path) -> None:
    values = icons.on_white(rendered[style][[icons.SUBJECTS.index(name)]])[0]
    pixels = ((values + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).numpy()
    write_pair(Image.fromarray(pixels), folder / f"{name}.png", icons.caption(name, style))


def write_pair(picture: Image.Image, path: Path, caption: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.convert("RGB").save(path, optimize=True)
    path.with_suffix(".txt").write_text(caption + "\n", encoding="utf-8")
