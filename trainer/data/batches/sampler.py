"""The order of an epoch and how it is cut into batches and updates: pure functions of seed and epoch, which count from 0, as
steps do. The order of the samples depends neither on batch size nor on the number of processes; both only cut it."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from trainer.base.types import Occurrence
from trainer.data.batches.ahead import numbered, orders
from trainer.data.batches.short_batches import appearances
from trainer.data.buckets import ReferenceLayout
from trainer.data.examples import Example

MicroBatch = tuple[Occurrence, ...]


def occurrences(
    every: Sequence[tuple[Example, int]], epoch: int, order: Sequence[int]
) -> Iterator[tuple[Occurrence, ReferenceLayout]]:
    """Every appearance of the epoch with its layout. every: (example, repeat). order: indices into it."""
    for example, repeat in map(every.__getitem__, order):
        yield Occurrence(epoch, example.sample, repeat), example.layout


def epoch_batches(
    examples: Sequence[Example], order: Iterable[tuple[Occurrence, ReferenceLayout]], batch_size: int, fill: bool
) -> Iterator[MicroBatch]:
    """The epoch's micro-batches, each of one layout: a bucket, and sizes of references.

    Going through the global order, a batch is emitted when its layout has `batch_size` samples; the remainders follow as one
    shorter batch for each layout, in the order of first samples. fill: these are filled with further appearances of the
    layout's first samples, each with the next repeat number of its photo, so that it has draws of its own.
    """
    open_batches: dict[ReferenceLayout, list[Occurrence]] = {}
    firsts: dict[ReferenceLayout, list[Occurrence]] = {}
    for occurrence, layout in order:
        if fill and len(first := firsts.setdefault(layout, [])) < batch_size:
            first.append(occurrence)
        batch = open_batches.setdefault(layout, [])
        batch.append(occurrence)
        if len(batch) == batch_size:
            yield tuple(open_batches.pop(layout))
    repeats = {example.sample: example.photo.repeats for example in examples} if fill else {}
    # A batch enters the dictionary with its first sample, so insertion order is the order of first samples.
    for layout, batch in open_batches.items():
        for again in range(batch_size - len(batch) if fill else 0):
            rounds, place = divmod(again, len(firsts[layout]))
            first = firsts[layout][place]
            batch.append(replace(first, repeat=first.repeat + (rounds + 1) * repeats[first.sample]))
        yield tuple(batch)


def batches_per_epoch(examples: Sequence[Example], *, batch_size: int) -> int:
    """Micro-batches in every epoch. The count depends only on how many photos have a layout, so it never changes."""
    return sum(math.ceil(size / batch_size) for size in appearances(examples).values())


def updates(batches: Iterable[MicroBatch], *, group: int) -> Iterator[list[MicroBatch]]:
    """An epoch's micro-batches in groups, one per update; the last may be short. group: micro-batches of an update in all
    processes together, step.accumulation for each process."""
    remaining = iter(batches)
    while update := list(islice(remaining, group)):
        yield update


def all_updates(
    examples: Sequence[Example],
    *,
    seed: int,
    batch_size: int,
    group: int,
    after: int,
    fill: bool = False,
    began: tuple[int, int] = (0, 0),
) -> Iterator[list[MicroBatch]]:
    """The micro-batches of every update beyond step `after`, of all processes, epoch after epoch without end. group: of
    `updates`."""
    length = steps_per_epoch(examples, batch_size=batch_size, group=group)
    epoch, skip = update_at(after, steps_per_epoch=length, began=began)
    every = numbered(examples)
    for order in orders(examples, seed, epoch):
        batches = epoch_batches(examples, occurrences(every, epoch, order), batch_size, fill)
        yield from islice(updates(batches, group=group), skip, None)
        epoch, skip = epoch + 1, 0


def share(update: Sequence[MicroBatch], *, processes: int, rank: int) -> list[MicroBatch]:
    """The micro-batches of an update for one process: index % processes == rank (perhaps none)."""
    return list(update[rank::processes])


def steps_per_epoch(examples: Sequence[Example], *, batch_size: int, group: int) -> int:
    """Updates in every epoch."""
    return math.ceil(batches_per_epoch(examples, batch_size=batch_size) / group)


def epoch_of(step: int, *, steps_per_epoch: int, began: tuple[int, int] = (0, 0)) -> int:
    """The epoch in which step `step` was made, both from 1. began: the (step, epoch) at which training on these photos
    began."""
    first, epoch = began
    return update_at(step - 1, steps_per_epoch=steps_per_epoch, began=began)[0] + 1 if step > first else max(1, epoch)


def update_at(step: int, *, steps_per_epoch: int, began: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """(epoch, index of the update in the epoch) of a global step, all counted from 0. began: the (step, epoch) at which
    training on these photos began; `step` is not before it."""
    first, epoch = began
    epochs, index = divmod(step - first, steps_per_epoch)
    return epoch + epochs, index
