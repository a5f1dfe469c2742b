"""Decodes image files to 8-bit sRGB by their bytes alone; file names do not matter."""

import functools
import io
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import ExifTags, Image, ImageChops, ImageCms, UnidentifiedImageError

from trainer.base.errors import one_line
from trainer.base.pictures import DECODE_ERRORS as OF_DECODERS
from trainer.base.text import refuse_stand_in
from trainer.data.images import jxl, plugins, png
from trainer.data.images.kinds import IMAGES

FORMATS = tuple(dict.fromkeys(IMAGES.values()))
# Decoders that may run on any file. A plug-in's decoder runs only on files that begin like its own.
PILLOWS = tuple(format for format in FORMATS if format not in plugins.PLUGINS)
KNOWN = "JPEG, PNG, WebP, AVIF, HEIC, JPEG XL, TIFF, GIF or BMP"
WHITE = "#ffffff"  # the default background of transparent parts
MAX_PIXELS = 200_000_000

# A profile that moves no colour by more than this many levels of 255 is sRGB: the many profiles of that name differ so.
SRGB_LEVELS = 2

# PIL's own guard is a global: above this value it warns, above twice the value it raises. `decode` refuses in between.
Image.MAX_IMAGE_PIXELS = MAX_PIXELS

DECODE_ERRORS = (*OF_DECODERS, Image.DecompressionBombError, Image.DecompressionBombWarning)

# By EXIF orientation. PIL's ImageOps.exif_transpose also rewrites the EXIF block, which fails on malformed tags.
TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True)
class Decoded:
    """A decoded image. image: 8-bit sRGB, upright. alpha: "L", of the same size; None if every pixel is opaque. format: one
    of FORMATS. choices: inputs of the pixels besides the file's bytes and `fill.PREPROCESSING_VERSION`. notes: differences
    from the file, for people."""

    image: Image.Image
    alpha: Image.Image | None
    format: str
    choices: tuple[str, ...]
    notes: tuple[str, ...]


def load_rgb(path: Path | str) -> Image.Image:
    """An image file as 8-bit sRGB, upright, transparency over white. Raises ValueError with the reason."""
    return decode(Path(path).read_bytes()).image


def decode(data: bytes, *, background: str = WHITE) -> Decoded:
    """The bytes of an image file as 8-bit sRGB.

    Transparency is composited over `background` ("#rrggbb"); 16 bits are converted to 8; a colour profile is applied if it is
    usable and not sRGB; the first of several frames or pages is used. Raises ValueError with the reason for anything but a
    complete image of at most MAX_PIXELS.
    """
    with _open(data) as image:
        notes = []
        # An MPO is a phone's JPEG with a depth or gain map behind the photo.
        if image.format != "MPO" and getattr(image, "is_animated", False):
            notes.append("it has several frames or pages, only the first is trained")
        transposition = _transposition(image, notes)
        rgb, alpha, choices = _to_srgb(image, background, notes)
        kind = "JPEG" if image.format == "MPO" else str(image.format)
    if transposition is not None:
        rgb, alpha = rgb.transpose(transposition), alpha and alpha.transpose(transposition)
    # Interned: a hundred thousand photos share a few.
    return Decoded(rgb, alpha, kind, tuple(map(sys.intern, choices)), tuple(map(sys.intern, notes)))


def decode_mask(data: bytes) -> Image.Image:
    """The bytes of a mask as "L": greys unchanged, transparency black. Raises ValueError with the reason."""
    with _open(data) as image:
        transposition = _transposition(image, [])
        image = _eight_bits(image)
        if image.has_transparency_data:
            rgba = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", rgba.size, "black"), rgba).convert("RGB")
        grey = image.convert("L")
    return grey if transposition is None else grey.transpose(transposition)


