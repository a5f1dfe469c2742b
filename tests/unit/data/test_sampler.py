"""The order of an epoch, and how batches and updates cut it."""

from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer import draws
from trainer.data import captions, sampler
from trainer.data.sources import Photo
from trainer.errors import UserError
from trainer.types import Occurrence

BUCKETS = [(64, 64), (80, 48), (48, 80)]


def photo(index: int, *, repeats: int = 1, caption: str = "text", has_caption: bool = True) -> Photo:
    return Photo(f"0/{index:03}.jpg", Path(f"{index}.jpg"), 64, 64, caption, has_caption, repeats, f"{index:064x}")


@st.composite
def datasets(draw):
    count = draw(st.integers(1, 30))
    repeats = st.integers(1, 3)
    return [(photo(i, repeats=draw(repeats)), draw(st.sampled_from(BUCKETS))) for i in range(count)]


seeds, epochs, sizes = st.integers(0, 2**32), st.integers(0, 50), st.integers(1, 6)


@given(datasets(), seeds, epochs, sizes)
def test_every_appearance_exactly_once_and_no_mixed_bucket(photos, seed, epoch, batch_size):
    batches = sampler.epoch_batches(photos, seed=seed, epoch=epoch, batch_size=batch_size)
    shown = [(o.sample, o.repeat) for batch in batches for o in batch]
    assert len(shown) == len(set(shown))
    assert set(shown) == {(p.sample, r) for p, _ in photos for r in range(p.repeats)}
    bucket_of = {p.sample: bucket for p, bucket in photos}
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
    order = sampler.epoch_order(photos, seed=seed, epoch=epoch)
    shuffled = list(photos)
    random.shuffle(shuffled)
    assert sampler.epoch_order(shuffled, seed=seed, epoch=epoch) == order
    batches = sampler.epoch_batches(photos, seed=seed, epoch=epoch, batch_size=batch_size)
    assert sorted((o for b in batches for o in b), key=positions(order).get) == [o for o, _ in order]
    keys = [draws.uniform(seed, "order", epoch, o.sample, o.repeat) for o, _ in order]
    assert keys == sorted(keys)


@given(datasets(), seeds, epochs, sizes)
def test_batches_form_over_the_global_order(photos, seed, epoch, batch_size):
    batches = sampler.epoch_batches(photos, seed=seed, epoch=epoch, batch_size=batch_size)
    full = [batch for batch in batches if len(batch) == batch_size]
    short = [batch for batch in batches if len(batch) < batch_size]
    assert batches == full + short
    place = positions(sampler.epoch_order(photos, seed=seed, epoch=epoch))
    assert [place[b[-1]] for b in full] == sorted(place[b[-1]] for b in full)
    assert [place[b[0]] for b in short] == sorted(place[b[0]] for b in short)
    assert all([place[o] for o in b] == sorted(place[o] for o in b) for b in batches)
    for bucket in BUCKETS:  # within a bucket nothing overtakes
        own = {p.sample for p, other in photos if other == bucket}
        places = [place[o] for b in batches for o in b if o.sample in own]
        assert places == sorted(places)


def test_a_hand_made_epoch(monkeypatch):
    monkeypatch.setattr(draws, "uniform", lambda seed, purpose, epoch, sample, repeat: int(sample[2:5]) / 10)
    photos = [(photo(i), BUCKETS[bucket]) for i, bucket in enumerate([0, 1, 1, 2, 0, 0, 2, 2])]
    batches = sampler.epoch_batches(photos, seed=0, epoch=0, batch_size=2)
    place = positions(sampler.epoch_order(photos, seed=0, epoch=0))
    assert [[place[o] for o in batch] for batch in batches] == [[1, 2], [0, 4], [3, 6], [5], [7]]


def test_epochs_and_seeds_differ():
    photos = [(photo(i), BUCKETS[0]) for i in range(20)]

    def order(seed, epoch):
        return tuple(o.sample for o, _ in sampler.epoch_order(photos, seed=seed, epoch=epoch))

    assert len({order(seed, epoch) for seed in range(4) for epoch in range(4)}) == 16


@given(datasets(), seeds, sizes, st.integers(1, 4), st.integers(1, 4))
def test_updates_and_their_shares(photos, seed, batch_size, accumulation, processes):
    batches = sampler.epoch_batches(photos, seed=seed, epoch=0, batch_size=batch_size)
    updates = sampler.updates(batches, accumulation=accumulation, processes=processes)
    assert [batch for update in updates for batch in update] == batches
    assert all(len(update) == accumulation * processes for update in updates[:-1])
    assert 1 <= len(updates[-1]) <= accumulation * processes
    assert len(updates) == sampler.steps_per_epoch(
        photos, batch_size=batch_size, accumulation=accumulation, processes=processes
    )
    for update in updates:
        shares = [sampler.share(update, processes=processes, rank=rank) for rank in range(processes)]
        assert all(len(share) <= accumulation for share in shares)
        assert all(batch in shares[index % processes] for index, batch in enumerate(update))
    # The same global batch on one process: the same updates.
    assert sampler.updates(batches, accumulation=accumulation * processes, processes=1) == updates


@given(st.integers(1, 100), st.integers(0, 10_000))
def test_update_at(steps_per_epoch, step):
    epoch, index = sampler.update_at(step, steps_per_epoch=steps_per_epoch)
    assert epoch * steps_per_epoch + index == step and 0 <= index < steps_per_epoch


def test_caption_dropout_is_drawn_per_appearance():
    occurrences = [Occurrence(epoch, "0/a.jpg", repeat) for epoch in range(50) for repeat in range(40)]
    for probability in (0.0, 0.05, 0.5, 1.0):
        count = sum(captions.dropped(7, occurrence, probability) for occurrence in occurrences)
        assert abs(count - 2000 * probability) <= 5 * (2000 * probability * (1 - probability)) ** 0.5


def test_caption_report():
    photos = [photo(0, caption="one two three"), photo(1, caption=""), photo(2, caption="", has_caption=False)]
    report = captions.report(photos, encoders={"clip": (lambda text: len(text.split()), 2), "t5": (len, 100)})
    assert (report.photos, report.missing, report.empty) == (3, ("0/002.jpg",), ("0/001.jpg",))
    assert report.truncated == {"clip": ("0/000.jpg",), "t5": ()}
    assert str(report) == "captions of 3 photos: 1 missing, 1 empty, 1 truncated by clip, 0 truncated by t5"
    with pytest.raises(UserError, match="0/000.jpg: too long for clip"):
        captions.refuse_truncated(report)
    captions.refuse_truncated(captions.report(photos))
