"""Batches: the right variant, caption and sizes per appearance; the same with and without workers; workers that end."""

import contextlib
import errno
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time

import pytest
import torch

from tests.photos import epoch_batches, scan
from tests.unit.data.cache.test_fill import fill_latents, fill_text, singly
from trainer.base import draws
from trainer.base.errors import DataError
from trainer.base.types import Batch, Conditioning
from trainer.data.batches import loader, sampler, sent
from trainer.data.batches.loader import Encoders, Reader, iterate
from trainer.data.buckets import place
from trainer.data.cache.entries import Cache, MemoryCache
from trainer.data.cache.fill import latent_key, text_key
from trainer.data.examples import Example, examples
from trainer.data.images import views
from trainer.data.images.views import View
from trainer.data.sources import Source
from trainer.models.base import collate

SEED = 7


def encode_text(captions: list[str]) -> Conditioning:
    codes = torch.zeros(len(captions), 80)
    for row, caption in enumerate(captions):
        codes[row, : len(caption)] = torch.tensor([float(ord(letter)) for letter in caption[:80]])
    return Conditioning(codes[..., None], mask=codes > 0, pooled=codes.sum(1, keepdim=True))


def taken(path="examples/bear_plushie", **settings) -> tuple[Example, ...]:
    return examples(scan([Source(0, path, repeats=3, resolutions=(64,), **settings)]).photos, step=16, enlarge=False, seed=7)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    found = taken(flip=True, caption_dropout=0.3)
    cache = Cache(tmp_path_factory.mktemp("cache"))
    fill_latents(
        cache,
        found,
        seed=SEED,
        fingerprint="vae",
        encode=lambda pixels: torch.nn.functional.avg_pool2d(pixels, 8),
        on_non_finite=pytest.fail,
    )
    captions = [example.photo.caption for example in found]
    fill_text(cache, captions, fingerprint="text", encode=singly(encode_text), on_non_finite=pytest.fail)
    return found, cache.directory


def reader(dataset, **changes) -> Reader:
    found, directory = dataset
    settings = {"seed": SEED, "latent_side": 8, "latent_fingerprint": "vae", "text_fingerprint": "text", "collate": collate}
    settings |= {"examples": {example.sample: example for example in found}}
    return Reader(**(settings | ({} if "cache" in changes else {"cache": Cache(directory)}) | changes))


def updates(dataset, *, batch_size=2, epochs=2, processes=1, rank=0):
    for epoch in range(epochs):
        batches = epoch_batches(dataset[0], seed=SEED, epoch=epoch, batch_size=batch_size)
        for update in sampler.updates(batches, group=2 * processes):
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
    found = {example.sample: example for example in dataset[0]}
    cache = Cache(dataset[1])
    flips, drops = set(), set()
    for (batch,) in iterate(([b] for u in updates(dataset, epochs=6) for b in u), reader(dataset), num_workers=0):
        for i, occurrence in enumerate(batch.occurrences):
            photo, bucket = found[occurrence.sample].photo, found[occurrence.sample].bucket
            key = (occurrence.epoch, occurrence.sample, occurrence.repeat)
            flip = draws.uniform(SEED, "flip", *key) < 0.5
            drop = draws.uniform(SEED, "caption_dropout", *key) < 0.3
            stored = cache.get(latent_key(found[occurrence.sample], View(flip), fingerprint="vae"))["latents"]
            assert torch.equal(batch.latents[i], stored)
            assert batch.captions[i] == ("" if drop else photo.caption)
            own = {name: tensor[i : i + 1] for name, tensor in batch.conditioning.tensors().items()}
            expected = cache.get(text_key(batch.captions[i], fingerprint="text"))
            assert own.keys() == expected.keys() == {"sequence", "mask", "pooled"}
            assert all(torch.equal(own[name], expected[name]) for name in own)
            placement = place(*photo.size, bucket, flip=flip)
            assert batch.original_size[i].tolist() == [*photo.size[::-1]] == list(placement.original_size)
            assert batch.crop_top_left[i].tolist() == list(placement.crop_top_left)
            assert batch.target_size[i].tolist() == [bucket[1], bucket[0]]
            flips.add(flip)
            drops.add(drop)
        assert batch.latents.dtype == torch.float32 and batch.original_size.dtype == torch.int64
    assert flips == drops == {True, False}


