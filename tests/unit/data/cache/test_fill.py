"""The cache: a key per input, damage found wherever it is, nothing stale, nothing non-finite, bounded memory."""

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.photos import scan
from trainer.base import tiles
from trainer.base.errors import DataError, Interrupted, NonFiniteError, UserError
from trainer.base.progress import Phases, Record
from trainer.base.tensorfile import TensorFile, parse, write_tensors
from trainer.base.types import Conditioning
from trainer.data.buckets import fit, to_pixels
from trainer.data.cache import entries, fill
from trainer.data.cache.entries import Cache
from trainer.data.cache.fill import latent_key, mask_key, text_key
from trainer.data.examples import Example, examples
from trainer.data.images.decode import decode
from trainer.data.images.views import View
from trainer.data.sources import Extras, Mask, Source
from trainer.runtime.processes import Processes

TENSORS = {"latents": torch.arange(24, dtype=torch.float32).reshape(2, 3, 4), "mask": torch.tensor([True, False])}
KEY = "ab" * 32


def dataset(folder="examples/bear_plushie", flip=False) -> tuple[Example, ...]:
    return examples(scan([Source(0, str(folder), flip=flip, resolutions=(64,))]).photos, step=16, enlarge=False, seed=7)


def encode(pixels: torch.Tensor) -> torch.Tensor:
    assert pixels.shape[:2] == (1, 3) and pixels.dtype == torch.float32
    return torch.nn.functional.avg_pool2d(pixels, 8)


def singly(encode):
    """`encode` of fill_text, by a function that maps captions to their conditioning."""
    return lambda captions: ((caption, encode([caption])) for caption in captions)


def encode_text(captions: list[str]) -> Conditioning:
    values = torch.tensor([[float(len(caption))] for caption in captions])
    return Conditioning(values[:, None].expand(-1, 4, 2).bfloat16(), mask=values > 0, pooled=values)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def stored(folder, key=KEY, tensors=TENSORS, metadata=None) -> Cache:
    """A cache with that entry on the disk."""
    cache = Cache(folder)
    cache.put(key, tensors, metadata)
    cache.flush()
    return cache


def alone(folder, key=KEY, tensors=TENSORS):
    """An entry in a file of its own, as caches of before have them; its path."""
    cache = Cache(folder)
    cache.put(key, tensors, {"sample": "0/ä.jpg"})
    path = cache.path(key)
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(cache._open[key].numpy().tobytes())
    return path


def entries_of(folder) -> dict[str, bytes]:
    """The bytes of each entry in the packs of a folder."""
    packs = map(TensorFile, folder.glob("packs/*.safetensors"))
    return {key: pack.read(key).numpy().tobytes() for pack in packs for key in pack.entries}


def test_any_changed_input_changes_the_key():
    example = examples(scan([Source(0, "examples/bear_plushie", resolutions=(64,))]).photos, step=16, enlarge=False, seed=7)[
        0
    ]
    photo = example.photo
    other = [
        replace(example, photo=replace(photo, sha256="b" * 64)),
        replace(example, photo=replace(photo, choices=("background #000000",))),
        replace(example, bucket=(48, 80)),
    ]
    shown = [View(flip=True), View(colours=(1.1, 1.0, 1.0)), View(crop=(1.2, 0.0, 0.0)), View(crop=(1.2, 0.1, 0.0))]
    keys = [latent_key(example, View(), fingerprint=name) for name in ("vae", "vae2")]
    keys += [latent_key(each, View(), fingerprint="vae") for each in other]
    keys += [latent_key(example, view, fingerprint="vae") for view in shown]
    masked = replace(example, photo=replace(photo, extras=Extras(Mask(photo.image, "c" * 64))))
    other = [
        replace(masked, photo=replace(masked.photo, extras=Extras(Mask(photo.image, "d" * 64)))),
        replace(masked, photo=replace(masked.photo, source=replace(photo.source, masks="alpha"))),
        replace(masked, bucket=(48, 80)),
    ]
    keys += [mask_key(masked, View(), side=side) for side in (8, 16)]
    keys += [mask_key(each, View(), side=8) for each in other]
    keys += [mask_key(masked, view, side=8) for view in (shown[0], *shown[2:])]
    assert mask_key(masked, shown[1], side=8) == mask_key(masked, View(), side=8), "colours are not the mask's"
    assert latent_key(masked, View(), fingerprint="vae") == keys[0], "nor the mask the latents'"
    keys += [text_key("a", fingerprint="x"), text_key("ax", fingerprint=""), text_key("", fingerprint="ax")]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 64 for key in keys)


