"""Mutated images and captions: no hang, no crash, bounded memory; each is named before training, or read whole.

The scan runs in a process of its own, so that a crash of a decoder would be seen as one.
"""

import hashlib
import io
import json
import random
import re
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image, ImageCms

from tests.harness import ROOT
from trainer.data.images import plugins
from trainer.data.images.decode import decode
from trainer.data.images.kinds import IMAGES

LACKING = plugins.lacking()  # images of these are left out by their names (test_images.py)
READ = {suffix: format for suffix, format in IMAGES.items() if format not in LACKING}

CHILD = """
import json, resource, sys, warnings
warnings.simplefilter("ignore")
from trainer.data.scan import refuse_damaged, survey
from trainer.data.sources import Source
from trainer.base.errors import UserError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
told, photos = "", []
try:
    scanned = survey([Source(0, sys.argv[1])])
    refuse_damaged(scanned)
    photos = [(p.sample, p.sha256, p.size, p.caption, p.notes) for p in scanned.photos]
except UserError as error:
    told = str(error)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({"told": told, "photos": photos, "grown": grown}))
"""


def encoded(image: Image.Image, format: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def whole_images() -> dict[str, tuple[str, bytes]]:
    """(suffix, bytes) of sound images, of every format and mode that it has."""
    with Image.open(ROOT / "examples" / "bear_plushie" / "00.jpg") as photo:
        small = photo.resize((48, 32))
    clear, other = small.convert("RGBA"), small.rotate(9)
    clear.putalpha(small.convert("L"))
    exif = Image.Exif()
    exif[0x0112] = 6
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    more = {"exif": exif.tobytes(), "icc_profile": profile}
    made = {
        "jpeg": (".jpg", encoded(small, "JPEG", **more)),
        "cmyk": (".jpg", encoded(small.convert("CMYK"), "JPEG")),
        "png": (".png", encoded(clear, "PNG", **more)),
        "grey16": (".png", encoded(Image.new("I;16", (48, 32), 4000), "PNG")),
        "palette": (".png", encoded(small.quantize(16), "PNG")),
        "webp": (".webp", encoded(clear, "WEBP", **more)),
        "avif": (".avif", encoded(clear, "AVIF", **more)),
        "gif": (".gif", encoded(small, "GIF", save_all=True, append_images=[other])),
        "bmp": (".bmp", encoded(small, "BMP")),
        **{
            f"tiff {kind}": (".tif", encoded(image, "TIFF", compression=kind))
            for kind, image in {
                "tiff_lzw": small, "jpeg": small, "tiff_adobe_deflate": small.convert("L"), "raw": small.convert("CMYK"),
            }.items()
        },
    }  # fmt: skip
    for plugin in plugins.PLUGINS:
        plugins.load(plugin)  # to write with
    if "HEIF" not in LACKING:
        made["heic"] = ".heic", encoded(clear, "HEIF", **more)
    if "JXL" not in LACKING:
        made["jxl"] = ".jxl", encoded(clear, "JXL", effort=3, use_container=True, exif=exif.tobytes())
        made["bare jxl"] = ".jxl", encoded(small, "JXL", effort=3)
    return made


def bombs() -> dict[str, tuple[str, bytes]]:
    """Small files of very many pixels, as far as their headers say."""
    whole = whole_images()
    png, bmp, gif = (bytearray(whole[name][1]) for name in ("png", "bmp", "gif"))
    png[16:24] = (60_000).to_bytes(4, "big") * 2
    png[29:33] = zlib.crc32(png[12:29]).to_bytes(4, "big")
    bmp[18:26] = (60_000).to_bytes(4, "little") * 2
    gif[6:10] = b"\xff\xff" * 2
    jxl = b"\xff\x0a" + (2 << 1 | (2**18 - 1) << 3 | 1 << 21).to_bytes(12, "little")
    made = {"png bomb": (".png", bytes(png)), "bmp bomb": (".bmp", bytes(bmp)), "gif bomb": (".gif", bytes(gif))}
    return made if "JXL" in LACKING else {**made, "jxl bomb": (".jxl", jxl)}


def mutated(rng: random.Random, whole: dict, large: dict) -> tuple[str, str, str, bytes]:
    """(what was done, to what, suffix, bytes)."""
    done = rng.choice(["bytes", "bytes", "bytes", "cut", "cut", "metadata", "wrong name", "empty", "bomb", "text", "sound"])
    if done == "empty":
        return done, "", rng.choice(sorted(READ)), b""
    if done == "text":
        return done, "", rng.choice(sorted(READ)), rng.randbytes(rng.randrange(1, 400))
    if done == "bomb":
        kind = rng.choice(sorted(large))
        return done, kind, *large[kind]
    kind = rng.choice(sorted(whole))
    suffix, data = whole[kind]
    data = bytearray(data)
    if done == "wrong name":
        suffix = rng.choice([each for each in sorted(READ) if READ[each] != READ[suffix]])
    elif done == "cut":
        del data[rng.randrange(1, len(data)) :]
    elif done == "metadata":  # EXIF, the colour profile, and what stands around them
        marks = [
            found.start() for mark in (b"Exif", b"II*\0", b"MM\0*", b"acsp") for found in re.finditer(re.escape(mark), data)
        ]
        start = rng.choice(marks or [0])
        for _ in range(rng.randrange(1, 20)):
            data[min(len(data) - 1, start + rng.randrange(64))] = rng.randrange(256)
    elif done == "bytes":
        for _ in range(rng.choice([1, 3, 10])):
            data[rng.randrange(rng.choice([64, len(data)])) % len(data)] = rng.choice([0, 255, rng.randrange(256)])
    return done, kind, suffix, bytes(data)


CAPTIONS = {
    "sound": b"a sks plush bear\n",
    "empty": b"",
    "marked": b"\xef\xbb\xbf a bear ",
    "latin": "caf\xe9".encode("latin-1"),
    "cut": "caf\xe9".encode()[:-1],
    "utf16": "a bear".encode("utf-16"),
    "long": b"bear, " * 2000,
}
BAD_CAPTIONS = ("latin", "cut")


def scanned(folder: Path, seconds: float) -> dict:
    child = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", CHILD, str(folder)],
        capture_output=True, text=True, timeout=seconds, cwd=ROOT,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout.splitlines()[-1])


