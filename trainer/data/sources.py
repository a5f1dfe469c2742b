"""The training photos: found, read in full and checked before anything else happens.

Whatever is wrong with any of them is reported at once, so that no run meets a bad photo hours later and no photo is
left out or replaced silently. Embedded colour profiles are not applied.
"""

import errno
import hashlib
import io
import os
import stat
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from PIL import ExifTags, Image, UnidentifiedImageError

from trainer.errors import UserError
from trainer.phases import QUIET, Phases

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp"})
FORMATS = ("JPEG", "PNG", "WEBP", "BMP")  # decoders that may run, whatever a file is named
MAX_PIXELS = 200_000_000
MAX_THREADS = 4

# PIL's own guard is a global. Above this value it warns, above twice the value it raises, `decode` refuses in between.
Image.MAX_IMAGE_PIXELS = MAX_PIXELS

# What Pillow's decoders raise on bytes that are not what their header claims, besides ValueError.
DECODE_ERRORS = (
    OSError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError, struct.error, zlib.error,
    Image.DecompressionBombError, Image.DecompressionBombWarning,
)  # fmt: skip

# The transposition that undoes each EXIF orientation. PIL's ImageOps.exif_transpose does this too, but then rewrites
# the EXIF block, which fails on malformed tags that do not matter here.
TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True)
class Photo:
    """One training image and its caption.

    sample: "INDEX/relative/posix/path", INDEX being the source's place in the config; the key of every draw.
    width, height: pixels, after the EXIF orientation is applied.
    caption: stripped text, "" where there is none.  has_caption: whether the caption file exists (it may be empty).
    repeats: how often the photo appears in an epoch.  sha256: of the image file's bytes.
    """

    sample: str
    path: Path
    width: int
    height: int
    caption: str
    has_caption: bool
    repeats: int
    sha256: str


def scan(sources: Sequence[tuple[str, int]], *, strict_captions: bool = False, phases: Phases = QUIET) -> tuple[Photo, ...]:
    """Every photo of the sources [(folder, repeats), ...], in order of source, then of relative path.

    Folders are searched recursively, symbolic links included; hidden files and folders are left out. The caption of
    `a/b.jpg` is `a/b.txt`, UTF-8. Every image is decoded in full.
    Raises one UserError that names everything wrong: folders, images, captions (with `strict_captions` also missing and
    empty ones).
    """
    problems: list[str] = []
    found: list[tuple[str, Path, int]] = []
    for index, (folder, repeats) in enumerate(sources):
        root = Path(folder)
        if not root.is_dir():
            problems.append(f"{folder}: {'not a folder' if root.exists() else 'no such folder'}")
            continue
        relative_paths = sorted(_image_files(root, problems))
        if not relative_paths:
            problems.append(f"{folder}: no images in it ({', '.join(sorted(SUFFIXES))})")
        found += [(f"{index}/{relative}", root / relative, repeats) for relative in relative_paths]

    def read(item: tuple[str, Path, int]) -> Photo | list[str]:
        return _read_photo(*item, strict_captions=strict_captions)

    photos: list[Photo] = []
    with phases("scanning photos", len(found), "photo") as phase, closing(in_threads(read, found)) as results:
        for result in results:
            phase.advance()
            if isinstance(result, Photo):
                photos.append(result)
            else:
                problems += result
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        listing = "\n".join(f"  {problem}" for problem in problems)
        raise UserError(f"data.sources: {count}; mend or remove what is named here:\n{listing}")
    return tuple(photos)


def load_rgb(path: Path | str) -> Image.Image:
    """An image file as 8-bit RGB, its EXIF orientation applied. Raises ValueError with the reason if it cannot be."""
    return decode(Path(path).read_bytes())


