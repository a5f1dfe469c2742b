"""What a source's path holds: the table of layouts, each with real photos; every file used, left out or refused, by name."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests import photos as photos_of
from tests.harness import PHOTOS
from tests.photos import notes_of, scan
from trainer.base.errors import UserError
from trainer.data.examples import examples
from trainer.data.identity import fingerprint
from trainer.data.layouts.table import unwrapped
from trainer.data.sources import Listing, Scanned, Source

STEMS = ("00", "01", "02", "03", "04")
# As they stand in the files, written out: no reader of captions has made them.
CAPTIONS = {
    "00": "a photo of sks plush bear sitting on a grey rock, bushes behind",
    "01": "a photo of sks plush bear sitting on a stone wall beside a river",
    "02": "a photo of sks plush bear sitting on an asphalt road",
    "03": "a photo of sks plush bear sitting on green grass",
    "04": "a photo of sks plush bear on the pavement in front of a red brick wall",
}
WIDE = {"00": (96, 64), "01": (96, 96), "02": (80, 96), "03": (64, 96), "04": (96, 80)}


@pytest.fixture(scope="module")
def small() -> dict[str, bytes]:
    """The photos, small, as PNGs."""
    made = {}
    for stem in STEMS:
        with Image.open(PHOTOS / f"{stem}.jpg") as photo:
            buffer = io.BytesIO()
            photo.resize(WIDE[stem]).save(buffer, "PNG")
        made[stem] = buffer.getvalue()
    return made


def write(root: Path, files: Mapping[str, bytes | str]) -> Path:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    return root


def jsonl(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def table_of(rows: list[dict[str, str]], suffix: str) -> bytes:
    if suffix == ".jsonl":
        return jsonl(rows).encode()
    if suffix == ".csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


Files = Mapping[str, bytes | str]


@dataclass(frozen=True)
class Layout:
    """make: (stem -> PNG) -> files of the source. path: of the source, below the folder that they are written to.

    names, repeats, captions: by stem, where they are not "00.png", 1 and CAPTIONS. dataset: read by `datasets`, this split.
    others: how many further splits it has.
    """

    make: Callable[[Mapping[str, bytes]], Files]
    path: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)
    name: Callable[[str], str] = "{}.png".format
    captions: Callable[[str], str] = CAPTIONS.__getitem__
    repeats: int = 1
    dataset: str | None = None
    others: int = 0


def pngs(small: Mapping[str, bytes], folder: str = "") -> Files:
    return {f"{folder}{stem}.png": data for stem, data in small.items()}


def beside(suffix: str, text: Callable[[str], str] = CAPTIONS.__getitem__, folder: str = "") -> Callable[..., Files]:
    return lambda small: pngs(small, folder) | {f"{folder}{stem}{suffix}": text(stem) for stem in STEMS}


def rows(image: str = "file_name", caption: str = "text", folder: str = "") -> list[dict[str, str]]:
    return [{image: f"{folder}{stem}.png", caption: CAPTIONS[stem], "size": "768"} for stem in STEMS]


def in_table(suffix: str, name: str = "metadata", folder: str = "", **columns: str) -> Callable[..., Files]:
    return lambda small: pngs(small, folder) | {name + suffix: table_of(rows(folder=folder, **columns), suffix)}


def json_of(key: str) -> Callable[[str], str]:
    return lambda stem: json.dumps({"width": 768, key: CAPTIONS[stem]})


def tar(files: Files, format: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data.encode() if isinstance(data, str) else data)
            archive.addfile(member, io.BytesIO(data.encode() if isinstance(data, str) else data))
    return buffer.getvalue()


def in_tar(make: Callable[..., Files], name: str = "bears.tar", format: int = tarfile.PAX_FORMAT) -> Callable[..., Files]:
    return lambda small: {name: tar(make(small), format)}


def in_shards(small: Mapping[str, bytes]) -> Files:
    """One sample in each, as WebDataset writes them: a key, and members by their suffix."""
    made = {}
    for stem, data in small.items():
        made[f"shards/bears-{stem}.tar"] = tar({f"{stem}.png": data, f"{stem}.txt": CAPTIONS[stem]})
    return made


def saved(small: Mapping[str, bytes], columns: Callable[..., dict], save: Callable[..., object], split: str = "") -> Files:
    """What `datasets` writes. split: with this one among others, where it is named."""
    import datasets

    dataset = datasets.Dataset.from_dict(columns(small)).cast_column("image", datasets.Image())
    with tempfile.TemporaryDirectory() as folder:
        save(datasets.DatasetDict({split: dataset, "other": dataset.select([0])}) if split else dataset, Path(folder))
        return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def with_bytes(small: Mapping[str, bytes]) -> dict:
    images = [{"bytes": data, "path": None} for data in small.values()]
    return {"image": images, "score": [1] * len(small), "text": [CAPTIONS[stem] for stem in small]}


def of_bytes(small: Mapping[str, bytes]) -> Files:
    """Written without `datasets`: columns of bytes and of text."""
    buffer = io.BytesIO()
    table = {"jpg": list(small.values()), "image": list(CAPTIONS.values())}
    pq.write_table(pa.table(table), buffer)
    return {"bears.parquet": buffer.getvalue()}


def by_row(stem: str) -> str:
    return str(int(stem))


LONG = "a long folder's name/" * 12

LAYOUTS: dict[str, Layout] = {
    ".txt beside": Layout(beside(".txt")),
    ".TXT beside": Layout(beside(".TXT")),
    ".caption beside": Layout(beside(".caption")),
    ".Caption beside": Layout(beside(".Caption")),
    ".json beside, caption": Layout(beside(".json", json_of("caption"))),
    ".json beside, text": Layout(beside(".JSON", json_of("text"))),
    ".json beside, prompt": Layout(beside(".json", json_of("prompt"))),
    ".json beside, a field by name": Layout(beside(".json", json_of("tags")), keys={"caption_column": "tags"}),
    "subfolders": Layout(beside(".txt", folder="a/b.c/"), name="a/b.c/{}.png".format),
    "file names": Layout(
        lambda small: {f"sks_plush_bear {stem}.png": data for stem, data in small.items()},
        keys={"captions": "filename"},
        name="sks_plush_bear {}.png".format,
        captions="sks plush bear {}".format,
    ),
    "folder names": Layout(
        lambda small: pngs(small, "sks_plush bear/"),
        keys={"captions": "folder"},
        name="sks_plush bear/{}.png".format,
        captions=lambda stem: "sks plush bear",
    ),
    "the name of the source's folder": Layout(
        lambda small: pngs(small, "sks_bear/"), path="sks_bear", keys={"captions": "folder"}, captions=lambda stem: "sks bear"
    ),
    "kohya, captions beside": Layout(
        beside(".txt", folder="10_sks bear/"), name="10_sks bear/{}.png".format, repeats=10
    ),
    "kohya, the folder's name": Layout(
        lambda small: pngs(small, "img/10_sks plush_bear/"),
        name="img/10_sks plush_bear/{}.png".format,
        captions=lambda stem: "sks plush_bear",
        repeats=10,
    ),
    "kohya, one folder": Layout(
        lambda small: pngs(small, "3_sks bear/"), path="3_sks bear/", captions=lambda stem: "sks bear", repeats=3
    ),
    "metadata.jsonl in the folder": Layout(in_table(".jsonl")),
    "metadata.jsonl": Layout(in_table(".jsonl"), path="metadata.jsonl"),
    "metadata.csv in the folder": Layout(in_table(".csv")),
    "metadata.csv": Layout(in_table(".csv"), path="metadata.csv"),
    "metadata.parquet in the folder": Layout(in_table(".parquet")),
    "metadata.parquet": Layout(in_table(".parquet"), path="metadata.parquet"),
    "a table, caption in `caption`": Layout(in_table(".jsonl", caption="caption")),
    "a table of another name and columns": Layout(
        in_table(".csv", "bears", image="image", caption="said"),
        path="bears.csv",
        keys={"image_column": "image", "caption_column": "said"},
    ),
    "a table of files in subfolders": Layout(in_table(".jsonl", folder="x/y/"), name="x/y/{}.png".format),
    "a table in each subfolder": Layout(
        lambda small: pngs(small, "train/") | {"train/metadata.jsonl": jsonl(rows())}, name="train/{}.png".format
    ),
    "a table made on Windows": Layout(
        lambda small: pngs(small, "x/") | {"metadata.csv": table_of(rows(folder="x\\"), ".csv")}, name="x/{}.png".format
    ),
    "a table without captions, captions beside": Layout(
        lambda small: beside(".txt")(small) | {"metadata.jsonl": jsonl({"file_name": f"{stem}.png"} for stem in STEMS)}
    ),
    "an archive, .txt": Layout(in_tar(beside(".txt")), path="bears.tar", name="bears.tar/{}.png".format),
    "an archive, .CAPTION": Layout(in_tar(beside(".CAPTION")), path="bears.tar", name="bears.tar/{}.png".format),
    "an archive, .json": Layout(
        in_tar(beside(".json", json_of("tags"))),
        path="bears.tar",
        keys={"caption_column": "tags"},
        name="bears.tar/{}.png".format,
    ),
    "an archive of a folder, made with tar -C": Layout(
        in_tar(beside(".txt", folder="./a/b.c/"), format=tarfile.USTAR_FORMAT),
        path="*.tar",
        name="bears.tar/a/b.c/{}.png".format,
    ),
    "an archive with long names, GNU": Layout(
        in_tar(beside(".txt", folder=LONG), format=tarfile.GNU_FORMAT),
        path="bears.tar",
        name=f"bears.tar/{LONG}{{}}.png".format,
    ),
    "an archive with long names, pax": Layout(
        in_tar(beside(".txt", folder=f"é/{LONG}")), path="bears.tar", name=f"bears.tar/é/{LONG}{{}}.png".format
    ),
    "an archive of kohya's folder": Layout(
        in_tar(pngs, "10_sks bear.tar"),
        path="10_sks bear.tar",
        name="10_sks bear.tar/{}.png".format,
        captions=lambda stem: "sks bear",
        repeats=10,
    ),
    "an archive, its name": Layout(
        in_tar(pngs, "sks_bear.tar"),
        path="sks_bear.tar",
        keys={"captions": "folder"},
        name="sks_bear.tar/{}.png".format,
        captions=lambda stem: "sks bear",
    ),
    "shards by numbers": Layout(in_shards, path="shards/bears-{00..04}.tar", name="bears-{0}.tar/{0}.png".format),
    "shards by names": Layout(in_shards, path="shards/{bears-00,bears-0[1-9]}.tar", name="bears-{0}.tar/{0}.png".format),
    "shards by a pattern": Layout(in_shards, path="shards/*.tar", name="bears-{0}.tar/{0}.png".format),
    "shards in folders": Layout(in_shards, path="*/bears-0?.tar", name="shards/bears-{0}.tar/{0}.png".format),
    "hf, save_to_disk": Layout(
        lambda small: saved(small, with_bytes, lambda dataset, folder: dataset.save_to_disk(folder)), name=by_row, dataset=""
    ),
    "hf, save_to_disk, a split": Layout(
        lambda small: saved(small, with_bytes, lambda dataset, folder: dataset.save_to_disk(folder), "bears"),
        name=by_row,
        dataset="@bears",
        others=1,
    ),
    "hf, a folder of parquet": Layout(
        lambda small: saved(small, with_bytes, lambda dataset, folder: dataset.to_parquet(folder / "train.parquet")),
        name=by_row,
        dataset="",
    ),
    "hf, a parquet file that another program wrote": Layout(
        of_bytes,
        path="bears.parquet",
        keys={"image_column": "jpg", "caption_column": "image"},
        name=by_row,
        dataset="@train",
    ),
    "hf, a folder of images": Layout(in_table(".jsonl", caption="prompt"), name=by_row, dataset="@train"),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_gives_the_same_samples_and_captions(layout: Layout, small, tmp_path_factory, tmp_path, monkeypatch):
    write(tmp_path, layout.make(small))
    path = os.path.join(tmp_path, layout.path)
    if layout.dataset is not None:
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        path = f"hf:{path.rstrip('/')}{layout.dataset}"
    scanned = scan([Source(4, path, 2, **layout.keys)], strict_captions=True)
    assert [
        (photo.sample, photo.caption, bool(photo.caption_from), photo.repeats, *photo.size, photo.image.read())
        for photo in scanned.photos
    ] == [
        (f"4/{layout.name(stem)}", layout.captions(stem), True, 2 * layout.repeats, *WIDE[stem], small[stem])
        for stem in STEMS
    ]
    assert [why for _, why in scanned.left_out] == ["in another split"] * layout.others


def test_an_ordinary_folder_has_the_digests_it_always_had():
    """Those of commit 0da379e, from before there were other layouts: a checkpoint pins them."""
    photos = scan([Source(0, "examples/bear_plushie", 3, resolutions=(64,))]).photos
    assert fingerprint(examples(photos, step=16, enlarge=False, seed=0)) == {
        "photos": "b8e67480a0d088cb0b426ffaaf5985facdb6de6ba7cc978f6dc35b0955b52790",
        "contents of the photos": "fd585599af0d0142cb46c63b21bc52a83935af8d98c806750bb594d2b5aaca4b",
        "captions": "a9b576d4d754814a950727548cfd5727df35f20b0c7621396cf44130c143aa2d",
        "repeats": "8454eaaaf3e92acb519956a021b2d50f23a1f86d8bee2a946600fabde29c7ab7",
        "buckets": "57a0f7e9db9ac24efa5891c419820dc6cea771ddf03abed2aee845e777181fb3",
    }


def listed(root: Path | str, **keys) -> Listing:
    return photos_of.listing(Source(0, str(root), **keys))


def told(listing: Listing) -> Scanned:
    return Scanned((), listing.account)


def captions_of(listing: Listing) -> dict[str, str | None]:
    """By the image's name; of a file its name."""
    return {
        item.name: item.caption if isinstance(item.caption, str | None) else os.path.basename(str(item.caption))
        for item in listing.photos
    }


