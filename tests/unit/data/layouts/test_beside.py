"""References of photos: found by name, read and checked, encoded and put beside their photos."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.photos import epoch_batches, scan, survey
from trainer.base.errors import UserError
from trainer.base.types import Occurrence
from trainer.data import buckets
from trainer.data.batches import short_batches
from trainer.data.batches.loader import Encoders, Reader
from trainer.data.cache.entries import MemoryCache
from trainer.data.cache.fill import fill_latents, latents_wanted
from trainer.data.examples import examples
from trainer.data.identity import differences, parts, photo_digests
from trainer.data.images import views
from trainer.data.sources import Source


def save(path: Path, size: tuple[int, int] = (64, 64), seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, format="PNG")


def source(folder: Path, references: str | tuple[str, ...] | None = "files", **more) -> Source:
    return Source(0, str(folder), references=references, resolutions=(64,), **({"captions": "none"} | more))


def shown(folder: Path, references: str | tuple[str, ...] | None = "files") -> dict[str, list[str]]:
    """The names of each photo's references."""
    photos = scan([source(folder, references)]).photos
    return {photo.sample: [Path(str(each.image)).name for each in photo.extras.references] for photo in photos}


def problems(folder: Path, references: str | tuple[str, ...] = "files") -> str:
    return "\n".join(survey([source(folder, references)]).damaged)


def test_they_lie_beside_the_photos_or_in_a_folder_of_their_own(tmp_path: Path) -> None:
    """In the order of their numbers, whatever the letters' case; the folder may lie within the source."""
    for name in ("a.jpg", "a.ref.png", "a.REF2.jpg", "a.ref10.png", "sub/b.png", "sub/b.ref.webp", "sub/b.ref2.png"):
        if name != "a.ref10.png":
            save(tmp_path / "beside" / name)
    assert shown(tmp_path / "beside") == {"0/a.jpg": ["a.ref.png", "a.REF2.jpg"], "0/sub/b.png": ["b.ref.webp", "b.ref2.png"]}
    for name in ("a.jpg", "sub/b.png"):
        save(tmp_path / "apart" / name)
    for name in ("a.png", "a.ref2.png", "sub/b.ref.jpg", "sub/b.ref2.jpg", "other.png"):
        save(tmp_path / "apart" / "before" / name)
    found = {"0/a.jpg": ["a.png", "a.ref2.png"], "0/sub/b.png": ["b.ref.jpg", "b.ref2.jpg"]}
    assert shown(tmp_path / "apart", str(tmp_path / "apart" / "before")) == found
    assert shown(tmp_path / "apart", str(tmp_path / "apart" / "before") + "/../before") == found


def test_a_folder_for_each_of_a_photos_references_has_it_under_the_photos_name(tmp_path: Path) -> None:
    """As most programs that train edits keep them (OneTrainer#1665). What is not there is named by its folder."""
    photos, before, style = (tmp_path / name for name in ("after", "before", "style"))
    for folder, ending in ((photos, "jpg"), (before, "png"), (style, "webp")):
        for name in ("a", "sub/b"):
            save(folder / f"{name}.{ending}")
    save(before / "other.png")
    folders = (str(before), str(style))
    assert shown(photos, folders) == {"0/a.jpg": ["a.png", "a.webp"], "0/sub/b.jpg": ["b.png", "b.webp"]}
    assert shown(photos, folders[::-1])["0/a.jpg"] == ["a.webp", "a.png"]
    assert [path for path, _ in survey([source(photos, folders)]).left_out] == [str(before / "other.png")]
    (before / "a.png").rename(before / "a.ref2.png")
    assert f"a.jpg: it has reference 2, and reference 1 (in {before}) is missing" in problems(photos, folders)
    (style / "a.webp").unlink()
    assert f"a.jpg: no reference image for it (a.* in {before}/ and {style}/)" in problems(photos, folders)
    gone = str(tmp_path / "gone")
    assert f"references[1] = '{gone}': no such folder" in problems(photos, (str(before), gone))


def test_references_of_names_that_differ_in_case_alone_are_told_apart(tmp_path: Path) -> None:
    """A reference whose photo has exactly its name is that photo's; another is that of any case."""
    for name in ("A.png", "a.png", "A.ref.png", "a.ref.png", "Log.png", "log.REF.png"):
        save(tmp_path / name)
    found = {"0/A.png": ["A.ref.png"], "0/a.png": ["a.ref.png"], "0/Log.png": ["log.REF.png"]}
    assert shown(tmp_path) == found


@pytest.mark.parametrize("several", [False, True])
def test_held_out_photos_have_theirs_in_the_folders_of_their_source(tmp_path: Path, several: bool) -> None:
    """Whatever contains the other. A file that neither side has is left out, once."""
    for name in ("a.png", "later/b.png", "before/a.png", "before/b.png", "before/c.png", "style/a.png", "style/b.png"):
        save(tmp_path / name, seed=len(name))
    references = (str(tmp_path / "before"), str(tmp_path / "style")) if several else str(tmp_path / "before")
    if not several:
        (tmp_path / "style").rename(tmp_path / "before" / "style")
    scanned = survey(source(tmp_path, references, held_out_path=str(tmp_path / "later")).with_held_out)
    count = 2 if several else 1
    assert not scanned.damaged and [len(photo.extras.references) for photo in scanned.photos] == [count] * 2
    assert [photo.sample for photo in scanned.photos] == ["0/a.png", "0.held_out/b.png"]
    unused = ["before/c.png"] if several else ["before/c.png", "before/style/a.png", "before/style/b.png"]
    assert [path for path, _ in scanned.left_out] == [str(tmp_path / name) for name in unused]


