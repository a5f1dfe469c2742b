"""Scanning: every mode and orientation read right, everything wrong reported in one message that names each file."""

import io
import json
import os
import random
import shutil
import struct
import tarfile
import unicodedata
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.photos import notes_of, scan
from trainer.base.console import printable
from trainer.base.errors import Interrupted, UserError
from trainer.base.progress import Phases
from trainer.data import threads
from trainer.data.examples import examples
from trainer.data.images.decode import MAX_PIXELS, decode, load_rgb
from trainer.data.scan import LONGEST_CAPTION
from trainer.data.sources import Source
from trainer.data.threads import MAX_THREADS, in_threads

PHOTOS = Path("examples/bear_plushie")


def encoded(image: Image.Image, format: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def flat(mode: str, value, size=(12, 8)) -> Image.Image:
    return Image.new(mode, size, value)


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_header(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))


def bomb_png(width: int, height: int) -> bytes:
    return png_header(width, height) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


def write(folder: Path, name: str, data: bytes | str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_the_example_folder():
    photos = scan([Source(0, str(PHOTOS), 3)]).photos
    assert [photo.sample for photo in photos] == [f"0/0{i}.jpg" for i in range(5)]
    assert [photo.size for photo in photos] == [(768, 512), (768, 768), (640, 768), (512, 768), (768, 640)]
    assert all(photo.repeats == 3 and photo.caption_from and "sks plush bear" in photo.caption for photo in photos)
    assert len({photo.sha256 for photo in photos}) == 5


def test_order_names_and_what_is_left_out(tmp_path):
    png = encoded(flat("RGB", "red"), "PNG")
    for name in ("one/b.PNG", "one/a/z.png", "one/.hidden.png", "one/.git/x.png", "one/notes.md", "one/a.b.png", "two/b.png"):
        write(tmp_path, name, png)
    write(tmp_path, "one/a.b.txt", "﻿  caption é\n".encode())
    write(tmp_path, "one/b.txt", " \n")
    photos = scan([Source(0, str(tmp_path / "one")), Source(1, str(tmp_path / "two"), 2)]).photos
    assert [photo.sample for photo in photos] == ["0/a.b.png", "0/a/z.png", "0/b.PNG", "1/b.png"]
    assert [photo.caption for photo in photos] == ["caption é", "", "", ""]
    assert [bool(photo.caption_from) for photo in photos] == [True, False, True, False]
    assert [photo.repeats for photo in photos] == [1, 1, 1, 2]


def test_links_are_followed_once(tmp_path):
    write(tmp_path, "real/a.png", encoded(flat("RGB", "red"), "PNG"))
    (tmp_path / "set").mkdir()
    (tmp_path / "set/link").symlink_to(tmp_path / "real")
    (tmp_path / "real/loop").symlink_to(tmp_path / "set")
    assert [photo.sample for photo in scan([Source(0, str(tmp_path / "set"))]).photos] == ["0/link/a.png"]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation, tmp_path):
    # Undoing the orientation by its definition in the EXIF standard: which corner and axis row 0 / column 0 are.
    upright = np.arange(6 * 4, dtype=np.uint8).reshape(4, 6) * 9
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: upright.T[::-1],  # row 0 is the right side, column 0 the top
        7: upright.T[::-1, ::-1],
        8: upright.T[:, ::-1],  # row 0 is the left side, column 0 the bottom
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = write(tmp_path, "a.png", encoded(Image.fromarray(np.ascontiguousarray(stored)), "PNG", exif=exif))
    assert np.array_equal(np.asarray(load_rgb(path))[..., 0], upright)
    (photo,) = scan([Source(0, str(tmp_path))]).photos
    assert photo.size == (6, 4)