def test_changed_preprocessing_changes_the_key(monkeypatch):
    from trainer.data import buckets
    from trainer.data.cache import fill as cache

    (example, *_) = dataset()

    def key():
        return latent_key(example, View(), fingerprint="vae")

    before = key()
    monkeypatch.setattr(cache, "PREPROCESSING_VERSION", cache.PREPROCESSING_VERSION + 1)
    assert key() != before
    monkeypatch.undo()
    monkeypatch.setattr(buckets, "RESIZE_FILTER", buckets.Image.Resampling.BICUBIC)
    assert key() != before


@given(st.text(), st.text(), st.text(), st.text())
def test_text_keys_are_unambiguous(caption, fingerprint, caption2, fingerprint2):
    same = (caption, fingerprint) == (caption2, fingerprint2)
    assert (text_key(caption, fingerprint=fingerprint) == text_key(caption2, fingerprint=fingerprint2)) == same


def test_put_then_get_in_another_process(tmp_path):
    writer = Cache(tmp_path)
    assert writer.missing([KEY, KEY]) == [KEY]
    writer.put(KEY, TENSORS, {"sample": "0/a.jpg"})
    assert equal(writer.get(KEY), TENSORS) and writer.missing([KEY]) == [] and not list(tmp_path.rglob("*.safetensors"))
    writer.flush()
    reader = Cache(tmp_path)
    assert reader.missing([KEY]) == []
    assert equal(reader.get(KEY), TENSORS) and equal(reader.get(KEY), TENSORS)
    assert equal(writer.get(KEY), TENSORS)


def test_the_same_entry_has_the_same_bytes(tmp_path):
    paths = []
    for name in ("one", "other"):
        paths.append(stored(tmp_path / name, metadata={"b": "1", "a": "2"}).path(KEY))
    assert paths[0].read_bytes() == paths[1].read_bytes() and paths[0].name == paths[1].name


def test_every_flipped_byte_of_a_file_of_its_own_is_detected(tmp_path):
    path = alone(tmp_path)
    whole = path.read_bytes()
    assert b"}  " in whole  # the header's padding, where 0x2A makes a space a newline: still the same JSON
    rng = random.Random(0)
    for place in range(len(whole)):
        for change in (0x2A, rng.choice([1, 128, rng.randrange(1, 256)])):
            damaged = bytearray(whole)
            damaged[place] ^= change
            path.write_bytes(damaged)
            assert Cache(tmp_path).missing([KEY]) == [KEY], (place, change)
    path.write_bytes(whole)
    assert Cache(tmp_path).missing([KEY]) == []


@pytest.mark.slow
def test_no_flipped_byte_of_a_pack_is_read_as_a_value(tmp_path):
    """What is damaged is missing at the start, or met when it is first read, and then missing at the next start."""
    path = stored(tmp_path, metadata={"sample": "0/ä.jpg"}).path(KEY)
    whole, rng, met = path.read_bytes(), random.Random(0), {"missing": 0, "read": 0, "whole": 0}
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= rng.choice([0x2A, 1, 128, rng.randrange(1, 256)])
        path.write_bytes(damaged)
        cache = Cache(tmp_path)
        if cache.missing([KEY]):
            met["missing"] += 1
            continue
        try:
            assert equal(cache.get(KEY), TENSORS), place  # a space of the header became a newline
            met["whole"] += 1
        except DataError as error:
            assert "start again, and 1 of the 1 entries in that file are made anew" in str(error)
            met["read"] += 1
            again = Cache(tmp_path)
            assert again.missing([KEY]) == [KEY], place
            again.put(KEY, TENSORS, {"sample": "0/ä.jpg"})
            again.flush()
            assert path.read_bytes() == whole and Cache(tmp_path).missing([KEY]) == []
    assert met["read"] > 200 and met["missing"] > 50 and met["whole"] < 60, met


