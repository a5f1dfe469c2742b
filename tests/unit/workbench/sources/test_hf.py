"""Datasets of the library `datasets` as sources: what is refused, what a row may name, and how its captions are found."""

from __future__ import annotations

import io
import json
import multiprocessing
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import pytest
from PIL import Image

from tests import photos as photos_of
from tests.photos import notes_of, scan, survey
from trainer import config as configs
from trainer.base.account import Heading
from trainer.base.errors import UserError
from trainer.data.sources import Listing, Scanned, Source
from workbench.sources import hf


def png(colour: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (64, 64), colour).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> None:
    """No cache of the user's, and no network."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


def saved(folder: Path, columns: dict, *images: str) -> str:
    dataset = datasets.Dataset.from_dict(columns)
    for column in images:
        dataset = dataset.cast_column(column, datasets.Image())
    dataset.save_to_disk(folder)
    return f"hf:{folder}"


def encoded(count: int) -> list[dict]:
    return [{"bytes": png(number), "path": None} for number in range(count)]


def listed(path: str, **keys) -> Listing:
    return photos_of.listing(Source(0, path, **keys))


def told(listing: Listing) -> Scanned:
    return Scanned((), listing.account)


def captions(listing: Listing) -> list[str | None]:
    return [item.caption for item in listing.photos]


def test_captions_come_from_the_first_column_that_has_them(tmp_path):
    columns = {"image": encoded(3), "prompt": ["p"] * 3, "text": [" said ", None, ""], "all": [["a", "b"], ["c"], None]}
    path = saved(tmp_path / "d", columns, "image")
    listing = listed(path)
    assert captions(listing) == ["said", None, ""]
    assert notes_of(told(listing))[0] == f"captions of {path}: 2 from column text; 1 images have none"
    assert captions(listed(path, caption_column="prompt")) == ["p"] * 3
    assert captions(listed(path, caption_column="all")) == ["a\nb", "c", None]
    assert captions(listed(path, captions="none")) == [None] * 3


def test_without_a_column_of_captions_its_columns_are_told(tmp_path):
    listing = listed(saved(tmp_path / "d", {"image": encoded(1), "words": ["x"]}, "image"))
    assert (
        captions(listing) == [None] and "none. Its columns: image, words. caption_column names" in notes_of(told(listing))[0]
    )


def test_what_cannot_be_meant_is_refused(tmp_path):
    path = saved(tmp_path / "d", {"a": encoded(1), "b": encoded(1), "words": ["x"], "number": [7]}, "a", "b")
    empty = saved(tmp_path / "e", {"image": encoded(1)}, "image")
    (tmp_path / "none").mkdir()
    datasets.load_from_disk(tmp_path / "e").select([]).to_parquet(tmp_path / "none" / "train.parquet")
    datasets.DatasetDict({name: datasets.load_from_disk(tmp_path / "e") for name in ("one", "two")}).save_to_disk(
        tmp_path / "s"
    )
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "train.parquet").write_bytes(b"PAR1")
    saved(tmp_path / "no_shards", {"image": encoded(1)}, "image")
    state = json.loads((tmp_path / "no_shards" / "state.json").read_text())
    (tmp_path / "no_shards" / "state.json").write_text(json.dumps(state | {"_data_files": []}))
    for source, keys, said in (
        (path, {}, "has several columns of images (['a', 'b', 'words', 'number']); name it with image_column"),
        (path, {"image_column": "c"}, "has no column c (['a', 'b', 'words', 'number'])"),
        (path, {"image_column": "number"}, "column number holds no images (Value('int64')); name it with image_column"),
        (path, {"image_column": "a", "caption_column": "said"}, "has no column said for captions"),
        (path, {"image_column": "a", "caption_column": "number"}, ", row 0: the caption is not text but 7"),
        (empty, {"captions": "filename"}, 'captions = "filename" has no effect'),
        (f"{empty}@test", {}, "has no split test, it has no splits; leave out @test"),
        (f"{empty}:small", {}, "knows no configurations; leave out :small"),
        (f"hf:{tmp_path}/none", {}, "corresponds to no data"),
        (f"hf:{tmp_path}/s", {}, "has no split train; name one of its own with @: one, two"),
        (f"hf:{tmp_path}/s@three", {}, "has no split three; name one of its own with @: one, two"),
        (f"hf:{tmp_path}/gone", {}, "no such folder or file, and not a valid name of a dataset on the hub"),
        (f"hf:{tmp_path}/broken", {}, "cannot be read as a dataset (ArrowInvalid: "),
        (f"hf:{tmp_path}/no_shards", {}, "cannot be read as a dataset (IndexError: "),
        ("hf:C:\\data\\x", {}, "no such folder or file, and not a valid name of a dataset on the hub"),
        ("hf:", {}, "write hf:NAME, hf:NAME@SPLIT or hf:NAME:CONFIGURATION@SPLIT"),
        ("hf:a@b@c", {}, "write hf:NAME, hf:NAME@SPLIT or hf:NAME:CONFIGURATION@SPLIT"),
    ):
        (problem,) = listed(source, **keys).problems
        assert problem.startswith(source) and said in problem, (source, problem)


def _script(root: Path) -> None:
    (root / f"{root.name}.py").write_text("import datasets\n")


def _wds(root: Path) -> None:
    (root / "train.tar").write_bytes(b"no archive" * 100)


def _zip(root: Path) -> None:
    (root / "train.zip").write_bytes(b"PK\3\4" + bytes(100))


def _readme(root: Path) -> None:
    (root / "README.md").write_text("---\nconfigs: [\n---\n")
    (root / "train.csv").write_text("image\na.png\n")


def _info(root: Path) -> None:
    saved(root, {"image": encoded(1)}, "image")
    (root / "dataset_info.json").write_text("[]")


def _generated(root: Path) -> None:
    (root / "train.jsonl").write_text('{"image": "a.png"}\n{"image": ')


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_script, "RuntimeError: Dataset scripts are no longer supported"),
        (_wds, "ReadError: "),
        (_zip, "BadZipFile: "),
        (_readme, "ParserError: "),
        (_info, "AttributeError: "),
        (_generated, "DatasetGenerationError: An error occurred while generating the dataset: "),
    ],
)
def test_a_damaged_dataset_is_named_in_one_line_with_the_cause(damage, said, tmp_path):
    root = tmp_path / "damaged"
    root.mkdir()
    damage(root)
    (problem,) = listed(f"hf:{root}").problems
    assert problem.startswith(f"hf:{root}: cannot be read as a dataset ({said}") and "\n" not in problem
    assert problem.endswith("; repair its files, or write it again with save_to_disk or to_parquet")
    assert "occurred while generating the dataset)" not in problem


def test_a_dataset_without_memory_ends_as_out_of_memory(tmp_path, monkeypatch):
    path = saved(tmp_path / "d", {"image": encoded(1)}, "image")
    monkeypatch.setattr(datasets, "load_from_disk", lambda name: exec("raise MemoryError"))
    with pytest.raises(MemoryError):
        listed(path)


@pytest.mark.parametrize("folder", ["me@host/d", "me@host", "C:\\data\\x", "a:b", "a:b@c"])
def test_a_path_that_exists_may_hold_what_splits_others(folder, tmp_path):
    one = datasets.Dataset.from_dict({"image": encoded(2)}).cast_column("image", datasets.Image())
    datasets.DatasetDict({"train": one, "test": one.select([0])}).save_to_disk(tmp_path / folder)
    assert len(listed(f"hf:{tmp_path / folder}").photos) == 2
    assert len(listed(f"hf:{tmp_path / folder}@test").photos) == 1
    (problem,) = listed(f"hf:{tmp_path / folder}:small@test").problems
    assert "knows no configurations; leave out :small" in problem


def test_without_a_network_one_message_says_what_to_do(tmp_path):
    with pytest.raises(UserError) as refused:
        scan([Source(0, "hf:nobody/nothing-here@train")])
    said = str(refused.value)
    assert "hf:nobody/nothing-here@train: cannot be fetched from the hub, and there is no such folder (" in said
    assert "fetch it elsewhere, write it with save_to_disk, and give that folder" in said and len(said.splitlines()) == 2


def test_a_row_may_name_a_file_of_the_dataset_and_no_other(tmp_path):
    """A table by hand: `save_to_disk` would put the images into it."""
    root, outside = tmp_path / "d", tmp_path / "out"
    for folder in (root, outside):
        folder.mkdir()
        (folder / "a.png").write_bytes(png(len(folder.name)))
    names = ["a.png", str(root / "a.png"), str(outside / "a.png"), "../out/a.png", "gone.png", None]
    datasets.Dataset.from_dict({"image": names, "text": [str(name) for name in names]}).to_csv(root / "train.csv")
    path = f"hf:{root}"
    listing = listed(path)
    assert not listing.problems and [item.image.read() for item in listing.photos[:2]] == [png(1)] * 2
    with pytest.raises(UserError) as refused:
        scan([Source(0, path)])
    said = str(refused.value)
    for number in (2, 3):
        assert f"{path}, row {number}: names {names[number]!r}, a file outside of the dataset; " in said
    assert f"{path}, row 4: cannot be read (No such file or directory)" in said
    assert f"{path}, row 5: the row has no image" in said and ": 4 problems;" in said


def test_save_to_disk_is_the_remedy_for_images_elsewhere(tmp_path):
    (tmp_path / "a.png").write_bytes(png(5))
    table = datasets.Dataset.from_dict({"image": [str(tmp_path / "a.png")]}).cast_column("image", datasets.Image())
    table.to_parquet(tmp_path / "own" / "train.parquet")
    with pytest.raises(UserError, match=r"row 0: names .*a\.png', a file outside of the dataset; .* \(save_to_disk does\)"):
        scan([Source(0, f"hf:{tmp_path}/own")])
    table.save_to_disk(tmp_path / "saved")
    assert [item.image.read() for item in listed(f"hf:{tmp_path}/saved").photos] == [png(5)]


def test_a_row_that_is_no_image_is_named(tmp_path):
    images = [*encoded(1), {"bytes": b"GIF89a", "path": None}, None]
    path = saved(tmp_path / "d", {"image": images}, "image")
    with pytest.raises(UserError) as refused:
        scan([Source(0, path)])
    said = str(refused.value)
    assert f"{path}, row 1: " in said and f"{path}, row 2: the row has no image" in said and "row 0" not in said


def test_samples_are_rows_in_their_order(tmp_path):
    photos = scan([Source(3, saved(tmp_path / "d", {"image": encoded(12)}, "image"))]).photos
    assert [photo.sample for photo in photos] == [f"3/{number}" for number in range(12)]
    assert [photo.image.read() for photo in photos] == [png(number) for number in range(12)]


def _contents(found) -> list[bytes]:
    return [item.image.read() for item in found]


def test_threads_and_forked_processes_read_at_the_same_time(tmp_path):
    found = listed(saved(tmp_path / "d", {"image": encoded(50)}, "image")).photos
    expected = [png(number) for number in range(50)]
    with ThreadPoolExecutor(4) as pool:
        assert all(read == expected for read in pool.map(_contents, [found] * 4))
    with multiprocessing.get_context("fork").Pool(2) as processes:
        assert all(read == expected for read in processes.map(_contents, [found] * 4))


def test_the_library_is_imported_for_a_dataset_alone(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(png())
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it fails
    assert len(listed(str(tmp_path)).photos) == 1 and listed("hf:/gone").problems
    with pytest.raises(ImportError):
        listed(f"hf:{tmp_path}")


def test_home_is_expanded_behind_the_prefix(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    tree = {
        "run": {"name": "n", "output_dir": "o", "max_steps": 1},
        "model": {"family": "sdxl", "path": "m"},
        "data": {"sources": [{"path": "hf:~/d@train"}, {"path": "hf:owner/name"}]},
    }
    assert [source.path for source in configs.parse(tree).data.sources] == [f"hf:{tmp_path}/d@train", "hf:owner/name"]


def folder_of_photos(root: Path, *names: str, table: bool = True) -> Path:
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(png(number))
    if table:
        rows = [{"file_name": name, "text": Path(name).stem} for name in names]
        (root / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.mark.parametrize(
    "names",
    [
        ("a cat.png", "a train.png", "test tubes.png"),
        ("train 1.png", "test 2.png", "val 3.png"),
        ("a.png", "dev/b.png", "c.png"),
        ("a training.png", "b.png"),
    ],
)
def test_words_in_names_of_photos_make_no_splits(tmp_path: Path, names: tuple[str, ...]) -> None:
    scanned = scan([Source(0, f"hf:{folder_of_photos(tmp_path / 'set', *names)}", resolutions=(64,))])
    assert sorted(photo.caption for photo in scanned.photos) == sorted(Path(name).stem for name in names)
    assert any("the folder is read whole" in note for note in notes_of(scanned)) and not scanned.left_out


def test_a_dataset_has_no_photos_of_others_and_names_what_looks_unintended(tmp_path: Path) -> None:
    root = folder_of_photos(tmp_path / "set", "a.png", "00_mask.png", "reg/7.png", "run/samples/9.png", table=False)
    sources = [Source(0, f"hf:{root}", resolutions=(64,)), Source(1, f"{root}/reg", resolutions=(64,), regularisation=True)]
    scanned = survey(sources, outputs=(f"{root}/run",))
    assert [photo.sample for photo in scanned.photos] == ["0/0", "0/1", "1/7.png"]
    reasons = {entry.reason for entry in scanned.account.entries(Heading.LEFT_OUT)}
    assert {"read as data.sources.1 alone, and not with the source around it", "the output of a training run"} <= reasons
    (odd,) = [each for each in scanned.account.entries(Heading.WARNING) if "named like a mask" in each.reason]
    assert [Path(name).name for name in odd.names] == ["00_mask.png"]
    twice = survey([Source(0, f"hf:{root}", resolutions=(64,)), Source(1, f"hf:{root}@train", resolutions=(64,))])
    assert any(
        "data.sources.1 and data.sources.0 both have them" in each.reason for each in twice.account.entries(Heading.WARNING)
    )


def test_splits_by_folders_stay_and_what_is_in_others_is_named(tmp_path: Path) -> None:
    names = ("train/a.png", "train/b.png", "test/c.png", "@eaDir/c.png", "d.png")
    scanned = scan([Source(0, f"hf:{folder_of_photos(tmp_path, *names, table=False)}", resolutions=(64,))])
    assert [photo.sample for photo in scanned.photos] == ["0/0", "0/1"]
    assert {Path(path).name: why for path, why in scanned.left_out} == {
        "c.png": "in the split test",
        "@eaDir": "thumbnails, settings or the bin of a system or a NAS",
        "d.png": "in no split",
    }
    asked = scan([Source(0, f"hf:{tmp_path}@test", resolutions=(64,))])
    assert len(asked.photos) == 1 and len(asked.left_out) == 4


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_table_in_one_split_alone_does_not_touch_the_others(tmp_path: Path, split: str) -> None:
    folder_of_photos(tmp_path, "train/a.png", "train/b.png", "test/c.png", table=False)
    names = {"train": ["a.png", "b.png"], "test": ["c.png"]}
    rows = (json.dumps({"file_name": name, "text": name}) + "\n" for name in names[split])
    (tmp_path / split / "metadata.jsonl").write_text("".join(rows))
    for each, captioned in names.items():
        listing = listed(f"hf:{tmp_path}@{each}")
        assert captions(listing) == (captioned if each == split else [None] * len(captioned)) and not listing.problems
    assert len(listed(f"hf:{tmp_path}").photos) == 2


@pytest.mark.parametrize("name", ["train.parquet", "train.csv", "metadata.jsonl", "data/train-00000-of-00001.arrow"])
def test_what_was_not_fetched_by_git_lfs_is_named(tmp_path: Path, name: str) -> None:
    folder_of_photos(tmp_path, "a.png", table=False)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 17\n")
    for path in (tmp_path, tmp_path / name):
        (problem,) = listed(f"hf:{path}").problems
        assert problem.startswith(f"hf:{path}: {tmp_path}/{name}: a Git LFS pointer") and "`git lfs pull`" in problem


def test_an_error_of_our_own_is_no_fault_of_the_dataset(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(hf, "_split_on_purpose", lambda *_: 1 + "")
    with pytest.raises(TypeError):
        listed(f"hf:{folder_of_photos(tmp_path, 'a.png')}")


def test_a_folder_of_photos_without_such_words_is_read_as_ever(tmp_path: Path) -> None:
    scanned = scan([Source(0, f"hf:{folder_of_photos(tmp_path, 'a.png', 'b/c.png', 'b/thumbs/d.png')}", resolutions=(64,))])
    assert [photo.caption for photo in scanned.photos] == ["a", "c", "d"] and not scanned.left_out
    folder_of_photos(tmp_path / "@eaDir", "e.png", table=False)
    assert [photo.caption for photo in scan([Source(0, f"hf:{tmp_path}", resolutions=(64,))]).photos] == ["a", "c", "d"]


def test_parquet_files_of_which_one_is_named_like_a_split_are_all_read(tmp_path: Path) -> None:
    for name in ("bears.parquet", "test bears.parquet"):
        dataset = datasets.Dataset.from_dict({"image": encoded(2), "text": ["one", "two"]})
        dataset.cast_column("image", datasets.Image()).to_parquet(tmp_path / name)
    listing = listed(f"hf:{tmp_path}")
    assert len(listing.photos) == 4 and "does not divide it" in "".join(notes_of(told(listing)))
    (problem,) = photos_of.listing(Source(0, str(tmp_path))).problems
    assert problem.endswith(f"for the dataset in them give hf:{tmp_path}")
