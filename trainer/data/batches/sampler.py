"""The order of an epoch and how it is cut into batches and updates: pure functions of seed and epoch.

The order of the samples depends neither on batch size nor on the number of processes; both only cut it. Epochs and
steps count from 0 here.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from trainer.base import draws
from trainer.base.types import Occurrence
from trainer.data.batches.short_batches import appearances
from trainer.data.buckets import ReferenceLayout
from trainer.data.examples import Example

MicroBatch = tuple[Occurrence, ...]


def epoch_order(examples: Sequence[Example], *, seed: int, epoch: int) -> list[tuple[Occurrence, ReferenceLayout]]:
    """Every (example, repeat) of the epoch, sorted by its draw, with its layout."""
    drawn = sorted(
        (draws.uniform(seed, "order", epoch, example.sample, repeat), example.sample, repeat, example.layout)
        for example in examples
        for repeat in range(example.photo.repeats)
    )
    drawn.reverse()
    order = []
    while drawn:  # each is let go of at once: of a hundred thousand photos there is one list
        _, sample, repeat, layout = drawn.pop()
        order.append((Occurrence(epoch, sample, repeat), layout))
    return order


def epoch_batches(
    examples: Sequence[Example], *, seed: int, epoch: int, batch_size: int, fill: bool = False
) -> list[MicroBatch]:
    """The epoch's micro-batches, each of one layout: a bucket, and sizes of references.

    Going through the global order, a batch is emitted when its layout has `batch_size` samples; what remains of each
    follows as one shorter batch, in the order of first samples. Nothing is dropped or shown twice.
    fill: these batches are filled with further appearances of the layout's first samples in this order, each with
    the next repeat number of its photo, so that it has draws of its own.
    """
    batches: list[MicroBatch] = []
    open_batches: dict[ReferenceLayout, list[Occurrence]] = {}
    order = epoch_order(examples, seed=seed, epoch=epoch)
    for occurrence, layout in order:
        batch = open_batches.setdefault(layout, [])
        batch.append(occurrence)
        if len(batch) == batch_size:
            batches.append(tuple(open_batches.pop(layout)))
    if fill:
        repeats = {example.sample: example.photo.repeats for example in examples}
        firsts: dict[ReferenceLayout, list[Occurrence]] = {layout: [] for layout in open_batches}
        for occurrence, layout in order:
            if layout in firsts and len(firsts[layout]) < batch_size:
                firsts[layout].append(occurrence)
        for layout, batch in open_batches.items():
            for again in range(batch_size - len(batch)):
                rounds, place = divmod(again, len(firsts[layout]))
                first = firsts[layout][place]
                batch.append(replace(first, repeat=first.repeat + (rounds + 1) * repeats[first.sample]))
    # A batch enters the dictionary with its first sample, so insertion order is the order of first samples.
    batches += [tuple(batch) for batch in open_batches.values()]
    assert len(batches) == batches_per_epoch(examples, batch_size=batch_size)
    return batches


def batches_per_epoch(examples: Sequence[Example], *, batch_size: int) -> int:
    """Micro-batches in every epoch: the count depends on how many photos have a layout, so it never changes."""
    return sum(math.ceil(size / batch_size) for size in appearances(examples).values())


def updates(batches: Sequence[MicroBatch], *, group: int) -> list[list[MicroBatch]]:
    """An epoch's micro-batches in groups, one per update; the last group may be short.

    group: micro-batches of an update, of all processes: step.accumulation for each of them.
    """
    return [list(batches[start : start + group]) for start in range(0, len(batches), group)]


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
    """The micro-batches of every update beyond step `after`, of all processes, epoch after epoch without end. group: of an
    update, of all processes."""
    length = steps_per_epoch(examples, batch_size=batch_size, group=group)
    epoch, skip = update_at(after, steps_per_epoch=length, began=began)
    while True:
        batches = epoch_batches(examples, seed=seed, epoch=epoch, batch_size=batch_size, fill=fill)
        yield from updates(batches, group=group)[skip:]
        epoch, skip = epoch + 1, 0


def share(update: Sequence[MicroBatch], *, processes: int, rank: int) -> list[MicroBatch]:
    """The micro-batches of an update that one process takes: those with index % processes == rank (perhaps none)."""
    return list(update[rank::processes])


def steps_per_epoch(examples: Sequence[Example], *, batch_size: int, group: int) -> int:
    """Updates in every epoch."""
    return math.ceil(batches_per_epoch(examples, batch_size=batch_size) / group)


def epoch_of(step: int, *, steps_per_epoch: int, began: tuple[int, int] = (0, 0)) -> int:
    """The epoch in which step `step` was made, both from 1. began: the (step, epoch) at which training on these photos
    began."""
    first, epoch = began
    return epoch + (step - first - 1) // steps_per_epoch + 1 if step > first else max(1, epoch)


def update_at(step: int, *, steps_per_epoch: int, began: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """(epoch, index of the update in the epoch) of a global step, all counted from 0.

    began: the (step, epoch) at which training on these photos began; `step` is not before it.
    """
    first, epoch = began
    epochs, index = divmod(step - first, steps_per_epoch)
    return epoch + epochs, index