@pytest.mark.parametrize("inside", [False, True])
def test_what_no_photo_has_is_left_out_and_named(tmp_path: Path, inside: bool) -> None:
    before = tmp_path / "after" / "before" if inside else tmp_path / "before"
    (before / "none").mkdir(parents=True)
    for name in ("01.png", "77.png", "01.ref02.png", "none/01.png", ".hidden.png"):
        save(before / name)
    (before / "01.psd").write_bytes(b"x")
    save(tmp_path / "after" / "01.png")
    left_out = dict(survey([source(tmp_path / "after", str(before))]).left_out)
    alone = "a reference, and no image has its name"
    assert left_out == {str(before / name): alone for name in ("77.png", "01.ref02.png", "none/01.png")} | {
        str(before / ".hidden.png"): "hidden",
        str(before / "01.psd"): ".psd images are not read; convert them to PNG or JPEG",
    }


def test_a_reference_whose_photo_is_left_out_is_told_so(tmp_path: Path) -> None:
    for name in ("01.png", "01.ref.png", "02.png", "02.ref.png", "03.ref.png"):
        save(tmp_path / name)
    (tmp_path / "metadata.csv").write_text("file_name,text\n01.png,a log\n")
    left_out = dict(survey([source(tmp_path)]).left_out)
    assert left_out[f"{tmp_path}/02.ref.png"] == "its image is left out"
    assert left_out[f"{tmp_path}/03.ref.png"] == "a reference, and no image has its name"
    assert set(left_out) == {f"{tmp_path}/{name}" for name in ("02.png", "02.ref.png", "03.ref.png")}


def test_what_the_decoder_says_of_a_reference_is_a_note_of_its_photo(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    frames = [Image.new("RGB", (64, 64), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "a.ref.png", format="GIF", save_all=True, append_images=frames[1:])
    (photo,) = scan([source(tmp_path)]).photos
    assert photo.notes == (
        "reference 1: it has several frames or pages, only the first is trained",
        "reference 1: its name ends in .png, its bytes are GIF",
    )


@pytest.mark.parametrize("path", ["photos.tar", "hf:photos"])
def test_they_are_of_folders_alone(path: str) -> None:
    said = f"{path}: references = 'files': they are found for a folder of photos, not for this; leave it out"
    assert problems(Path(path)) == said


def test_without_the_key_such_a_file_is_a_photo(tmp_path: Path) -> None:
    for name in ("a.png", "a.ref.png"):
        save(tmp_path / name)
    assert shown(tmp_path, None) == {"0/a.png": [], "0/a.ref.png": []}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["a.png", "b.png", "b.ref.png"], r"/a\.png: no reference image for it \(a\.ref\.png beside it\)"),
        (["a.png", "a.ref.png", "a.ref3.png"], r"/a\.png: it has reference 3, and reference 2 is missing"),
        (
            ["a.png", "a.ref.png", "a.ref2.png", "b.png", "b.ref2.png"],
            r"/b\.png: it has reference 2, and reference 1 is missing",
        ),
        (["a.png", "a.ref.png", "a.ref.jpg"], r"/a\.png: a\.ref\.jpg, a\.ref\.png are all its reference 1; keep one"),
        (
            ["a.png", "a.ref.png", "b.png", "b.ref.png", "c.png", "c.ref.png", "c.ref2.png"],
            r"/c\.png: 2 references, and most photos of its source have 1; give all the same number",
        ),
        (["a.png", "a.ref.png", "narrow/b.png"], r"/b\.png: no reference image for it"),
    ],
)
def test_what_does_not_go_together_is_named_by_the_photo(tmp_path: Path, files: list[str], said: str) -> None:
    for name in files:
        save(tmp_path / name)
    (line,) = problems(tmp_path).splitlines()
    import re

    assert re.search(said, line), line


def test_a_damaged_one_is_named_with_its_photo(tmp_path: Path) -> None:
    for name in ("a.png", "a.ref.png", "b.png", "b.ref.png"):
        save(tmp_path / name)
    (tmp_path / "a.ref.png").write_bytes((tmp_path / "a.ref.png").read_bytes()[:-2000])
    save(tmp_path / "b.ref.png", (640, 64))
    damaged, narrow = problems(tmp_path).splitlines()
    assert damaged.startswith(f"{tmp_path}/a.ref.png: ") and damaged.endswith(f"(reference 1 of {tmp_path}/a.png)")
    assert narrow.startswith(f"{tmp_path}/b.ref.png: 640 x 64 pixels; a reference has sides of at least 64 pixels")
    with pytest.raises(UserError, match="2 problems"):
        scan([source(tmp_path)])


