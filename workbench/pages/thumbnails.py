"""Thumbnails, small enough for a page with all of them: encoded once, and cached."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from trainer.base.digests import Stamp, stamp_of
from trainer.base.pictures import data_uri, is_sound, reduced, unreadable

EMBED_BYTES = 5 * 2**20  # all images of a page together, before base64 adds a third
BYTES_PX = 0.3  # bytes a pixel of a JPEG of photos and drawings; noise takes twice as many
THREADS = 4
# Longer sides in pixels, tried in order: of images side by side, and of those on the strip.
SIDES = ((768, 768), (512, 512), (512, 384), (448, 256), (384, 192), (320, 128), (256, 96), (192, 64), (128, 48))


@dataclass(frozen=True)
class Picture:
    """An image file as embedded. side: limit of its longer side in pixels; None: the file unchanged."""

    uri: str
    side: int | None


@dataclass(frozen=True)
class Description:
    """The text entries of a PNG, and its size in pixels."""

    prompt: str | None
    request: str | None
    size: tuple[int, int]


class Thumbnails:
    """Thumbnails of files that may change: a file is read again when its size, inode, mtime or ctime changed."""

    def __init__(self) -> None:
        self._pictures: dict[Path, tuple[Stamp, Picture | None]] = {}
        self._described: dict[Path, tuple[Stamp, Description | None]] = {}

    def describe(self, file: Path) -> Description | None:
        """The description of a PNG; None if it cannot be opened."""
        from PIL import Image

        about = None
        try:
            stamp = stamp_of(file.stat())
            if file in self._described and self._described[file][0] == stamp:
                return self._described[file][1]
            with Image.open(file, formats=("PNG",)) as image:
                about = Description(image.info.get("prompt"), image.info.get("request"), image.size)
        except FileNotFoundError:  # another process removed it since
            return None
        except unreadable():
            pass
        self._described[file] = stamp, about
        return about

    def of(self, large: Sequence[Path], small: Sequence[Path], check: Callable[[], None]) -> dict[Path, Picture]:
        """The picture of each file that can be decoded. large: those side by side. check: called now and then; may raise."""
        sizes = {file: file.stat().st_size for file in (*large, *small)}
        if sum(sizes.values()) <= EMBED_BYTES:
            return self._all(dict.fromkeys(sizes), check)
        for sides in SIDES:
            side_of = {file: side for files, side in zip((large, small), sides, strict=True) for file in files}
            if sum(min(sizes[file], side * side * BYTES_PX) for file, side in side_of.items()) > EMBED_BYTES:
                continue
            images = self._all(side_of, check)
            if sum(len(picture.uri) * 3 // 4 for picture in images.values()) <= EMBED_BYTES:
                return images
        return self._all(side_of, check)

    def _all(self, side_of: Mapping[Path, int | None], check: Callable[[], None]) -> dict[Path, Picture]:
        self._pictures = {file: entry for file, entry in self._pictures.items() if file in side_of}
        missing = {file: side for file, side in side_of.items() if not self._is_cached(file, side)}
        # Pillow computes without Python's lock.
        with ThreadPoolExecutor(THREADS) as pool:
            for file, entry in zip(missing, pool.map(self._make, missing, missing.values()), strict=True):
                self._pictures[file] = entry
                check()
        return {file: picture for file in side_of if (picture := self._pictures[file][1]) is not None}

    def _is_cached(self, file: Path, side: int | None) -> bool:
        stamp, picture = self._pictures.get(file, (None, None))
        return stamp == stamp_of(file.stat()) and (picture is None or picture.side == side)

    def _make(self, file: Path, side: int | None) -> tuple[Stamp, Picture | None]:
        stamp = stamp_of(file.stat())
        if side is None:
            return stamp, Picture(data_uri(file.read_bytes(), "png"), None) if is_sound(file) else None
        last, picture = self._pictures.get(file, (None, None))
        if last == stamp and picture is not None and (picture.side or 0) > side:
            # Reducing the file of full size takes ten times as long.
            data = base64.b64decode(picture.uri.partition(",")[2])
        else:
            data = file.read_bytes()
        try:
            return stamp, Picture(data_uri(reduced(data, side), "jpeg"), side)
        except unreadable():
            return stamp, None
