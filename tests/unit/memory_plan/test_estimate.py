"""What a run needs: its largest moment, with what lies below it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainer.memory_plan import estimate
from trainer.memory_plan.estimate import Forecast, Stage

GIB = 2**30


def test_a_run_needs_what_its_largest_phase_does() -> None:
    """Each part of a phase is there at the same time, and the phases are one after another."""
    small = Stage("encoding", {"weights": 3 * GIB})
    large = Stage("a step", {"weights": 2 * GIB, "saved": 5 * GIB, "transient": GIB})
    found = Forecast((small, large, small), cache=9 * GIB, checkpoint=9 * GIB)
    assert found.largest is large and found.margin == int(0.8 * GIB + 0.03 * 8 * GIB)
    assert found.total == 8 * GIB + found.margin, "what is on the disk takes none"
    assert found.fits(found.total) and not found.fits(found.total - 1)
    cpu = Forecast((large,), 0, 0, base=GIB)
    assert cpu.total == 9 * GIB + int(0.135 * GIB + 0.04 * 8 * GIB), "of a CPU the process itself is counted"


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
    examples: Any = [SimpleNamespace(bucket=bucket) for bucket in buckets]
    assert estimate._sizes(examples) == planned
