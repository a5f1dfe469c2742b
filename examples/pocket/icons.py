"""The pictures the pocket models learn from: icons of the same subjects, drawn in several styles.

The sets are npm packages of Iconify: an SVG body for each name, and the same names across sets. `npm pack` fetches a package
and runs nothing of it. Every icon is drawn at SIZE x SIZE with an alpha channel; models see it on white.
"""

from __future__ import annotations

import json
import subprocess
import tarfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

SIZE = 64  # pixels
SUBJECTS = tuple((Path(__file__).parent / "subjects.txt").read_text().split())


@dataclass(frozen=True)
class IconSet:
    """One style. `style` is its name in captions. work, source: what the icons are called, and where they come from."""

    style: str
    package: str
    version: str
    licence: str
    author: str
    work: str
    source: str


_CATALOGUE = tomllib.loads((Path(__file__).parent / "icons.toml").read_text(encoding="utf-8"))
SETS = {each["style"]: IconSet(**each) for each in _CATALOGUE["sets"]}
# EmojiOne's shapes in one ink on cream paper: what a subject's colours become can be learned from a few. In black and white
# it cannot: nothing says whether a cat is white with black lines or the other way round, so a truth measures little.
NEW_STYLE = "ink"
INK, PAPER = (10, 35, 150), (250, 244, 225)
LIGHTEST = 0.65  # of the way from ink to paper: what was white stands out from the paper
TRAINED_STYLES = tuple(style for style in SETS if style != NEW_STYLE)

ALWAYS_SHOWN, LESSONS, UNDRAWN = (tuple(_CATALOGUE[key]) for key in ("always_shown", "lessons", "undrawn"))
EXAMS = (*(name for name in ALWAYS_SHOWN if name not in LESSONS and name not in UNDRAWN), "dolphin", "snail", "violin")


def left_out(style: str) -> frozenset[str]:
    """Twenty subjects that the models do not see in this trained style, but in the others: every 27th, from another start."""
    others = [name for name in SUBJECTS if name not in ALWAYS_SHOWN]
    start = TRAINED_STYLES.index(style) * 7
    return frozenset(others[start::27][:20])


def drawn_in(style: str) -> tuple[str, ...]:
    """The subjects that are rendered in that style, in their order."""
    return (*LESSONS, *EXAMS) if style == NEW_STYLE else SUBJECTS


def subject(name: str) -> str:
    return name.replace("-", " ")


def caption(name: str, style: str | None) -> str:
    """ "a red apple, noto style"; without a style "a red apple"."""
    words = subject(name)
    plain = words.endswith("s") and not words.endswith(("ss", "us", "is")) or words == "zzz"
    article = "" if plain else "an " if words[0] in "aeiou" else "a "
    return f"{article}{words}" if style is None else f"{article}{words}, {style} style"


def fetch(folder: Path) -> None:
    """Fetch every package that is not in `folder` yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for each in SETS.values():
        if not archive(folder, each).exists():
            name = f"@iconify-json/{each.package}@{each.version}"
            subprocess.run(["npm", "pack", "--silent", name], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def archive(folder: Path, icons: IconSet) -> Path:
    return folder / f"iconify-json-{icons.package}-{icons.version}.tgz"


def read_svgs(folder: Path, style: str) -> dict[str, str]:
    """Name -> SVG document of every subject that is rendered in that style."""
    with tarfile.open(archive(folder, SETS[style])) as package:
        content = json.load(package.extractfile("package/icons.json"))
    width, height = content.get("width", 16), content.get("height", 16)
    svgs = {}
    for name in drawn_in(style):
        chain = name
        while chain not in content["icons"]:
            chain = content["aliases"][chain]["parent"]
        icon = content["icons"][chain]
        box = (icon.get("left", 0), icon.get("top", 0), icon.get("width", width), icon.get("height", height))
        view = " ".join(map(str, box))
        svgs[name] = (
            f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{view}" '
            f'color="#000">{icon["body"]}</svg>'
        )
    return svgs


def render(svg: str, size: int = SIZE) -> np.ndarray:
    """uint8 [size, size, 4]: colours (not multiplied by alpha) and alpha."""
    import io

    import resvg_py
    from PIL import Image

    picture = Image.open(io.BytesIO(bytes(resvg_py.svg_to_bytes(svg_string=svg, width=size, height=size))))
    return np.asarray(picture.convert("RGBA").resize((size, size)))


def in_ink(icon: np.ndarray) -> np.ndarray:
    """uint8 [H, W, 4] -> the same shape, opaque: paper, and on it the icon's luma (ITU-R BT.601) from ink towards paper."""
    values = icon / 255
    luma = values[..., :3] @ np.array([0.299, 0.587, 0.114])
    ink, paper = np.array(INK) / 255, np.array(PAPER) / 255
    inked = ink + (paper - ink) * LIGHTEST * luma[..., None]
    alpha = values[..., 3:]
    opaque = np.ones_like(alpha)
    return (255 * np.concatenate([inked * alpha + paper * (1 - alpha), opaque], axis=-1)).round().astype(np.uint8)


def on_white(icons: torch.Tensor) -> torch.Tensor:
    """uint8 [N, 4, H, W] -> fp32 [N, 3, H, W] in [-1, 1]."""
    return on_colour(icons, torch.ones(3))


def on_colour(icons: torch.Tensor, colour: torch.Tensor) -> torch.Tensor:
    """uint8 [N, 4, H, W] on a colour in [-1, 1], [3] or [N, 3, 1 or H, 1 or W] -> fp32 [N, 3, H, W] in [-1, 1]."""
    values = icons.float() / 255
    alpha = values[:, 3:]
    if colour.ndim == 1:
        colour = colour.view(1, 3, 1, 1)
    return (values[:, :3] * 2 - 1) * alpha + colour * (1 - alpha)


def render_all(packages: Path, out: Path) -> None:
    """All styles as one safetensors file: style -> uint8 [subjects, 4, SIZE, SIZE], in the order of `drawn_in`."""
    from safetensors.torch import save_file

    tensors = {}
    for style in SETS:
        svgs = read_svgs(packages, style)
        drawn = np.stack([render(svg) for svg in svgs.values()])
        if style == NEW_STYLE:
            drawn = np.stack([in_ink(icon) for icon in drawn])
        tensors[style] = torch.from_numpy(drawn).permute(0, 3, 1, 2).contiguous()
    save_file(tensors, out)