# The time is for a machine that is busy otherwise; alone it takes a tenth.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "seconds"), [pytest.param(10_000, 1800, marks=pytest.mark.proof), (150, 300)], ids=["all", "some"]
)
def test_each_is_named_or_read_as_it_is(tmp_path, count, seconds):
    rng, whole, large = random.Random(0), whole_images(), bombs()
    files = {}
    for number in range(count):
        done, kind, suffix, data = mutated(rng, whole, large)
        path, caption = tmp_path / f"{number:05}{suffix}", rng.choice(sorted(CAPTIONS))
        path.write_bytes(data)
        path.with_suffix(".txt").write_bytes(CAPTIONS[caption])
        files[path.name] = done, kind, caption

    first = scanned(tmp_path, seconds)
    named = {name for name in files if f"{tmp_path}/{name}: " in first["told"]}
    wrong = {name for name in files if f"{tmp_path / name}"[: -len(Path(name).suffix)] + ".txt: " in first["told"]}
    assert wrong == {name for name, (_, _, caption) in files.items() if caption in BAD_CAPTIONS}
    lines = first["told"].splitlines()[1:]
    assert all(line.startswith(f"  {tmp_path}/") for line in lines), [line for line in lines if str(tmp_path) not in line]
    assert len(lines) == len(named) + len(wrong) and not first["photos"], "one line for each, and nothing is trained"
    for name, (done, _, _) in files.items():
        assert name in named or done not in ("empty", "bomb", "text"), (name, done)
        assert name not in named or done not in ("wrong name", "sound"), (name, done)
    assert first["grown"] < 700_000, "kilobytes; a photo of the pixel limit takes more"

    for name in named | wrong:
        (tmp_path / name).unlink()
        (tmp_path / name).with_suffix(".txt").unlink()
    left = files.keys() - named - wrong
    second = scanned(tmp_path, seconds)
    assert not second["told"] and {sample for sample, *_ in second["photos"]} == {f"0/{name}" for name in left}
    survived = Counter()
    for sample, digest, (width, height), caption, notes in second["photos"]:
        name = sample.removeprefix("0/")
        done, kind, written = files[name]
        data = (tmp_path / name).read_bytes()
        assert digest == hashlib.sha256(data).hexdigest() and width * height <= 200_000_000
        coding = "utf-16" if written == "utf16" else "utf-8-sig"
        assert caption == CAPTIONS[written].decode(coding).strip(), "its own caption"
        survived[done] += 1
        if done == "wrong name":
            assert any("its name ends in" in note for note in notes)
        if done in ("cut", "wrong name", "sound"):
            one, other = decode(data), decode(whole[kind][1])
            assert one.image.tobytes() == other.image.tobytes(), f"{name}: {kind}, {done}: not the whole photo"
    assert min(survived[done] for done in ("bytes", "metadata", "wrong name", "sound")) > 0
    assert len(named) > count / 4
