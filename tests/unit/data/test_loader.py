"""Batches: the right variant, caption and sizes per appearance; the same with and without workers; workers that end."""

import contextlib
import multiprocessing
import os
import signal
import time

import pytest
import torch

from trainer import draws
from trainer.data import loader, sampler
from trainer.data.buckets import choose_bucket, place
from trainer.data.cache import Cache, fill_latents, fill_text, latent_key, text_key
from trainer.data.loader import Reader, iterate
from trainer.data.sources import scan
from trainer.errors import DataError
from trainer.models.base import collate
from trainer.types import Batch, Conditioning

SEED = 7


def encode_text(captions: list[str]) -> Conditioning:
    codes = torch.zeros(len(captions), 80)
    for row, caption in enumerate(captions):
        codes[row, : len(caption)] = torch.tensor([float(ord(letter)) for letter in caption[:80]])
    return Conditioning(codes[..., None], mask=codes > 0, pooled=codes.sum(1, keepdim=True))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    photos = [
        (photo, choose_bucket(photo.width, photo.height, resolution=64, step=16))
        for photo in scan([("examples/bear_plushie", 3)])
    ]
    cache = Cache(tmp_path_factory.mktemp("cache"))
    fill_latents(
        cache,
        photos,
        fingerprint="vae",
        flip=True,
        encode=lambda pixels: torch.nn.functional.avg_pool2d(pixels, 8),
        on_non_finite=pytest.fail,
    )
    captions = [photo.caption for photo, _ in photos]
    fill_text(cache, captions, fingerprint="text", encode=encode_text, on_non_finite=pytest.fail)
    return photos, cache.directory


def reader(dataset, **changes) -> Reader:
    photos, directory = dataset
    settings = {
        "seed": SEED,
        "flip": True,
        "caption_dropout": 0.3,
        "latent_fingerprint": "vae",
        "text_fingerprint": "text",
        "collate": collate,
    }
    by_sample = {photo.sample: (photo, bucket) for photo, bucket in photos}
    return Reader(photos=by_sample, cache=Cache(directory), **(settings | changes))


def updates(dataset, *, batch_size=2, epochs=2, processes=1, rank=0):
    for epoch in range(epochs):
        batches = sampler.epoch_batches(dataset[0], seed=SEED, epoch=epoch, batch_size=batch_size)
        for update in sampler.updates(batches, accumulation=2, processes=processes):
            yield sampler.share(update, processes=processes, rank=rank)


def tensors(batch: Batch) -> dict[str, torch.Tensor]:
    named = {name: getattr(batch, name) for name in ("latents", "original_size", "crop_top_left", "target_size")}
    return named | (batch.conditioning.tensors() if batch.conditioning else {})


def same(one: Batch, other: Batch) -> bool:
    a, b = tensors(one), tensors(other)
    return (
        (one.occurrences, one.captions) == (other.occurrences, other.captions)
        and a.keys() == b.keys()
        and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)
    )


def test_a_batch_holds_what_its_occurrences_say(dataset):
    photos = {photo.sample: (photo, bucket) for photo, bucket in dataset[0]}
    cache = Cache(dataset[1])
    flips, drops = set(), set()
    for (batch,) in iterate(([b] for u in updates(dataset, epochs=6) for b in u), reader(dataset), num_workers=0):
        for i, occurrence in enumerate(batch.occurrences):
            photo, bucket = photos[occurrence.sample]
            key = (occurrence.epoch, occurrence.sample, occurrence.repeat)
            flip = draws.uniform(SEED, "flip", *key) < 0.5
            drop = draws.uniform(SEED, "caption_dropout", *key) < 0.3
            stored = cache.get(latent_key(photo.sha256, bucket=bucket, flip=flip, fingerprint="vae"))["latents"]
            assert torch.equal(batch.latents[i], stored)
            assert batch.captions[i] == ("" if drop else photo.caption)
            own = {name: tensor[i : i + 1] for name, tensor in batch.conditioning.tensors().items()}
            expected = cache.get(text_key(batch.captions[i], fingerprint="text"))
            assert own.keys() == expected.keys() == {"sequence", "mask", "pooled"}
            assert all(torch.equal(own[name], expected[name]) for name in own)
            placement = place(photo.width, photo.height, bucket, flip=flip)
            assert batch.original_size[i].tolist() == [photo.height, photo.width] == list(placement.original_size)
            assert batch.crop_top_left[i].tolist() == list(placement.crop_top_left)
            assert batch.target_size[i].tolist() == [bucket[1], bucket[0]]
            flips.add(flip)
            drops.add(drop)
        assert batch.latents.dtype == torch.float32 and batch.original_size.dtype == torch.int64
    assert flips == drops == {True, False}


