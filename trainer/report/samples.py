"""The validation images of a run, ready to embed: one row a prompt, one column a step."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass, field
from pathlib import Path

EMBED_BYTES = 6 * 2**20  # as much as is embedded untouched; a larger set is embedded as thumbnails
THUMBNAIL_PX = 512
JPEG_QUALITY = 85


@dataclass(frozen=True)
class Samples:
    """steps: the columns.  rows: file stem -> (prompt, {step: data URI}).  links: (stem, step) -> path from the page.

    are_thumbnails: the embedded images are reduced JPEGs, because the files together exceed EMBED_BYTES.
    """

    steps: tuple[int, ...] = ()
    rows: dict[str, tuple[str, dict[int, str]]] = field(default_factory=dict)
    links: dict[tuple[str, int], str] = field(default_factory=dict)
    are_thumbnails: bool = False


def read_samples(folder: Path) -> Samples:
    """Read FOLDER/step-00000000/*.png. The prompt is the PNG's text entry "prompt", else the file's name."""
    files = [(file, step) for file in sorted(folder.glob("step-*/*.png")) if (step := _step_of(file)) is not None]
    if not files:
        return Samples()
    shrink = sum(file.stat().st_size for file, _ in files) > EMBED_BYTES
    rows: dict[str, tuple[str, dict[int, str]]] = {}
    links: dict[tuple[str, int], str] = {}
    for file, step in files:
        prompt, uri = _embed(file, shrink)
        rows.setdefault(file.stem, (prompt or file.stem, {}))[1][step] = uri
        links[file.stem, step] = file.relative_to(folder.parent).as_posix()
    return Samples(tuple(sorted({step for _, step in files})), dict(sorted(rows.items())), links, shrink)


def _step_of(file: Path) -> int | None:
    digits = file.parent.name.removeprefix("step-")
    return int(digits) if digits.isdecimal() else None


def _embed(file: Path, shrink: bool) -> tuple[str | None, str]:
    """(the prompt, a data URI) of one PNG."""
    from PIL import Image

    data, kind = file.read_bytes(), "png"
    with Image.open(io.BytesIO(data)) as image:
        prompt = image.info.get("prompt")
        if shrink:
            image = image.convert("RGB")
            image.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX), Image.Resampling.LANCZOS)
            buffer = io.BytesIO()
            image.save(buffer, "JPEG", quality=JPEG_QUALITY)
            data, kind = buffer.getvalue(), "jpeg"
    return prompt, f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
