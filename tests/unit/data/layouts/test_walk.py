"""Every file below a source is a photo, serves one or is left out, each once; what is left out, and what is warned of."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests import photos as photos_of
from tests.photos import notes_of, survey
from trainer.base.account import Account, Heading
from trainer.data import layouts
from trainer.data.layouts import walk
from trainer.data.scan import BLACK, WHITE
from trainer.data.sources import Scanned, Source


def fill(root: Path, *names: str) -> Path:
    """Files: images of different grey, text that has the file's name."""
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if name.lower().endswith((".png", ".jpg")):
            Image.new("L", (64, 64), number % 256).save(root / name, "PNG")
        else:
            (root / name).write_text(name)
    return root


def seen(root: Path | str, *more: Path | str, outputs: tuple[str, ...] = (), **keys) -> Scanned:
    sources = [Source(index, str(path), resolutions=(64,), **keys) for index, path in enumerate((root, *more))]
    return survey(sources, outputs=outputs)


def samples(scanned: Scanned) -> list[str]:
    return [photo.sample for photo in scanned.photos]


def warnings(scanned: Scanned) -> str:
    return "\n".join(note for note in notes_of(scanned) if note.startswith("warning"))


def items(account: Account, heading: Heading) -> int:
    return sum(entry.count for entry in account.entries(heading))


FOLDERS = st.lists(
    st.sampled_from(["a", "0_k", "10_k w", "@eaDir", ".git", "masks", "control", "samples", "run", "1000_x", "refs"]),
    max_size=2,
)
FILES = st.tuples(
    st.sampled_from(["a", "A", "b", "a_mask", "a.mask", "b-masklabel", "a-masklabel2", "a-condlabel", "mask", "a.ref", ".h"]),
    st.sampled_from([".png", ".PNG", ".jpg", ".txt", ".json", ".psd", ".md", ".mp4"]),
).map("".join)
SINGLE = st.sampled_from(["Thumbs.db", "config.toml", "metrics.jsonl", "metadata.csv"])


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sets(st.tuples(FOLDERS, FILES | SINGLE).map(lambda parts: "/".join([*parts[0], parts[1]])), min_size=1, max_size=25),
    st.sampled_from(["none", "files", "alpha"]),
    st.sampled_from([None, "files", "refs"]),
)
def test_all_files_are_counted_each_once(tmp_path_factory, names: set[str], masks: str, references: str | None) -> None:
    root = tmp_path_factory.mktemp("tree")
    (root / "refs").mkdir()
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("file_name,text\n" if name.endswith(".csv") else "x")
    references = str(root / "refs") if references == "refs" else references
    source = Source(0, str(root), masks=masks, references=references)
    listing = photos_of.listing(source, layouts.walk.exclusions_of(source, [source], ()))
    there = {os.path.join(folder, file) for folder, _, files in os.walk(root) for file in files}
    if not listing.photos:
        return
    used = len(listing.photos) + items(listing.account, Heading.USED)
    assert used + items(listing.account, Heading.LEFT_OUT) == len(there), listing.account.lines()
    left = Scanned((), listing.account).left_out
    out = {path for path in there if any(path == name or name.endswith("/") and path.startswith(name) for name, _ in left)}
    places = {str(place) for item in listing.photos for place in (item.image, item.mask, *item.references)}
    assert not out & places and len(out) == items(listing.account, Heading.LEFT_OUT)


@pytest.mark.parametrize(
    "name",
    ["@eaDir/00.png/SYNOPHOTO_THUMB_M.jpg", "#recycle/a.png", "$RECYCLE.BIN/S-1/a.png", "__MACOSX/._00.png", "@Recycle/a.png",
     "System Volume Information/a.png", ".Trash-1000/a.png", "sub/@EADIR/a.png", "0_unused/a.png"],
)  # fmt: skip
def test_what_a_system_a_bin_or_a_zero_keeps_is_left_out(tmp_path: Path, name: str) -> None:
    scanned = seen(fill(tmp_path, "00.png", "00_thumbs/b.png", "10_x/c.png", name))
    assert samples(scanned) == ["0/00.png", "0/00_thumbs/b.png", "0/10_x/c.png"]
    assert items(scanned.account, Heading.LEFT_OUT) == 1
    assert not name.startswith("0_") or scanned.left_out[0][1].endswith("to train it, name it 1_NAME")


