"""The validation images of a run, ready to embed: one row for what was asked (prompt, size, seed...), one column a step."""

import base64
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.layout import plain_request, step_of

EMBED_BYTES = 6 * 2**20  # as much as is embedded untouched; a larger set is embedded as thumbnails
THUMBNAIL_PX = 512
JPEG_QUALITY = 85
THUMBNAIL = 256  # px: the side that ModelSpec recommends


@dataclass
class Row:
    """What was asked, and what came of it. detail: all but the prompt, in words.

    images: step -> data URI.  links: step -> path from the page.  truth: both of what it ought to look like, if known.
    """

    prompt: str
    detail: str
    images: dict[int, str] = field(default_factory=dict)
    links: dict[int, str] = field(default_factory=dict)
    truth: tuple[str, str] | None = None


@dataclass(frozen=True)
class Samples:
    """steps: the columns.  rows: in the order of the newest step; prompts that are no longer asked for come last.

    are_thumbnails: the embedded images are reduced JPEGs, because the files together exceed EMBED_BYTES.
    """

    steps: tuple[int, ...] = ()
    rows: tuple[Row, ...] = ()
    are_thumbnails: bool = False


def read_samples(folder: Path, check: Callable[[], None] = lambda: None) -> Samples:
    """Read FOLDER/step-00000000/*.png and FOLDER/truth/*.png.

    An image belongs to the row of its PNG's text entry "request", whatever its file is called: a run may go on with other
    prompts. Without that entry it is the prompt, else the file's name, and the size that make the row.
    """
    files = [(file, step) for file in sorted(folder.glob("*/*.png")) if (step := step_of(file.parent.name)) is not None]
    truths = sorted(folder.glob("truth/*.png"))
    shrink = sum(file.stat().st_size for file in (*(file for file, _ in files), *truths)) > EMBED_BYTES
    rows: dict[tuple[str, int], Row] = {}
    asked: Counter[tuple[str, int]] = Counter()
    place: dict[tuple[str, int], tuple[int, str]] = {}
    for file, step in files:
        check()
        prompt, request, size, uri = _embed(file, shrink)
        what = request or f"{prompt or file.stem} {size}"
        key = what, asked[what, step]  # what is asked twice has two rows
        asked[what, step] += 1
        row = rows.setdefault(key, Row(prompt or file.stem, _detail(request)))
        row.images[step], row.links[step] = uri, file.relative_to(folder.parent).as_posix()
        place[key] = -step, file.stem
    for file in truths:
        check()
        _, request, _, uri = _embed(file, shrink)
        for (what, _), row in rows.items():
            if plain_request(what) == request:
                row.truth = uri, file.relative_to(folder.parent).as_posix()
    steps = tuple(sorted({step for _, step in files}))
    return Samples(steps, tuple(rows[key] for key in sorted(rows, key=place.__getitem__)), shrink)


def _detail(request: str | None) -> str:
    """'64 x 64 px, seed 0, 20 steps', and what else was asked for."""
    try:
        asked = json.loads(request or "")
        parts = [f"{asked['width']} x {asked['height']} px", f"seed {asked['seed']}", f"{asked['steps']} steps"]
    except (ValueError, KeyError, TypeError):  # not written by this program
        return ""
    parts += [f"not: {asked['negative']}"] if asked.get("negative") else []
    parts += [f"guidance {asked['guidance']:g}"] if asked.get("guidance") is not None else []
    parts += [f"strength {asked['strength']:g}"] if asked.get("strength", 1) != 1 else []
    parts += [f"average of the weights ({asked['weights']})"] if asked.get("weights") else []
    return ", ".join(parts)


def _embed(file: Path, shrink: bool) -> tuple[str | None, str | None, tuple[int, int], str]:
    """(the prompt, the request, the size in pixels, a data URI) of one PNG."""
    from PIL import Image

    data, kind = file.read_bytes(), "png"
    with Image.open(io.BytesIO(data)) as image:
        prompt, request, size = image.info.get("prompt"), image.info.get("request"), image.size
        if shrink:
            data, kind = _reduced(image, THUMBNAIL_PX), "jpeg"
    return prompt, request, size, _uri(data, kind)


def asked_of(file: Path) -> dict[str, Any]:
    """What a PNG that a run drew says of its request: at least "prompt"."""
    from PIL import Image

    with Image.open(file) as image:
        prompt, request = image.info.get("prompt", ""), image.info.get("request", "{}")
    try:
        asked = json.loads(request)
    except (ValueError, RecursionError):  # not written by this program
        asked = {}
    return (asked if isinstance(asked, dict) else {}) | {"prompt": prompt}


def at_full_strength(asked: Mapping[str, Any]) -> bool:
    """Whether it shows what the adapter does, and not a part of that or the model without it."""
    return asked.get("strength", 1) == 1


def first_sample(folder: Path, ending: str = "") -> Path | None:
    """The first sample of a step's folder that shows the adapter at full strength; None where none does. ending: "", or
    AVERAGE."""
    files = (file for file in sorted(folder.glob("*.png")) if re.fullmatch(rf"\d+{ending}", file.stem))
    return next((file for file in files if at_full_strength(asked_of(file))), None)


def thumbnail(file: Path, side: int) -> str:
    """An image as a JPEG of at most `side` pixels to a side, in a data URI."""
    from PIL import Image

    with Image.open(file) as image:
        return _uri(_reduced(image, side), "jpeg")


def _reduced(image, side: int) -> bytes:
    """As a JPEG."""
    from PIL import Image

    image, buffer = image.convert("RGB"), io.BytesIO()
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    image.save(buffer, "JPEG", quality=JPEG_QUALITY)
    return buffer.getvalue()


def _uri(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
