"""Image files: every format read alike, colours, transparency and orientation as they are meant, all else refused or told."""

import io
import itertools
import os
import random
import re
import struct
import subprocess
import sys
import tarfile
import threading
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms

from tests.harness import ROOT
from tests.photos import notes_of, scan
from trainer.base.errors import UserError
from trainer.data.cache.fill import latent_key
from trainer.data.examples import Example
from trainer.data.images import decode as images
from trainer.data.images import jxl, plugins
from trainer.data.images.decode import MAX_PIXELS, decode, decode_mask
from trainer.data.images.kinds import IMAGES
from trainer.data.images.views import View
from trainer.data.sources import Source

PHOTO = Path("examples/bear_plushie/00.jpg")

# How each format is written so that it keeps the pixels, and by how much at most it may miss them.
WRITTEN = {
    "JPEG": ({"quality": 100, "subsampling": 0}, 4),
    "PNG": ({}, 0),
    "WEBP": ({"lossless": True}, 0),
    "AVIF": ({"quality": 100, "subsampling": "4:4:4"}, 6),
    "HEIF": ({"quality": -1, "chroma": 444, "matrix_coefficients": 0}, 0),
    "JXL": ({"lossless": True, "effort": 3}, 0),
    "TIFF": ({}, 0),
    "BMP": ({}, 0),
}

LACKING = plugins.lacking()
for plugin in plugins.PLUGINS:
    plugins.load(plugin)  # to write with, where it is there