def decode(data: bytes) -> Image.Image:
    """The bytes of an image file as 8-bit RGB: `load_rgb` without the file.

    Transparency is composited over white, 16 bits are scaled to 8. Raises ValueError with the reason for anything that
    is not one still, complete image of at most MAX_PIXELS.
    """
    if not data:
        raise ValueError("the file is empty (0 bytes)")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels, more than the limit of {MAX_PIXELS:,}")
            # An MPO is a phone's JPEG with a depth or gain map behind the photo: not an animation.
            if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
                raise ValueError(f"animated ({image.n_frames} frames), only still images can be trained on")
            image.load()
            orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
            rgb = _to_rgb(image)
    except UnidentifiedImageError as error:
        raise ValueError("not a JPEG, PNG, WebP or BMP image, or its header is damaged") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"more pixels than the limit of {MAX_PIXELS:,}") from error
    except DECODE_ERRORS as error:
        raise ValueError(f"cannot be decoded ({error})") from error
    return rgb.transpose(TRANSPOSITIONS[orientation]) if orientation in TRANSPOSITIONS else rgb


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I;16", "I;16L", "I;16B", "I"):  # Pillow opens a 16-bit grey PNG as one of these, by its version
        return _grey16_to_8(image).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


def _grey16_to_8(image: Image.Image) -> Image.Image:
    """0..65535 to 0..255, rounded. Pillow's own conversion clips at 255, which makes nearly everything white."""
    raw = bytearray(image.convert("I").tobytes())  # int32 in the machine's byte order
    grey = (torch.frombuffer(raw, dtype=torch.int32).clamp(0, 65535) + 128).div(257, rounding_mode="floor")
    return Image.frombytes("L", image.size, grey.to(torch.uint8).numpy().tobytes())


def _image_files(root: Path, problems: list[str]) -> Iterator[str]:
    """Relative POSIX paths of the images below `root`. A folder reached twice through links is searched once."""
    seen: set[tuple[int, int]] = set()

    def unreadable(error: OSError) -> None:
        problems.append(f"{error.filename}: {error.strerror}")

    for folder, subfolders, files in os.walk(root, followlinks=True, onerror=unreadable):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            subfolders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in files:
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES:
                yield (Path(folder) / name).relative_to(root).as_posix()


def _read_photo(sample: str, path: Path, repeats: int, *, strict_captions: bool) -> Photo | list[str]:
    """The photo, or what is wrong with it and its caption, one line each."""
    problems: list[str] = []
    shown = _printable(path)
    if shown != str(path):
        problems.append(f"{shown}: the file's name is not UTF-8")
    try:
        data = _read_regular(path)
        width, height = decode(data).size
    except OSError as error:
        problems.append(f"{shown}: cannot be read ({error.strerror})")
    except ValueError as error:
        problems.append(f"{shown}: {error}")

    text_path, has_caption, caption = path.with_suffix(".txt"), True, ""
    shown_text = _printable(text_path)
    try:
        caption = _read_regular(text_path).decode("utf-8-sig").strip()
    except FileNotFoundError:
        has_caption = False
    except OSError as error:
        problems.append(f"{shown_text}: cannot be read ({error.strerror})")
    except UnicodeDecodeError as error:
        problems.append(f"{shown_text}: the caption is not UTF-8 (at byte {error.start}); save it as UTF-8")
    if strict_captions and not has_caption:
        problems.append(f"{shown}: no caption file {os.path.basename(shown_text)} beside it")
    elif strict_captions and not caption and not problems:
        problems.append(f"{shown_text}: the caption is empty")
    if problems:
        return problems
    return Photo(sample, path, width, height, caption, has_caption, repeats, hashlib.sha256(data).hexdigest())


def _read_regular(path: Path) -> bytes:
    """A file's bytes. Raises OSError, also for a named pipe or a device, which might never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.read_bytes()


def _printable(path: Path) -> str:
    """The path, with bytes of its name that are not UTF-8 written as escapes."""
    return os.fsencode(path).decode(errors="backslashreplace")


def in_threads(function: Callable[[In], Out], items: Iterable[In]) -> Iterator[Out]:
    """`map` with a few threads running ahead, in order, holding at most 2 x threads results; stops when closed.

    Decoding releases the interpreter's lock, so threads do help.
    """
    threads = max(2, min(MAX_THREADS, os.cpu_count() or 1))
    pool = ThreadPoolExecutor(threads)
    pending: deque = deque()
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) >= 2 * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
