"""The order of an epoch, and how batches and updates cut it."""

import multiprocessing
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness import ROOT
from tests.photos import epoch_batches, epoch_order
from trainer.base import draws, signals
from trainer.base.errors import DataError
from trainer.base.types import Occurrence
from trainer.data.batches import ahead, sampler
from trainer.data.buckets import Bucket
from trainer.data.examples import Example
from trainer.data.sources import File, Photo, Source

BUCKETS = [(64, 64), (80, 48), (48, 80)]


SOURCE = Source(0, "photos")


def photo(index: int, *, repeats: int = 1, caption: str = "text") -> Photo:
    place = File("photos", f"{index:03}.jpg")
    return Photo(f"0/{place.name}", SOURCE, place, (64, 64), caption, repeats, f"{index:064x}")


def example(index: int, bucket: Bucket, repeats: int = 1) -> Example:
    one = photo(index, repeats=repeats)
    return Example(one.sample, one, bucket, (one.caption,))


@st.composite
def datasets(draw):
    count = draw(st.integers(1, 30))
    repeats = st.integers(1, 3)
    return [example(i, draw(st.sampled_from(BUCKETS)), draw(repeats)) for i in range(count)]


seeds, epochs, sizes = st.integers(0, 2**32), st.integers(0, 50), st.integers(1, 6)


@given(datasets(), seeds, epochs, sizes)
def test_every_appearance_exactly_once_and_no_mixed_bucket(photos, seed, epoch, batch_size):
    batches = epoch_batches(photos, seed=seed, epoch=epoch, batch_size=batch_size)
    shown = [(o.sample, o.repeat) for batch in batches for o in batch]
    assert len(shown) == len(set(shown))
    assert set(shown) == {(e.sample, r) for e in photos for r in range(e.photo.repeats)}
    bucket_of = {e.sample: e.bucket for e in photos}
    short = defaultdict(int)
    for batch in batches:
        (bucket,) = {bucket_of[o.sample] for o in batch}
        assert 1 <= len(batch) <= batch_size
        assert all(o.epoch == epoch for o in batch)
        short[bucket] += len(batch) < batch_size
    assert all(count <= 1 for count in short.values())
    assert len(batches) == sampler.batches_per_epoch(photos, batch_size=batch_size)


def positions(order) -> dict[Occurrence, int]:
    """Where each stands in the global order."""
    return {occurrence: place for place, (occurrence, _) in enumerate(order)}


@given(datasets(), seeds, epochs, sizes, st.randoms())
def test_the_order_knows_nothing_of_batches_nor_of_the_listing(photos, seed, epoch, batch_size, random):
    order = epoch_order(photos, seed=seed, epoch=epoch)
    shuffled = list(photos)
    random.shuffle(shuffled)
    assert epoch_order(shuffled, seed=seed, epoch=epoch) == order
    batches = epoch_batches(photos, seed=seed, epoch=epoch, batch_size=batch_size)
    assert sorted((o for b in batches for o in b), key=positions(order).get) == [o for o, _ in order]
    keys = [draws.uniform(seed, "order", epoch, o.sample, o.repeat) for o, _ in order]
    assert keys == sorted(keys)


@given(datasets(), seeds, epochs, sizes)
def test_batches_form_over_the_global_order(photos, seed, epoch, batch_size):
    batches = epoch_batches(photos, seed=seed, epoch=epoch, batch_size=batch_size)
    full = [batch for batch in batches if len(batch) == batch_size]
    short = [batch for batch in batches if len(batch) < batch_size]
    assert batches == full + short
    place = positions(epoch_order(photos, seed=seed, epoch=epoch))
    assert [place[b[-1]] for b in full] == sorted(place[b[-1]] for b in full)
    assert [place[b[0]] for b in short] == sorted(place[b[0]] for b in short)
    assert all([place[o] for o in b] == sorted(place[o] for o in b) for b in batches)
    for bucket in BUCKETS:  # within a bucket nothing overtakes
        own = {e.sample for e in photos if e.bucket == bucket}
        places = [place[o] for b in batches for o in b if o.sample in own]
        assert places == sorted(places)