def needs(format: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(format in LACKING, reason=LACKING.get(format, ""))


def each(*formats: str) -> list:
    return [pytest.param(format, marks=needs(format)) for format in formats]


def encoded(image: Image.Image, format: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def small_photo() -> Image.Image:
    with Image.open(PHOTO) as photo:
        return photo.resize((48, 32))


def off_by(one: Image.Image, other: Image.Image) -> int:
    assert one.mode == other.mode and one.size == other.size
    return int(np.abs(np.asarray(one).astype(int) - np.asarray(other)).max())


@pytest.mark.parametrize("format", each(*WRITTEN))
def test_every_format_gives_the_same_pixels(format):
    options, miss = WRITTEN[format]
    photo = small_photo()
    decoded = decode(encoded(photo, format, **options))
    assert decoded.format == format and off_by(decoded.image, photo) <= miss
    assert (decoded.alpha, decoded.choices, decoded.notes) == (None, (), ())


def test_a_gif_has_the_colours_of_its_palette():
    photo = small_photo().quantize(200)
    assert off_by(decode(encoded(photo, "GIF")).image, photo.convert("RGB")) == 0


def test_every_format_is_tested_here():
    assert {*WRITTEN, "GIF"} == set(images.FORMATS)


@pytest.mark.parametrize("format", each("JPEG", "PNG", "WEBP", "AVIF", "HEIF"))
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_exif_orientation_in_every_format_that_has_it(format, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options, miss = WRITTEN[format]
    photo = small_photo()
    turned = photo.rotate({1: 0, 3: 180, 6: 90, 8: -90}[orientation], expand=True)  # as the sensor saw it
    assert off_by(decode(encoded(turned, format, exif=exif.tobytes(), **options)).image, photo) <= miss


def test_a_tiff_is_turned_upright_once():
    photo = small_photo()
    turned = photo.rotate(90, expand=True)
    assert off_by(decode(encoded(turned, "TIFF", tiffinfo={0x0112: 6})).image, photo) == 0


@needs("JXL")
def test_jpeg_xl_has_its_orientation_in_the_picture_alone():
    exif = Image.Exif()
    exif[0x0112] = 6
    photo = small_photo()
    assert off_by(decode(encoded(photo, "JXL", lossless=True, effort=3, exif=exif.tobytes())).image, photo) == 0


@pytest.mark.parametrize("place", ["head", "count"])
def test_a_broken_exif_block_is_told(place):
    exif = Image.Exif()
    exif[0x0112] = 6
    data = bytearray(encoded(small_photo(), "JPEG", exif=exif.tobytes(), quality=95))
    start = data.index(b"Exif\0\0") + 6
    data[start : start + 2] = b"??" if place == "head" else data[start : start + 2]
    if place == "count":
        data[start + 8 : start + 10] = b"\0\0"
    decoded = decode(bytes(data))
    assert decoded.image.size == (48, 32) and decoded.notes == ("its EXIF block cannot be read, it is taken as upright",)


# --- colours ----------------------------------------------------------------------------------------------------------

# Display P3's primaries, adapted to D50 (its ICC profile), and sRGB's (IEC 61966-2-1, as every sRGB profile has them).
P3 = [[0.51512, 0.29198, 0.15710], [0.24120, 0.69225, 0.06657], [-0.00105, 0.04189, 0.78407]]
SRGB = [[0.43607, 0.38515, 0.14307], [0.22249, 0.71687, 0.06061], [0.01392, 0.09708, 0.71410]]


def profile(primaries, gamma: float | None, kind: bytes = b"RGB ") -> bytes:
    """A version 2 display profile of a matrix and a gamma, or sRGB's own curve (ICC.1:2001-04)."""

    def fixed(value: float) -> bytes:
        return struct.pack(">i", round(value * 65536))

    def xyz(values) -> bytes:
        return b"XYZ \0\0\0\0" + b"".join(map(fixed, values))

    steps = np.arange(1024) / 1023
    linear = np.where(steps <= 0.04045, steps / 12.92, ((steps + 0.055) / 1.055) ** 2.4)
    values = [round(gamma * 256)] if gamma else [round(65535 * value) for value in linear]
    curve = b"curv\0\0\0\0" + struct.pack(f">I{len(values)}H", len(values), *values)
    text = b"A gamut"
    tags = {
        b"desc": b"desc\0\0\0\0" + struct.pack(">I", len(text) + 1) + text + b"\0" + bytes(78),
        b"wtpt": xyz([0.9642, 1.0, 0.8249]),
    }
    if kind == b"RGB ":
        tags |= {name + b"XYZ": xyz([row[i] for row in primaries]) for i, name in enumerate((b"r", b"g", b"b"))}
        tags |= {name + b"TRC": curve for name in (b"r", b"g", b"b")}
    else:
        tags[b"kTRC"] = curve
    place, table, body = 128 + 4 + 12 * len(tags), b"", b""
    for name, value in tags.items():
        value += bytes(-len(value) % 4)
        table += name + struct.pack(">II", place + len(body), len(value))
        body += value
    head = bytearray(128)
    head[0:4], head[8:12] = struct.pack(">I", place + len(body)), b"\x02\x10\0\0"
    head[12:16], head[16:20], head[20:24], head[36:40] = b"mntr", kind, b"XYZ ", b"acsp"
    head[68:80] = fixed(0.9642) + fixed(1.0) + fixed(0.8249)
    return bytes(head) + struct.pack(">I", len(tags)) + table + body


def to_srgb(rgb: np.ndarray, primaries, gamma: float) -> np.ndarray:
    """Written out in fp64: linear light, the matrix to XYZ and on to sRGB's primaries, clipped, sRGB's curve."""
    linear = (rgb / 255.0) ** gamma @ (np.linalg.inv(SRGB) @ np.array(primaries)).T
    linear = linear.clip(0, 1)
    return 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


@pytest.mark.parametrize("format", each("PNG", "JPEG", "WEBP", "AVIF", "HEIF", "TIFF"))
def test_a_profile_is_converted_to_srgb(format):
    colours = np.array(list(itertools.product(range(0, 256, 51), repeat=3)), dtype=np.uint8).reshape(18, 12, 3)
    big = Image.fromarray(colours).resize((96, 144), Image.Resampling.NEAREST)
    options, _ = WRITTEN[format]
    data = encoded(big, format, icc_profile=profile(P3, 2.2), **options)
    plain = np.asarray(decode(encoded(big, format, **options)).image)
    decoded = decode(data)
    assert np.abs(np.asarray(decoded.image) - to_srgb(plain, P3, 2.2)).max() <= 2  # 16 bits inside of lcms, two roundings
    assert decoded.choices == ("colour profile applied",)
    assert decoded.notes == ("its colours are converted from the profile 'A gamut' to sRGB",)


@needs("JXL")
def test_the_profile_of_jpeg_xl_is_in_the_picture():
    wide = Image.new("RGB", (16, 16), (40, 200, 40))
    decoded = decode(encoded(wide, "JXL", lossless=True, effort=3))  # the plug-in writes an sRGB profile
    assert decoded.image.getpixel((3, 3)) == (40, 200, 40) and not decoded.notes


def srgb_profiles() -> dict[str, bytes]:
    made = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    return {"lcms": made, "no colour outside": profile(SRGB, 2.2)}


def test_an_srgb_profile_changes_no_pixel():
    photo = small_photo()
    decoded = decode(encoded(photo, "PNG", icc_profile=srgb_profiles()["lcms"]))
    assert off_by(decoded.image, photo) == 0 and not decoded.choices and not decoded.notes
    # Two makers' sRGB differ in the last digits, here of the primaries: it would move the purest colours by a level.
    nearly = profile([[value + 0.0001 for value in row] for row in SRGB], None)
    pure = Image.new("RGB", (32, 32), "red")
    pure.paste("lime", (0, 0, 16, 32))
    decoded = decode(encoded(pure, "PNG", icc_profile=nearly))
    assert off_by(decoded.image, pure) == 0 and not decoded.choices and not decoded.notes
    # A plain gamma of 2.2 is not sRGB's curve: it differs in the shadows, by more than profiles named sRGB do.
    assert decode(encoded(photo, "PNG", icc_profile=srgb_profiles()["no colour outside"])).choices


def test_where_a_profile_changes_nothing_it_is_no_input():
    """Greys have no gamut; this profile's curve is the same at black and white."""
    still = Image.new("RGB", (8, 8), "white")
    decoded = decode(encoded(still, "PNG", icc_profile=profile(P3, 2.2)))
    assert off_by(decoded.image, still) == 0 and not decoded.choices and not decoded.notes


@pytest.mark.parametrize(
    "bad", [b"no profile", b"", profile(P3, 2.2)[:200], profile(P3, 2.2, b"CMYK"), profile(P3, 2.2, b"GRAY")]
)
def test_a_profile_that_cannot_be_applied_is_told_and_changes_no_pixel(bad):
    photo = small_photo()
    decoded = decode(encoded(photo, "TIFF", icc_profile=bad))
    assert off_by(decoded.image, photo) == 0 and not decoded.choices
    assert [note.rpartition(", ")[2] for note in decoded.notes] == ["it is taken as sRGB"] * bool(bad)


def test_grey_photos_take_a_grey_profile_and_that_of_a_coloured_one():
    ramp = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
    grey = np.asarray(ramp)[..., None].repeat(3, 2)
    for made in (profile(None, 1.0, b"GRAY"), profile(SRGB, 1.0)):
        decoded = decode(encoded(ramp, "PNG", icc_profile=made))
        assert decoded.choices and np.abs(np.asarray(decoded.image) - to_srgb(grey, SRGB, 1.0)).max() <= 1.6
    assert not decode(encoded(ramp, "PNG", icc_profile=srgb_profiles()["lcms"])).choices


def test_a_profile_leaves_transparency_alone():
    half = Image.new("RGBA", (8, 8), (40, 200, 40, 0))
    half.paste((40, 200, 40, 255), (0, 0, 4, 8))
    decoded = decode(encoded(half, "PNG", icc_profile=profile(P3, 2.2)), background="#000000")
    assert np.abs(np.array(decoded.image.getpixel((0, 0))) - to_srgb(np.array([40, 200, 40]), P3, 2.2)).max() <= 2
    assert decoded.image.getpixel((7, 7)) == (0, 0, 0), "the background is a colour of sRGB"
    assert decoded.choices == ("colour profile applied", "background #000000")


# --- transparency, depth, frames --------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", each("PNG", "WEBP", "AVIF", "HEIF", "JXL", "TIFF"))
def test_transparency_lies_on_the_background(format):
    image = Image.new("RGBA", (16, 16), (200, 0, 0, 255))
    image.paste((200, 0, 0, 51), (8, 0, 16, 16))
    data = encoded(image, format, **WRITTEN[format][0])
    for background, expected in {"#ffffff": (244, 204, 204), "#0000ff": (40, 0, 204)}.items():
        decoded = decode(data, background=background)
        assert np.abs(np.subtract(decoded.image.getpixel((12, 8)), expected)).max() <= (3 if format == "AVIF" else 0)
        assert decoded.choices == (() if background == "#ffffff" else ("background #0000ff",))
        assert decoded.alpha.getpixel((2, 2)) == 255 and abs(decoded.alpha.getpixel((12, 8)) - 51) <= 1
    opaque = decode(encoded(image.convert("RGB").convert("RGBA"), format, **WRITTEN[format][0]), background="#0000ff")
    assert opaque.alpha is None and not opaque.choices


@pytest.mark.parametrize("format", each("PNG", "WEBP", "GIF", "AVIF", "TIFF", "HEIF"))
def test_of_several_frames_the_first_is_taken_and_told(format):
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue", "lime")]
    options, _ = WRITTEN.get(format, ({}, 0))
    decoded = decode(encoded(frames[0], format, save_all=True, append_images=frames[1:], **options))
    assert np.abs(np.subtract(decoded.image.getpixel((8, 8)), (255, 0, 0))).max() <= 6
    assert decoded.notes == ("it has several frames or pages, only the first is trained",) and not decoded.choices


def test_sixteen_bits_of_colour_are_brought_to_eight():
    """A TIFF of 16 bits a channel, made by hand: Pillow writes none."""
    values = np.array([[0, 255, 256, 32768, 65280, 65535]] * 3, dtype="<u2").T.reshape(1, 6, 3)
    tags = [(256, 6), (257, 1), (258, 0), (259, 1), (262, 2), (273, 0), (277, 3), (278, 1), (279, values.nbytes)]
    extra = 8 + 2 + 12 * len(tags) + 4
    entries = b""
    for tag, value in tags:
        count, held = (3, extra) if tag == 258 else (1, extra + 6 if tag == 273 else value)
        entries += struct.pack("<HHII", tag, 3 if tag == 258 else 4, count, held)
    data = b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + entries + b"\0" * 4 + struct.pack("<HHH", 16, 16, 16)
    found = np.asarray(decode(data + values.tobytes()).image)[0]
    assert np.abs(found - values[0] / 257).max() <= 1


@pytest.mark.parametrize(("mode", "value", "reason"), [("F", 0.5, "floating-point"), ("I", 70000, "more than 16 bits")])
def test_what_has_no_eight_bits_is_refused(mode, value, reason):
    with pytest.raises(ValueError, match=reason):
        decode(encoded(Image.new(mode, (8, 8), value), "TIFF"))


def test_masks_are_read_as_they_are():
    grey = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
    assert off_by(decode_mask(encoded(grey, "PNG", icc_profile=profile(None, 1.0, b"GRAY"))), grey) == 0
    assert off_by(decode_mask(encoded(grey.convert("RGB"), "PNG")), grey) == 0
    assert decode_mask(encoded(Image.new("1", (4, 4), 1), "PNG")).getpixel((0, 0)) == 255
    assert decode_mask(encoded(Image.new("I;16", (4, 4), 65535), "PNG")).getpixel((0, 0)) == 255
    assert decode_mask(encoded(Image.new("LA", (4, 4), (255, 0)), "PNG")).getpixel((0, 0)) == 0
    with pytest.raises(ValueError, match="truncated|broken"):
        decode_mask(encoded(small_photo(), "PNG")[:600])


def test_a_name_of_another_format_is_told(tmp_path):
    (tmp_path / "a.jpg").write_bytes(encoded(small_photo(), "PNG"))
    (tmp_path / "b.JPG").write_bytes(encoded(small_photo(), "JPEG"))
    notes = notes_of(scan([Source(0, str(tmp_path))]))
    assert f"1 photo: its name ends in .jpg, its bytes are PNG ({tmp_path}/a.jpg)" in notes


def test_a_key_follows_what_decides_the_pixels_and_no_more(tmp_path):
    clear = Image.new("RGBA", (16, 16), (200, 0, 0, 51))
    (tmp_path / "clear.png").write_bytes(encoded(clear, "PNG"))
    (tmp_path / "plain.png").write_bytes(encoded(small_photo(), "PNG"))
    (tmp_path / "wide.png").write_bytes(encoded(small_photo(), "PNG", icc_profile=profile(P3, 2.2)))

    def keys(background):
        photos = scan([Source(0, str(tmp_path), background=background)]).photos
        made = [latent_key(Example("", p, (64, 64), ()), View(), fingerprint="v") for p in photos]
        old = [latent_key(Example("", replace(p, choices=()), (64, 64), ()), View(), fingerprint="v") for p in photos]
        assert [p.contents == p.sha256 for p in photos] == [a == b for a, b in zip(made, old, strict=True)]
        return made, old

    (white, old), (black, _) = keys("#ffffff"), keys("#000000")
    assert [a == b for a, b in zip(white, old, strict=True)] == [True, True, False], "only a profile that was applied is new"
    assert [a == b for a, b in zip(white, black, strict=True)] == [False, True, True]


# --- plug-ins -----------------------------------------------------------------------------------------------------------

# The first bytes of each; no decoder gets to see them.
BEGINNINGS = {
    "a.heic": b"\0\0\0\x18ftypheic" + bytes(32),
    "b.HIF": b"\0\0\0\x18ftypmif1" + bytes(32),
    "c.jxl": jxl.MAGIC + bytes(32),
}


@pytest.fixture
def without_plugins(monkeypatch) -> None:
    for plugin in plugins.PLUGINS.values():
        monkeypatch.setitem(sys.modules, plugin.module, None)  # importing it fails


@pytest.mark.parametrize("name", BEGINNINGS)
def test_without_its_plug_in_an_image_is_refused_with_the_remedy(name, without_plugins, tmp_path):
    lacks = plugins.PLUGINS[IMAGES[Path(name).suffix.lower()]].lacks
    assert re.search(r"pip install pillow-\S+ \(.*GPL-.*\), or convert", lacks)
    (tmp_path / name).write_bytes(BEGINNINGS[name])
    (tmp_path / name).with_suffix(".txt").write_text("said")
    with pytest.raises(UserError) as refused:
        scan([Source(0, str(tmp_path))])
    said = str(refused.value)
    readable = ".avif, .bmp, .dib, .gif, .jfif, .jpe, .jpeg, .jpg, .png, .tif, .tiff, .webp"
    assert f"no images in it ({readable})" in said and lacks in said and len(said.splitlines()) == 2
    (tmp_path / "z.png").write_bytes(encoded(small_photo(), "PNG"))
    stem = Path(name).stem
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        for member in (name, f"{stem}.txt", "z.png"):
            archive.add(tmp_path / member, member)
    for path, inside in ((tmp_path, ""), (tmp_path / "all.tar", "all.tar/")):  # one that is read does not train for all
        with pytest.raises(UserError) as refused:
            scan([Source(0, str(path))])
        assert str(refused.value).splitlines()[1:] == [f"  {path}: 1 of its 2 photos ({inside}{name}): {lacks}"]
    (tmp_path / "z.png").rename(tmp_path / f"{stem}.png")  # the same photo, as phones save it twice
    scanned = scan([Source(0, str(tmp_path))])
    assert [photo.sample for photo in scanned.photos] == [f"0/{stem}.png"] and scanned.photos[0].caption == "said"
    assert dict(scanned.left_out)[f"{tmp_path}/{name}"] == lacks


@pytest.mark.parametrize("name", BEGINNINGS)
def test_without_its_plug_in_an_image_under_another_name_is_refused_with_the_remedy(name, without_plugins, tmp_path):
    (tmp_path / "a.jpg").write_bytes(BEGINNINGS[name])
    with pytest.raises(UserError) as refused:
        scan([Source(0, str(tmp_path))])
    assert f"{tmp_path}/a.jpg: {plugins.PLUGINS[IMAGES[Path(name).suffix.lower()]].lacks}" in str(refused.value)


def test_an_avif_of_a_general_brand_needs_no_plug_in(without_plugins):
    data = encoded(small_photo(), "AVIF")
    assert data[8:12] == b"avif" and decode(data[:8] + b"mif1" + data[12:]).format == "AVIF"


@pytest.mark.slow
def test_other_images_import_no_plug_in():
    """In a process of its own: what this one has imported stays."""
    code = (
        "import sys\nfrom trainer.data.scan import survey\nfrom trainer.data.sources import Source\n"
        "assert len(survey([Source(0, 'examples/bear_plushie')]).photos) == 5\n"
        "assert not {'pillow_heif', 'pillow_jxl'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_no_plug_in_is_installed_unasked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = {name for name, wants in extras.items() if any(w.startswith(("pillow-heif", "pillow-jxl")) for w in wants)}
    assert asked == {"heic", "jxl", "dev"} and not any(want.startswith("pillow-") for want in project["dependencies"])


# --- limits -----------------------------------------------------------------------------------------------------------


@needs("JXL")
@settings(max_examples=30, deadline=None)
@given(st.one_of(st.integers(1, 40), st.integers(1, 600)), st.integers(1, 40), st.booleans())
def test_the_size_of_a_jpeg_xl_is_read_from_its_header(width, height, container):
    data = encoded(Image.new("L", (width, height)), "JXL", effort=1, use_container=container)
    assert jxl.is_jxl(data) and jxl.size(jxl.codestream(data)) == (width, height)


@needs("JXL")
def test_the_sides_of_a_jpeg_xl_at_their_ratios():
    for width, height in ((64, 64), (76, 64), (84, 64), (96, 64), (113, 64), (80, 64), (128, 64)):
        data = encoded(Image.new("L", (width, height)), "JXL", effort=1)
        assert jxl.size(jxl.codestream(data)) == (width, height)


@needs("JXL")
def test_a_jpeg_xl_bomb_is_refused_before_it_is_decoded(monkeypatch):
    side = 2**18 - 1  # not small, 18 + 2 bits: selector 2; ratio 1: a square
    bits = 0 | 2 << 1 | side << 3 | 1 << 21
    monkeypatch.setattr(Image, "open", pytest.fail)
    with pytest.raises(ValueError, match="262144 x 262144 pixels, more than the limit"):
        decode(jxl.MAGIC + bits.to_bytes(12, "little"))


@needs("JXL")
@pytest.mark.parametrize("cut", [1, 9, 40, 400])
def test_a_jpeg_xl_cut_short_is_refused(cut):
    data = encoded(small_photo(), "JXL", effort=3, use_container=True)
    with pytest.raises(ValueError, match="truncated|no picture|cannot be decoded"):
        decode(data[:-cut])


def test_threads_decode_a_bounded_number_of_pixels_at_a_time():
    room, seen = images._Room(), []

    def take(pixels):
        with room.for_pixels(pixels, 1):
            seen.append(room.pixels)
            time.sleep(0.001)

    rng = random.Random(0)
    threads = [threading.Thread(target=take, args=(rng.randrange(1, MAX_PIXELS),)) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert len(seen) == 30 and max(seen) <= MAX_PIXELS and room.pixels == 0


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="Linux")
def test_no_file_stays_open():
    before = len(os.listdir("/proc/self/fd"))
    for format in {"TIFF", "GIF", "HEIF"} - LACKING.keys():
        for data in (encoded(small_photo(), format), encoded(small_photo(), format)[:-50]):
            try:
                decode(data)
            except ValueError:
                continue
    assert len(os.listdir("/proc/self/fd")) == before
