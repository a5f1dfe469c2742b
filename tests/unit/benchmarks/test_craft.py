"""Choices are measured against the default of their seed. What is there is kept; a choice of nothing differs by nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import craft, craft_page
from tests.harness import ROOT
from trainer import config as configs


def test_every_choice_is_one_that_the_config_takes(tmp_path: Path) -> None:
    """And that changes the demo in what it names alone."""
    default = configs.flatten(configs.tree(craft.of_config(craft.DEFAULT, 0, tmp_path, tmp_path, None)))
    for choice in craft.CHOICES:
        chosen = configs.flatten(configs.tree(craft.of_config(choice, 0, tmp_path, tmp_path, None)))
        differing = {key for key in chosen.keys() | default.keys() if chosen.get(key) != default.get(key)}
        named = tuple(key.replace("__", ".") for key in choice.changes)
        assert all(key.startswith(named) for key in differing) and bool(differing) == bool(named), choice.name
    there = [choice.path for choice in craft.CHOICES]
    assert all(choice.against in there[: there.index(choice.path)] for choice in craft.CHOICES if choice is not craft.DEFAULT)
    assert len({choice.path for choice in craft.CHOICES}) == len(craft.CHOICES)
    assert {choice.kind for choice in craft.CHOICES} - {"default"} <= craft_page.HEADINGS.keys()


# As the command line has it, with fewer draws, and with a choice that sets what the demo has.
SHORT = """
from dataclasses import replace
from benchmarks import craft, lessons
craft.DRAWS, lessons.CURVE_DRAWS, craft.WARM_UP = 2, 1, 0
nothing = craft.Choice("schedule", "nothing", {"schedule__name": "cosine"})
raise SystemExit(replace(craft.BENCH, cells=(craft.DEFAULT, nothing, *craft.CHOICES[1:])).main())
"""


@pytest.mark.proof
def test_what_was_measured_before_a_kill_is_kept_and_nothing_differs_by_nothing(tmp_path: Path) -> None:
    """The whole way, in short: killed after its first cell it goes on with the others, and the page has them all. The kill
    alone, without a training, is in test_cells.py.

    A choice that changes nothing has the default's bits, also beside a default that it takes turns with.
    """
    out = tmp_path / "out"
    command = [sys.executable, "-c", SHORT, "--out", str(out), "--cells", "default,nothing,constant", "--seeds", "1"]
    first = out / "default-0.json"
    process = subprocess.Popen([*command, "--steps", "2"], cwd=ROOT)
    while not first.exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    kept = first.stat()
    assert not (out / "constant-0.json").exists()
    assert subprocess.run([*command, "--steps", "2"], cwd=ROOT).returncode == 0
    assert (first.stat().st_ino, first.stat().st_mtime_ns) == (kept.st_ino, kept.st_mtime_ns)

    default, nothing, constant = (
        json.loads((out / f"{name}-0.json").read_text()) for name in ("default", "nothing", "constant")
    )
    for what in ("draws", "forgetting", "state_bytes"):
        assert default[what] == nothing[what]
        assert (default[what] == constant[what]) == (what == "state_bytes")
    assert [len(run["turns"]) for run in (default, nothing)] == [2, 2] and default["state_bytes"] > 0
    assert craft_page.differences([(nothing, default)]) == [0.0] != craft_page.differences([(constant, default)])
    docs = tmp_path / "docs"
    (docs / "benchmarks").mkdir(parents=True)
    text = craft_page.write(craft.BENCH.read(out), docs).read_text()
    assert '| constant | `schedule.name = "constant"` | ' in text and " % | one seed | " in text
