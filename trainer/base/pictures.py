"""The PNGs that a run has drawn. They may be damaged by a power failure, or be anybody's files."""

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

# Raised by Pillow's decoders on bytes that do not match their header, besides ValueError and its own errors.
DECODE_ERRORS = (
    OSError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError, RuntimeError, struct.error, zlib.error,
)  # fmt: skip


def unreadable() -> tuple[type[Exception], ...]:
    """The exceptions of opening or decoding a damaged file. Imports Pillow, on first use."""
    from PIL import Image

    return (*DECODE_ERRORS, ValueError, Image.DecompressionBombError)


def pngs(folder: Path, pattern: str = "*.png") -> list[Path]:
    """A folder's PNG files, by name, without hidden ones: some systems leave "._00.png" next to "00.png"."""
    return [file for file in sorted(folder.glob(pattern)) if not file.name.startswith(".") and file.is_file()]


def png(image: Any) -> bytes:
    """The bytes of a PNG file of a PIL image."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def is_sound(file: Path) -> bool:
    """Whether the whole PNG can be decoded."""
    from PIL import Image

    try:
        with Image.open(file, formats=("PNG",)) as image:
            image.load()
    except unreadable():
        return False
    return True


def request_of(file: Path) -> dict[str, Any]:
    """The request in the metadata of a PNG that a run drew: at least "prompt"."""
    from PIL import Image

    with Image.open(file) as image:
        prompt, request = image.info.get("prompt", ""), image.info.get("request", "{}")
    try:
        fields = json.loads(request)
    except (ValueError, RecursionError):  # not written by this program
        fields = {}
    return (fields if isinstance(fields, dict) else {}) | {"prompt": prompt}


def at_full_strength(request: Mapping[str, Any]) -> bool:
    """Whether the image was drawn with the adapter at strength 1."""
    return request.get("strength", 1) == 1


def first_sample(folder: Path, ending: str = "") -> Path | None:
    """The first sound sample in a step's folder with the adapter at full strength, or None. ending: "" or AVERAGE."""
    files = (file for file in pngs(folder) if re.fullmatch(rf"\d+{ending}", file.stem))
    return next((file for file in files if is_sound(file) and at_full_strength(request_of(file))), None)


def thumbnail(file: Path, side: int) -> str:
    """An image as a JPEG of at most `side` pixels to a side, in a data URI."""
    return data_uri(reduced(file.read_bytes(), side), "jpeg")


def reduced(data: bytes, side: int) -> bytes:
    """An image file's bytes, converted to a JPEG of at most `side` pixels to a side."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as opened:
        image, buffer = opened.convert("RGB"), io.BytesIO()
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    image.save(buffer, "JPEG", quality=JPEG_QUALITY)
    return buffer.getvalue()


def data_uri(data: bytes, kind: str) -> str:
    """An image file's bytes as a `data:` URI. kind: "png", "jpeg" and the like."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