def test_of_several_captions_the_first_kind_is_taken_and_the_others_are_named(tmp_path):
    write(tmp_path, dict.fromkeys(["a.png", "a.json", "a.caption", "a.TXT", "b.png", "b.json", "b.Caption", "c.png"], "x"))
    listing = listed(tmp_path)
    assert captions_of(listing) == {"a.png": "a.TXT", "b.png": "b.Caption", "c.png": None}
    left = {os.path.basename(what): why for what, why in told(listing).left_out}
    assert left == {
        "a.json": ".txt is used instead",
        "a.caption": ".txt is used instead",
        "b.json": ".caption is used instead",
    }
    assert "1 from .caption, 1 from .txt; 1 images have none" in notes_of(told(listing))[0]


def test_a_caption_of_exactly_the_image_s_name_belongs_to_it_alone(tmp_path):
    write(tmp_path, dict.fromkeys(["a.png", "A.png", "a.txt", "B.jpg", "b.txt", "c.png", "c.jpg", "c.txt"], "x"))
    captions = captions_of(listed(tmp_path))
    expected = {"a.png": "a.txt", "A.png": None, "B.jpg": "b.txt", "c.png": "c.txt", "c.jpg": "c.txt"}
    assert captions == expected


def test_masks_are_no_images(tmp_path):
    names = [
        "a.png",
        "a.mask.png",
        "b.jpg",
        "B-MaskLabel.png",
        "c.png",
        "c.mask.png",
        "c-masklabel.png",
        "d.mask.png",
        "e.png",
    ]
    write(tmp_path, dict.fromkeys(names, "x"))
    listing = listed(tmp_path, masks="files")
    masks = {item.name: item.mask and os.path.basename(str(item.mask)) for item in listing.photos}
    assert masks == {"a.png": "a.mask.png", "b.jpg": "B-MaskLabel.png", "c.png": "c.mask.png", "e.png": None}
    left = {os.path.basename(what): why for what, why in told(listing).left_out}
    assert left == {"c-masklabel.png": ".mask.png is used instead", "d.mask.png": "no image has its name"}


