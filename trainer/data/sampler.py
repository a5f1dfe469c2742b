"""The order of an epoch and how it is cut into batches and updates: pure functions of seed and epoch.

The order of the samples depends neither on batch size nor on the number of processes; both only cut it. Epochs and
steps count from 0 here.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from trainer import draws
from trainer.data.buckets import Bucket
from trainer.data.sources import Photo
from trainer.types import Occurrence

MicroBatch = tuple[Occurrence, ...]


def epoch_order(photos: Sequence[tuple[Photo, Bucket]], *, seed: int, epoch: int) -> list[tuple[Occurrence, Bucket]]:
    """Every (photo, repeat) of the epoch, sorted by its draw."""
    drawn = sorted(
        (draws.uniform(seed, "order", epoch, photo.sample, repeat), photo.sample, repeat, bucket)
        for photo, bucket in photos
        for repeat in range(photo.repeats)
    )
    return [(Occurrence(epoch, sample, repeat), bucket) for _, sample, repeat, bucket in drawn]


def epoch_batches(photos: Sequence[tuple[Photo, Bucket]], *, seed: int, epoch: int, batch_size: int) -> list[MicroBatch]:
    """The epoch's micro-batches, each of one bucket.

    Going through the global order, a batch is emitted when its bucket has `batch_size` samples; what is left in each
    bucket follows as one shorter batch, in the order of first samples. Nothing is dropped or shown twice.
    """
    batches: list[MicroBatch] = []
    open_batches: dict[Bucket, list[Occurrence]] = {}
    for occurrence, bucket in epoch_order(photos, seed=seed, epoch=epoch):
        batch = open_batches.setdefault(bucket, [])
        batch.append(occurrence)
        if len(batch) == batch_size:
            batches.append(tuple(open_batches.pop(bucket)))
    # A batch enters the dictionary with its first sample, so insertion order is the order of first samples.
    batches += [tuple(batch) for batch in open_batches.values()]
    assert len(batches) == batches_per_epoch(photos, batch_size=batch_size)
    return batches


def batches_per_epoch(photos: Sequence[tuple[Photo, Bucket]], *, batch_size: int) -> int:
    """Micro-batches in every epoch: the count depends on the buckets' sizes alone, so it never changes."""
    sizes: Counter[Bucket] = Counter()
    for photo, bucket in photos:
        sizes[bucket] += photo.repeats
    return sum(math.ceil(size / batch_size) for size in sizes.values())


def updates(batches: Sequence[MicroBatch], *, accumulation: int, processes: int) -> list[list[MicroBatch]]:
    """An epoch's micro-batches in groups of accumulation * processes, one per update; the last group may be short."""
    size = accumulation * processes
    return [list(batches[start : start + size]) for start in range(0, len(batches), size)]


def all_updates(
    photos: Sequence[tuple[Photo, Bucket]], *, seed: int, batch_size: int, accumulation: int, processes: int, after: int
) -> Iterator[list[MicroBatch]]:
    """The micro-batches of every update beyond step `after`, of all processes, epoch after epoch without end."""
    length = steps_per_epoch(photos, batch_size=batch_size, accumulation=accumulation, processes=processes)
    epoch, skip = update_at(after, steps_per_epoch=length)
    while True:
        batches = epoch_batches(photos, seed=seed, epoch=epoch, batch_size=batch_size)
        yield from updates(batches, accumulation=accumulation, processes=processes)[skip:]
        epoch, skip = epoch + 1, 0


def share(update: Sequence[MicroBatch], *, processes: int, rank: int) -> list[MicroBatch]:
    """The micro-batches of an update that one process takes: those with index % processes == rank (perhaps none)."""
    return list(update[rank::processes])


def fingerprint(photos: Sequence[tuple[Photo, Bucket]]) -> dict[str, str]:
    """SHA-256 over everything of the data that decides what a step sees, by what it is."""
    parts = {
        "photos": [p.sample for p, _ in photos],
        "contents of the photos": [p.sha256 for p, _ in photos],
        "captions": [p.caption for p, _ in photos],
        "repeats": [p.repeats for p, _ in photos],
        "buckets": [list(bucket) for _, bucket in photos],
    }
    return {name: hashlib.sha256(json.dumps(values).encode()).hexdigest() for name, values in parts.items()}


def steps_per_epoch(photos: Sequence[tuple[Photo, Bucket]], *, batch_size: int, accumulation: int, processes: int) -> int:
    """Updates in every epoch."""
    return math.ceil(batches_per_epoch(photos, batch_size=batch_size) / (accumulation * processes))


def update_at(step: int, *, steps_per_epoch: int) -> tuple[int, int]:
    """(epoch, index of the update in the epoch) of a global step, all counted from 0."""
    return divmod(step, steps_per_epoch)