@pytest.mark.slow
@given(datasets(), seeds, epochs, sizes)
def test_filled_batches_are_all_full_and_every_appearance_is_there_once(photos, seed, epoch, batch_size):
    known = {"seed": seed, "epoch": epoch, "batch_size": batch_size}
    plain, filled = (epoch_batches(photos, **known, fill=fill) for fill in (False, True))
    assert len(filled) == len(plain) == sampler.batches_per_epoch(photos, batch_size=batch_size)
    bucket_of = {e.sample: e.bucket for e in photos}
    place = positions(epoch_order(photos, seed=seed, epoch=epoch))
    for before, after in zip(plain, filled, strict=True):
        assert len(after) == batch_size and after[: len(before)] == before, "what is short is added to, no more"
        assert len({bucket_of[o.sample] for o in after}) == 1
    shown = [o for batch in filled for o in batch]
    assert len(shown) == len(set(shown)), "no draw is made twice"
    for bucket in BUCKETS:
        own = sorted((o for o in place if bucket_of[o.sample] == bucket), key=place.get)
        further = [o for o in shown if bucket_of[o.sample] == bucket and o not in place]
        # The first of the bucket in the order of the epoch, round by round.
        assert [o.sample for o in further] == [own[n % len(own)].sample for n in range(len(further))]


def test_a_hand_made_epoch(monkeypatch):
    monkeypatch.setattr(draws, "uniform", lambda seed, purpose, epoch, sample, repeat: int(sample[2:5]) / 10)
    photos = [example(i, BUCKETS[bucket]) for i, bucket in enumerate([0, 1, 1, 2, 0, 0, 2, 2])]
    batches = epoch_batches(photos, seed=0, epoch=0, batch_size=2)
    place = positions(epoch_order(photos, seed=0, epoch=0))
    assert [[place[o] for o in batch] for batch in batches] == [[1, 2], [0, 4], [3, 6], [5], [7]]


def test_epochs_and_seeds_differ():
    photos = [example(i, BUCKETS[0]) for i in range(20)]

    def order(seed, epoch):
        return tuple(o.sample for o, _ in epoch_order(photos, seed=seed, epoch=epoch))

    assert len({order(seed, epoch) for seed in range(4) for epoch in range(4)}) == 16


@given(datasets(), seeds, sizes, st.integers(1, 4), st.integers(1, 4))
def test_updates_and_their_shares(photos, seed, batch_size, accumulation, processes):
    batches = epoch_batches(photos, seed=seed, epoch=0, batch_size=batch_size)
    updates = list(sampler.updates(batches, group=accumulation * processes))
    assert [batch for update in updates for batch in update] == batches
    assert all(len(update) == accumulation * processes for update in updates[:-1])
    assert 1 <= len(updates[-1]) <= accumulation * processes
    assert len(updates) == sampler.steps_per_epoch(photos, batch_size=batch_size, group=accumulation * processes)
    for update in updates:
        shares = [sampler.share(update, processes=processes, rank=rank) for rank in range(processes)]
        assert all(len(share) <= accumulation for share in shares)
        assert all(batch in shares[index % processes] for index, batch in enumerate(update))
    # The same global batch on one process: the same updates.
    assert list(sampler.updates(batches, group=accumulation * processes)) == updates


def take(updates, count: int) -> list:
    return [update for update, _ in zip(updates, range(count), strict=False)]