def test_a_companion_that_is_not_taken_says_what_is_taken_instead(tmp_path):
    names = [
        "a.png", "a.txt", "A.txt", "A.json", "a.mask.png", "A.mask.png", "A-masklabel.png",
        "b.psd", "b.txt", "b.json", "b.mask.png", "c.txt", "c.json",
    ]  # fmt: skip
    write(tmp_path, dict.fromkeys(names, "x"))
    left = {os.path.basename(what): why for what, why in told(listed(tmp_path, masks="files")).left_out}
    assert left == {
        "A.txt": "a.txt is used instead",
        "A.json": "a.txt is used instead",
        "A.mask.png": "a.mask.png is used instead",
        "A-masklabel.png": "a.mask.png is used instead",
        "b.psd": ".psd images are not read; convert them to PNG or JPEG",
        "b.txt": "its image is left out",
        "b.json": "its image is left out",
        "b.mask.png": "its image is left out",
        "c.txt": "no image has its name",
        "c.json": "no image has its name",
    }


def test_captions_by_name_read_no_file(tmp_path):
    write(tmp_path, {"10_sks dog/a_b.png": "x", "10_sks dog/a_b.txt": "text", "top.png": "x"})
    for keys, captions in {
        "filename": {"10_sks dog/a_b.png": "a b", "top.png": "top"},
        "folder": {"10_sks dog/a_b.png": "sks dog", "top.png": tmp_path.name.replace("_", " ")},
        "none": {"10_sks dog/a_b.png": None, "top.png": None},
    }.items():
        listing = listed(tmp_path, captions=keys)
        assert captions_of(listing) == captions
        assert [(os.path.basename(what), why) for what, why in told(listing).left_out] == [
            ("a_b.txt", f'captions = "{keys}"')
        ]
        assert [item.repeats for item in listing.photos] == [10, 1]