def test_a_folder_that_is_given_itself_is_read_whatever_its_name(tmp_path: Path) -> None:
    assert samples(seen(fill(tmp_path / "0_unused", "a.png"))) == ["0/a.png"]
    assert samples(seen(fill(tmp_path / "#recycle", "a.png"))) == ["0/a.png"]


def test_masks_of_other_programs_are_masks_or_left_out(tmp_path: Path) -> None:
    names = ["0.png", "1.jpg", "2.png", "0_mask.png", "1-MASK.jpg", "2-masklabel.png", "0-masklabel1.png", "1-condlabel.png"]
    fill(tmp_path, *names, "masks/2.png", "control/1.png")
    scanned = seen(tmp_path, masks="files")
    assert {photo.sample: os.path.basename(str(photo.mask.place)) for photo in scanned.photos if photo.mask} == {
        "0/0.png": "0_mask.png",
        "0/1.jpg": "1-MASK.jpg",
        "0/2.png": "2-masklabel.png",
    }
    assert len(scanned.photos) == 3 and not warnings(scanned)
    unused = dict(seen(tmp_path).left_out)
    assert len(unused) == 7 and unused[f"{tmp_path}/0_mask.png"] == 'a mask, and masks = "none"'


@pytest.mark.parametrize("name", ["mask.png", "the mask.jpg", "girl_mask.png", "bear_depth.png", "masks/9.png", "a.ref.png"])
def test_a_photo_that_is_only_named_like_a_mask_is_trained(tmp_path: Path, name: str) -> None:
    fill(tmp_path, "girl.png", name, f"{os.path.splitext(name)[0]}.txt")
    scanned = seen(tmp_path)
    assert f"0/{name}" in samples(scanned)
    assert ("named like a mask" in warnings(scanned)) == (name != "the mask.jpg")


def test_a_folder_of_masks_whose_name_is_the_caption_is_trained(tmp_path: Path) -> None:
    fill(tmp_path, "hats/0.png", "masks/0.png")
    scanned = seen(tmp_path, captions="folder")
    assert [photo.caption for photo in scanned.photos] == ["hats", "masks"] and "named like a mask" in warnings(scanned)
    assert samples(seen(tmp_path)) == ["0/hats/0.png"]


@pytest.mark.parametrize("name", ["reg", "reg/1_man", "Regularization", "class_images", "a/regularisation images/b"])
def test_regularisation_images_among_the_photos_are_warned_of(tmp_path: Path, name: str) -> None:
    fill(tmp_path, "img/10_bob man/0.png", f"{name}/1.png", "regal/2.png", "1st class/3.png")
    said = "1 photo: in a folder whose name means regularisation images, and trained as photos of the subject"
    said += f" ({tmp_path}/{name}/1.png)"
    scanned = seen(tmp_path)
    assert said in warnings(scanned) and "a source of its own with regularisation = true" in warnings(scanned)
    assert len(scanned.photos) == 4 and "means regularisation" not in warnings(seen(tmp_path, regularisation=True))


def test_masks_that_are_asked_for_and_nowhere_are_warned_of(tmp_path: Path) -> None:
    fill(tmp_path, "a.png", "b.png")
    for kind in ("files", "alpha"):
        assert f'masks = "{kind}", and no photo has a mask' in warnings(seen(tmp_path, masks=kind))
    assert not warnings(seen(tmp_path))


def test_black_masks_are_warned_of_and_refused_where_there_are_no_others(tmp_path: Path) -> None:
    fill(tmp_path / "own", "a.mask.png", "b.png", "b.mask.png", "c.png")
    fill(tmp_path / "reg", "d.png")
    Image.new("L", (64, 64)).save(tmp_path / "own/a.png")
    scanned = seen(tmp_path / "own", masks="files")
    said = f"1 photo: {BLACK} ({tmp_path}/own/a.png); {WHITE}"
    assert f"warning: {said}" in notes_of(scanned) and len(scanned.photos) == 3 and not scanned.damaged
    assert not warnings(seen(tmp_path / "own", masks="files", unmasked_weight=0.1))
    for name in ("b.png", "c.png"):
        (tmp_path / "own" / name).unlink()
    own = Source(0, str(tmp_path / "own"), resolutions=(64,), masks="files")
    reg = Source(1, str(tmp_path / "reg"), resolutions=(64,), regularisation=True)
    (problem,) = survey([own, reg]).damaged
    assert problem.startswith("every photo's mask is black all over, so nothing would be learnt")
    assert not survey([reg]).damaged


