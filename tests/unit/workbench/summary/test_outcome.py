"""What a run changed: before beside after by what was asked for alone, and how far a picture moved."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.unit.artifacts.test_sampling import BEAR, SEA, Request, plain
from trainer.artifacts.sampling import draw_samples, keep_truths
from trainer.base.run_layout import Layout
from workbench.summary.outcome import image_distance, sample_triples


def test_before_and_after_are_of_the_same_request(tmp_path: Path) -> None:
    """Prompts and their order may change in mid-run. An average has the before and truth of the weights themselves."""
    layout = Layout(tmp_path)
    before, after, truths = layout.samples_of(0), layout.samples_of(9), layout.truths
    draw_samples((BEAR, SEA), sample=lambda request: plain(request.seed), folder=before)
    new, other_seed = Request("a log"), Request("the sea", 4)
    weights = {"": nullcontext, "_ema": nullcontext}
    draw_samples((new, SEA, BEAR, other_seed), sample=lambda request: plain(9), folder=after, weights=weights)
    keep_truths((SEA,), (plain(5),), truths)
    keep_truths((BEAR, new), (None, plain(6)), truths)
    assert len(list(truths.iterdir())) == 2, "those of prompts that were asked for earlier stay"
    found = [(one.name, other.name, truth is not None) for one, other, truth in sample_triples(layout, 9)]
    assert found == [
        ("01.png", "01.png", True), ("01.png", "01_ema.png", True),
        ("00.png", "02.png", False), ("00.png", "02_ema.png", False),
    ]  # fmt: skip
    (before / "00.png").write_bytes(b"damaged")
    assert [one.name for one, _, _ in sample_triples(layout, 9)] == ["01.png", "01.png"]


def test_how_far_an_image_moved_is_relative_to_the_one_before(tmp_path: Path) -> None:
    for name, level in (("a", 100), ("b", 125), ("c", 0)):
        plain(level).save(tmp_path / f"{name}.png")
    assert image_distance(tmp_path / "a.png", tmp_path / "b.png") == pytest.approx(0.25)
    assert image_distance(tmp_path / "b.png", tmp_path / "a.png") == pytest.approx(0.2)
    assert image_distance(tmp_path / "c.png", tmp_path / "c.png") == 0
