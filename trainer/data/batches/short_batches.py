"""Short batches: how many there are, and the merging of buckets, which leaves fewer."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from trainer.data.buckets import Bucket, covers
from trainer.data.examples import Example

# Buckets may be merged if their aspect ratios, and their areas, differ by at most this factor. A photo of the bucket's shape
# then keeps at least two thirds of itself.
APART = 1.5


def appearances(examples: Iterable[Example]) -> Counter[Bucket]:
    """Appearances in an epoch, by bucket."""
    sizes: Counter[Bucket] = Counter()
    for example in examples:
        sizes[example.bucket] += example.photo.repeats
    return sizes


def shapes(examples: Sequence[Example], *, batch_size: int, fill: bool) -> set[tuple[Bucket, int]]:
    """(bucket, photos) of every kind of micro-batch, a bucket on its side counted as the same. fill: short ones are."""
    found = set()
    for bucket, size in appearances(examples).items():
        full, left = divmod(size, batch_size)
        whole = [batch_size] if full or fill else []
        found |= {((max(bucket), min(bucket)), count) for count in [*whole, *([left] if left and not fill else [])]}
    return found


def short(examples: Iterable[Example], *, batch_size: int) -> dict[Bucket, int]:
    """The number of photos in the last batch of each bucket in which that is not full."""
    return {bucket: left for bucket, size in sorted(appearances(examples).items()) if (left := size % batch_size)}


def would_fill(examples: Iterable[Example], *, batch_size: int) -> tuple[int, int]:
    """(the largest batch size below, the smallest factor for all repeats) with which every batch is full."""
    sizes = appearances(examples).values()
    below = max(size for size in range(1, batch_size) if all(count % size == 0 for count in sizes))
    return below, math.lcm(*(batch_size // math.gcd(count, batch_size) for count in sizes))


def merged(examples: Sequence[Example], *, batch_size: int, enlarge: bool) -> tuple[Example, ...]:
    """The examples. Those in buckets with fewer appearances in an epoch than a batch are moved to other buckets.

    The smallest bucket goes first. Each of its photos moves to the bucket nearest to its own aspect ratio, of those that
    are at most APART from the photo's first bucket, however often it moves, and that it covers (unless `enlarge`). If one
    photo of a bucket has no such bucket, the bucket stays. This repeats until every bucket that is smaller than a batch
    stays.
    """
    members: dict[Bucket, list[int]] = defaultdict(list)
    for index, example in enumerate(examples):
        members[example.bucket].append(index)
    sizes, staying = appearances(examples), set()
    result = list(examples)
    while small := [bucket for bucket, size in sizes.items() if size < batch_size and bucket not in staying]:
        least = min(small, key=lambda bucket: (sizes[bucket], bucket))
        others = [bucket for bucket in sizes if bucket != least]
        ways = {index: _way(examples[index], others, enlarge) for index in members[least]}
        if None in ways.values():
            staying.add(least)
            continue
        del sizes[least], members[least]
        for index, bucket in ways.items():
            result[index] = replace(examples[index], bucket=bucket, merged=True)
            sizes[bucket] += examples[index].photo.repeats
            members[bucket].append(index)
    return tuple(result)


def _near(one: Bucket, other: Bucket) -> bool:
    aspect = math.log(one[0] / one[1]) - math.log(other[0] / other[1])
    area = math.log(one[0] * one[1]) - math.log(other[0] * other[1])
    return max(abs(aspect), abs(area)) <= math.log(APART)


def _way(example: Example, buckets: Iterable[Bucket], enlarge: bool) -> Bucket | None:
    photo = example.photo
    near = [bucket for bucket in buckets if _near(bucket, example.bucket)]
    open_ones = [bucket for bucket in near if enlarge or covers(photo.width, photo.height, bucket)]
    shape = math.log(photo.width / photo.height)
    return min(open_ones, key=lambda b: (abs(math.log(b[0] / b[1]) - shape), b), default=None)