def test_captions_left_out_by_name_are_not_missing_in_strict_mode(small, tmp_path):
    write(tmp_path, pngs(small))
    photos = scan([Source(0, str(tmp_path), captions="none")], strict_captions=True).photos
    assert [(photo.caption, bool(photo.caption_from)) for photo in photos] == [("", False)] * 5
    with pytest.raises(UserError, match="5 problems"):
        scan([Source(0, str(tmp_path))], strict_captions=True)


def test_auto_that_finds_nothing_says_what_it_found(tmp_path):
    write(tmp_path, dict.fromkeys(["a.png", "b.png", "a.tags", "b.tags", "notes.md"], "x"))
    listing = listed(tmp_path)
    assert captions_of(listing) == {"a.png": None, "b.png": None}
    assert (
        "captions of" in notes_of(told(listing))[0]
        and ": none." in notes_of(told(listing))[0]
        and "found 2 .tags, 1 .md" in notes_of(told(listing))[0]
    )
    assert 'captions = "filename"' in notes_of(told(listing))[0]


@pytest.mark.parametrize(
    ("name", "repeats"),
    [
        ("10_sks dog", 10), ("1_dog", 1), ("999_a b", 999), ("2023_holiday", None), ("01_first", None), ("10 dogs", None),
        ("10_", None), ("10_ ", None), ("sks_10", None), ("-3_dog", None), ("3_dog/7_cat", 7), ("3_dog/cat", 3),
    ],
)  # fmt: skip
def test_which_folders_are_kohya_s(name, repeats, tmp_path):
    write(tmp_path, {f"{name}/a.png": "x"})
    listing = listed(tmp_path)
    (item,) = listing.photos
    assert item.repeats == (repeats or 1) and (item.caption is None) == (repeats is None)
    assert any(f"{repeats} repeats of 1 images" in line for line in notes_of(told(listing))) == (repeats is not None)


def problems(root: Path | str, **keys) -> list[str]:
    return list(listed(root, **keys).problems)