def test_without_flip_dropout_and_text_cache(dataset):
    plain = reader((taken(), dataset[1]), text_fingerprint=None)
    captions = {example.sample: example.photo.caption for example in dataset[0]}
    for batches in iterate(updates(dataset), plain, num_workers=0):
        for batch in batches:
            assert batch.conditioning is None
            assert all(views.draw(SEED, o, plain.examples[o.sample]) == View() for o in batch.occurrences)
            assert batch.captions == tuple(captions[o.sample] for o in batch.occurrences)


def test_the_same_captions_are_dropped_with_a_text_cache_and_without(dataset):
    """ai-toolkit ab5fef89: dropout took effect beside cached text alone."""
    each = [
        reader(dataset),
        reader(dataset, text_fingerprint=None),
        reader(dataset, cache=None, encoders=Encoders(pool, encode_text)),
    ]
    batches = [[b for made in iterate(updates(dataset), one, num_workers=0) for b in made] for one in each]
    cached, live, without = ([batch.captions for batch in made] for made in batches)
    assert cached == live == without and {"" in captions for captions in cached} == {True, False}
    for batch in batches[0]:
        assert torch.equal(batch.conditioning.sequence, encode_text(list(batch.captions)).sequence)


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


@pytest.mark.parametrize("large", [0, 300, 2**40], ids=["all in shared memory", "some", "all as bytes"])
def test_however_a_batch_is_sent_it_arrives_as_it_was(dataset, monkeypatch, large):
    monkeypatch.setattr(sent, "LARGE", large)
    alone = iterate(updates(dataset), reader(dataset), num_workers=0)
    with contextlib.closing(iterate(updates(dataset), reader(dataset), num_workers=1)) as helped:
        assert all(same(a, b) for one, other in zip(alone, helped, strict=True) for a, b in zip(one, other, strict=True))


def pool(pixels: torch.Tensor) -> torch.Tensor:
    assert pixels.shape[0] == 1, "one photo at a time"
    return torch.nn.functional.avg_pool2d(pixels, 8)


def reader_of(kind: str, dataset) -> Reader:
    if kind == "none":
        return reader(dataset, cache=None, encoders=Encoders(pool, encode_text))
    cache = MemoryCache() if kind == "memory" else Cache(dataset[1])
    if kind == "memory":
        fill_latents(cache, dataset[0], seed=SEED, fingerprint="vae", encode=pool, on_non_finite=pytest.fail)
        texts = [caption for example in dataset[0] for caption in example.captions]
        fill_text(cache, texts, fingerprint="text", encode=singly(encode_text), on_non_finite=pytest.fail)
    return reader(dataset, cache=cache)


@pytest.mark.parametrize("num_workers", [0, 1, 4])
@pytest.mark.parametrize("kind", ["disk", "memory", "none"])
def test_every_cache_and_number_of_workers_gives_the_same_batches(dataset, kind, num_workers):
    expected = [batch for batches in iterate(updates(dataset), reader(dataset), num_workers=0) for batch in batches]
    found = iterate(updates(dataset), reader_of(kind, dataset), num_workers=num_workers)
    assert all(same(a, b) for a, b in zip(expected, (b for batches in found for b in batches), strict=True))
    assert not multiprocessing.active_children()


