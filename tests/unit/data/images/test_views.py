"""Views: finitely many crops and colours, each a pure function of its key; masks that follow the photo; nothing parts."""

import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.photos import epoch_batches, notes_of, scan, survey
from tests.unit.data.cache.test_fill import fill_latents, fill_text, singly
from trainer.base import draws
from trainer.base.errors import UserError
from trainer.base.types import Conditioning, Occurrence
from trainer.data import buckets
from trainer.data.batches.loader import Reader, iterate
from trainer.data.buckets import CENTRE, place
from trainer.data.cache.fill import Cache, fill_masks, latent_key, mask_key, masks_wanted
from trainer.data.examples import Example, examples
from trainer.data.images import views
from trainer.data.images.decode import decode
from trainer.data.images.views import View
from trainer.data.scan import BLACK
from trainer.data.sources import Extras, File, Photo, Source
from trainer.models.base import collate
from trainer.objectives import sample_losses

JITTERED = {"crop_jitter": 0.1, "colour_jitter": 0.2, "image_variants": 5}
sides = st.integers(16, 4000)


def example_of(source: Source, width: int = 300, height: int = 200, bucket=(80, 48)) -> Example:
    photo = Photo("0/a.png", source, File("", "a.png"), (width, height), "a", 1, "0" * 64)
    return Example("0/a.png", photo, bucket, ("a",))


def test_the_first_view_is_the_photo_and_no_other_is():
    every = views.every(7, example_of(Source(0, "", **JITTERED)))
    assert every[0] == View() and len(every) == len(set(every)) == 5
    assert all(view.crop != CENTRE and len(view.colours) == 3 for view in every[1:])
    mirrored = views.every(7, example_of(Source(0, "", flip=True, **JITTERED)))
    assert mirrored == [replace(view, flip=flip) for view in every for flip in (False, True)]
    assert views.every(8, example_of(Source(0, "", **JITTERED)))[1:] != every[1:]
    assert views.every(7, example_of(Source(0, ""))) == [View()]


