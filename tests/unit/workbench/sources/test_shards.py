"""Archives as sources: nothing outside is read, nothing is written, and what is hostile or damaged is named."""

from __future__ import annotations

import gzip
import io
import multiprocessing
import os
import random
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image

from tests import photos as photos_of
from tests.photos import scan
from trainer.base.errors import UserError
from trainer.data.sources import MAX_BYTES, Listing, Scanned, Source
from workbench.sources import tar


def png(colour: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (64, 64), colour).save(buffer, "PNG")
    return buffer.getvalue()


def archive(path: Path, *members: tuple[str | tarfile.TarInfo, bytes], format: int = tarfile.GNU_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format) as made:
        for member, data in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            if info.isreg():
                info.size = len(data)
            made.addfile(info, io.BytesIO(data))
    return path


def special(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def listed(path: Path | str, **keys) -> Listing:
    return photos_of.listing(Source(0, str(path), **keys))


def told(listing: Listing) -> Scanned:
    return Scanned((), listing.account)


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = special(name, kind)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


def checked(block: bytes) -> bytes:
    """With the checksum that it should have."""
    block = block[:148] + b" " * 8 + block[156:]
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def write(path: Path, *blocks: bytes) -> Path:
    path.write_bytes(b"".join(block + bytes(-len(block) % 512) for block in blocks))
    return path


END = bytes(1024)


def everything(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))}


def test_a_hostile_archive_reads_and_writes_nothing_outside(tmp_path, monkeypatch):
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    (outside / "secret.png").write_bytes(png(1))
    (outside / "secret.txt").write_text("secret")
    secret = str(outside / "secret.png")
    path = archive(
        inside / "a.tar",
        ("good.png", png(2)),
        ("good.txt", b"good"),
        ("../out/up.png", png(3)),
        ("x/../../out/up2.png", png(3)),
        ("..", png(3)),
        (str(outside / "absolute.png"), png(4)),
        (special("linked.png", tarfile.SYMTYPE, secret), b""),
        (special("linked.txt", tarfile.SYMTYPE, "../out/secret.txt"), b""),
        (special("hard.png", tarfile.LNKTYPE, "../out/secret.png"), b""),
        (special("out", tarfile.SYMTYPE, str(outside)), b""),
        ("out/through.png", png(5)),
        (special("null.png", tarfile.CHRTYPE), b""),
        (special("disk.png", tarfile.BLKTYPE), b""),
        (special("pipe.png", tarfile.FIFOTYPE), b""),
        (special("folder.png", tarfile.DIRTYPE), b""),
        (special("volume.png", b"V"), b""),
        (".hidden.png", png(6)),
        ("metadata.jsonl", b'{"file_name": "../out/secret.png"}'),
        ("film.mp4", b"x"),
    )
    before = everything(tmp_path)
    opened = []
    monkeypatch.setattr(
        "builtins.open", lambda name, *args, _open=open, **keys: opened.append(name) or _open(name, *args, **keys)
    )
    scanned = scan([Source(0, str(path))])
    monkeypatch.undo()
    assert [(photo.sample, photo.caption) for photo in scanned.photos] == [
        ("0/a.tar/good.png", "good"),
        ("0/a.tar/out/through.png", ""),  # its own member: the link of that name leads nowhere here
    ]
    assert [photo.image.read() for photo in scanned.photos] == [png(2), png(5)]
    assert set(map(str, opened)) == {str(path)} and everything(tmp_path) == before
    leads_out = "its name leads out of the archive"
    assert {what.removeprefix(f"{path}/"): why for what, why in scanned.left_out} == {
        "../out/up.png": leads_out,
        "x/../../out/up2.png": leads_out,
        "..": leads_out,
        f"{outside}/absolute.png": leads_out,
        "linked.png": "a symbolic link",
        "linked.txt": "a symbolic link",
        "hard.png": "a link to another member",
        "out": "a symbolic link",
        "null.png": "a device",
        "disk.png": "a device",
        "pipe.png": "a named pipe",
        "volume.png": "a member of kind b'V', not a file",
        ".hidden.png": "hidden",
        "metadata.jsonl": "a table in an archive is not read; put captions beside the images",
        "film.mp4": "a video",
    }