def test_a_rotated_jpeg_has_its_sides_swapped(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(PHOTOS / "00.jpg") as image:
        rotated = image.transpose(Image.Transpose.ROTATE_90)
        path = write(tmp_path, "a.jpg", encoded(rotated, "JPEG", exif=exif, quality=95))
        difference = np.asarray(load_rgb(path)).astype(int) - np.asarray(image)
    assert np.abs(difference).mean() < 2  # JPEG at quality 95; an unrotated photo differs by tens


@pytest.mark.parametrize(
    ("image", "format", "expected"),
    [
        (flat("L", 100), "PNG", (100, 100, 100)),
        (flat("1", 1), "PNG", (255, 255, 255)),
        (flat("LA", (100, 0)), "PNG", (255, 255, 255)),
        (flat("LA", (100, 255)), "PNG", (100, 100, 100)),
        (flat("RGBA", (200, 0, 0, 0)), "PNG", (255, 255, 255)),
        (flat("RGBA", (200, 0, 0, 51)), "PNG", (244, 204, 204)),  # a fifth of the colour, four fifths of white
        (flat("RGBA", (200, 0, 0, 255)), "WEBP", (200, 0, 0)),
        (flat("RGB", (10, 200, 30)).quantize(4), "PNG", (10, 200, 30)),
        (flat("RGB", (10, 200, 30)).quantize(4), "BMP", (10, 200, 30)),
        (flat("CMYK", (0, 255, 255, 0)), "JPEG", (255, 0, 0)),
        (flat("CMYK", (0, 0, 0, 128)), "JPEG", (127, 127, 127)),
        (flat("I;16", 40000), "PNG", (156, 156, 156)),  # 40000 / 257 = 155.6
        (flat("I;16", 300), "PNG", (1, 1, 1)),
        (flat("I;16", 65535), "PNG", (255, 255, 255)),
    ],
)
def test_modes(image, format, expected):
    options = {"lossless": True} if format == "WEBP" else {"quality": 100} if format == "JPEG" else {}
    rgb = decode(encoded(image, format, **options)).image
    assert rgb.mode == "RGB" and rgb.size == (12, 8)
    assert np.abs(np.asarray(rgb).astype(int) - expected).max() <= (1 if format == "JPEG" else 0)


def test_a_transparent_palette_entry_becomes_white():
    image = flat("P", 0)
    image.putpalette([10, 20, 30, 200, 0, 0])
    image.putpixel((0, 0), 1)
    pixels = np.asarray(decode(encoded(image, "PNG", transparency=0)).image)
    assert tuple(pixels[0, 0]) == (200, 0, 0) and tuple(pixels[1, 1]) == (255, 255, 255)


def test_a_photo_with_a_gain_map_is_a_still_image():
    still = flat("RGB", (255, 0, 0))
    data = encoded(still, "MPO", save_all=True, append_images=[flat("RGB", "blue")])
    assert decode(data).image.getpixel((0, 0))[0] > 250


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_everything_wrong_is_reported_at_once(tmp_path):
    whole = (PHOTOS / "00.jpg").read_bytes()
    broken = {
        "truncated.jpg": whole[: len(whole) // 2],
        "zero.png": b"",
        "garbage.png": b"this is not an image",
        "bomb.png": bomb_png(60_000, 60_000),
        "large.png": bomb_png(MAX_PIXELS // 10_000 + 1, 10_000),
        "other.jpg": encoded(flat("RGB", "red"), "PPM"),
    }
    for name, data in broken.items():
        write(tmp_path / "set", name, data)
    shutil.copy(PHOTOS / "01.jpg", tmp_path / "set/good.jpg")
    shutil.copy(PHOTOS / "01.jpg", tmp_path / "set/latin.jpg")
    write(tmp_path / "set", "latin.txt", "café".encode("latin-1"))
    os.mkfifo(tmp_path / "set/pipe.png")
    (tmp_path / "set/dangling.png").symlink_to("nowhere")
    (tmp_path / "empty").mkdir()
    file = write(tmp_path, "file", "")
    paths = (tmp_path / "set", tmp_path / "absent", file, tmp_path / "empty")
    sources = [Source(index, str(path)) for index, path in enumerate(paths)]
    with pytest.raises(UserError) as caught:
        scan(sources)
    lines = str(caught.value).splitlines()[1:]
    for name, reason in {
        "truncated.jpg": "truncated",
        "zero.png": "empty (0 bytes)",
        "garbage.png": "not a JPEG",
        "bomb.png": "more pixels",
        "large.png": "more than the limit",
        "other.jpg": "not a JPEG",
        "latin.txt": "not UTF-8",
        "pipe.png": "not a regular file",
        "dangling.png": "cannot be read",
        "absent": "no such folder",
        "file": "not a folder",
        "empty": "no images",
    }.items():
        (line,) = [line for line in lines if f"/{name}:" in line]
        assert reason in line
    assert len(lines) == 12
    assert "12 problems" in str(caught.value)


def test_strict_captions_name_what_is_missing_or_empty(tmp_path):
    for name in "abc":
        write(tmp_path, f"{name}.png", encoded(flat("RGB", "red"), "PNG"))
    write(tmp_path, "a.txt", "text")
    write(tmp_path, "b.txt", "\n")
    assert len(scan([Source(0, str(tmp_path))]).photos) == 3
    with pytest.raises(UserError, match=r"(?s)2 problems.*b\.txt: the caption is empty.*c\.png: no caption for it"):
        scan([Source(0, str(tmp_path))], strict_captions=True)


def test_a_caption_that_is_none_is_refused_before_a_tokenizer_meets_it(tmp_path):
    """Ten megabytes of text take a tokenizer more than ten seconds."""
    for name, length in (("a", LONGEST_CAPTION), ("b", LONGEST_CAPTION + 1)):
        write(tmp_path, f"{name}.png", encoded(flat("RGB", "red"), "PNG"))
        write(tmp_path, f"{name}.txt", "x" * length)
    with pytest.raises(UserError, match=r"1 problem;.*\n.*b\.png: its caption has 65,537 characters; 65,536 are the most"):
        scan([Source(0, str(tmp_path))])


def test_captions_lose_what_no_editor_shows_and_each_photo_says_so(tmp_path):
    """From every kind of place: a file, JSON, a name, a row."""
    for name in ("a", "b", "c"):
        write(tmp_path, f"{name}.png", encoded(flat("RGB", "red"), "PNG"))
    write(tmp_path, "a.txt", b"\xef\xbb\xbf" * 2 + "a\u200b dog\u2060\n".encode())
    write(tmp_path, "b.json", json.dumps({"caption": "\ufeffa \u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"}))
    write(tmp_path, "c.txt", "\u200b\n")
    write(tmp_path / "named", "a \u200bdog.png", encoded(flat("RGB", "red"), "PNG"))
    write(tmp_path / "table", "a.png", encoded(flat("RGB", "red"), "PNG"))
    write(tmp_path / "table", "metadata.csv", b"\xef\xbb\xbf" * 2 + "file_name,text\na.png,a \u200bdog\n".encode())
    (tmp_path / "files").mkdir()
    for file in [each for each in tmp_path.iterdir() if each.is_file()]:
        file.rename(tmp_path / "files" / file.name)
    sources = [("files", "auto"), ("named", "filename"), ("table", "auto")]
    found = scan([Source(index, str(tmp_path / name), captions=how) for index, (name, how) in enumerate(sources)])
    expected = ["a dog", "a \u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "", "a dog", "a dog"]
    assert [photo.caption for photo in found.photos] == expected
    notes = [
        f"its caption had invisible characters ({which}), dropped" for which in ("U+200B, U+2060, U+FEFF", "U+FEFF", "U+200B")
    ]
    assert [photo.notes for photo in found.photos] == [(note,) for note in (*notes, notes[2], notes[2])]
    with pytest.raises(UserError, match=r"1 problem.*\n.*c\.txt: the caption is empty"):
        scan([Source(0, str(tmp_path / "files"))], strict_captions=True)


@pytest.mark.parametrize("name", ["a.png", "a.txt", "a.json", "a.mask.png", "a.ref.png", "metadata.csv", "metadata.parquet"])
def test_a_pointer_of_git_lfs_is_none_of_them(tmp_path, name):
    for each in ("a.png", "a.ref.png"):
        write(tmp_path, each, encoded(flat("RGB", "red"), "PNG"))
    write(tmp_path, name, f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 17\n")
    with pytest.raises(UserError, match=rf"{name}: .*Git LFS pointer.*git lfs pull"):
        scan([Source(0, str(tmp_path), masks="files", references="files")])


@pytest.mark.parametrize("forms", [("NFD", "NFC"), ("NFC", "NFD")])
def test_what_belongs_to_a_photo_is_found_in_either_form_of_its_letters(tmp_path, forms):
    """A Mac writes names in NFD. No name is rewritten."""
    theirs, mine = (unicodedata.normalize(form, "Caf\u00e9") for form in forms)
    for own, beside in ((theirs, mine), ("plain", "plain")):
        for name in (f"{own}.png", f"{beside}.mask.png", f"{beside.lower()}.ref.png"):
            write(tmp_path, name, encoded(flat("L", 255, (64, 64)), "PNG"))
    write(tmp_path, f"{mine.lower()}.txt", "a cup")
    (photo, _) = scan([Source(0, str(tmp_path), masks="files", references="files")]).photos
    assert (photo.sample, photo.caption, photo.mask is not None) == (f"0/{theirs}.png", "a cup", True)
    assert len(photo.extras.references) == 1
    assert not any("names that look the same" in note for note in notes_of(scan([Source(0, str(tmp_path))])))
    table = tmp_path / "table"
    write(table, f"{theirs}.png", encoded(flat("RGB", "red"), "PNG"))
    write(table, "metadata.jsonl", json.dumps({"file_name": f"{mine}.png", "text": "a cup"}))
    assert [(photo.sample, photo.caption) for photo in scan([Source(0, str(table))]).photos] == [(f"0/{theirs}.png", "a cup")]


def test_two_photos_whose_names_differ_in_form_alone_have_their_own(tmp_path):
    forms = [unicodedata.normalize(form, "caf\u00e9") for form in ("NFC", "NFD")]
    rows = []
    for form, caption in zip(forms, ("composed", "decomposed"), strict=True):
        for folder in ("beside", "table"):
            write(tmp_path / folder, f"{form}.png", encoded(flat("RGB", "red"), "PNG"))
        write(tmp_path / "beside", f"{form}.txt", caption)
        rows.append(json.dumps({"file_name": f"{form}.png", "text": caption}))
    write(tmp_path / "table", "metadata.jsonl", "\n".join(rows))
    for folder in ("beside", "table"):
        scanned = scan([Source(0, str(tmp_path / folder))])
        assert any("2 photos: names that look the same (Unicode's NFC and NFD)" in note for note in notes_of(scanned))
        assert {photo.sample: photo.caption for photo in scanned.photos} == {
            f"0/{forms[0]}.png": "composed",
            f"0/{forms[1]}.png": "decomposed",
        }


@pytest.mark.parametrize(("own", "said"), [("0\u00a0a.png", "0 a.png"), ("0 a.png", "0\u202fa.png")])
def test_a_row_finds_its_photo_with_other_spaces(tmp_path, own, said):
    write(tmp_path, own, encoded(flat("RGB", "red"), "PNG"))
    write(tmp_path, "S/a.png", encoded(flat("RGB", "red"), "PNG"))
    write(tmp_path, "s/a.png", encoded(flat("RGB", "red"), "PNG"))
    rows = [{"file_name": said, "text": "a cup"}, {"file_name": "s/a.png", "text": "a saucer"}]
    write(tmp_path, "metadata.jsonl", "\n".join(map(json.dumps, rows)))
    found = [(photo.sample, photo.caption) for photo in scan([Source(0, str(tmp_path))]).photos]
    assert found == [(f"0/{own}", "a cup"), ("0/s/a.png", "a saucer")]


@pytest.mark.skipif(os.name == "nt", reason="file names are Unicode there")
def test_a_name_that_is_not_utf8_is_refused_printably(tmp_path):
    with open(os.path.join(os.fsencode(tmp_path), b"caf\xe9.png"), "wb") as file:
        file.write(encoded(flat("RGB", "red"), "PNG"))
    with pytest.raises(UserError, match=r"caf\\xe9\.png: the file's name is not UTF-8"):
        scan([Source(0, str(tmp_path))])


HOSTILE = "x\n  error: all is lost\x1b[31m\u202egnp\x7f"


@given(st.text(st.characters(), max_size=30))
def test_a_name_that_is_said_is_one_line_of_what_can_be_seen(name):
    said = printable(name)
    assert all(each.isprintable() or unicodedata.category(each) == "Zs" for each in said)
    assert said == name or not name.isprintable()
    if "\\" not in name and not any("\ud800" <= each <= "\udfff" for each in name):  # nothing is lost
        assert said.encode("ascii", "backslashreplace").decode("unicode_escape") == name


def test_names_are_said_as_they_are_where_they_can_be():
    assert printable("été/日本\u3000語 ünï.png") == "été/日本\u3000語 ünï.png"
    assert printable(os.fsdecode(b"caf\xe9.png")) == "caf\\xe9.png"
    assert printable(HOSTILE) == "x\\n  error: all is lost\\x1b[31m\\u202egnp\\x7f"


def in_one_line_each(said: str, names: int) -> bool:
    return len(said.splitlines()) == 1 + names and all(line.isprintable() for line in said.splitlines())


def test_what_a_hostile_name_says_stays_in_its_line(tmp_path):
    """Of a file, of a member of an archive, of a folder, of a photo too small, of a row."""
    folder = tmp_path / "photos"
    for name in (f"{HOSTILE}.png", f"{HOSTILE}/a.png", f"{HOSTILE}.txt"):
        write(folder, name, b"\xff")
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        archive.add(folder, "photos")
    for path in (folder, tmp_path / "all.tar"):
        with pytest.raises(UserError) as refused:
            scan([Source(0, str(path))])
        assert in_one_line_each(str(refused.value), 3) and printable(HOSTILE) in str(refused.value)
    small = write(tmp_path, f"small/{HOSTILE}.png", encoded(flat("L", 0), "PNG"))
    with pytest.raises(UserError) as refused:
        examples(scan([Source(0, str(small.parent))]).photos, step=64, enlarge=False, seed=0)
    assert in_one_line_each(str(refused.value), 1)
    (folder / "metadata.jsonl").write_text(json.dumps({"file_name": f"gone{HOSTILE}.png"}))
    with pytest.raises(UserError) as refused:
        scan([Source(0, str(folder))])
    assert in_one_line_each(str(refused.value), 1)


def test_check_interrupts_the_scan():
    calls = []

    def check():
        calls.append(None)
        if len(calls) == 2:
            raise Interrupted(15)

    with pytest.raises(Interrupted):
        scan([Source(0, str(PHOTOS))], phases=Phases(check=check))
    assert len(calls) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Pillow warns of damaged EXIF and of headers that claim too many pixels
def test_mutated_files_are_read_or_refused():
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(PHOTOS / "00.jpg") as photo:
        small = photo.resize((24, 16))
    seeds = [encoded(small, format, exif=exif) for format in ("JPEG", "PNG", "WEBP")] + [encoded(small, "BMP")]
    rng = random.Random(0)
    refused = 0
    for _ in range(2000):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.choice([1, 3, 10])):
            data[rng.randrange(rng.choice([64, len(data)]))] = rng.choice([0, 255, rng.randrange(256)])
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        try:
            assert decode(bytes(data)).image.mode == "RGB"
        except ValueError:
            refused += 1
    assert refused > 500


@pytest.mark.parametrize(
    ("groups", "files", "processes", "expected"),
    [
        ("0::/", {}, "", 6),
        ("0::/", {"cpu.max": "max 100000"}, "", 6),
        ("0::/", {"cpu.max": "250000 100000"}, "", 3),
        ("0::/", {"cpu.max": "1600000 100000"}, "", 6),
        ("0::/a/b", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, "", 2),
        ("0::/gone", {"cpu.max": "100000 100000"}, "", 1),
        ("4:memory:/x\n1:cpu,cpuacct:/x\n0::/", {"cpu,cpuacct/x/cpu.cfs_quota_us": "400000",
                                                 "cpu,cpuacct/x/cpu.cfs_period_us": "100000"}, "", 4),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "", 6),
        ("0::/", {"cpu.max": "400000 100000"}, "2", 2),
        ("0::/", {}, "8", 1),
        (None, {}, "", 6),
    ],
)  # fmt: skip
def test_threads_follow_affinity_quota_and_the_processes_of_the_node(
    tmp_path, monkeypatch, groups, files, processes, expected
):
    """Of 64 processors in the machine, 6 of which this process may run on."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.setattr(threads, "PROC", tmp_path / "proc")
    monkeypatch.setattr(threads, "CGROUP", tmp_path / "group")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    told = {} if groups is None else {"proc/self/cgroup": groups}
    for name, text in (told | {f"group/{name}": text for name, text in files.items()}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert threads.processors() == expected


def test_in_threads_keeps_the_order_and_runs_a_bounded_way_ahead():
    taken = []
    results = in_threads(lambda i: i * i, (taken.append(i) or i for i in range(1000)))
    assert [next(results) for _ in range(3)] == [0, 1, 4]
    assert len(taken) <= 3 + 2 * MAX_THREADS
    results.close()
    assert list(in_threads(lambda i: i, range(50))) == list(range(50))
