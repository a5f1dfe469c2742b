"""Counts short batches, and merges buckets, which leaves fewer of them."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from trainer.data.buckets import Bucket, ReferenceLayout, covers
from trainer.data.examples import Example

# Buckets may be merged if their aspect ratios, and their areas, differ by at most this factor. A photo of the bucket's shape
# then keeps at least two thirds of itself.
APART = 1.5


def appearances(examples: Iterable[Example]) -> Counter[ReferenceLayout]:
    """Appearances in an epoch, by bucket and sizes of references."""
    sizes: Counter[ReferenceLayout] = Counter()
    for example in examples:
        sizes[example.layout] += example.photo.repeats
    return sizes


def shapes(examples: Sequence[Example], *, batch_size: int, fill: bool) -> set[tuple[ReferenceLayout, int]]:
    """(layout, photos) of every kind of micro-batch; portrait and landscape count as one. fill: short batches are filled."""
    pairs = set()
    for layout, size in appearances(examples).items():
        full, remainder = divmod(size, batch_size)
        counts = {batch_size} if full or fill else set()
        counts |= {remainder} if remainder and not fill else set()
        pairs |= {(tuple((max(bucket), min(bucket)) for bucket in layout), count) for count in counts}
    return pairs


def short(examples: Iterable[Example], *, batch_size: int) -> dict[ReferenceLayout, int]:
    """The number of photos in the last batch of each layout whose last batch is not full."""
    counts = sorted(appearances(examples).items())
    return {layout: remainder for layout, size in counts if (remainder := size % batch_size)}


def would_fill(examples: Iterable[Example], *, batch_size: int) -> tuple[int, int]:
    """(the largest batch size below, the smallest factor for all repeats) with which every batch is full."""
    sizes = appearances(examples).values()
    smaller = max(size for size in range(1, batch_size) if all(count % size == 0 for count in sizes))
    return smaller, math.lcm(*(batch_size // math.gcd(count, batch_size) for count in sizes))


def merged(examples: Sequence[Example], *, batch_size: int, enlarge: bool) -> tuple[Example, ...]:
    """The examples; a bucket with fewer appearances in an epoch than a batch is dissolved into others.

    The smallest bucket goes first. Each of its photos moves to the bucket nearest to its own aspect ratio, among the buckets
    at most APART from the photo's first one that it covers (unless `enlarge`), with references of the same sizes. If one
    photo has none, its bucket stays. This repeats until every bucket that is smaller than a batch stays.
    """
    members: dict[ReferenceLayout, list[int]] = defaultdict(list)
    for index, example in enumerate(examples):
        members[example.layout].append(index)
    sizes, staying = appearances(examples), set()
    result = list(examples)
    while small := [layout for layout, size in sizes.items() if size < batch_size and layout not in staying]:
        least = min(small, key=lambda layout: (sizes[layout], layout))
        others = [layout[0] for layout in sizes if layout != least and layout[1:] == least[1:]]
        ways = {index: _way(examples[index], others, enlarge) for index in members[least]}
        if None in ways.values():
            staying.add(least)
            continue
        del sizes[least], members[least]
        for index, bucket in ways.items():
            result[index] = replace(examples[index], bucket=bucket, merged=True)
            sizes[result[index].layout] += examples[index].photo.repeats
            members[result[index].layout].append(index)
    return tuple(result)


def _near(one: Bucket, other: Bucket) -> bool:
    aspect = math.log(one[0] / one[1]) - math.log(other[0] / other[1])
    area = math.log(one[0] * one[1]) - math.log(other[0] * other[1])
    return max(abs(aspect), abs(area)) <= math.log(APART)


def _way(example: Example, buckets: Iterable[Bucket], enlarge: bool) -> Bucket | None:
    width, height = example.photo.size
    near = [bucket for bucket in buckets if _near(bucket, example.bucket)]
    open_ones = [bucket for bucket in near if enlarge or covers(width, height, bucket)]
    shape = math.log(width / height)
    return min(open_ones, key=lambda b: (abs(math.log(b[0] / b[1]) - shape), b), default=None)
