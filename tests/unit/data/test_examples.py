"""Photos at the sizes that their sources ask for."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.base.errors import UserError
from trainer.config import DataTable
from trainer.data.examples import examples, extremes
from trainer.data.sources import File, Photo, Source
from trainer.plan.data_sources import sources_of


def photo(name: str, width: int, height: int, *resolutions: int, index: int = 0) -> Photo:
    source = Source(index=index, path="photos", resolutions=resolutions)
    place = File("photos", name)
    return Photo(f"{index}/{name}", source, place, (width, height), "text", 1, f"{width:032x}{height:032x}")


def test_one_resolution_keeps_the_plain_name() -> None:
    (one,) = examples([photo("a.jpg", 3000, 2000, 1024)], step=64, enlarge=False, seed=7)
    assert (one.sample, one.bucket, one.captions, one.small) == ("0/a.jpg", (1216, 832), ("text",), False)


def test_every_photo_is_trained_at_each_resolution_of_its_source() -> None:
    photos = [photo("a.jpg", 3000, 2000, 768, 1024), photo("b.jpg", 800, 800, 512, index=1)]
    made = {example.sample: example.bucket for example in examples(photos, step=64, enlarge=False, seed=7)}
    assert made == {"0/a.jpg@768": (896, 640), "0/a.jpg@1024": (1216, 832), "1/b.jpg": (512, 512)}


def test_a_small_photo_is_enlarged_only_when_asked() -> None:
    photos = [photo("small.jpg", 640, 480, 1024), photo("large.jpg", 1152, 896, 1024)]
    for enlarge, bucket in ((False, (640, 448)), (True, (1152, 896))):
        small, large = examples(photos, step=64, enlarge=enlarge, seed=7)
        assert (small.bucket, small.small) == (bucket, True)
        assert (large.bucket, large.small) == ((1152, 896), False)


def test_longer_buckets_are_made_when_asked() -> None:
    wide = [photo("wide.jpg", 4096, 1024, 1024), photo("plain.jpg", 3000, 2000, 1024)]
    for most, buckets in ((2.0, [(1408, 704), (1216, 832)]), (4.0, [(2048, 512), (1216, 832)]), (1.0, [(1024, 1024)] * 2)):
        assert [each.bucket for each in examples(wide, step=64, enlarge=False, seed=7, max_aspect=most)] == buckets


def test_where_nothing_may_be_cut_a_photo_beyond_the_buckets_is_refused() -> None:
    whole = [photo("wide.jpg", 4010, 1000, 768, 1024), photo("plain.jpg", 2000, 1000, 1024)]
    whole = [replace(each, source=replace(each.source, crop="none")) for each in whole]
    with pytest.raises(UserError) as refused:
        examples(whole, step=64, enlarge=False, seed=7)
    assert str(refused.value) == (
        "data.crop = 'none': 1 photo beyond data.max_aspect = 2; set data.max_aspect = 4.1, or crop or remove "
        "these:\n"
        "  photos/wide.jpg: 4010 x 1000 pixels"
    )
    assert len(examples(whole, step=64, enlarge=False, seed=7, max_aspect=4.1)) == 3


def test_photos_too_small_for_any_bucket_are_all_named_with_the_remedy() -> None:
    photos = [photo("a.jpg", 255, 900, 1024), photo("b.jpg", 3000, 2000, 1024), photo("c.jpg", 900, 100, 512, 1024)]
    with pytest.raises(UserError) as refused:
        examples(photos, step=64, enlarge=False, seed=7)
    lines = str(refused.value).splitlines()
    remedy = "remove them, lower the resolution, or set data.enlarge = true"
    assert lines[0] == f"data.sources: 3 photos are too small; {remedy}:"
    assert lines[1:] == [
        "  photos/a.jpg: 255 x 900 pixels, too small for a bucket of resolution 1024 (no side of a bucket is shorter than "
        "256 pixels)",
        "  photos/c.jpg: 900 x 100 pixels, too small for a bucket of resolution 512 (no side of a bucket is shorter than "
        "128 pixels)",
        "  photos/c.jpg: 900 x 100 pixels, too small for a bucket of resolution 1024 (no side of a bucket is shorter than "
        "256 pixels)",
    ]
    assert len(examples(photos, step=64, enlarge=True, seed=7)) == 4


def test_what_a_source_does_not_say_the_data_table_says_for_it() -> None:
    own = {"resolution": [1024, 768], "flip": False, "caption_dropout": 0.0}
    table = DataTable(flip=True, caption_dropout=0.3, resolution=512, sources=[{"path": "a"}, {"path": "b"} | own])
    first, second = sources_of(table)
    assert (first.resolutions, first.flip, first.caption_dropout) == ((512,), True, 0.3)
    assert (second.resolutions, second.flip, second.caption_dropout) == ((768, 1024), False, 0.0)


@pytest.mark.parametrize(
    ("buckets", "planned"),
    [
        ([(64, 64)], [(64, 64)]), ([(64, 64), (64, 64)], [(64, 64)]), ([], []),
        # By area: a long narrow one is not the largest. Of equal ones one is enough.
        ([(1536, 512), (1024, 1024), (896, 1152)], [(1024, 1024), (1536, 512)]),
        ([(512, 512), (1024, 768), (768, 1024), (640, 640)], [(1024, 768), (512, 512)]),
    ],
)  # fmt: skip
def test_a_step_is_planned_at_the_largest_and_the_smallest_size(buckets: Any, planned: Any) -> None:
    examples: Any = [SimpleNamespace(layout=(bucket,)) for bucket in buckets]
    assert extremes(examples) == [(bucket,) for bucket in planned]
