"""PNGs with much beside their pixels: sound photos decode, whatever their text and profile; what decides pixels counts."""

from __future__ import annotations

import io
import os
import struct
import zlib

import pytest
from PIL import Image, ImageCms

from trainer.data.images.decode import decode
from trainer.data.images.png import LIMIT, lean

MB = 1 << 20
PHOTO = Image.merge("RGB", [Image.effect_noise((48, 32), 80) for _ in range(3)])
UPRIGHT, TURNED = (48, 32), (32, 48)
NOT_READ = "its EXIF block cannot be read, it is taken as upright"


def plain(**options) -> bytes:
    buffer = io.BytesIO()
    PHOTO.save(buffer, "PNG", **options)
    return buffer.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def with_chunks(*chunks: bytes, last: bool = False) -> bytes:
    """The photo with chunks behind its header, or before its end."""
    data = plain()
    at = len(data) - 12 if last else 33
    return data[:at] + b"".join(chunks) + data[at:]


def text(size: int = MB) -> bytes:
    return os.urandom(size // 2).hex().encode()


BESIDE = {
    "zTXt": lambda: chunk(b"zTXt", b"workflow\0\0" + zlib.compress(text(3 * MB))),
    "zTXt that inflates a thousandfold": lambda: chunk(b"zTXt", b"workflow\0\0" + zlib.compress(bytes(40 * MB), 9)),
    "iTXt": lambda: chunk(b"iTXt", b"prompt\0\1\0\0\0" + zlib.compress(text(3 * MB))),
    "tEXt in all": lambda: chunk(b"tEXt", b"parameters\0" + text(MB)) * 70,
    "damaged zlib": lambda: chunk(b"zTXt", b"workflow\0\0" + zlib.compress(text())[:100]),
    "another compression": lambda: chunk(b"zTXt", b"workflow\0\7" + text(100)),
    "damaged sum": lambda: chunk(b"tEXt", b"a\0b")[:-1] + b"?",
}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", BESIDE)
def test_text_does_not_decide_whether_a_photo_can_be_read(kind: str, last: bool) -> None:
    data = with_chunks(BESIDE[kind](), last=last)
    decoded = decode(data)
    assert decoded.image.tobytes() == PHOTO.tobytes() and not decoded.notes
    assert lean(data)[0] == plain()


def test_a_file_without_text_is_the_same_object() -> None:
    for data in (plain(), b"\xff\xd8\xff", b"", plain()[:100]):
        assert lean(data)[0] is data


XMP = b'<rdf tiff:Orientation="6"/>'
EXIF = Image.Exif()
EXIF[274] = 6
RAW = b"\nexif\n      26\n" + EXIF.tobytes().hex().encode() + b"\n"


@pytest.mark.parametrize(
    ("body", "size", "notes"),
    [
        (chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP), TURNED, ()),
        (chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP + bytes(3 * MB)), TURNED, ()),
        (chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(XMP)), TURNED, ()),
        (chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(XMP + bytes(3 * MB))), UPRIGHT, (NOT_READ,)),
        (chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(RAW)), TURNED, ()),
        (chunk(b"eXIf", EXIF.tobytes()[6:]) + chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(3 * MB))), TURNED, ()),
    ],
    ids=["XMP", "long XMP", "compressed XMP", "XMP too large for Pillow", "EXIF as text", "EXIF beside long text"],
)  # fmt: skip
def test_what_says_which_side_is_up_is_read_or_missed_aloud(body: bytes, size: tuple[int, int], notes: tuple) -> None:
    decoded = decode(with_chunks(body))
    assert (decoded.image.size, decoded.notes) == (size, notes)


def profile(kind: str, more: int) -> bytes:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile(kind)).tobytes() + os.urandom(more)


def test_a_large_profile_is_applied_as_a_small_one() -> None:
    """lcms knows a profile by the size in its header; what follows is not read."""
    swapped = profile("sRGB", 0)
    swapped = swapped.replace(b"rXYZ", b"tmp_").replace(b"gXYZ", b"rXYZ").replace(b"tmp_", b"gXYZ")  # red is green
    small, large = (with_chunks(chunk(b"iCCP", b"x\0\0" + zlib.compress(swapped + os.urandom(size)))) for size in (0, 3 * MB))
    with pytest.raises(ValueError, match="MAX_TEXT_CHUNK"), Image.open(io.BytesIO(large)):
        pass
    assert decode(small).image.tobytes() == decode(large).image.tobytes() != PHOTO.tobytes()
    assert decode(small).notes == decode(large).notes != ()


def test_a_profile_beyond_all_measure_is_missed_aloud() -> None:
    decoded = decode(with_chunks(chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(2 * LIMIT), 9))))
    assert decoded.image.tobytes() == PHOTO.tobytes()
    assert decoded.notes == ("its colour profile cannot be read, it is taken as sRGB",)


@pytest.mark.parametrize("cut", [60, 200, 3000])
def test_a_file_that_is_cut_off_is_refused_still(cut: int) -> None:
    with pytest.raises(ValueError, match="cannot be decoded|damaged"):
        decode(with_chunks(chunk(b"tEXt", b"a\0" + text(1000)))[:cut])