def test_without_flip_dropout_and_text_cache(dataset):
    plain = reader(dataset, flip=False, caption_dropout=0.0, text_fingerprint=None)
    captions = {photo.sample: photo.caption for photo, _ in dataset[0]}
    for batches in iterate(updates(dataset), plain, num_workers=0):
        for batch in batches:
            assert batch.conditioning is None and not any(plain.flipped(o) for o in batch.occurrences)
            assert batch.captions == tuple(captions[o.sample] for o in batch.occurrences)


def test_an_appearance_is_the_same_in_every_batch_size(dataset):
    def appearances(batch_size):
        found = {}
        for batches in iterate(updates(dataset, batch_size=batch_size), reader(dataset), num_workers=0):
            for batch in batches:
                for i, occurrence in enumerate(batch.occurrences):
                    found[occurrence] = (batch.captions[i], {name: t[i] for name, t in tensors(batch).items()})
        return found

    one, other = appearances(1), appearances(4)
    assert one.keys() == other.keys() and len(one) == 30
    for occurrence, (caption, values) in one.items():
        assert caption == other[occurrence][0]
        assert all(torch.equal(values[name], other[occurrence][1][name]) for name in values)


def test_workers_give_equal_batches_and_end(dataset):
    before = torch.get_rng_state()
    alone = list(iterate(updates(dataset), reader(dataset), num_workers=0))
    helped = list(iterate(updates(dataset), reader(dataset), num_workers=2))
    assert [len(batches) for batches in alone] == [len(batches) for batches in helped]
    assert all(same(a, b) for one, other in zip(alone, helped, strict=True) for a, b in zip(one, other, strict=True))
    assert torch.equal(before, torch.get_rng_state())
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_update_without_a_share_gives_an_empty_list(dataset, num_workers):
    shares = list(updates(dataset, processes=4, rank=3))
    assert [] in shares
    found = list(iterate(shares, reader(dataset), num_workers=num_workers))
    assert [[batch.occurrences for batch in batches] for batches in found] == shares


def test_updates_may_be_endless(dataset):
    batches = iterate(updates(dataset, epochs=10**9), reader(dataset), num_workers=2)
    first = [next(batches) for _ in range(12)]
    batches.close()
    expected = iterate(updates(dataset, epochs=10**9), reader(dataset), num_workers=0)
    assert all(same(a, b) for one in first for a, b in zip(one, next(expected), strict=True))
    assert not multiprocessing.active_children()


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_workers_leave_signals_to_the_main_process(dataset):
    arrived = []
    handlers = {number: signal.signal(number, lambda n, _: arrived.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    batches = iterate(updates(dataset, epochs=50), reader(dataset), num_workers=2)
    try:
        next(batches)
        workers = multiprocessing.active_children()
        assert len(workers) == 2
        for worker in workers:
            for number in handlers:
                os.kill(worker.pid, number)
        time.sleep(0.1)
        for _ in range(20):
            next(batches)
        assert all(worker.is_alive() for worker in workers)
        os.kill(os.getpid(), signal.SIGTERM)  # the main process still hears
        time.sleep(0.05)
        assert arrived == [signal.SIGTERM]
    finally:
        batches.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_missing_entry_is_named(dataset, num_workers, tmp_path):
    lost = reader(dataset)
    lost.cache = Cache(tmp_path)
    with (
        contextlib.closing(iterate(updates(dataset), lost, num_workers=num_workers)) as batches,
        pytest.raises(DataError, match=r"\.safetensors"),
    ):
        next(batches)


def test_workers_share_the_memory_of_the_cache(dataset):
    class Telling(Reader):
        def __getitem__(self, occurrences):
            return self.cache.memory_bytes

    told = reader(dataset)
    told.__class__ = Telling
    told.cache.memory_bytes = 1000
    assert {memory for batches in iterate(updates(dataset), told, num_workers=2) for memory in batches} == {500}
    assert told.cache.memory_bytes == 1000


def test_a_dead_worker_is_told_with_a_remedy() -> None:
    """Played: torch tells of a real death by a signal, wherever the main process is then."""

    def batches(text: str):
        raise RuntimeError(text)
        yield

    with pytest.raises(DataError, match="is killed by signal: Killed.; if memory ran out, a lower data.num_workers"):
        loader._next(batches("DataLoader worker (pid 7) is killed by signal: Killed."))
    with pytest.raises(RuntimeError, match="shapes"):
        loader._next(batches("shapes"))
