"""Images small enough for a page that holds all of them: encoded once, and remembered."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from trainer.base.digests import Stamp, stamp_of
from trainer.base.pictures import data_uri, is_sound, reduced, unreadable

EMBED_BYTES = 5 * 2**20  # of all images of a page together, before base64 adds a third
BYTES_PX = 0.3  # of a JPEG, as photos and drawings have them; noise takes twice as many
THREADS = 4
# The sides in pixels that are tried: of what stands side by side, and of what lies between.
SIDES = ((768, 768), (512, 512), (512, 384), (448, 256), (384, 192), (320, 128), (256, 96), (192, 64), (128, 48))


@dataclass(frozen=True)
class Picture:
    """An image file as it is embedded. side: the longer one that it may have, in pixels; None: the file as it is."""

    uri: str
    side: int | None


@dataclass(frozen=True)
class Description:
    """What a PNG says of itself: its text entries, and its size in pixels."""

    prompt: str | None
    request: str | None
    size: tuple[int, int]


class Thumbnails:
    """Thumbnails of files that may change: one is read again when its size, inode, or a time (mtime, ctime) is another."""

    def __init__(self) -> None:
        self._made: dict[Path, tuple[Stamp, Picture | None]] = {}
        self._described: dict[Path, tuple[Stamp, Description | None]] = {}

    def describe(self, file: Path) -> Description | None:
        """The size and the words of a picture's file; None where it cannot be opened."""
        from PIL import Image

        about = None
        try:
            stamp = stamp_of(file.stat())
            if file in self._described and self._described[file][0] == stamp:
                return self._described[file][1]
            with Image.open(file, formats=("PNG",)) as image:
                about = Description(image.info.get("prompt"), image.info.get("request"), image.size)
        except FileNotFoundError:  # others have taken it away since
            return None
        except unreadable():
            pass
        self._described[file] = stamp, about
        return about

    def of(self, large: Sequence[Path], small: Sequence[Path], check: Callable[[], None]) -> dict[Path, Picture]:
        """The picture of each file that can be decoded. large: those that are looked at first. check: may raise, now and
        then."""
        sizes = {file: file.stat().st_size for file in (*large, *small)}
        if sum(sizes.values()) <= EMBED_BYTES:
            return self._all(dict.fromkeys(sizes), check)
        for sides in SIDES:
            each = {file: side for files, side in zip((large, small), sides, strict=True) for file in files}
            if sum(min(sizes[file], side * side * BYTES_PX) for file, side in each.items()) > EMBED_BYTES:
                continue
            images = self._all(each, check)
            if sum(len(picture.uri) * 3 // 4 for picture in images.values()) <= EMBED_BYTES:
                return images
        return self._all(each, check)

    def _all(self, wanted: Mapping[Path, int | None], check: Callable[[], None]) -> dict[Path, Picture]:
        self._made = {file: made for file, made in self._made.items() if file in wanted}
        lacking = {file: side for file, side in wanted.items() if not self._is_made(file, side)}
        # Pillow computes without Python's lock.
        with ThreadPoolExecutor(THREADS) as pool:
            for file, made in zip(lacking, pool.map(self._make, lacking, lacking.values()), strict=True):
                self._made[file] = made
                check()
        return {file: picture for file in wanted if (picture := self._made[file][1]) is not None}

    def _is_made(self, file: Path, side: int | None) -> bool:
        stamp, picture = self._made.get(file, (None, None))
        return stamp == stamp_of(file.stat()) and (picture is None or picture.side == side)

    def _make(self, file: Path, side: int | None) -> tuple[Stamp, Picture | None]:
        stamp = stamp_of(file.stat())
        if side is None:
            return stamp, Picture(data_uri(file.read_bytes(), "png"), None) if is_sound(file) else None
        known, picture = self._made.get(file, (None, None))
        if known == stamp and picture is not None and (picture.side or 0) > side:
            # A file of full size takes ten times as long.
            data = base64.b64decode(picture.uri.partition(",")[2])
        else:
            data = file.read_bytes()
        try:
            return stamp, Picture(data_uri(reduced(data, side), "jpeg"), side)
        except unreadable():
            return stamp, None