@contextmanager
def _open(data: bytes) -> Iterator[Image.Image]:
    """The decoded image. Any error in its bytes, also inside the context, becomes a ValueError."""
    if not data:
        raise ValueError("the file is empty (0 bytes)")
    refuse_stand_in(data)
    plugin = plugins.format_of(data)
    lacks = plugins.load(plugin) if plugin else ""
    decoders = PILLOWS if plugin is None or lacks else (*PILLOWS, plugin)
    data, profile, unread_exif = png.lean(data)
    try:
        if plugin == "JXL" and not lacks:
            data = jxl.codestream(data)
            _refuse_large(*jxl.size(data))
            with _room.for_pixels(*jxl.size(data)), Image.open(io.BytesIO(data), formats=("JXL",)) as image:
                image.load()
                yield image
        else:
            with Image.open(io.BytesIO(data), formats=decoders) as image:
                _refuse_large(*image.size)
                with _room.for_pixels(*image.size):
                    image.load()
                    _refuse_large(*image.size)
                    image.info |= {"icc_profile": profile} if profile else {}
                    # `_transposition` notes an EXIF block that cannot be read.
                    image.info |= {"exif": b"too large"} if unread_exif and "exif" not in image.info else {}
                    yield image
    except UnidentifiedImageError as error:
        raise ValueError(lacks or f"not a {KNOWN} image, or its header is damaged") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"more pixels than the limit of {MAX_PIXELS:,}") from error
    except DECODE_ERRORS as error:
        raise ValueError(f"cannot be decoded ({_message(error)})") from error
    except ValueError as error:  # of this module, or of a decoder
        raise ValueError(_message(error)) from error


def _message(error: Exception) -> str:
    """The message in one line; some decoders write several."""
    return one_line(error).partition(". Please build")[0]