def test_which_view_is_drawn_follows_from_the_appearance_alone():
    example = example_of(Source(0, "", flip=True, **JITTERED))
    every, count = views.every(7, example), 4000
    shown = Counter(views.draw(7, Occurrence(i // 10, "0/a.png", i % 10), example) for i in range(count))
    assert set(shown) == set(every)
    spread = 5 * math.sqrt(count * 0.1 * 0.9)
    assert all(abs(times - count / 10) <= spread for times in shown.values())
    plain = replace(example, photo=replace(example.photo, source=Source(0, "", flip=True)))
    for epoch in range(50):  # as before there was any jitter
        occurrence = Occurrence(epoch, "0/a.png", 0)
        assert views.draw(7, occurrence, plain) == View(flip=draws.uniform(7, "flip", epoch, "0/a.png", 0) < 0.5)
        assert views.draw(7, occurrence, example).flip == views.draw(7, occurrence, plain).flip


@given(sides, sides, st.tuples(st.integers(2, 64), st.integers(2, 64)), st.floats(1, 1.5), st.floats(-1, 1), st.floats(-1, 1))
def test_a_moved_crop_stays_in_the_photo_and_never_enlarges(width, height, steps, zoom, right, down):
    bucket = (steps[0] * 16, steps[1] * 16)
    plain = place(width, height, bucket)
    for flip in (False, True):
        moved = place(width, height, bucket, crop=(zoom, right, down), flip=flip)
        (top, left), (h, w), (rh, rw) = moved.crop_top_left, moved.target_size, moved.resized_size
        assert (w, h) == bucket and 0 <= top <= rh - h and 0 <= left <= rw - w
        assert rh >= plain.resized_size[0] and rw >= plain.resized_size[1]
        # Half a pixel of rounding beyond the photo's own size, and only where it was not enlarged anyway.
        assert rh <= max(height + 1, plain.resized_size[0]) and rw <= max(width + 1, plain.resized_size[1])
        assert rh <= plain.resized_size[0] * zoom + 1 and rw <= plain.resized_size[1] * zoom + 1
    left, top, right, bottom = buckets.kept_box(place(width, height, bucket, crop=(zoom, right, down)))
    assert 0 <= left < right <= width and 0 <= top < bottom <= height


def test_a_view_shows_the_moved_crop_in_its_colours():
    gradient = np.stack(np.meshgrid(np.arange(320) / 2, np.arange(240)), -1).astype(np.uint8)
    image = Image.fromarray(np.dstack([gradient, np.full((240, 320), 100, np.uint8)]))
    example = example_of(Source(0, ""), 320, 240, (160, 96))
    for view in (View(crop=(1.2, 0.1, -0.1)), View(crop=(1.0, 0.0, 0.1)), View(flip=True, crop=(1.2, 0.1, -0.1))):
        kept, shown = view.place(example), np.asarray(view.show(image, example)).astype(float)
        (top, left), (rh, rw) = kept.crop_top_left, kept.resized_size
        across = (np.arange(160) + left + 0.5) * 320 / rw - 0.5
        if view.flip:  # of the mirrored photo
            across = 319 - across
        down = (np.arange(96) + top + 0.5) * 240 / rh - 0.5
        assert np.abs(shown[..., 0] - across / 2).max() <= 1.5 and np.abs(shown[..., 1] - down[:, None]).max() <= 1.5
    dark = np.asarray(View(colours=(0.5, 1.0, 1.0)).show(image, example)).astype(float)
    assert np.abs(dark - np.asarray(View().show(image, example)) / 2).max() <= 1
    grey = np.asarray(View(colours=(1.0, 1.0, 0.0)).show(image, example))
    assert (grey == grey[..., :1]).all()


@given(sides, sides, st.booleans())
def test_without_a_crop_the_whole_photo_is_shown(width, height, flip):
    example = example_of(Source(0, "", crop="none"), width, height)
    (upright,) = views.every(7, example)
    kept = replace(upright, flip=flip).place(example)
    assert kept == buckets.Placement((height, width), (0, 0), (48, 80), (48, 80))
    assert buckets.kept_box(kept) == (0, 0, width, height)
    assert buckets.share_kept(width, height, (80, 48), crop=upright.crop) == 1


def test_every_corner_of_an_uncropped_photo_stays():
    image = Image.new("RGB", (300, 100))
    corners = {(0, 0): "red", (250, 0): "lime", (0, 80): "blue", (250, 80): "white"}
    for at, colour in corners.items():
        image.paste(colour, (*at, at[0] + 50, at[1] + 20))
    example = example_of(Source(0, "", crop="none", colour_jitter=0.1), 300, 100)
    assert {view.crop for view in views.every(7, example)} == {buckets.WHOLE}
    shown = views.plain(example).show(image, example)
    assert [shown.getpixel(at) for at in ((2, 2), (77, 2), (2, 45), (77, 45))] == [
        (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
    ]  # fmt: skip
    cropped = replace(example, photo=replace(example.photo, source=Source(0, "")))
    assert views.plain(cropped).show(image, example).getpixel((2, 2)) == (0, 0, 0)
    assert latent_key(example, views.plain(example), fingerprint="") != latent_key(cropped, View(), fingerprint="")


# --- masks ------------------------------------------------------------------------------------------------------------


def averages(mask: np.ndarray, box, grid) -> np.ndarray:
    """By fine sampling: every pixel cut into 16 x 16."""
    fine = mask.repeat(16, 0).repeat(16, 1).astype(np.float64) / 255
    left, top, right, bottom = (round(edge * 16) for edge in box)
    rows = np.linspace(top, bottom, grid[0] + 1).round().astype(int)
    columns = np.linspace(left, right, grid[1] + 1).round().astype(int)
    return np.array([
        [fine[a:b, c:d].mean() for c, d in zip(columns, columns[1:], strict=False)]
        for a, b in zip(rows, rows[1:], strict=False)
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("box", "grid"), [((0, 0, 24, 16), (4, 6)), ((0.5, 1.25, 20.5, 13.25), (3, 5)), ((3, 2, 4, 3), (2, 2))]
)
def test_a_mask_is_averaged_by_area(box, grid):
    mask = np.random.default_rng(0).integers(0, 256, (16, 24), dtype=np.uint8)
    found = views.area_average(Image.fromarray(mask), box, grid)
    assert found.dtype == torch.float32
    assert np.abs(found.numpy() - averages(mask, box, grid)).max() <= 1e-6
    white = views.area_average(Image.new("L", (24, 16), 255), box, grid)
    assert torch.equal(white, torch.ones(grid)), "to the bit: no loss changes for it"


def folder_of_photos(folder: Path, count: int = 9) -> Path:
    """Photo i: black, with a white block whose place says i and is no mirror image of another's. Its caption: "i". Its mask:
    the same block, so that latents which are averages of pixels are the mask's.
    """
    folder.mkdir()
    for i in range(count):
        size = [(96, 64), (64, 64), (64, 96)][i % 3]
        mask, (left, top) = Image.new("L", size), (2 + 8 * (i % 3), 2 + 14 * (i // 3))
        mask.paste(255, (left, top, left + 24, top + 24))
        mask.save(folder / f"{i}.mask.png")
        mask.convert("RGB").save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(str(i))
    return folder


def encode(pixels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.avg_pool2d(pixels, 8)


def prompts(captions: list[str]) -> Conditioning:
    codes = torch.tensor([[float(caption or -1)] for caption in captions])
    return Conditioning(codes[..., None], pooled=codes)


def reader_of(tmp_path, **more) -> Reader:
    source = Source(0, str(folder_of_photos(tmp_path / "photos")), repeats=3, resolutions=(64,), masks="files", **more)
    found = examples(scan([source]).photos, step=16, enlarge=False, seed=7)
    cache = Cache(tmp_path / "cache")
    fill_latents(cache, found, seed=7, fingerprint="vae", encode=encode, on_non_finite=pytest.fail)
    views_of_all = {mask_key(e, view, side=8) for e in found for view in views.every(7, e)}
    wanted = masks_wanted(found, seed=7, side=8)
    assert wanted.keys() == views_of_all and fill_masks(cache, wanted, side=8) == len(views_of_all)
    assert fill_masks(Cache(tmp_path / "cache"), wanted, side=8) == 0
    captions = [caption for example in found for caption in example.captions]
    fill_text(cache, captions, fingerprint="text", encode=singly(prompts), on_non_finite=pytest.fail)
    return Reader(
        examples={example.sample: example for example in found},
        cache=cache, seed=7, latent_side=8, latent_fingerprint="vae", text_fingerprint="text", collate=collate,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_latents_captions_and_masks_never_part(tmp_path, num_workers):
    reader = reader_of(tmp_path, flip=True, crop_jitter=0.1, image_variants=3, unmasked_weight=0.5, loss_weight=2.0)
    found = list(reader.examples.values())
    images = {example.sample: decode(example.photo.image.read()).image for example in found}
    updates = [[batch] for epoch in range(3) for batch in epoch_batches(found, seed=7, epoch=epoch, batch_size=2)]
    seen = Counter()
    for (batch,) in iterate(updates, reader, num_workers=num_workers):
        for i, occurrence in enumerate(batch.occurrences):
            number = int(Path(occurrence.sample.partition("/")[2]).stem)
            assert batch.captions[i] == str(number) and batch.conditioning.pooled[i].item() == number
            example = reader.examples[occurrence.sample]
            view = views.draw(7, occurrence, example)
            shown = buckets.to_pixels(view.show(images[occurrence.sample], example))
            assert torch.allclose(batch.latents[i], encode(shown[None])[0])
            white = (batch.latents[i][0] + 1) / 2
            assert white.max() > 0.9 and (white < 0.1).sum() > white.numel() / 2, "the block is seen, and more beside it"
            assert batch.loss_weights[i].shape == white.shape
            # A photo is resized with Lanczos, a mask averaged by area: they differ at the edges of the block.
            assert (batch.loss_weights[i] - 2 * (white + 0.5 * (1 - white))).abs().max() <= 0.1
            seen[number, view] += 1
    assert sum(seen.values()) == 9 * 9 and {number for number, _ in seen} == set(range(9))
    assert {(view.flip, view.crop != CENTRE) for _, view in seen} == {(a, b) for a in (False, True) for b in (False, True)}


@pytest.mark.parametrize(
    "view",
    [View(), View(flip=True), View(crop=buckets.WHOLE), View(crop=(1.2, 0.1, -0.1)), View(flip=True, crop=(1.2, 0.1, 0.1))],
)
def test_a_mask_is_cropped_and_mirrored_as_its_photo(tmp_path, view):
    """The photo is its own mask: then latents that are averages of pixels are the mask's."""
    gradient = np.minimum(np.add.outer(np.arange(200), np.arange(300)) // 2, 255).astype(np.uint8)
    Image.fromarray(gradient).save(tmp_path / "a.png")
    Image.fromarray(gradient).save(tmp_path / "a.mask.png")
    source = Source(0, str(tmp_path), masks="files", resolutions=(128,))
    (example,) = examples(scan([source]).photos, step=16, enlarge=False, seed=7)
    shown = view.show(decode(example.photo.image.read()).image, example)
    pixels = buckets.to_pixels(shown)[:1]
    found = views.mask_on_latents(example, view, side=8)
    assert found.shape == (shown.height // 8, shown.width // 8)
    assert (found - (encode(pixels[None])[0, 0] + 1) / 2).abs().max() <= 1.5 / 255


def test_what_is_wrong_with_masks_is_told(tmp_path):
    folder = folder_of_photos(tmp_path / "photos")
    (folder / "1.mask.png").write_bytes(b"no image")
    Image.new("L", (5, 7)).save(folder / "2.mask.png")
    (folder / "3.mask.png").unlink()
    Image.new("L", (96, 64)).save(folder / "0.mask.png")
    with pytest.raises(
        UserError, match=r"(?s)2 problems.*1\.mask\.png: not a .*2\.mask\.png: the mask has 5 x 7 pixels, its photo"
    ):
        scan([Source(0, str(folder), masks="files")])
    unused = scan([Source(0, str(folder))])
    assert [why for _, why in unused.left_out] == ['a mask, and masks = "none"'] * 8
    assert all(photo.mask is None and photo.contents == photo.sha256 for photo in unused.photos)
    for number in (1, 2):
        (folder / f"{number}.mask.png").unlink()
    photos = scan([Source(0, str(folder), masks="files")]).photos
    assert [photo.mask is None for photo in photos] == [i in (1, 2, 3) for i in range(9)]
    assert photos[0].notes == (BLACK,)
    assert photos[5].contents[0] == photos[5].sha256 and photos[5].contents[1].startswith("mask ")


def test_masks_lie_in_a_folder_of_their_own(tmp_path):
    """Under the photos' names; the folder may lie within the source, and none of its files is a photo."""
    photos, apart = tmp_path / "photos", tmp_path / "photos" / "white"
    (photos / "sub").mkdir(parents=True)
    (apart / "sub").mkdir(parents=True)
    for number, name in enumerate(("a.jpg", "b.png", "sub/a.png", "bare.png")):
        Image.new("RGB", (64, 64), (number, 0, 0)).save(photos / name)
    for number, name in enumerate(("a.png", "b-masklabel.png", "sub/a.webp", "other.png"), 1):
        Image.new("L", (64, 64), 50 * number).save(apart / name, lossless=True)
    (apart / "notes.txt").write_text("")
    Image.new("L", (64, 64)).save(photos / "a.mask.png")
    scanned = scan([Source(0, str(photos), captions="none", masks=str(apart), resolutions=(64,))])
    found = examples(scanned.photos, step=16, enlarge=False, seed=7)
    weights = {e.sample: views.mask_on_latents(e, View(), side=8).unique().tolist() for e in found if e.photo.mask}
    assert weights == {"0/a.jpg": [pytest.approx(50 / 255)], "0/b.png": [pytest.approx(100 / 255)],
                       "0/sub/a.png": [pytest.approx(150 / 255)]}  # fmt: skip
    assert scanned.left_out == (
        (f"{photos}/a.mask.png", f'a mask, and masks = "{apart}"'),
        (f"{apart}/notes.txt", "not an image"),
        (f"{apart}/other.png", "a mask, and no image has its name"),
    )
    noted = f"1 photo: no mask of its name in the folder of masks, so it counts everywhere ({photos}/bare.png)"
    assert noted in notes_of(scanned) and "found: 4 photos, 3 masks, 3 left out" in scanned.account.lines()
    shutil.copytree(apart, tmp_path / "moved")
    moved = scan([Source(0, str(photos), captions="none", masks=str(tmp_path / "moved"), resolutions=(64,))])
    elsewhere = {photo.sample: photo for photo in moved.photos}
    for example in found:
        again = replace(example, photo=elsewhere[example.sample])
        assert again.photo.contents == example.photo.contents
        assert not again.photo.mask or mask_key(again, View(), side=8) == mask_key(example, View(), side=8)


@pytest.mark.parametrize(
    ("masks", "why"),
    [
        ("nowhere", "no such folder; 'files' takes NAME.mask.png beside each photo"),
        ("photos", "holds the photos themselves; give a folder of masks alone, or 'files'"),
    ],
)
def test_a_folder_that_cannot_be_of_masks_is_refused(tmp_path, monkeypatch, masks, why):
    monkeypatch.chdir(tmp_path)
    folder_of_photos(tmp_path / "photos")
    assert survey([Source(0, "photos", masks=masks)]).damaged == (
        f"photos: masks = {masks!r}{':' * (masks != 'photos')} {why}",
    )
    archived = survey([Source(0, "photos/*.tar", masks="photos")]).damaged
    rest = "they are found for a folder of photos, not for this; leave it out"
    assert archived == (f"photos/*.tar: masks = 'photos': {rest}",)


def test_a_photos_own_weight_multiplies_that_of_its_source():
    source = Source(0, "", loss_weight=0.5)
    example = example_of(source)
    heavy = replace(example, photo=replace(example.photo, extras=Extras(loss_weight=3.0)))
    reader = Reader(
        examples={}, cache=None, seed=7, latent_side=8, latent_fingerprint="", text_fingerprint=None, collate=collate
    )
    assert reader.loss_weights(heavy, View()).unique().tolist() == [1.5]
    assert reader.loss_weights(example, View()).unique().tolist() == [0.5]
    plain = replace(example, photo=replace(example.photo, source=Source(0, "")))
    assert reader.loss_weights(plain, View()) is None


def test_transparency_is_a_mask(tmp_path):
    image = Image.new("RGBA", (64, 64), (200, 0, 0, 255))
    image.paste((0, 0, 0, 0), (0, 0, 32, 64))
    image.save(tmp_path / "a.png")
    Image.new("RGB", (64, 64)).save(tmp_path / "b.png")
    found = examples(
        scan([Source(0, str(tmp_path), masks="alpha", resolutions=(64,))]).photos, step=16, enlarge=False, seed=7
    )
    assert [example.photo.mask is None for example in found] == [False, True]
    assert torch.equal(
        views.mask_on_latents(found[0], View(flip=True), side=8), torch.tensor([1.0] * 4 + [0.0] * 4).expand(8, 8)
    )


# --- the loss ---------------------------------------------------------------------------------------------------------


def test_the_weighed_loss_against_fp64():
    generator = torch.Generator().manual_seed(0)
    prediction, target = (torch.randn(3, 4, 6, 5, generator=generator) for _ in range(2))
    weight, latents = torch.rand(3, generator=generator), torch.rand(3, 6, 5, generator=generator)
    expected = torch.zeros(3, dtype=torch.float64)
    for b in range(3):
        for c in range(4):
            for y in range(6):
                for x in range(5):
                    error = float(prediction[b, c, y, x]) - float(target[b, c, y, x])
                    expected[b] += float(weight[b]) * float(latents[b, y, x]) * error**2 / (4 * 6 * 5)
    found = sample_losses(prediction, target, weight, latents)
    assert ((found - expected) / expected).abs().max() <= 120 * 2**-24  # 120 terms, each rounded


def test_weights_of_one_change_no_bit_and_a_mask_of_zero_leaves_no_gradient():
    generator = torch.Generator().manual_seed(0)
    target, weight = torch.randn(2, 4, 8, 8, generator=generator), torch.rand(2, generator=generator)
    plain, ones = (torch.randn(2, 4, 8, 8, generator=generator.manual_seed(1)).requires_grad_() for _ in range(2))
    losses = sample_losses(plain, target, weight), sample_losses(ones, target, weight, torch.ones(2, 8, 8))
    for loss in losses:
        loss.sum().backward()
    assert torch.equal(*losses) and torch.equal(plain.grad, ones.grad)
    masked = plain.detach().clone().requires_grad_()
    mask = torch.ones(2, 8, 8)
    mask[0, 2:5, 3:] = 0
    sample_losses(masked, target, weight, mask).sum().backward()
    assert (masked.grad[0, :, 2:5, 3:] == 0).all() and (masked.grad[0, :, :2] != 0).all()
    assert torch.equal(masked.grad[1], plain.grad[1])
