"""Samples as files: all of a step or none, each with what was asked for."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from trainer.artifacts.sampling import draw_samples
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
