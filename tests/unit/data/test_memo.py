"""What an earlier start knows of photos: none is read twice, and none is trained as what it no longer is."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests.harness import PHOTOS
from tests.photos import survey
from trainer.base import digests
from trainer.base.errors import UserError
from trainer.data import memo as memos
from trainer.data import scan as scans
from trainer.data.cache.fill import pixels
from trainer.data.examples import examples
from trainer.data.images import views
from trainer.data.images.views import View
from trainer.data.memo import Facts, Memo
from trainer.data.sources import File, Source
from workbench.sources import LAYOUTS


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Photos with captions, masks, references and notes, as they were long ago."""
    made = Path(shutil.copytree(PHOTOS, tmp_path / "photos"))
    shutil.copy(made / "00.jpg", made / "copy.jpg")
    shutil.copy(made / "01.jpg", made / "misnamed.png")
    with Image.open(made / "02.jpg") as photo:
        Image.new("L", photo.size, 200).save(made / "02.mask.png")
        photo.convert("RGBA").save(made / "clear.png")
    monkeypatch.setattr(digests, "SETTLED_SECONDS", -(10**6))
    return made


def source(folder: Path, **more) -> Source:
    return Source(0, str(folder), resolutions=(64,), **{"masks": "files"} | more)


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """The files whose bytes were read, captions apart, and "decode" for every image that was decoded."""
    done: list[str] = []
    read, decode, decode_mask = File.read, scans.decode, scans.decode_mask

    def counted(place: File) -> bytes:
        if not place.name.endswith(".txt"):
            done.append(place.name)
        return read(place)

    monkeypatch.setattr(File, "read", counted)
    monkeypatch.setattr(scans, "decode", lambda *a, **k: done.append("decode") or decode(*a, **k))
    monkeypatch.setattr(scans, "decode_mask", lambda *a: done.append("decode") or decode_mask(*a))
    return done


def start(folder: Path, *, trusted: bool = True, **more) -> tuple[scans.Scanned, Memo]:
    memo = Memo(folder.parent / "cache", trusted=trusted, layouts=LAYOUTS)
    scanned = survey([source(folder, **more)], memo=memo)
    memo.save()
    return scanned, memo


def test_a_second_start_reads_no_image_and_knows_the_same(folder, reads):
    first, _ = start(folder)
    images = len([path for path in folder.iterdir() if path.suffix != ".txt"])
    # Two threads may decode one copy each at the same time.
    assert images - 2 <= reads.count("decode") <= images, "copies are decoded once, by any name"
    assert len(reads) - reads.count("decode") == images
    reads.clear()
    again, memo = start(folder)
    assert reads == [] and (memo.reused, memo.read) == (images, 0)
    assert again.photos == first.photos and again.account.lines() == first.account.lines()
    assert any("its bytes are JPEG" in line for line in again.account.lines())
    assert memo.lines() == [
        f"photos: {images} of {images} image files are as an earlier start read them (--verify reads all)"
    ]
    reads.clear()
    verified, memo = start(folder, trusted=False)
    assert len(reads) - reads.count("decode") == images and memo.lines() == [] and verified.photos == first.photos


def test_of_copies_one_is_looked_at(folder):
    """By any name; of what is read as another kind, again."""
    memo, looked = Memo(), []
    for name, kind in (("00.jpg", "photo"), ("copy.jpg", "photo"), ("copy.jpg", "mask")):
        given = memo.facts(
            source(folder), kind, File(str(folder), name), lambda data, sha256: looked.append(data) or Facts("a", (1, 2))
        )
        assert given == Facts("a", (1, 2))
    assert looked == [(folder / "00.jpg").read_bytes()] * 2


def test_captions_are_read_at_every_start(folder):
    start(folder)
    (folder / "00.txt").write_text("another caption")
    scanned, memo = start(folder)
    assert memo.read == 0 and scanned.photos[0].caption == "another caption"


@pytest.mark.parametrize("how", ["times", "inode", "size", "settings", "decoders"])
def test_what_changed_is_read(folder, reads, monkeypatch, how):
    start(folder)
    path, more = folder / "00.jpg", {}
    status = path.stat()
    if how == "times":
        path.write_bytes(path.read_bytes())
    elif how == "inode":
        shutil.copy(path, folder / "new")
        os.replace(folder / "new", path)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif how == "size":
        path.write_bytes(path.read_bytes() + b"\0")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif how == "settings":
        more = {"background": "#000000"}
    else:
        monkeypatch.setattr(memos, "_decoders", lambda: [memos.VERSION, {"pillow": "99"}])
    reads.clear()
    start(folder, **more)
    files = [name for name in reads if name != "decode"]
    assert files == ["00.jpg"] if how in ("times", "inode", "size") else len(files) == 9
    reads.clear()
    start(folder, **more)
    assert reads == []


