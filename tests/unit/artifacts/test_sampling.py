"""Samples as files: all of a step or none, each with what was asked for, and before beside after by that alone."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from trainer.artifacts.sampling import compared, draw_samples, image_distance, keep_truths
from trainer.base.errors import Interrupted


@dataclass(frozen=True)
class Request:
    prompt: str
    seed: int = 0


def plain(level: int) -> Image.Image:
    return Image.new("RGB", (8, 8), (level, level, level))


BEAR, SEA = Request("a bear"), Request("the sea", 3)


def test_an_average_is_drawn_with_its_own_weights(tmp_path: Path) -> None:
    level = [10]

    @contextmanager
    def average() -> Iterator[None]:
        level[0] = 90
        yield
        level[0] = 10

    folder = tmp_path / "step-00000001"
    draw_samples((BEAR, SEA), sample=lambda request: plain(level[0] + request.seed), folder=folder,
                 weights={"": nullcontext, "_ema": average})  # fmt: skip
    found = {}
    for path in sorted(folder.iterdir()):
        with Image.open(path) as image:
            request = json.loads(image.info["request"])
            assert image.info["prompt"] == request["prompt"]
            found[path.name] = (image.getpixel((0, 0))[0], request["seed"], request.get("weights"))
    assert found == {
        "00.png": (10, 0, None), "00_ema.png": (90, 0, "ema"), "01.png": (13, 3, None), "01_ema.png": (93, 3, "ema"),
    }  # fmt: skip


def test_a_stop_between_two_samples_leaves_no_folder(tmp_path: Path) -> None:
    """The next start would take the step's drawing for done."""

    def sample(request: Request) -> Image.Image:
        if request is SEA:
            raise Interrupted(signal.SIGTERM)
        return plain(1)

    with pytest.raises(Interrupted):
        draw_samples((BEAR, SEA), sample=sample, folder=tmp_path / "step-00000001")
    assert not list(tmp_path.iterdir())


def test_before_and_after_are_of_the_same_request(tmp_path: Path) -> None:
    """Prompts and their order may change in mid-run. An average has the before and truth of the weights themselves."""
    before, after, truths = tmp_path / "step-00000000", tmp_path / "step-00000009", tmp_path / "truth"
    draw_samples((BEAR, SEA), sample=lambda request: plain(request.seed), folder=before)
    new, other_seed = Request("a log"), Request("the sea", 4)
    weights = {"": nullcontext, "_ema": nullcontext}
    draw_samples((new, SEA, BEAR, other_seed), sample=lambda request: plain(9), folder=after, weights=weights)
    keep_truths((SEA,), (plain(5),), truths)
    keep_truths((BEAR, new), (None, plain(6)), truths)
    assert len(list(truths.iterdir())) == 2, "those of prompts that were asked for earlier stay"
    found = [(one.name, other.name, truth is not None) for one, other, truth in compared(before, after, truths)]
    assert found == [
        ("01.png", "01.png", True), ("01.png", "01_ema.png", True),
        ("00.png", "02.png", False), ("00.png", "02_ema.png", False),
    ]  # fmt: skip
    (before / "00.png").write_bytes(b"damaged")
    assert [one.name for one, _, _ in compared(before, after, truths)] == ["01.png", "01.png"]


def test_how_far_an_image_moved_is_relative_to_the_one_before(tmp_path: Path) -> None:
    for name, level in (("a", 100), ("b", 125), ("c", 0)):
        plain(level).save(tmp_path / f"{name}.png")
    assert image_distance(tmp_path / "a.png", tmp_path / "b.png") == pytest.approx(0.25)
    assert image_distance(tmp_path / "b.png", tmp_path / "a.png") == pytest.approx(0.2)
    assert image_distance(tmp_path / "c.png", tmp_path / "c.png") == 0