@pytest.mark.slow
@given(datasets(), datasets(), seeds, sizes, st.integers(1, 3), st.integers(0, 20), st.integers(0, 12), st.booleans())
def test_after_other_photos_an_epoch_of_these_begins(first, second, seed, batch_size, accumulation, changed, later, fill):
    """The order beyond the change is a function of (seed, epoch) and of the step where it was: of no other start between."""
    cut = {"batch_size": batch_size, "group": accumulation}
    length = sampler.steps_per_epoch(first, **cut)
    epoch, index = sampler.update_at(changed, steps_per_epoch=length)
    epoch += index > 0
    known = {"seed": seed, "fill": fill, "began": (changed, epoch)} | cut
    count = later + 2 * sampler.steps_per_epoch(second, **cut)
    whole = take(sampler.all_updates(second, after=changed, **known), count)
    assert take(sampler.all_updates(second, after=changed + later, **known), count - later) == whole[later:]
    # Whole epochs of the new photos, each appearance once, under numbers that the old ones have not had.
    before = take(sampler.all_updates(first, after=0, seed=seed, fill=fill, **cut), changed)
    assert not {o.epoch for update in before for batch in update for o in batch} & {
        o.epoch for u in whole for b in u for o in b
    }
    own = sampler.steps_per_epoch(second, **cut)
    for number in range(2):
        batches = [batch for update in whole[number * own : (number + 1) * own] for batch in update]
        assert batches == epoch_batches(second, seed=seed, epoch=epoch + number, batch_size=batch_size, fill=fill)


@pytest.mark.skipif(sys.platform != "linux", reason="a forked process draws")
@pytest.mark.parametrize("fill", [False, True])
def test_the_next_epoch_is_drawn_by_another_process(monkeypatch, fill):
    """Once, in its order, from wherever the run goes on; the process ends with the updates, or with this one."""
    photos = [example(i, BUCKETS[i % 3], 2) for i in range(15)]
    known = {"seed": 3, "batch_size": 4, "group": 2, "fill": fill}
    expected = take(sampler.all_updates(photos, after=0, **known), 20)
    draw_order, here = ahead.draw_order, []
    monkeypatch.setattr(ahead, "MANY", 30)
    monkeypatch.setattr(ahead, "draw_order", lambda *known: here.append(os.getpid()) or draw_order(*known))
    for after in (0, 1, 7):
        here.clear()
        some = sampler.all_updates(photos, after=after, **known)
        assert take(some, 20 - after) == expected[after:]
        assert here == [os.getpid()], "the first epoch alone is drawn here"
        (worker,) = multiprocessing.active_children()
        some.close()
        assert not worker.is_alive() and not multiprocessing.active_children()
    some = sampler.all_updates(photos, after=0, **known)
    next(some)
    (worker,) = multiprocessing.active_children()
    for signum in signals.HANDLED:
        time.sleep(0.05)
        os.kill(worker.pid, signum)
    assert take(some, 19) == expected[1:], "signals are for the main process"
    worker.kill()
    with pytest.raises(DataError, match="the process that orders the epochs was killed"):
        take(some, 5000)  # beyond what the pipe held


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a forked process draws")
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", ""])
def test_the_process_that_draws_ends_with_the_main_one(end):
    """Killed, or at its end without having closed the updates."""
    script = (
        "import os, multiprocessing\n"
        "from tests.unit.data.batches.test_sampler import BUCKETS, example\n"
        "from trainer.data.batches import ahead, sampler\n"
        "ahead.MANY = 1\n"
        "some = sampler.all_updates([example(i, BUCKETS[0]) for i in range(5)], seed=0, batch_size=1, group=1, after=0)\n"
        "next(some)\n"
        "print(multiprocessing.active_children()[0].pid, flush=True)\n"
        f"{end}\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    pid, deadline = int(done.stdout), time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "Traceback" not in done.stderr


@given(st.integers(1, 100), st.integers(0, 10_000))
def test_update_at(steps_per_epoch, step):
    epoch, index = sampler.update_at(step, steps_per_epoch=steps_per_epoch)
    assert epoch * steps_per_epoch + index == step and 0 <= index < steps_per_epoch