TABLE = {"file_name": "a.png", "text": "said"}
# (files besides a.png and b.png, keys, what every problem says)
BAD_TABLES = {
    "a missing file": ([TABLE, {"file_name": "c.png"}], "row 2 names 'c.png': no such file; correct or remove the row"),
    "another folder": ([TABLE, {"file_name": "../x.png"}], "row 2: file_name = '../x.png' is not in the table's folder"),
    "round about": (
        [TABLE, {"file_name": "s/../../x.png"}],
        "row 2: file_name = 's/../../x.png' is not in the table's folder",
    ),
    "absolute": ([TABLE, {"file_name": "/etc/x.png"}], "row 2: file_name = '/etc/x.png' is not in the table's folder"),
    "a drive": ([TABLE, {"file_name": "C:\\x.png"}], "is not in the table's folder"),
    "backslashes": ([TABLE, {"file_name": "..\\x.png"}], "is not in the table's folder"),
    "twice": ([TABLE, {"file_name": "./a.png", "text": "other"}], "row 2 names 'a.png' again, after row 1"),
    "hidden": ([TABLE, {"file_name": ".h/x.png"}], "row 2 names '.h/x.png': hidden; give it another name"),
    "not an image": ([TABLE, {"file_name": "n.md"}], "row 2 names 'n.md': not an image (.avif, "),
    "a mask": ([TABLE, {"file_name": "a.mask.png"}], "row 2 names 'a.mask.png': a mask"),
    "an image that is not read": (
        [TABLE, {"file_name": "p.psd"}],
        "row 2 names 'p.psd': .psd images are not read; convert them to PNG or JPEG",
    ),
    "a folder": ([TABLE, {"file_name": "f.png"}], "row 2 names 'f.png': no file of exactly this name"),
    "no name": ([TABLE, {"file_name": None}], "row 2: file_name is not a file name: None"),
    "a number": ([TABLE, {"file_name": 7}], "row 2: file_name is not a file name: 7"),
    "a caption that is none": ([TABLE, {"file_name": "b.png", "text": 7}], "row 2: the caption is not text but 7"),
    "half a character": ([TABLE, {"file_name": "b.png", "text": "\ud800"}], "row 2: the caption is not Unicode"),
    "no column": ([{"image": "a.png"}], "row 1 has no column file_name (['image']); name it with image_column"),
}


@pytest.mark.parametrize(("rows", "said"), BAD_TABLES.values(), ids=BAD_TABLES.keys())
def test_a_row_that_cannot_be_used_is_named(rows, said, tmp_path):
    write(tmp_path, {"a.png": "x", "b.png": "x", "n.md": "x", ".h/x.png": "x", "metadata.jsonl": jsonl(rows)})
    write(tmp_path, {"a.mask.png": "x", "p.psd": "x", "f.png/n.md": "x"})
    write(tmp_path.parent, {"x.png": "x"})
    (problem,) = problems(tmp_path)
    assert problem.startswith(f"{tmp_path}/metadata.jsonl: ") and said in problem


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("metadata.jsonl", b'{"file_name": "a.png"}\n{"file_name": ', "row 2 is not JSON"),
        ("metadata.jsonl", b"[" * 100_000, "row 1 is not JSON"),
        ("metadata.jsonl", b"[1]\n", "row 1 is not a JSON object but [1]"),
        ("metadata.jsonl", b'{"file_name": "a.png", "text": "caf\xe9"}', "line 1: 0xe9, \u00e9 in Windows-1252); save"),
        ("metadata.jsonl", b"", "no images in it"),
        (
            "metadata.csv",
            b"file_name,text\na.png,one, two\n",
            "row 1 has 3 cells, the first line 2; put text that has commas",
        ),
        ("metadata.csv", b'file_name,text\na.png,"one\n', "unexpected end of data"),
        ("metadata.csv", b"file_name,text\na.png," + b"x" * 200_000, "field larger than field limit"),
        ("metadata.csv", b"", "no images in it"),
        ("metadata.parquet", b"PAR1", "Parquet"),
        ("metadata.parquet", b"", "Parquet"),
    ],
)
def test_a_damaged_table_is_named(name, data, said, tmp_path):
    write(tmp_path, {"a.png": "x", name: data})
    found = problems(tmp_path)
    assert len(found) == 1 and said in found[0], found


@pytest.mark.parametrize(
    "text",
    ["file_name;text\na.png;red, wet\n", "sep=;\nfile_name;text\na.png;red, wet\n", "file_name\ttext\na.png\tred, wet\n"],
    ids=["semicolons", "named", "tabs"],
)
def test_what_stands_between_the_cells_of_csv_is_seen(tmp_path: Path, text: str):
    """Excel writes semicolons where the comma is for decimals. A comma in a caption parts nothing there."""
    write(tmp_path, {"a.png": "x", "metadata.csv": "\ufeff" + text})
    listing = listed(tmp_path)
    assert captions_of(listing) == {"a.png": "red, wet"} and not listing.problems


def test_two_tables_in_a_folder_are_refused_and_one_of_them_can_be_named(tmp_path):
    one, two = jsonl([TABLE]), "file_name,text\na.png,other\n"
    write(tmp_path, {"a.png": "x", "metadata.jsonl": one, "metadata.csv": two})
    assert any("metadata.csv and metadata.jsonl; keep one, or give its path" in problem for problem in problems(tmp_path))
    listing = listed(tmp_path / "metadata.csv")
    assert captions_of(listing) == {"a.png": "other"} and not listing.problems
    assert told(listing).left_out == ((f"{tmp_path}/metadata.jsonl", "not an image"),)