def test_a_file_that_may_change_again_within_its_time_stamp_is_not_known(folder, reads, monkeypatch):
    monkeypatch.setattr(digests, "SETTLED_SECONDS", 600)
    start(folder)  # all were written just now
    reads.clear()
    start(folder)
    assert "00.jpg" in reads and len(reads) > 9
    for path in list(folder.iterdir()):
        if path.name != "00.jpg":
            path.unlink()
    monkeypatch.setattr(memos, "is_settled", lambda stamp: bool(reads.append("asked")))
    reads.clear()
    start(folder)
    assert reads == ["asked", "00.jpg", "decode"], "asked before the file is read: a slow read settles nothing"


def equal_times(monkeypatch, path: Path, data: bytes) -> None:
    """Other bytes, under a stamp that is as it was."""
    kept, stamp = File(str(path.parent), path.name).stamp(), File.stamp
    path.write_bytes(data)
    monkeypatch.setattr(File, "stamp", lambda place: kept if place.path == str(path) else stamp(place))


def test_a_photo_that_changed_under_equal_times_is_caught_before_it_is_trained_as_another(folder, monkeypatch):
    start(folder)
    equal_times(monkeypatch, folder / "00.jpg", (folder / "01.jpg").read_bytes())
    with Image.open(folder / "02.jpg") as photo:
        Image.new("L", photo.size, 90).save(folder / "grey.png")
    equal_times(monkeypatch, folder / "02.mask.png", (folder / "grey.png").read_bytes())
    (folder / "grey.png").unlink()
    scanned, memo = start(folder)
    assert memo.read == 0, "it is taken for what it was"
    made = examples(scanned.photos, step=16, enlarge=False, seed=7)
    with pytest.raises(UserError, match=r"00\.jpg changed since the start .*start again with --verify"):
        pixels(made[0], View())
    with pytest.raises(UserError, match=r"02\.mask\.png changed .*start again with --verify"):
        views.mask_on_latents(made[2], View(), side=8)
    verified, memo = start(folder, trusted=False)
    assert memo.read == 9 and verified.photos[0].sha256 == verified.photos[1].sha256
    again, memo = start(folder)
    assert memo.read == 0 and again.photos == verified.photos, "what was verified takes the place of what was wrong"
    pixels(examples(again.photos, step=16, enlarge=False, seed=7)[0], View())


@pytest.mark.slow
def test_a_damaged_page_counts_as_empty_and_is_named(folder):
    first, _ = start(folder)
    (page,) = (folder.parent / "cache").iterdir()
    whole = page.read_bytes()
    for damaged in (b"", whole[:-9], whole.replace(b"00.jpg", b"01.jpg", 1), b"[]\n" + whole, b"\xff" + whole, b"{}\n"):
        page.write_bytes(damaged)
        scanned, memo = start(folder)
        assert memo.read == 9 and scanned.photos == first.photos
        assert len(memo.damaged) == 1 and memo.damaged[0].startswith(f"warning: {page} is damaged (")
        assert page.read_bytes() == whole
    page.unlink()
    page.mkdir()
    memo = Memo(page.parent)
    assert survey([source(folder)], memo=memo).photos == first.photos and "cannot be read (Is a directory)" in memo.damaged[0]


def test_a_damaged_photo_is_named_at_every_start(folder):
    (folder / "00.jpg").write_bytes(b"no image")
    for _ in range(2):
        scanned, _ = start(folder)
        assert len(scanned.damaged) == 1 and "00.jpg: not a JPEG" in scanned.damaged[0]


@pytest.mark.slow
def test_starts_share_a_folder_and_leave_nothing_else(folder, reads):
    """A source has a page for each of its settings. The next start removes what a kill left."""
    other = Path(shutil.copytree(folder, folder.parent / "others"))
    for photos, background in ((folder, "#ffffff"), (other, "#ffffff"), (folder, "#000000")):
        start(photos, background=background)
    reads.clear()
    for photos, background in ((folder, "#ffffff"), (other, "#ffffff"), (folder, "#000000")):
        start(photos, background=background)
    assert reads == []
    pages = sorted((folder.parent / "cache").iterdir())
    assert len(pages) == 3 and all(json.loads(line) for page in pages for line in page.read_text().splitlines())
    before = [page.read_bytes() for page in pages]
    assert [page.read_bytes() for page in pages] == before
    (folder / "copy.jpg").unlink()
    start(folder)
    assert sorted(len(page.read_bytes()) for page in pages) < sorted(map(len, before)), "what is gone is forgotten"


def test_members_of_an_archive_are_known_by_the_archive(folder, reads):
    import tarfile

    path = folder.parent / "set.tar"
    with tarfile.open(path, "w") as tar:
        for name in ("00.jpg", "01.jpg"):
            tar.add(folder / name, name)
    first, memo = start(path)
    assert (memo.reused, memo.read) == (0, 2)
    again, memo = start(path)
    assert (memo.reused, memo.read) == (2, 0) and again.photos == first.photos
    path.touch()
    assert start(path)[1].read == 2
