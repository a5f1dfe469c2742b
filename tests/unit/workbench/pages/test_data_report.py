"""How many photos of each bucket the data report pictures."""

from __future__ import annotations

import pytest

from workbench.pages import data_report
from workbench.pages.data_report import PICTURES


@pytest.mark.parametrize(
    ("sizes", "each"),
    [
        ([10], PICTURES), ([1000], 240), ([1000, 1000], 120), ([1000, 40], 200), ([1000] * 7, 34), ([1] * 300, PICTURES),
        ([1000] * 300, 1),
    ],
)  # fmt: skip
def test_as_many_of_each_bucket_as_there_is_room_for(sizes: list[int], each: int) -> None:
    """Small buckets leave room for others. Of a bucket there is one at least."""
    share = data_report._share(sizes)
    assert min(share, max(sizes)) == min(each, max(sizes))
    assert sum(min(share, size) for size in sizes) <= max(PICTURES, len(sizes))