@pytest.mark.parametrize(
    ("name", "text", "right"),
    [
        ("captions.csv", "file_name,text\na.png,said\n", "metadata.csv"),
        ("captions.jsonl", jsonl([{"file_name": "a.png", "text": "said"}]), "metadata.jsonl"),
        ("prices.csv", "thing,price\nbear,3\n", ""),
        ("broken.csv", 'file_name,text\n"a.png', ""),
    ],
)
def test_a_table_of_another_name_is_told_to_be_renamed(tmp_path, name: str, text: str, right: str):
    write(tmp_path, {"a.png": "x", name: text})
    warnings = [note for note in notes_of(told(listed(tmp_path))) if note.startswith("warning: ")]
    expected = f"warning: {tmp_path}/{name} is not read; rename it to {right}, and its rows give the captions"
    assert warnings == ([expected] if right else [])
    if right:
        (tmp_path / name).rename(tmp_path / right)
        assert captions_of(listed(tmp_path)) == {"a.png": "said"}


def test_a_photo_in_place_of_a_folder_names_its_folder(tmp_path):
    write(tmp_path, {"a.png": "x"})
    assert problems(tmp_path / "a.png") == [
        f"{tmp_path}/a.png: one photo; give the folder that holds your photos ({tmp_path})"
    ]


def test_a_table_says_which_images_and_its_text_goes_before_a_file(tmp_path):
    rows = [TABLE, {"file_name": "b.png", "text": None}, {"file_name": "c.png", "text": ""}]
    files = dict.fromkeys(["a.png", "a.txt", "b.png", "b.txt", "c.png", "c.txt", "d.png", "d.txt", "e.txt"], "x")
    write(tmp_path, files | {"metadata.jsonl": jsonl(rows)})
    listing = listed(tmp_path)
    assert captions_of(listing) == {"a.png": "said", "b.png": "b.txt", "c.png": ""} and not listing.problems
    assert {os.path.basename(what): why for what, why in told(listing).left_out} == {
        "a.txt": "metadata.jsonl is used instead",
        "c.txt": "metadata.jsonl is used instead",
        "d.png": "no row of metadata.jsonl names it",
        "d.txt": "its image is left out",
        "e.txt": "no image has its name",
    }


def test_the_nearest_table_rules_a_folder(tmp_path):
    inner = {"file_name": "a.png", "text": "inner"}
    outer = [TABLE, {"file_name": "s/a.png", "text": "outer"}]
    write(tmp_path, {"a.png": "x", "s/a.png": "x", "s/metadata.jsonl": jsonl([inner])})
    write(tmp_path, {"metadata.jsonl": jsonl(outer)})
    listing = listed(tmp_path)
    assert captions_of(listing) == {"a.png": "said", "s/a.png": "inner"}
    assert len(listing.problems) == 1 and "the metadata of its own subfolder names it too" in listing.problems[0]


def test_columns_that_nothing_has_are_refused(tmp_path):
    write(tmp_path, {"a.png": "x", "a.txt": "x"})
    assert "data.sources.0.image_column = 'i' has no effect" in problems(tmp_path, image_column="i")[0]
    assert "data.sources.0.caption_column = 'c' has no effect" in problems(tmp_path, caption_column="c")[0]
    write(tmp_path, {"metadata.jsonl": jsonl([TABLE])})
    assert "no row has the column c that caption_column names" in problems(tmp_path, caption_column="c")[0]
    assert "row 1 has no column i" in problems(tmp_path, image_column="i")[0]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'["a"]', "not a JSON object"),
        (
            b'{"tags": "a"}',
            "has no field caption or text or prompt (it has ['tags']); name the caption's field with caption_column",
        ),
        (b'{"caption": 7}', "the caption is not text but 7"),
        (b'{"caption": "\\ud800"}', "the caption is not Unicode"),
        (b'{"caption": "caf\xe9"}', "not UTF-8 (at byte 16, line 1: 0xe9, é in Windows-1252); save it as UTF-8"),
    ],
)
def test_a_json_file_without_a_caption_is_refused(data, said, small, tmp_path):
    write(tmp_path, {"a.png": small["00"], "a.json": data})
    with pytest.raises(UserError) as refused:
        scan([Source(0, str(tmp_path))])
    assert f"{tmp_path}/a.json: " in str(refused.value) and said in str(refused.value)


def test_null_is_no_caption_in_a_json_file_as_in_a_table(small, tmp_path):
    files = {"a.png": small["00"], "a.json": '{"caption": null}', "b.png": small["01"], "b.json": '{"caption": ""}'}
    table = jsonl({"file_name": f"{stem}.png", "caption": caption} for stem, caption in (("a", None), ("b", "")))
    write(tmp_path / "beside", files)
    write(tmp_path / "table", pngs({"a": small["00"], "b": small["01"]}) | {"metadata.jsonl": table})
    for folder in ("beside", "table"):
        photos = scan([Source(0, str(tmp_path / folder))]).photos
        assert [(photo.caption, bool(photo.caption_from)) for photo in photos] == [("", False), ("", True)]
    assert [photo.caption_from for photo in scan([Source(0, str(tmp_path / "beside"))]).photos] == ["", ".json"]
    with pytest.raises(UserError) as refused:
        scan([Source(0, str(tmp_path / "beside"))], strict_captions=True)
    assert "a.png: no caption for it" in str(refused.value) and "b.json: the caption is empty" in str(refused.value)