SPARSE = special("a.png", tarfile.GNUTYPE_SPARSE)
SPARSE.size = 512
# The map of a sparse member goes on in a second block; the member's bytes begin after it.
SPARSE_HEADER = bytearray(SPARSE.tobuf(tarfile.GNU_FORMAT))
SPARSE_HEADER[482] = 1
PAX_SPARSE = tarfile.TarInfo("GNUSparseFile.0/a.png")
PAX_SPARSE.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.realsize": str(1 << 50), "GNU.sparse.name": "a.png"}


@pytest.mark.parametrize(
    "blocks",
    [(checked(bytes(SPARSE_HEADER)), bytes(512), bytes(512)), (PAX_SPARSE.tobuf(tarfile.PAX_FORMAT),)],
    ids=["GNU", "pax"],
)
def test_a_sparse_member_is_left_out_and_the_next_is_found(blocks, tmp_path):
    path = write(tmp_path / "a.tar", *blocks, header("b.png", 3), b"abc", END)
    listing = listed(path)
    assert [item.name for item in listing.photos] == ["a.tar/b.png"] and not listing.problems
    assert listing.photos[0].image.read() == b"abc"
    assert [why for _, why in told(listing).left_out] == [tar.SPARSE]


def test_what_a_link_says_of_its_size_counts_for_nothing(tmp_path):
    blocks = header("a.png", 4096, tarfile.SYMTYPE), header("f", 4096, tarfile.DIRTYPE), header("b.png", 3), b"abc", END
    listing = listed(write(tmp_path / "a.tar", *blocks))
    assert [(item.name, item.image.read()) for item in listing.photos] == [("a.tar/b.png", b"abc")]


DAMAGED: dict[str, tuple[list[bytes], str]] = {
    "no bytes": ([], "empty (0 bytes)"),
    "no archive": ([b"hello" * 200], "not a tar archive"),
    "a member larger than the archive": ([header("a.png", 1 << 40)], "'a.png' has 1,099,511,627,776 bytes, 0 are left"),
    "a negative size": ([checked(header("a.png", 0)[:124] + b"\xff" * 12 + header("a.png", 0)[136:])], "has -1 bytes"),
    "a name without end": ([header("x", 1 << 33, tarfile.GNUTYPE_LONGNAME)], "8,589,934,592 bytes of text, more than"),
    "a pax header without end": ([header("x", 1 << 33, tarfile.XHDTYPE)], "8,589,934,592 bytes of text, more than"),
    "cut off in a name": ([header("x", 2000, tarfile.GNUTYPE_LONGNAME), b"x" * 512], "cut off at byte 1,024, within"),
    "cut off in a member": ([header("a.png", 2000), b"x" * 512], "cut off: 'a.png' has 2,000 bytes, 512 are left"),
    "cut off after a member": ([header("a.png", 512), b"x" * 512], "cut off at byte 1,024: it has no end mark"),
    "a damaged header": ([header("a.png", 0), b"x" * 512, END], "damaged at byte 512 (invalid header)"),
    "two of one name": ([header("a.png", 0), header("./a.png", 0), END], "holds a.png twice"),
    "more after the end": ([header("a.png", 0), END, header("b.png", 0), END], "continues after its end mark at byte 512"),
    "a pax size of words": (
        [header("x", 14, tarfile.XHDTYPE), b"14 size=hello\n", header("a.png", 0), END], "'hello' is no number"
    ),
    "a pax record of no length": ([header("x", 9, tarfile.XHDTYPE), b"0 path=a\n", END], "a malformed pax header"),
    "a pax record of too great a length": ([header("x", 9, tarfile.XHDTYPE), b"99 path=a", END], "a malformed pax header"),
    "a pax record of a huge number": ([header("x", 99, tarfile.XHDTYPE), b"9" * 99, END], "is no number"),
    "gzip": ([gzip.compress(b"x")], "compressed with gzip, so single photos cannot be read from it; decompress it"),
    "zstd": ([b"\x28\xb5\x2f\xfd" + bytes(600)], "compressed with zstd"),
}  # fmt: skip


