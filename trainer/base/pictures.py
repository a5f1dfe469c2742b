"""The PNGs that a run has drawn. They may be damaged: a machine can lose its power, and anybody can put a file there."""

from __future__ import annotations

import base64
import io
import json
import re
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

THUMBNAIL = 256  # px: the side that ModelSpec recommends
JPEG_QUALITY = 85

# What Pillow's decoders raise on bytes that are not what their header claims, besides ValueError and its own.
DECODE_ERRORS = (
    OSError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError, RuntimeError, struct.error, zlib.error,
)  # fmt: skip


def unreadable() -> tuple[type[Exception], ...]:
    """What opening or decoding a damaged file raises. Pillow is imported here, and not before."""
    from PIL import Image

    return (*DECODE_ERRORS, ValueError, Image.DecompressionBombError)


def pngs(folder: Path, pattern: str = "*.png") -> list[Path]:
    """A folder's pictures, by name. Hidden ones are none: some systems leave "._00.png" beside "00.png". Nor is a pipe, or a
    folder."""
    return [file for file in sorted(folder.glob(pattern)) if not file.name.startswith(".") and file.is_file()]


def png(image: Any) -> bytes:
    """A PIL image as the bytes of a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def is_sound(file: Path) -> bool:
    """Whether all of it can be decoded."""
    from PIL import Image

    try:
        with Image.open(file, formats=("PNG",)) as image:
            image.load()
    except unreadable():
        return False
    return True


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
    files = (file for file in pngs(folder) if re.fullmatch(rf"\d+{ending}", file.stem))
    return next((file for file in files if is_sound(file) and at_full_strength(asked_of(file))), None)


def thumbnail(file: Path, side: int) -> str:
    """An image as a JPEG of at most `side` pixels to a side, in a data URI."""
    return data_uri(reduced(file.read_bytes(), side), "jpeg")


def reduced(data: bytes, side: int) -> bytes:
    """An image file's content as a JPEG of at most `side` pixels to a side."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as opened:
        image, buffer = opened.convert("RGB"), io.BytesIO()
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    image.save(buffer, "JPEG", quality=JPEG_QUALITY)
    return buffer.getvalue()


def data_uri(data: bytes, kind: str) -> str:
    """An image file's bytes as a `data:` URI. kind: "png", "jpeg" and the like."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
