"""The PNGs that a run has drawn. They may be damaged: a machine can lose its power, and anybody can put a file there."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

# What Pillow's decoders raise on bytes that are not what their header claims, besides ValueError and its own.
DECODE_ERRORS = (
    OSError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError, RuntimeError, struct.error, zlib.error,
)  # fmt: skip


def unreadable() -> tuple[type[Exception], ...]:
    """What opening or decoding a damaged file raises. Pillow is imported here, and not before."""
    from PIL import Image

    return (*DECODE_ERRORS, ValueError, Image.DecompressionBombError)


def pngs(folder: Path, pattern: str = "*.png") -> list[Path]:
    """In order. Hidden ones are none: some systems leave "._00.png" beside "00.png"."""
    return [file for file in sorted(folder.glob(pattern)) if not file.name.startswith(".")]


def is_sound(file: Path) -> bool:
    """Whether all of it can be decoded."""
    from PIL import Image

    try:
        with Image.open(file, formats=("PNG",)) as image:
            image.load()
    except unreadable():
        return False
    return True