def test_truncated_extended_swapped_and_unsigned_entries_are_detected(tmp_path):
    path = alone(tmp_path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        assert Cache(tmp_path).missing([KEY]) == [KEY]
    path.write_bytes(whole + b"\0")
    assert Cache(tmp_path).missing([KEY]) == [KEY]
    path.write_bytes(whole)
    other = "cd" * 32
    Cache(tmp_path).path(other).parent.mkdir()
    shutil.copy(path, Cache(tmp_path).path(other))
    assert Cache(tmp_path).missing([KEY, other]) == [other]
    write_tensors(path, TENSORS, {"key": KEY})
    assert Cache(tmp_path).missing([KEY]) == [KEY]


def test_a_pack_that_is_no_whole_file_is_named(tmp_path):
    path = stored(tmp_path).path(KEY)
    whole = path.read_bytes()
    for data in (b"", whole[:9], whole[:-1], whole + b"\0", bytes(len(whole))):
        path.write_bytes(data)
        cache = Cache(tmp_path)
        assert cache.missing([KEY]) == [KEY]
        assert len(cache.damaged) == 1 and str(path) in cache.damaged[0] and "made anew; delete it" in cache.damaged[0]
    stored(tmp_path)
    assert path.read_bytes() == whole and not Cache(tmp_path).missing([KEY])


def test_of_a_pack_all_that_is_damaged_is_made_anew_at_once(tmp_path):
    """As after a power failure: nothing is synced."""
    keys = [f"{number:064x}" for number in range(8)]
    cache = Cache(tmp_path)
    for key in keys:
        cache.put(key, TENSORS)
    cache.flush()
    path = cache.path(keys[0])
    data = bytearray(path.read_bytes())
    size = len(data)
    data[size // 2 :] = bytes(size - size // 2)
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"start again, and (\d) of the 8 entries in that file are made anew"):
        Cache(tmp_path).get(keys[-1])
    absent = Cache(tmp_path).missing(keys)
    assert 3 <= len(absent) <= 7 and absent == keys[-len(absent) :]
    again = Cache(tmp_path)
    for key in again.missing(keys):
        again.put(key, TENSORS)
    again.flush()
    last = Cache(tmp_path)
    assert last.missing(keys) == [] and all(equal(last.get(key), TENSORS) for key in keys)


def test_a_cache_of_files_of_their_own_is_read_beside_packs(tmp_path):
    other = "cd" * 32
    path = alone(tmp_path)
    stored(tmp_path, other)
    cache = Cache(tmp_path)
    assert cache.missing([KEY, other, "e" * 64]) == ["e" * 64]
    assert equal(cache.get(KEY), TENSORS) and equal(cache.get(other), TENSORS) and cache.path(KEY) == path


def test_a_broken_entry_is_named_by_get_and_mended_by_put(tmp_path):
    path = alone(tmp_path)
    cache = Cache(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=KEY):
        cache.get(KEY)
    with pytest.raises(DataError, match="cd" * 32):
        cache.get("cd" * 32)
    cache.put(KEY, TENSORS)
    cache.flush()
    assert equal(Cache(tmp_path).get(KEY), TENSORS)


def test_a_pack_is_no_larger_than_it_may_be(tmp_path, monkeypatch):
    monkeypatch.setattr(entries, "PACK_BYTES", 10_000)
    cache, clock = Cache(tmp_path), [0.0]
    for number in range(40):
        cache.put(f"{number:064x}", {"x": torch.zeros(1000, dtype=torch.uint8)})
        assert len(list(tmp_path.rglob("*.safetensors"))) == number // 6, "written when it is full"
    cache.flush()
    sizes = [path.stat().st_size for path in tmp_path.rglob("*.safetensors")]
    assert len(sizes) == 7 and max(sizes) <= 10_000 and cache.missing([f"{number:064x}" for number in range(40)]) == []
    cache.put("a" * 64, {"x": torch.zeros(20_000, dtype=torch.uint8)})
    cache.put("b" * 64, TENSORS)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 8, "what is larger has a file of its own"
    monkeypatch.setattr(entries, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    slow = Cache(tmp_path / "slow")
    for number in range(4):
        slow.put(f"{number:064x}", TENSORS)
        clock[0] += 200
    assert len(list((tmp_path / "slow").rglob("*.safetensors"))) == 1, "a kill loses minutes at most"


def test_nothing_of_the_cache_is_synced(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda number: pytest.fail("it can be made again"))
    assert fill_latents(Cache(tmp_path), dataset(), seed=0, fingerprint="vae", **ENCODING) == 5


def test_memory_is_bounded_and_keeps_what_was_used_last(tmp_path):
    size = 1000
    cache = Cache(tmp_path, memory_bytes=3 * size)
    keys = [f"{i:064x}" for i in range(5)]
    for i, key in enumerate(keys):
        cache.put(key, {"x": torch.full((size,), i, dtype=torch.uint8)})
    first = [cache.get(key)["x"] for key in keys[:3]]
    assert cache.get(keys[0])["x"] is first[0]
    cache.get(keys[3])  # pushes out keys[1], the one used longest ago
    assert cache.get(keys[0])["x"] is first[0]
    assert cache.get(keys[2])["x"] is first[2]
    assert cache.get(keys[1])["x"] is not first[1]
    assert cache._memory_used == 3 * size == sum(t["x"].numel() for t in cache._memory.values())
    cache.put(keys[0], {"x": torch.zeros(4 * size, dtype=torch.uint8)})
    assert cache.get(keys[0])["x"].numel() == 4 * size  # the new value, although too large to keep
    assert cache._memory.keys() == {keys[2], keys[1]}


def refuse(what: str) -> None:
    raise NonFiniteError(what)


ENCODING = {"encode": encode, "on_non_finite": refuse}


def fill_latents(cache, photos, *, seed, fingerprint, mine=lambda key: True, **more) -> int:
    """`fill.fill_latents`, of the views of `photos` whose keys are mine."""
    wanted = fill.latents_wanted(photos, seed=seed, fingerprint=fingerprint)
    return fill.fill_latents(cache, {key: view for key, view in wanted.items() if mine(key)}, **more)


def fill_text(cache, captions, *, prompts=(), fingerprint, mine=lambda key: True, **more) -> int:
    """`fill.fill_text`, of the texts whose keys are mine."""
    wanted = (fill.texts_wanted(some, fingerprint=fingerprint) for some in (captions, prompts))
    return fill.fill_text(cache, *({key: text for key, text in some.items() if mine(key)} for some in wanted), **more)


def test_fill_latents(tmp_path):
    record, written = Record(), tmp_path / "phases.jsonl"
    settings = {"seed": 0, "fingerprint": "vae", "encode": encode, "on_non_finite": refuse, "phases": Phases(record=record)}
    assert fill_latents(Cache(tmp_path), dataset(), **settings) == 5
    record.open(written)
    entries = [json.loads(line) for line in written.read_text().splitlines()]
    assert [(e["phase"], e["done"], e["unit"]) for e in entries] == [
        ("reading the cache", 5, "entry"), ("encoding photos", 5, "photo"),
    ]  # fmt: skip
    cache = Cache(tmp_path)
    assert fill_latents(cache, dataset(flip=True), **settings) == 5  # only the mirrored ones are new
    assert fill_latents(cache, dataset(flip=True), **settings) == 0
    for example in dataset():
        photo, bucket = example.photo, example.bucket
        for flip in (False, True):
            stored = cache.get(latent_key(example, View(flip), fingerprint="vae"))["latents"]
            expected = encode(to_pixels(fit(decode(photo.image.read()).image, bucket, flip=flip))[None])[0]
            assert stored.shape == (3, bucket[1] // 8, bucket[0] // 8) and torch.equal(stored, expected)


def test_a_changed_photo_or_encoder_is_encoded_anew(tmp_path):
    folder = shutil.copytree("examples/bear_plushie", tmp_path / "photos")
    cache = tmp_path / "cache"
    assert fill_latents(Cache(cache), dataset(folder), seed=0, fingerprint="vae", **ENCODING) == 5
    shutil.copy(folder / "00.jpg", folder / "01.jpg")
    assert fill_latents(Cache(cache), dataset(folder), seed=0, fingerprint="vae", **ENCODING) == 0
    with open(folder / "01.jpg", "ab") as file:
        file.write(b"\0")
    assert fill_latents(Cache(cache), dataset(folder), seed=0, fingerprint="vae", **ENCODING) == 1
    assert fill_latents(Cache(cache), dataset(folder), seed=0, fingerprint="other", encode=encode, on_non_finite=refuse) == 5


def test_a_damaged_entry_is_rebuilt_with_the_same_bytes(tmp_path):
    photos = dataset()
    fill_latents(Cache(tmp_path), photos, seed=0, fingerprint="vae", **ENCODING)
    (pack,) = tmp_path.rglob("*.safetensors")
    before, whole = entries_of(tmp_path), pack.read_bytes()
    pack.write_bytes(whole[:-3] + b"abc")
    victim = max(before)
    with pytest.raises(DataError, match=victim):
        Cache(tmp_path).get(victim)
    assert fill_latents(Cache(tmp_path), photos, seed=0, fingerprint="vae", **ENCODING) == 1
    packs = [TensorFile(path) for path in tmp_path.rglob("*.safetensors")]
    assert sum(file.read(victim).numpy().tobytes() == before[victim] for file in packs if victim in file.entries) == 1
    assert all(Cache(tmp_path).get(key) for key in before)


def test_a_photo_that_changed_after_the_scan_is_refused(tmp_path):
    example, *_ = dataset()
    stale = replace(example, photo=replace(example.photo, sha256="0" * 64))
    with pytest.raises(UserError, match="00.jpg changed"):
        fill_latents(Cache(tmp_path), [stale], seed=0, fingerprint="vae", encode=encode, on_non_finite=refuse)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_non_finite_latents_and_text_are_refused_by_name(tmp_path):
    cache, photos = Cache(tmp_path), dataset()

    for value in (float("nan"), float("inf")):
        calls = []

        def broken(pixels, value=value, calls=calls):
            calls.append(None)
            latents = encode(pixels)
            latents[0, 0, 0, 0] = value if len(calls) == 3 else 0.0
            return latents

        with pytest.raises(NonFiniteError, match=r"0/02\.jpg"):
            fill_latents(cache, photos, seed=0, fingerprint=f"vae {value}", encode=broken, on_non_finite=refuse)
        assert fill_latents(cache, photos, seed=0, fingerprint=f"vae {value}", **ENCODING) == 3
    with pytest.raises(NonFiniteError, match="a bad caption"):
        fill_text(
            cache,
            ["a bad caption"],
            fingerprint="t",
            encode=singly(lambda texts: Conditioning(torch.full((1, 2, 2), float("nan")))),
            on_non_finite=refuse,
        )
    assert cache.missing([text_key("a bad caption", fingerprint="t")])


def test_non_finite_entries_that_are_kept_are_told_again(tmp_path):
    """Skipped now, such an entry is not taken for a sound one by a later start that would stop."""

    def broken(pixels):
        return encode(pixels) * float("nan")

    def text(texts):
        return Conditioning(torch.full((1, 2, 2), float("inf" if texts == ["bad"] else "1")))

    told: list[str] = []
    photos = dataset()[:2]
    arguments = {"seed": 0, "fingerprint": "vae", "on_non_finite": told.append}
    assert fill_latents(Cache(tmp_path), photos, encode=broken, **arguments) == 2
    first, told[:] = list(told), []
    assert fill_latents(Cache(tmp_path), photos, encode=encode, **arguments) == 0
    assert [text.partition(" (")[0] for text in first] == ["the latents of 0/00.jpg", "the latents of 0/01.jpg"]
    for before, again in zip(first, told, strict=True):
        assert again.startswith(before) and ".safetensors: delete it to encode anew" in again
    with pytest.raises(NonFiniteError, match="0/0"):
        fill_latents(Cache(tmp_path), photos, encode=encode, **arguments | {"on_non_finite": refuse})
    for made in (2, 0):
        told[:] = []
        assert fill_text(Cache(tmp_path), ["bad"], fingerprint="t", encode=singly(text), on_non_finite=told.append) == made
        assert len(told) == 1 and told[0].startswith("the text encodings of 'bad'")
        assert ("delete it to encode anew" in told[0]) == (made == 0)


def test_fill_text_takes_each_caption_once_and_the_empty_one(tmp_path):
    cache, calls = Cache(tmp_path), []

    def counted(captions):
        calls.append(captions)
        return encode_text(captions)

    assert fill_text(cache, ["a", "bb", "a"], fingerprint="t", encode=singly(counted), on_non_finite=refuse) == 3
    assert calls == [["a"], ["bb"], [""]]
    assert fill_text(Cache(tmp_path), ["bb", "ccc"], fingerprint="t", encode=singly(counted), on_non_finite=refuse) == 1
    stored = Conditioning(**Cache(tmp_path).get(text_key("bb", fingerprint="t")))
    expected = encode_text(["bb"])
    assert equal(stored.tensors(), expected.tensors()) and stored.sequence.dtype == torch.bfloat16


def test_captions_of_several_lines_have_entries_of_their_own(tmp_path):
    """SimpleTuner 03d824c27: the name of an entry was made of the caption, which a line break ended."""
    captions, cache = (
        ["a bear", "a bear\n", "a bear\non a beach", "a bear\r\non a beach\n\nat night", "\n", "a/b\0c"],
        Cache(tmp_path),
    )
    assert fill_text(cache, captions, fingerprint="t", encode=singly(encode_text), on_non_finite=refuse) == len(captions) + 1
    for caption in ["", *captions]:
        found = Cache(tmp_path).get(text_key(caption, fingerprint="t"))
        assert equal(found, encode_text([caption]).tensors()), caption
    assert len(entries_of(tmp_path)) == len(captions) + 1


def test_a_photo_that_is_encoded_in_tiles_has_another_key(monkeypatch):
    small = dataset()[0]
    large = replace(small, bucket=(2048, 2048))
    before = [latent_key(example, View(), fingerprint="vae") for example in (small, large)]
    monkeypatch.setattr(tiles, "WHOLE", 2**40)
    after = [latent_key(example, View(), fingerprint="vae") for example in (small, large)]
    assert before[0] == after[0] and before[1] != after[1]


def test_prompts_of_samples_are_told_of_apart(tmp_path):
    """One that is a caption, too, counts as a caption."""

    def broken(captions):
        return Conditioning(torch.full((1, 2, 2), float("nan" if captions != [""] else "1")))

    told: dict[str, list[str]] = {"trained": [], "drawn": []}
    settings = {"fingerprint": "t", "on_non_finite": told["trained"].append, "on_black": told["drawn"].append}
    for made in (4, 0):
        assert fill_text(Cache(tmp_path), ["a", "b"], prompts=["b", "c", ""], encode=singly(broken), **settings) == made
    texts = {kind: [what.split()[4].rstrip(",") for what in some] for kind, some in told.items()}
    assert texts == {"trained": ["'a'", "'b'"] * 2, "drawn": ["'c'"] * 2}


@pytest.mark.slow
def test_processes_share_out_what_is_to_be_made(tmp_path):
    """Each looks at its keys alone and makes them; then at the others', and makes what is not on its own disk."""
    whole, parts = Cache(tmp_path / "whole"), Cache(tmp_path / "parts")
    captions = [f"caption {i}" for i in range(40)]
    views = [SimpleNamespace(count=3, rank=rank) for rank in range(3)]
    everything = {"fingerprint": "t", "encode": singly(encode_text), "on_non_finite": refuse}
    photos = {"seed": 0, "fingerprint": "vae", **ENCODING}
    fill_text(whole, captions, **everything)
    fill_latents(whole, dataset(flip=True), **photos)
    made = []
    for view in views:
        mine = partial(Processes.takes, view)
        made.append(fill_text(parts, captions, mine=mine, **everything) + fill_latents(
            parts, dataset(flip=True), mine=mine, **photos))  # fmt: skip
    assert sum(made) == 41 + 10 and all(10 <= count <= 24 for count in made)
    for view in views:
        again = Cache(tmp_path / "parts")
        assert fill_text(again, captions, mine=lambda key, view=view: not Processes.takes(view, key), **everything) == 0
    assert entries_of(tmp_path / "whole") == entries_of(tmp_path / "parts")


def test_filling_is_interrupted_and_continued(tmp_path):
    calls = []

    def check():
        calls.append(None)
        if len(calls) == 1 + 5 + 1 + 3:  # the first phase and its five look-ups, the second and its third photo
            raise Interrupted(2)

    with pytest.raises(Interrupted):
        fill_latents(Cache(tmp_path), dataset(), seed=0, fingerprint="vae", **ENCODING, phases=Phases(check=check))
    assert len(entries_of(tmp_path)) == 3
    assert fill_latents(Cache(tmp_path), dataset(), seed=0, fingerprint="vae", **ENCODING) == 2


def test_leftovers_of_killed_processes_are_removed(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / "ab").mkdir()
    names = {
        pid: tmp_path / "ab" / f".{KEY}.safetensors.{pid}.0a1b2c3d.tmp" for pid in (ended.pid, os.getpid(), os.getppid())
    }
    for path in names.values():
        path.write_bytes(b"half")
    fill_latents(Cache(tmp_path), dataset(), seed=0, fingerprint="vae", **ENCODING)
    assert list(tmp_path.rglob("*.tmp")) == [names[os.getppid()]]  # that process may still be writing


def test_an_entry_tells_people_what_it_is(tmp_path):
    fill_latents(Cache(tmp_path), dataset()[:1], seed=0, fingerprint="vae", **ENCODING)
    ((key, data),) = entries_of(tmp_path).items()
    metadata, tensors = parse(bytearray(data), tmp_path)
    assert metadata["sample"] == "0/00.jpg" and metadata["key"] == key and list(tensors) == ["latents"]
