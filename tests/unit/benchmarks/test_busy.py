"""benchmarks/busy.py: its figures are kept, and its table compares what it says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks import busy


def test_the_table_compares_within_a_round_and_with_no_loops(tmp_path: Path, monkeypatch, capsys) -> None:
    """Three rounds of invented seconds; the median of the ratios is not the ratio of the medians."""
    taken = {
        ("spinning", 0): [1.0, 2.0, 4.0],
        ("chosen", 0): [1.5, 2.0, 3.0],
        ("spinning", 4): [20.0] * 3,
        ("chosen", 4): [6.0] * 3,
    }
    left = {key: iter(of) for key, of in taken.items()}
    monkeypatch.setattr(busy, "seconds_of_a_step", lambda side, loops, steps, limit: next(left[side, loops]))
    monkeypatch.setattr("os.sched_setaffinity", lambda process, cores: None, raising=False)
    file = tmp_path / "busy.json"
    monkeypatch.setattr(sys, "argv", ["busy.py", "--loops", "0", "4", "--rounds", "3", "--json", str(file)])
    busy.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line[:3] in ("| 0", "| 4")]
    assert rows == ["| 0 | 2.000 s | 2.000 s | 1.000 | 1.00 | 1.00 |", "| 4 | 20.000 s | 6.000 s | 0.300 | 10.00 | 3.00 |"]
    assert json.loads(file.read_text())["seconds of a step"] == {
        loops: {side: taken[side, int(loops)] for side in busy.SIDES} for loops in ("0", "4")
    }