def test_strict_mode_names_the_remedy_of_the_layout(small, tmp_path):
    write(tmp_path / "folder", pngs({"a": small["00"]}))
    write(tmp_path, {"a.tar": tar(pngs({"a": small["00"]}))})
    row = saved(small, lambda small: {"image": [{"bytes": small["00"], "path": None}]}, lambda d, to: d.save_to_disk(to))
    write(tmp_path / "hf", row)
    for path, remedy in (
        (f"{tmp_path}/folder", "a.png: no caption for it (.txt, .caption, .json beside it, or a row of metadata)"),
        (f"{tmp_path}/a.tar", "a.tar/a.png: no caption for it (.txt, .caption, .json beside it in the archive)"),
        (
            f"hf:{tmp_path}/hf",
            "row 0: no caption for it (column caption or text or prompt of its row; caption_column names another)",
        ),
    ):
        with pytest.raises(UserError) as refused:
            scan([Source(0, path)], strict_captions=True)
        assert str(refused.value).endswith(remedy)


def test_several_captions_of_a_record_are_lines(small, tmp_path):
    write(tmp_path, {"a.png": small["00"], "a.json": json.dumps({"caption": [" one", "two "]}), "b.png": small["01"]})
    assert scan([Source(0, str(tmp_path))]).photos[0].caption == "one\ntwo"


def test_what_is_left_out_is_told_by_reason(tmp_path):
    names = [".hidden.png", ".git/x.png", "notes.md", "film.mp4", "raw.CR2", "orphan.txt", "a.png", "sub/.DS_Store"]
    write(tmp_path, dict.fromkeys(names, "x"))
    (tmp_path / "sub/back").symlink_to(tmp_path)
    assert {
        os.path.relpath(what, tmp_path) + "/" * what.endswith("/"): why for what, why in told(listed(tmp_path)).left_out
    } == {
        ".hidden.png": "hidden",
        ".git/": "hidden",
        "notes.md": "not an image",
        "film.mp4": "a video",
        "raw.CR2": ".cr2 images are not read; convert them to PNG or JPEG",
        "orphan.txt": "no image has its name",
        "sub/.DS_Store": "hidden",
        "sub/back/": f"a link to the folder {tmp_path}, which is read already",
    }


def test_a_folder_without_images_says_what_it_holds(tmp_path):
    write(tmp_path, {"a.psd": "x", "b.psd": "x", "README": "x"})
    (problem,) = problems(tmp_path)
    assert "no images in it" in problem and problem.endswith("it holds other files: 2 .psd, 1 without a suffix")


def test_a_path_that_is_neither_a_folder_nor_a_table(tmp_path):
    write(tmp_path, {"a.zip": "x"})
    assert problems(tmp_path / "a.zip") == [
        f"{tmp_path}/a.zip: not a folder, and not a table of images (.jsonl, .csv, .parquet)"
    ]
    write(tmp_path, {"meta_cap.json": '{"a": {"caption": "x"}}'})
    (kohyas,) = problems(tmp_path / "meta_cap.json")
    assert "sd-scripts' metadata" in kohyas and '{"file_name": "01.png", "text": "..."}' in kohyas
    assert problems(tmp_path / "metadata.jsonl") == [f"{tmp_path}/metadata.jsonl: no such file"]
    assert problems(tmp_path / "photos") == [f"{tmp_path}/photos: no such folder"]