def test_folders_beside_kohya_s_and_numbers_that_are_not_read_are_named(tmp_path: Path) -> None:
    fill(tmp_path, "10_a/1.png", "rejected/2.png", "1000_cat/3.png", "2023_trip/4.png")
    said = warnings(seen(tmp_path))
    assert (
        "3 folders: the name has no number of 1 to 999 before it, so its photos count once" in said
        and "for 10 repeats name it 10_NAME" in said
        and f"({tmp_path}/1000_cat/, {tmp_path}/2023_trip/, {tmp_path}/rejected/)" in said
    )
    assert "in a folder whose name means" in said
    fill(tmp_path / "years", "2023_trip/5.png", "01_first/6.png")
    assert not warnings(seen(tmp_path / "years"))
    assert "no number of 1 to 999" in warnings(seen(fill(tmp_path / "one", "1000_cat/7.png")))


@pytest.mark.parametrize("way", ["inner", "inner/", "other/../inner", "link", "inner/metadata.csv"])
def test_a_source_within_another_owns_its_photos(tmp_path: Path, way: str) -> None:
    fill(tmp_path / "all", "a.png", "inner/b.png", "other/c.png")
    (tmp_path / "all/inner/metadata.csv").write_text("file_name,text\nb.png,words\n")
    (tmp_path / "all/link").symlink_to(tmp_path / "all/inner")
    scanned = seen(tmp_path / "all", f"{tmp_path}/all/{way}")
    assert samples(scanned) == ["0/a.png", "0/other/c.png", "1/b.png"]
    assert "read as data.sources.1 alone" in warnings(scanned)


@pytest.mark.parametrize("way", ["link", "copy", "archive", "alone"])
def test_photos_of_two_sources_are_warned_of(tmp_path: Path, way: str) -> None:
    first, second = fill(tmp_path / "a", "a.png", "b.png"), tmp_path / "b"
    if way == "link":
        second.symlink_to(first)
    elif way == "copy":
        shutil.copytree(first, second)
    elif way == "archive":
        for name in ("a", "b"):
            with tarfile.open(tmp_path / f"{name}.tar", "w") as archive:
                archive.add(first / f"{name}.png", f"{name}.png")
        first, second = tmp_path / "*.tar", tmp_path / "a.tar"
    else:
        fill(second, "a.txt", "b.txt", "c.png")
    found = warnings(seen(first, second))
    assert ("data.sources.1 and data.sources.0 both have them, byte for byte" in found) is (way != "alone")


def test_outputs_of_runs_are_no_photos(tmp_path: Path) -> None:
    fill(tmp_path, "a.png", "mine/samples/step-00000002/0.png", "mine/x.txt", "before/config.toml", "before/metrics.jsonl")
    fill(tmp_path, "before/adapters/images/0.png", "samples/z.png")
    scanned = seen(tmp_path, outputs=(str(tmp_path / "mine"),))
    assert samples(scanned) == ["0/a.png", "0/samples/z.png"] and items(scanned.account, Heading.LEFT_OUT) == 5
    assert "samples, copies or rejected photos" in warnings(scanned)
    assert samples(seen(tmp_path, outputs=(str(tmp_path),))) == ["0/a.png", "0/mine/samples/step-00000002/0.png"]

    fill(tmp_path, "superseded-after-step-00000002/samples/9.png")
    assert samples(seen(tmp_path, outputs=(str(tmp_path),))) == ["0/a.png", "0/mine/samples/step-00000002/0.png"]


MASKS = ["mask_00", "mask-01", "mask (1)", "00 mask", "00_mask_0", "01_seg", "00_matte", "masks_img/1", "00 masks/2"]
DRAWN = ["sample_images/1", "training_samples/1", "_thumbs/1", "thumbs_256/1", "temp/1", "Recently Deleted/1", "Papierkorb/1"]
PRIORS = ["man_reg/1", "regularization_images_v2/1", "10_man reg/2"]
PHOTOS = ["masked ball/1", "old town/1", "class of 99/1", "control tower", "region/1", "maskara", "the mask", "example/1",
          "regatta/1", "log cabin/1", "segway", "temple/1", "bin chicken/1", "sampler/1", "IMG 12 (3)"]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "why"),
    [(MASKS, "named like a mask"), (DRAWN, "samples, copies or rejected"), (PRIORS, "regularisation images"), (PHOTOS, "")],
    ids=["masks", "drawn", "priors", "photos"],
)
def test_names_that_mean_no_photos_in_other_spellings(names: list[str], why: str) -> None:
    told = {name: walk.looks_unintended(f"{name}.png", regularisation=False) for name in names}
    assert {name: bool(said) and why in said[0] for name, said in told.items()} == dict.fromkeys(names, bool(why))