def test_a_folder_that_cannot_be_that_of_references_is_named_once(tmp_path: Path) -> None:
    """Whatever the number of photos. A link to a folder within the source is that folder."""
    for name in ("set/after/a.png", "set/after/b.png", "set/after/before/a.png", "set/after/before/b.png"):
        save(tmp_path / name)
    after = tmp_path / "set" / "after"
    gone = problems(after, str(tmp_path / "gone"))
    assert gone == f"{after}: references = '{tmp_path}/gone': no such folder; 'files' takes NAME.ref.png beside each photo"
    for above in (tmp_path / "set", after):
        assert problems(after, str(above)).startswith(f"{after}: references = '{above}' holds the photos themselves; give")
    (tmp_path / "link").symlink_to(after)
    assert shown(tmp_path / "link", str(after / "before")) == {"0/a.png": ["a.png"], "0/b.png": ["b.png"]}


@pytest.fixture
def edits(tmp_path: Path) -> Path:
    """Photos of one size, whose references are of two."""
    for index, name in enumerate("abcdef"):
        save(tmp_path / "edits" / f"{name}.png", seed=index)
        save(tmp_path / "edits" / f"{name}.ref.png", (64, 64) if index % 2 else (96, 70), seed=10 + index)
    return tmp_path / "edits"


def sized(folder: Path, **more):
    return examples(scan([source(folder, **more)]).photos, step=16, enlarge=False, seed=3)


def test_a_batch_has_one_layout(edits: Path) -> None:
    made = sized(edits)
    layouts = {example.sample: example.layout for example in made}
    assert set(layouts.values()) == {((64, 64), (64, 64)), ((64, 64), (96, 64))}
    for epoch in range(3):
        for batch in epoch_batches(made, seed=3, epoch=epoch, batch_size=2, fill=bool(epoch)):
            assert len({layouts[occurrence.sample] for occurrence in batch}) == 1
    assert short_batches.short(made, batch_size=2) == {((64, 64), (64, 64)): 1, ((64, 64), (96, 64)): 1}
    assert short_batches.merged(made, batch_size=4, enlarge=True) == made, "references keep their sizes"
    assert buckets.named(((64, 64), (96, 64), (16, 32))) == "64x64 beside 96x64 and 16x32"


def test_they_are_part_of_what_a_photo_holds(edits: Path, tmp_path: Path) -> None:
    before = sized(edits)
    without = tuple(replace(e, photo=replace(e.photo, extras=replace(e.photo.extras, references=()))) for e in before)
    save(edits / "c.ref.png", (96, 70), seed=99)
    after = sized(edits)
    changed = differences(photo_digests(before), photo_digests(after))
    assert changed == {"other contents": ["0/c.png"]}
    assert parts(without)["contents of the photos"] == [each.photo.sha256 for each in without], "as of runs without any"


def encode(pixels: torch.Tensor) -> torch.Tensor:
    """Latents of which each holds all that its pixels were."""
    return torch.nn.functional.pixel_unshuffle(pixels, 16)


@pytest.mark.parametrize("cached", [True, False])
def test_a_batch_holds_them_as_they_are_shown(edits: Path, cached: bool) -> None:
    """Whole, mirrored where the photo is, and of the photo's own; a jitter of the photo leaves them alone, and so does a
    caption that is dropped (ai-toolkit 21dc6597)."""
    for name in "ace":
        (edits / f"{name}.txt").write_text("make it blue")
    made = sized(edits, flip=True, crop_jitter=0.2, captions="files", caption_dropout=0.5)
    cache = MemoryCache() if cached else None
    if cache is not None:
        wanted = latents_wanted(made, seed=3, fingerprint="f")
        assert fill_latents(cache, wanted, encode=encode, on_non_finite=pytest.fail) == len(wanted)
        assert len([each for each, _ in wanted.values() if "reference" in each.sample]) == 2 * len(made)
    reader = Reader(
        examples={example.sample: example for example in made}, cache=cache, seed=3, latent_side=16,
        latent_fingerprint="f", text_fingerprint=None, collate=lambda parts: parts[0],
        encoders=None if cached else Encoders(encode, lambda texts: pytest.fail("no texts")),
    )  # fmt: skip
    mirrored, captions = set(), set()
    for repeat in range(4):
        occurrences = tuple(Occurrence(0, f"0/{name}.png", repeat) for name in "ace")
        batch = reader[occurrences]
        assert [each.shape for each in batch.references] == [(3, 768, 4, 6)]
        captions |= {*batch.captions}
        for occurrence, latents in zip(occurrences, batch.references[0], strict=True):
            flip = views.draw(3, occurrence, reader.examples[occurrence.sample]).flip
            mirrored.add(flip)
            image = Image.open(edits / occurrence.sample[2:].replace(".png", ".ref.png")).crop((0, 3, 96, 67))
            assert torch.equal(latents, encode(buckets.to_pixels(image).flip(2) if flip else buckets.to_pixels(image)))
    assert mirrored == {True, False} and captions == {"", "make it blue"}
