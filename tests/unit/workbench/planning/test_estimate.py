"""What a run needs: its largest moment, with what lies below it."""

from __future__ import annotations

from workbench.planning.estimate import Forecast, Stage

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