def test_of_two_processes_each_gets_its_share_from_every_cache(dataset):
    in_turn = [update for epoch in (0, 1) for update in sampler.updates(
        epoch_batches(dataset[0], seed=SEED, epoch=epoch, batch_size=2), group=4)]  # fmt: skip
    shares = [
        list(iterate(updates(dataset, processes=2, rank=rank), reader_of(kind, dataset), num_workers=rank))
        for rank, kind in enumerate(("memory", "none"))
    ]
    alone = iter([batch for (batch,) in iterate(([b] for u in in_turn for b in u), reader(dataset), num_workers=0)])
    for update, *of_ranks in zip(in_turn, *shares, strict=True):
        for index in range(len(update)):
            assert same(of_ranks[index % 2][index // 2], next(alone))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["changed", "gone"])
def test_a_photo_that_changes_while_nothing_is_cached_is_named(dataset, tmp_path, kind, num_workers):
    folder = shutil.copytree("examples/bear_plushie", tmp_path / "photos")
    found = taken(path=str(folder))
    for path in folder.glob("*.jpg"):
        path.write_bytes(path.read_bytes() + b"x") if kind == "changed" else path.unlink()
    live = reader((found, None), cache=None, encoders=Encoders(pool, encode_text))
    reason = (
        "it changed since the run began, or under equal times before: --verify reads all"
        if kind == "changed"
        else "No such file or directory"
    )
    with (
        contextlib.closing(iterate(updates((found, None)), live, num_workers=num_workers)) as batches,
        pytest.raises(DataError, match=rf"\.jpg can no longer be read \({reason}\)"),
    ):
        next(batches)


def test_encoders_stay_in_the_process_that_trains(dataset):
    class Telling(Reader):
        def read(self, occurrences):
            return self.encoders

        def finish(self, batch):
            return (batch, self.encoders)

    told = reader_of("none", dataset)
    told.__class__ = Telling
    assert next(iterate(updates(dataset), told, num_workers=1)) == [(None, told.encoders)] * 2


def test_workers_read_into_pinned_memory_where_it_is_asked_for(dataset, monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor.clone())
    (batch, *_) = next(iterate(updates(dataset), reader(dataset), num_workers=0))
    assert same(batch.pin_memory(), batch) and len(pinned) == 4 + 3, "every tensor of a batch, its conditioning's, too"
    asked = []

    class Asked(loader.DataLoader):
        def __init__(self, *arguments, pin_memory, **more):
            asked.append(pin_memory)
            super().__init__(*arguments, **more)

    monkeypatch.setattr(loader, "DataLoader", Asked)
    for pin in (False, True):
        iterate(updates(dataset), reader(dataset), num_workers=1, pin=pin).__next__()
    assert asked == [False, True]


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
    batches = iterate(updates(dataset), lost, num_workers=num_workers)
    with pytest.raises(DataError, match=r"\.safetensors") as told:
        next(batches)
    assert not multiprocessing.active_children(), f"whoever holds {told!r} would wait for its workers without end"


def test_workers_share_the_memory_of_the_cache(dataset):
    class Telling(Reader):
        def read(self, occurrences):
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

    with pytest.raises(DataError, match="is killed by signal: Killed.; if memory ran out, lower data.num_workers"):
        loader._next(batches("DataLoader worker (pid 7) is killed by signal: Killed."))
    with pytest.raises(RuntimeError, match="shapes"):
        loader._next(batches("shapes"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's end of a loader that is half built
@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")
def test_a_worker_that_cannot_be_started_ends_those_that_were(dataset, monkeypatch) -> None:
    """They heed no signal: the program waited for them without end."""
    fork, started = os.fork, []

    def few() -> int:
        if started:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        started.append(True)
        return fork()

    monkeypatch.setattr(os, "fork", few)
    with pytest.raises(OSError, match="Too many open files"):
        next(iterate(updates(dataset), reader(dataset), num_workers=2))
    assert started and not multiprocessing.active_children()
    started.clear()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 10, limits[1]))
        with pytest.raises(OSError, match="Too many open files"):
            next(iterate(updates(dataset), reader(dataset), num_workers=2))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not started, "it is seen before the first one starts"