@pytest.mark.parametrize(("blocks", "said"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_archive_is_named(blocks, said, tmp_path):
    path = write(tmp_path / "a.tar", *blocks)
    (problem,) = listed(path).problems
    assert problem.startswith(f"{path}: ") and said in problem


def test_an_archive_cut_off_anywhere_is_refused(tmp_path):
    whole = archive(tmp_path / "a.tar", ("a.png", png()), ("a.txt", b"said")).read_bytes()
    end = whole.rstrip(b"\0")
    for length in range(0, len(end) + 512, 128):
        (tmp_path / "a.tar").write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"a\.tar: (cut off|empty)"):
            scan([Source(0, str(tmp_path / "a.tar"))])


MUTATED = (
    *range(10),
    *range(124, 136),
    156,
    *range(345, 350),
    *range(512, 540),
)  # of a header: name, size, kind; what follows


@pytest.mark.parametrize("count", [100, pytest.param(5000, marks=pytest.mark.proof)])
def test_a_mutated_archive_is_read_or_refused(count, tmp_path):
    """The name of every member that is not refused lies in the archive; so do its bytes."""
    long = "é" * 120
    whole = archive(tmp_path / "a.tar", ("a.png", png()), (f"{long}.txt", b"said"), format=tarfile.PAX_FORMAT).read_bytes()
    headers = [at for at in range(0, len(whole), 512) if whole[at + 257 : at + 262] == b"ustar"]
    draw = random.Random(0)
    refused = 0
    for _ in range(count):
        mutated = bytearray(whole)
        at = draw.choice(headers)
        for _ in range(draw.randint(1, 3)):
            mutated[at + draw.choice(MUTATED)] = draw.randrange(256)
        mutated[at : at + 512] = checked(bytes(mutated[at : at + 512]))
        (tmp_path / "a.tar").write_bytes(mutated)
        listing = listed(tmp_path / "a.tar")
        refused += bool(listing.problems)
        for item in listing.photos:
            assert item.image.offset + item.image.size <= len(mutated) and ".." not in item.name.split("/")
    assert 0.1 * count < refused < 0.95 * count


def test_a_member_larger_than_any_photo_is_refused_unread(tmp_path):
    path = tmp_path / "a.tar"
    with path.open("wb") as file:  # the file has a hole: it takes no room on the disk
        file.write(header("a.png", MAX_BYTES + 1))
        file.truncate(512 + -(-(MAX_BYTES + 1) // 512) * 512 + 1024)
    with pytest.raises(UserError, match=r"a\.tar/a\.png: cannot be read \(2,147,483,649 bytes, more than the limit"):
        scan([Source(0, str(path))])


def test_an_archive_that_never_ends_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.tar")
    assert listed(tmp_path / "a.tar").problems == [f"{tmp_path}/a.tar: cannot be read (not a regular file)"]


def test_an_archive_that_shrank_is_named(tmp_path):
    path = archive(tmp_path / "a.tar", ("a.png", png()))
    (item,) = listed(path).photos
    os.truncate(path, 520)
    with pytest.raises(OSError, match=f"its archive ends after 8 of its {len(png())} bytes"):
        item.image.read()


def test_patterns_that_name_no_archive(tmp_path):
    archive(tmp_path / "a-0.tar", ("a.png", png()))
    for pattern, said in {
        "a-{0..2}.tar": [f"{tmp_path}/a-1.tar: no such file", f"{tmp_path}/a-2.tar: no such file"],
        "b*.tar": [f"{tmp_path}/b*.tar: no archive of this pattern"],
        "b.tar": [f"{tmp_path}/b.tar: no such file"],
        "b.tar.gz": [f"{tmp_path}/b.tar.gz: no such file"],
        "{0..99999999}.tar": [
            f"{tmp_path}/{{0..99999999}}.tar: {{0..99999999}} expands to 100,000,000 archives, the limit is 100,000"
        ],
        "{0..999}{0..999}.tar": [f"{tmp_path}/{{0..999}}{{0..999}}.tar: expands to 1,000,000 archives, the limit is 100,000"],
        "{2..1}.tar": [f"{tmp_path}/{{2..1}}.tar: {{2..1}} expands to no archive"],
    }.items():
        assert listed(tmp_path / pattern).problems == said


def test_compressed_archives_are_refused_by_every_name(tmp_path):
    archive(tmp_path / "a.tar", ("a.png", png()))
    packed = gzip.compress((tmp_path / "a.tar").read_bytes())
    for name in ("a.tar.gz", "b.tgz", "c.TAR.GZ", "d.tar"):
        (tmp_path / name).write_bytes(packed)
        (problem,) = listed(tmp_path / name).problems
        assert problem.startswith(f"{tmp_path / name}: compressed with gzip")


def test_archives_in_a_folder_are_told_how_to_be_read(tmp_path):
    archive(tmp_path / "a.tar", ("a.png", png()))
    (problem,) = listed(tmp_path).problems
    assert problem.endswith(f"other files: 1 .tar; for the archives give {tmp_path}/*.tar")
    (tmp_path / "b.png").write_bytes(png())
    assert told(listed(tmp_path)).left_out == (
        (f"{tmp_path}/a.tar", "an archive; give its path, or a pattern such as *.tar"),
    )


def test_masks_and_the_other_parts_of_a_sample_are_no_photos(tmp_path):
    names = ["a.png", "a.mask.png", "a.depth.png", "a.cls", "b.v1.png", "b.v2.png", "c.jpg", "C-masklabel.png"]
    listing = listed(archive(tmp_path / "a.tar", *((name, name.encode()) for name in names)), masks="files")
    assert {item.name: item.mask and item.mask.read() for item in listing.photos} == {
        "a.tar/a.png": b"a.mask.png",
        "a.tar/b.v1.png": None,
        "a.tar/b.v2.png": None,
        "a.tar/c.jpg": b"C-masklabel.png",
    }
    assert {Path(what).name: why for what, why in told(listing).left_out} == {
        "a.depth.png": "another part of a sample that has a photo",
        "a.cls": "not an image",
    }


def _digests(found) -> list[bytes]:
    return [item.image.read() for item in found]


def test_threads_and_processes_read_at_the_same_time(tmp_path):
    contents = {f"{number:03d}.png": random.Random(number).randbytes(5000) for number in range(100)}
    found = listed(archive(tmp_path / "a.tar", *contents.items())).photos
    with ThreadPoolExecutor(4) as pool:
        for read in pool.map(_digests, [found] * 4):
            assert read == list(contents.values())
    with multiprocessing.get_context("fork").Pool(2) as processes:
        for read in processes.map(_digests, [found] * 4):
            assert read == list(contents.values())


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_where_tarfile_says(format, tmp_path):
    """An independent reader, over names of every length that a header can hold and over it."""
    names = [
        f"{'d' * (length - 10)}/{'f' * 5}.png" for length in range(11, 255 if format == tarfile.USTAR_FORMAT else 400, 9)
    ]
    names = [name for name in names if format != tarfile.USTAR_FORMAT or len(name.partition("/")[0]) <= 100]
    path = archive(tmp_path / "a.tar", *((name, name.encode()) for name in names), format=format)
    with tarfile.open(path) as archived, path.open("rb") as file:
        expected = [(member.name, member.offset_data, member.size, None) for member in archived]
        assert list(map(tuple, tar.members(file, path.stat().st_size))) == expected
    assert [item[0] for item in expected] == names
