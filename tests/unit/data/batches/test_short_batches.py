"""Buckets that cannot fill a batch: counted, and merged by the stated rule."""

import math

from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainer.data.batches import short_batches
from trainer.data.buckets import bucket_of_shape, covers
from trainer.data.examples import Example, examples
from trainer.data.sources import File, Photo, Source


def photo(index: int, width: int, height: int, repeats: int = 1) -> Photo:
    place = File("photos", f"{index:03}.jpg")
    source = Source(index=0, path="photos", resolutions=(1024,))
    return Photo(f"0/{place.name}", source, place, (width, height), "text", repeats, f"{index:064x}")


def placed(*sizes: tuple[int, int], enlarge: bool = False) -> tuple[Example, ...]:
    return examples([photo(i, *size) for i, size in enumerate(sizes)], step=64, enlarge=enlarge, seed=7)


def by_sample(made: tuple[Example, ...]) -> list[tuple[int, int]]:
    return [example.bucket for example in made]


SQUARE, WIDE, WIDER, TALL = (2000, 2000), (3000, 2000), (3840, 2160), (2000, 3000)


def test_a_lonely_photo_moves_to_the_nearest_bucket_in_aspect_ratio() -> None:
    made = short_batches.merged(placed(SQUARE, SQUARE, WIDE, WIDE, WIDER), batch_size=2, enlarge=False)
    assert by_sample(made) == [(1024, 1024)] * 2 + [(1216, 832)] * 3
    assert [example.merged for example in made] == [False] * 4 + [True]


def test_buckets_that_lie_too_far_apart_stay() -> None:
    before = placed(TALL, WIDE, WIDE)  # 832x1216 and 1216x832: 2.1 apart
    assert short_batches.merged(before, batch_size=2, enlarge=False) == before


def test_the_smallest_bucket_goes_first_and_what_it_fills_stays() -> None:
    # One 16:9 photo and two 3:2 ones: together a batch of three, where the squares were not asked for.
    made = short_batches.merged(placed(SQUARE, SQUARE, SQUARE, WIDE, WIDE, WIDER), batch_size=3, enlarge=False)
    assert by_sample(made) == [(1024, 1024)] * 3 + [(1216, 832)] * 3


def test_nobody_is_enlarged_by_merging() -> None:
    # A square photo that is not high enough for 1216x832 turned upright, and too narrow for it lying.
    sizes = ((1024, 1024), (3000, 2000), (3000, 2000))
    before = placed(*sizes)
    assert short_batches.merged(before, batch_size=2, enlarge=False) == before
    made = short_batches.merged(placed(*sizes, enlarge=True), batch_size=2, enlarge=True)
    assert by_sample(made) == [(1216, 832)] * 3


def test_repeats_count() -> None:
    made = examples([photo(0, *SQUARE, repeats=4), photo(1, *WIDE, repeats=2)], step=64, enlarge=False, seed=7)
    assert short_batches.short(made, batch_size=3) == {((1024, 1024),): 1, ((1216, 832),): 2}
    assert short_batches.would_fill(made, batch_size=3) == (2, 3)
    assert short_batches.short(made, batch_size=2) == {}
    assert by_sample(short_batches.merged(made, batch_size=3, enlarge=False)) == [(1024, 1024)] * 2


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(256, 3000), st.integers(256, 3000), st.integers(1, 3)), min_size=1, max_size=12),
    st.integers(2, 6),
)
# The first photo's bucket goes into the second's, which then goes into the third's: too far from the first.
@example(sizes=[(896, 640, 1), (1024, 832, 1), (1024, 1091, 1)], batch_size=3)
def test_what_merging_keeps(sizes, batch_size):
    photos = [photo(i, *size) for i, size in enumerate(sizes)]
    before = examples(photos, step=64, enlarge=False, seed=7)
    after = short_batches.merged(before, batch_size=batch_size, enlarge=False)
    assert [e.sample for e in after] == [e.sample for e in before]
    assert short_batches.merged(before[::-1], batch_size=batch_size, enlarge=False) == after[::-1], "the order is no matter"
    kept = short_batches.appearances(after)
    assert set(kept) <= set(short_batches.appearances(before))
    for old, new in zip(before, after, strict=True):
        assert covers(*old.photo.size, new.bucket)
        assert new.merged == (new.bucket != old.bucket)
        if not new.merged:
            continue
        assert short_batches.appearances(before)[old.bucket] < batch_size
        apart = [
            old.bucket[0] / old.bucket[1] / (new.bucket[0] / new.bucket[1]),
            math.prod(old.bucket) / math.prod(new.bucket),
        ]
        assert all(1 / 1.5 - 1e-9 <= each <= 1.5 + 1e-9 for each in apart)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=3), st.integers(2, 8))
def test_the_advice_does_fill_every_batch(counts, batch_size):
    shapes = (SQUARE, WIDE, TALL)
    photos = [photo(i, *shapes[i], repeats=count) for i, count in enumerate(counts)]
    made = examples(photos, step=64, enlarge=False, seed=7)
    below, factor = short_batches.would_fill(made, batch_size=batch_size)
    assert 1 <= below < batch_size and not short_batches.short(made, batch_size=below)
    more = [photo(i, *shapes[i], repeats=count * factor) for i, count in enumerate(counts)]
    assert not short_batches.short(examples(more, step=64, enlarge=False, seed=7), batch_size=batch_size)
    assert bucket_of_shape(*SQUARE, resolution=1024, step=64) == (1024, 1024)