def _refuse_large(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise ValueError(f"{width} x {height} pixels, more than the limit of {MAX_PIXELS:,}")


class _Room:
    """Bounds the memory of several threads: together they decode at most MAX_PIXELS at a time."""

    def __init__(self) -> None:
        self.pixels, self.free = 0, threading.Condition()

    @contextmanager
    def for_pixels(self, width: int, height: int) -> Iterator[None]:
        with self.free:
            self.free.wait_for(lambda: self.pixels + width * height <= MAX_PIXELS)
            self.pixels += width * height
        try:
            yield
        finally:
            with self.free:
                self.pixels -= width * height
                self.free.notify_all()


_room = _Room()


def _transposition(image: Image.Image, notes: list[str]) -> Image.Transpose | None:
    if image.format == "JXL":  # its own orientation is applied already; EXIF's does not count (ISO/IEC 18181-2)
        return None
    try:
        exif = image.getexif()
        orientation = exif.get(ExifTags.Base.Orientation, 1)
        damaged = bool(image.info.get("exif")) and not len(exif)
    except (ValueError, *DECODE_ERRORS):
        damaged, orientation = True, 1
    if damaged:
        notes.append("its EXIF block cannot be read, it is taken as upright")
    return TRANSPOSITIONS.get(orientation) if isinstance(orientation, int) else None


def _to_srgb(image: Image.Image, background: str, notes: list[str]) -> tuple[Image.Image, Image.Image | None, list[str]]:
    """(sRGB, alpha if there is any, choices)."""
    profile, choices = image.info.get("icc_profile"), []
    image, alpha = _eight_bits(image), None
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        alpha = rgba.getchannel("A")
        if alpha.getextrema()[0] == 255:
            alpha = None
        image = rgba.convert("RGB") if image.mode not in ("L", "LA") else image.convert("L")
    plain = image.convert("RGB")
    if not profile and image.info.get("nclx_profile", {}).get("color_primaries", 1) not in (1, 2):  # BT.709 = sRGB; not said
        notes.append("its colours are not those of sRGB and no profile comes with it, it is taken as sRGB")
    rgb = _apply_profile(profile, image, plain, notes) if profile else plain
    if rgb is not plain:
        choices.append("colour profile applied")
    if alpha is not None:
        if background != WHITE:
            choices.append(f"background {background}")
        rgba = rgb.copy()
        rgba.putalpha(alpha)
        rgb = Image.alpha_composite(Image.new("RGBA", rgba.size, background), rgba).convert("RGB")
    return rgb, alpha, choices


def _eight_bits(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers; save it with 8 or 16 bits a channel")
    if image.mode == "I" and (image.getextrema()[0] < 0 or image.getextrema()[1] > 65535):
        raise ValueError("its pixels have more than 16 bits a channel; save it with 8 or 16")
    if image.mode in ("I;16", "I;16L", "I;16B", "I;16N", "I"):
        return _grey16_to_8(image)
    return image


def _grey16_to_8(image: Image.Image) -> Image.Image:
    """0..65535 to 0..255, rounded. Pillow's own conversion clips at 255, which makes nearly everything white."""
    raw = bytearray(image.convert("I").tobytes())  # int32 in the machine's byte order
    grey = (torch.frombuffer(raw, dtype=torch.int32) + 128).div(257, rounding_mode="floor")
    return Image.frombytes("L", image.size, grey.to(torch.uint8).numpy().tobytes())


def _apply_profile(profile: bytes, image: Image.Image, plain: Image.Image, notes: list[str]) -> Image.Image:
    """The image in sRGB. `plain`, the image without its profile, if the profile changes nothing, is sRGB, or is unusable."""
    if image.mode not in ("L", "CMYK"):
        image = plain
    try:
        name, transform = _transform(profile, image.mode)
        if transform is None and image.mode == "L":  # a grey photo saved with the profile of a coloured one
            image, (name, transform) = plain, _transform(profile, "RGB")
    except (ValueError, *DECODE_ERRORS, ImageCms.PyCMSError):
        notes.append("its colour profile cannot be read, it is taken as sRGB")
        return plain
    if transform is None:
        notes.append(f"its colour profile {name!r} does not fit its colour mode, it is taken as sRGB")
        return plain
    if transform is SRGB:
        return plain
    converted = transform(image)
    if ImageChops.difference(converted, plain).getbbox() is None:
        return plain
    notes.append(f"its colours are converted from the profile {name!r} to sRGB")
    return converted


SRGB = object()  # stands for the transform that is not needed


@functools.lru_cache(maxsize=16)
def _transform(profile: bytes, mode: str) -> tuple[str, Any]:
    """(the profile's name, the transform of `mode` to sRGB: SRGB if it does nothing, None if the profile has another mode).
    Relative colorimetric with black point compensation, as photo editors do it."""
    source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    name = "".join(filter(str.isprintable, ImageCms.getProfileDescription(source))).strip()[:60]
    if source.profile.xcolor_space.strip() != {"L": "GRAY"}.get(mode, mode):
        return name, None
    # lcms's tables are too coarse in the shadows: greys are off by up to 6 levels. Without a table it is slow.
    precise = ImageCms.Flags.NOOPTIMIZE if mode == "L" else ImageCms.Flags.HIGHRESPRECALC
    apply = ImageCms.buildTransform(
        source, ImageCms.createProfile("sRGB"), mode, "RGB",
        ImageCms.Intent.RELATIVE_COLORIMETRIC, ImageCms.Flags.BLACKPOINTCOMPENSATION | precise,
    ).apply  # fmt: skip
    if mode == "CMYK":
        return name, apply
    if mode == "L":
        probe = Image.frombytes("L", (256, 1), bytes(range(256)))
        table = [level for channel in apply(probe).split() for level in channel.tobytes()]
        apply = functools.partial(_look_up, table)
    else:
        levels = bytes(min(level, 255) for level in range(0, 257, 16))
        colours = bytes(channel for r in levels for g in levels for b in levels for channel in (r, g, b))
        probe = Image.frombytes("RGB", (len(levels) ** 2, len(levels)), colours)
    moved = ImageChops.difference(apply(probe), probe.convert("RGB")).getextrema()
    return name, SRGB if max(high for _, high in moved) <= SRGB_LEVELS else apply


def _look_up(table: list[int], grey: Image.Image) -> Image.Image:
    return grey.convert("RGB").point(table)