NAMES = st.sampled_from(["a", "A", "b", "a.mask", "b-masklabel", "c.d", ".h", "metadata", "10_x"])
SUFFIXES = st.sampled_from([".png", ".PNG", ".jpg", ".txt", ".TXT", ".caption", ".json", ".psd", ".md", ""])
FOLDERS = st.sampled_from(["", "s/", "10_k w/", ".g/", "s/t/"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sets(st.tuples(FOLDERS, NAMES, SUFFIXES).map("".join), min_size=1, max_size=14),
    st.sampled_from(["auto", "filename", "folder", "none"]),
    st.booleans(),
)
def test_every_file_is_used_or_named(tmp_path_factory, names, captions, with_table):
    root = tmp_path_factory.mktemp("source")
    names = {name for name in names if not any(other.startswith(f"{name}/") for other in names)}
    write(root, dict.fromkeys(names, "x"))
    images = [name for name in sorted(names) if name.lower().endswith((".png", ".jpg")) and "/." not in f"/{name}"]
    rows = [{"file_name": name} for name in images[::2] if "mask" not in name]
    if with_table:
        write(root, {"metadata.jsonl": jsonl(rows)})
    listing = listed(root, captions=captions)
    used = [str(place) for item in listing.photos for place in (item.image, item.caption, item.mask)]
    left = [what for what, _ in told(listing).left_out]
    for name in names:
        path = os.path.join(root, name)
        there = used.count(path) > 0, any(path == what or (what.endswith("/") and path.startswith(what)) for what in left)
        assert sum(there) == 1, (name, there)
    assert len(left) == len(set(left))
    for what, why in told(listing).left_out:
        assert why.strip(), what
        if (
            why.endswith(" is used instead") and why != "metadata.jsonl is used instead"
        ):  # of this image, whatever its letter case
            stem = os.path.basename(what).partition(".")[0].removesuffix("-masklabel").lower()
            folder, taken = os.path.dirname(what), why.removesuffix(" is used instead")
            mine = [each for each in used if os.path.dirname(each) == folder and each.lower().endswith(taken.lower())]
            assert any(os.path.basename(each).lower().startswith(stem) for each in mine), (what, why, used)


WEIGHED = [
    {"file_name": "a.png", "repeats": 3, "loss_weight": None},
    {"file_name": "b.png", "repeats": 1, "loss_weight": 0.5},
    {"file_name": "c.png", "repeats": None, "loss_weight": None},
]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_row_has_repeats_and_a_loss_weight_of_its_own(tmp_path: Path, small: dict[str, bytes], suffix: str) -> None:
    files = {f"2_bears/{name}.png": small[stem] for name, stem in zip("abc", STEMS, strict=False)}
    folder = write(tmp_path, files | {f"2_bears/metadata{suffix}": table_of(WEIGHED, suffix)})
    photos = scan([Source(0, str(folder), repeats=5, loss_weight=0.1)]).photos
    assert [photo.repeats for photo in photos] == [30, 10, 10]
    assert [photo.loss_weight for photo in photos] == [0.1, 0.05, 0.1]
    # A run whose table had such a column while it was not read is not resumed: its photos are others.
    assert [photo.contents == photo.sha256 for photo in photos] == [True, False, True]
    assert photos[1].contents == [photos[1].sha256, "loss weight 0.5"]


@pytest.mark.parametrize(
    ("column", "value", "why"),
    [
        ("repeats", 0, "repeats = 0 is not 1 or more; to leave a photo out, remove its row"),
        ("repeats", 1.5, "repeats = 1.5 is not a whole number"),
        ("repeats", "often", "repeats = 'often' is not 1 or more; to leave a photo out, remove its row"),
        ("repeats", True, "repeats = True is not 1 or more; to leave a photo out, remove its row"),
        ("loss_weight", 0, "loss_weight = 0 is not a number above 0"),
        ("loss_weight", [1], "loss_weight = [1] is not a number above 0"),
        ("loss_weight", float("inf"), "loss_weight = inf is not a number above 0"),
    ],
)
def test_a_row_with_another_number_is_refused(tmp_path: Path, small: dict[str, bytes], column: str, value, why: str) -> None:
    rows = [{"file_name": "a.png", column: value}, {"file_name": "b.png"}]
    write(tmp_path, {"a.png": small["00"], "b.png": small["01"], "metadata.jsonl": jsonl(rows)})
    with pytest.raises(UserError, match=re.escape(f"metadata.jsonl: row 1: {why}")):
        scan([Source(0, str(tmp_path))])


@pytest.mark.parametrize(
    ("text", "caption", "field"),
    [
        ('{"caption": "a bear"}', "a bear", "caption"),
        (' {"tags": ["x"], "prompt": ["one", "two"]}\n', "one\ntwo", "prompt"),
        ('{"mine": "a bear", "caption": "no"}', "a bear", "mine"),
        ("{red|blue} bear", "{red|blue} bear", ""),
        ("{a bear}", "{a bear}", ""),
        ('["a"]', '["a"]', ""),
        ("{" * 100_000, None, ""),
    ],
)
@pytest.mark.parametrize("where", ["a.txt", "metadata.jsonl"])
def test_a_caption_that_is_json_is_its_field(tmp_path, small, where, text: str, caption: str | None, field: str) -> None:
    data = jsonl([{"file_name": "a.png", "mine" if field == "mine" else "text": text}]) if where != "a.txt" else text
    write(tmp_path, {"a.png": small["00"], where: data})
    if caption is None:
        with pytest.raises(UserError, match="its caption has 100,000 characters"):
            scan([Source(0, str(tmp_path))])
        return
    if field == "mine" and where == "a.txt":  # a column of nothing but such texts
        assert unwrapped(text, "mine") == (caption, field)
        return
    scanned = scan([Source(0, str(tmp_path), caption_column="mine" if field == "mine" else None)])
    assert scanned.photos[0].caption == caption
    noted = f"1 photo: its caption is the field {field} of a JSON text ({tmp_path}/a.png)"
    assert (noted in notes_of(scanned)) == bool(field)


@pytest.mark.parametrize(
    "text", ['{"scene": "a bear"}', "{}", '{"caption": null}', '{"caption": 7}', '{"caption": {"a": "b"}}']
)
def test_braces_of_json_are_not_trained_unless_a_file_says_so(tmp_path: Path, small: dict[str, bytes], text: str) -> None:
    write(tmp_path, {"a.png": small["00"], "a.txt": text})
    with pytest.raises(UserError, match=r"a\.txt: the caption is (JSON without caption or text or prompt|not text but)"):
        scan([Source(0, str(tmp_path))])
    (tmp_path / "a.txt").unlink()
    write(tmp_path, {"a.json": json.dumps({"caption": json.loads(text)})})
    assert json.loads(scan([Source(0, str(tmp_path))]).photos[0].caption) == json.loads(text)