def test_a_caption_of_several_photos_is_named(tmp_path: Path) -> None:
    fill(tmp_path, "a.png", "b.png", "c.png", "d.png", "d.jpg", "d.txt")
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("a bear")
    scanned = seen(tmp_path)
    assert any(note.startswith("3 photos: one caption is that of three photos") for note in notes_of(scanned))
    assert f"2 photos: one caption file for two photos of one name ({tmp_path}/d.jpg, {tmp_path}/d.png)" in warnings(scanned)
    for name in ("d.jpg", "d.png"):
        (tmp_path / name).unlink()
    assert "3 photos: one caption is that of three photos" in warnings(seen(tmp_path))


@pytest.mark.parametrize(
    ("file", "text"),
    [("0.png.txt", "its"), ("0.PNG.caption", "its"), ("0 .txt", "its"), ("0\u200b.txt", "its"), ("\u00a00.txt", "its")],
)
def test_a_caption_has_the_photo_s_whole_name_or_other_spaces(tmp_path: Path, file: str, text: str) -> None:
    fill(tmp_path, "0.png", "1.png", "1.txt", "1.png.txt", file)
    (tmp_path / file).write_text(text)
    scanned = seen(tmp_path)
    assert [photo.caption for photo in scanned.photos] == [text, "1.txt"] and not warnings(scanned)
    assert scanned.left_out == ((f"{tmp_path}/1.png.txt", "1.txt is used instead"),)


def test_spaces_of_a_photo_s_name_are_any(tmp_path: Path) -> None:
    fill(tmp_path, "0\u00a0a.png", "0 a.txt", "0\u3000A.mask.png")
    scanned = seen(tmp_path, masks="files")
    assert [(photo.sample, photo.caption) for photo in scanned.photos] == [("0/0\u00a0a.png", "0 a.txt")]
    assert scanned.photos[0].mask


ROW = '{"image_path": "0.png", "caption": "a bear"}\n'


@pytest.mark.parametrize(
    ("files", "lost"),
    [
        (["captions/0.txt", "captions/1.txt"], 2),
        (["0_words.caption", "meta_cap.json"], 2),
        (["0.png.json"], 1),
        (["data.jsonl"], 1),
        (["10_bear/2.png", "data.jsonl"], 1),
        (["0.txt", "1.txt", "captions/0.txt"], 0),
        (["prices.jsonl", "notes.md", "0.npz"], 0),
    ],
)
def test_captions_that_no_photo_gets_are_warned_of(tmp_path: Path, files: list[str], lost: int) -> None:
    fill(tmp_path, "0.png", "1.png", *files)
    for name, row in (("data.jsonl", ROW), ("prices.jsonl", '{"thing": 3}\n')):
        if name in files:
            (tmp_path / name).write_text(row)
    without = 2 + ("10_bear/2.png" in files)
    plural = "" if lost == 1 else "s"
    said = f"{tmp_path}: {without} photos without a caption file, and {lost} caption file{plural} without a photo of the same"
    assert (said in warnings(seen(tmp_path))) == bool(lost), warnings(seen(tmp_path))
    assert not lost or f"{tmp_path}/{files[-1]}" in warnings(seen(tmp_path))
    assert "caption file" not in warnings(seen(tmp_path, captions="filename"))


def test_a_row_that_names_a_photo_of_a_folder_that_is_left_out_says_so(tmp_path: Path) -> None:
    fill(tmp_path, "a.png", "0_old/b.png", "reg/c.png")
    (tmp_path / "metadata.csv").write_text("file_name,text\na.png,a\n0_old/b.png,b\nreg/c.png,c\n")
    damaged = seen(tmp_path, tmp_path / "reg").damaged
    assert [line.rpartition(": ")[2] for line in damaged] == ["its folder is left out; remove the row"] * 2
