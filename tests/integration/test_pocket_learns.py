"""What the shipped pocket models learn, where the truth is known: the figures of the README and of the model cards."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from PIL import Image

from scripts.bench import learning, learning_page
from scripts.pocket import card, data, draw, icons
from tests.harness import ROOT

DEMO = learning.CELLS[0]


def show(capsys: pytest.CaptureFixture, line: str) -> None:
    with capsys.disabled():
        print(f"\n{line}", flush=True)


def test_the_demo_is_what_is_measured() -> None:
    """The default cell trains with the demo's config: only where it reads and writes, and what it draws, is another."""
    from trainer import config as configs

    chosen, shipped = learning.config(DEMO, 0, Path("out"), Path("cache"), None), configs.load("pocket_sdxl.toml", [])
    measured, demo = configs.flatten(configs.tree(chosen)), configs.flatten(configs.tree(shipped))
    differing = {key for key in measured.keys() | demo.keys() if measured.get(key) != demo.get(key)}
    free = {"run.output_dir", "model.path", "data.cache_dir", "logging.tensorboard", "checkpoint.every_steps"}
    assert {key for key in differing - free if not key.startswith(("data.sources", "validation."))} == set()
    assert chosen.data.sources[0].path == str(ROOT / shipped.data.sources[0].path)


def test_what_it_is_asked_for_was_not_trained_on() -> None:
    for family in ("sdxl",):
        from trainer import config as configs

        demo = configs.load(f"pocket_{family}.toml", [])
        lessons = {path.name for path in (ROOT / demo.data.sources[0].path).glob("*.png")}
        assert lessons == {f"{name}.png" for name in icons.LESSONS}
        for sample in demo.validation.samples:
            truth = ROOT / sample.truth
            assert truth.is_file() and truth.name not in lessons
            assert sample.prompt == truth.with_suffix(".txt").read_text().strip()


def test_a_third_of_the_demo_already_teaches(tmp_path: Path) -> None:
    """The short form: a third of its steps reach half of the fall that the whole is held to."""
    result = learning.measure(replace(DEMO, draws=False), 0, tmp_path / "cache", steps=30, draws=4, known=())
    assert learning_page.falls([result])[0] >= 0.125


@pytest.mark.slow
def test_the_demo_teaches_a_style_and_keeps_the_subjects(tmp_path: Path, capsys) -> None:
    result = learning.measure(DEMO, 0, tmp_path / "cache", known=())
    (fall,) = learning_page.falls([result])
    show(capsys, f"held-out loss of the unseen style: falls by {fall:.1%} ({result['seconds']:.0f} s of training)")
    assert fall >= 0.25
    for space in ("pixels", "features"):
        nearer, own = learning_page.nearer(result, space), learning_page.own(result, space)
        show(capsys, f"{space}: {nearer} of 60 icons are nearer to the truth than before, {own} nearer to their own")
        assert nearer >= 50 and own >= 45


@cache
def drawn(family: str):
    from diffusers import DiffusionPipeline

    folder = ROOT / "examples" / f"pocket_{family}"
    pipeline = DiffusionPipeline.from_pretrained(folder)
    chosen = card.asked()
    more = {"max_sequence_length": 16} if family == "flux" else {}
    return pipeline, chosen, draw.draw(pipeline, [icons.caption(*each) for each in chosen], seed=0, **more)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sdxl"])
def test_the_pocket_models_draw_what_they_are_told(family: str, capsys) -> None:
    """The contact sheet shows the truths, to the right of what is drawn; what another caption draws is farther from them."""
    folder = ROOT / "examples" / f"pocket_{family}"
    pipeline, chosen, images = drawn(family)
    sheet = Image.open(folder / "contact_sheet.png").convert("RGB")
    size = icons.SIZE
    truth = []
    for number in range(len(chosen)):
        left, top = (number % card.COLUMNS) * 2 * size + size, number // card.COLUMNS * size
        pixels = learning.pixels(sheet.crop((left, top, left + size, top + size)))
        truth.append(pixels)
    scale, shift = pipeline.vae.config.scaling_factor, pipeline.vae.config.shift_factor or 0.0
    figures = card.figures(images, torch.stack(truth), lambda values: (data.encode(pipeline.vae, values) - shift) * scale)
    show(capsys, f"pocket {family}: {figures}")
    assert len(chosen) == card.SHOWN == 100
    assert figures["pixels_nearer"] >= 95 and figures["features_nearer"] >= 95
