"""The pictures that are shipped: what an adapter of the new style learns from, what it is examined on, and Zib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from PIL import Image

from scripts.pocket import icons, mascot


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


ATTRIBUTION = """# Attribution

These icons were drawn at {size} x {size} pixels from npm packages of Iconify, on white. Those of the style "{new}" were
changed: they are printed in one ink on cream paper. Nothing else was changed. The caption in each `.txt` file was written for
this project.

| folder | style | package | author | licence |
|---|---|---|---|---|
{rows}

Apache-2.0 is the licence of this project too: see LICENSE. CC BY 4.0: https://creativecommons.org/licenses/by/4.0/. MIT:

> Copyright (c) Microsoft Corporation.
>
> Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated documentation
> files (the "Software"), to deal in the Software without restriction, including without limitation the rights to use, copy,
> modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit persons to whom the
> Software is furnished to do so, subject to the following conditions:
>
> The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
> Software.
>
> THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
> WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
> COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE,
> ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""


def attribution() -> str:
    rows = []
    for style, each in icons.SETS.items():
        folder = "lessons, exams" if style == icons.NEW_STYLE else f"trained/{style.replace(' ', '_')}"
        package = f"`@iconify-json/{each.package}` {each.version}"
        rows.append(f"| {folder} | {style} | {package} | {each.author} | {each.licence} |")
    return ATTRIBUTION.format(size=icons.SIZE, new=icons.NEW_STYLE, rows="\n".join(rows))


def save(rendered: Mapping[str, torch.Tensor], style: str, name: str, folder: Path) -> None:
    values = icons.on_white(rendered[style][[icons.drawn_in(style).index(name)]])[0]
    pixels = ((values + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).numpy()
    write_pair(Image.fromarray(pixels), folder / f"{name}.png", icons.caption(name, style))


def write_pair(picture: Image.Image, path: Path, caption: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.convert("RGB").save(path, optimize=True)
    path.with_suffix(".txt").write_text(caption + "\n", encoding="utf-8")
