"""The table of a comparison has every measurement and every difference, and a run that two variants share once."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.unit.workbench.compare.test_page import run
from workbench.compare import comparison
from workbench.compare.page import group_runs, pairs_of, record
from workbench.compare.variations import Variation, Variations


def test_every_measurement_and_every_difference_has_a_line(tmp_path: Path) -> None:
    runs = [run(tmp_path, name, seed, [0.9, base + seed / 9]) for name, base in (("a", 0.5), ("b", 0.4)) for seed in (1, 2)]
    pairs = pairs_of(group_runs(runs))
    lines = list(csv.DictReader(io.StringIO(comparison._csv(record(runs, pairs)))))
    losses = [
        (line["first"], line["seed"], line["step"], float(line["held_out_loss"])) for line in lines if not line["second"]
    ]
    assert losses == [
        (each.variant, str(each.config["run.seed"]), str(step), loss)
        for each in runs
        for step, loss in each.history.series("held_out_loss")
    ]
    (pair,) = pairs
    told = [(line["seed"], line["step"], float(line["difference"]), float(line["low"])) for line in lines if line["second"]]
    assert told == [
        (str(seed), str(at.step), each, at.interval()[0])
        for at in pair.by_step
        for seed, each in zip(at.seeds, at.each, strict=True)
    ]


def test_a_run_that_two_variants_share_is_there_once(tmp_path: Path) -> None:
    run(tmp_path, "a", 1, [0.9, 0.5])
    config: Any = SimpleNamespace(run=SimpleNamespace(max_steps=9, epochs=None, output_dir=str(tmp_path / "a-1")))
    variations = tuple(Variation(name, seed, (), config) for name in ("a", "b") for seed in (1, 2))
    shared = [variation for variation in variations if variation.seed == 1]
    comparison.write_page(Variations("base.toml", str(tmp_path), variations), shared)
    assert len(json.loads((tmp_path / "comparison.json").read_text())["runs"]) == 1
