"""What the shipped pocket models learn, where the truth is known: figures of docs/benchmarks/learning.md, of the cards."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from PIL import Image

from benchmarks import learning, learning_page
from examples.pocket import card, data, draw, flux, flux2, icons
from tests.harness import ROOT

FAMILIES = ("sdxl", "flux", "flux2")
DEMO = {family: next(cell for cell in learning.CELLS if cell.path == f"{family}/default") for family in FAMILIES}


def show(capsys: pytest.CaptureFixture, line: str) -> None:
    with capsys.disabled():
        print(f"\n{line}", flush=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_demo_is_what_is_measured(family: str) -> None:
    """The default cell trains with the demo's config: only where it reads and writes, and what it draws, is another, and
    it computes as on a card."""
    from trainer import config as configs

    chosen = learning.config(DEMO[family], 0, Path("out"), Path("cache"), None)
    shipped = configs.load(f"pocket_{family}.toml", [])
    measured, demo = configs.flatten(configs.tree(chosen)), configs.flatten(configs.tree(shipped))
    differing = {key for key in measured.keys() | demo.keys() if measured.get(key) != demo.get(key)}
    free = {"run.output_dir", "model.path", "data.cache_dir", "logging.tensorboard", "checkpoint.every_steps"}
    assert (chosen.precision.compute, shipped.precision.compute) == ("bf16", "fp32")
    free.add("precision.compute")
    assert {key for key in differing - free if not key.startswith(("data.sources", "validation."))} == set()
    assert chosen.data.sources[0].path == str(ROOT / shipped.data.sources[0].path)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_it_is_asked_for_was_not_trained_on(family: str) -> None:
    from trainer import config as configs

    demo = configs.load(f"pocket_{family}.toml", [])
    lessons = {path.name for path in (ROOT / demo.data.sources[0].path).glob("*.png")}
    assert lessons == {f"{name}.png" for name in icons.LESSONS}
    for sample in demo.validation.samples:
        truth = ROOT / sample.truth
        assert truth.is_file() and truth.name not in lessons
        assert sample.prompt == truth.with_suffix(".txt").read_text().strip()
    assert demo.data.text_length == {"sdxl": None, "flux": flux.T5_LENGTH, "flux2": flux2.TEXT_LENGTH}[family]


@pytest.mark.proof
@pytest.mark.parametrize("family", FAMILIES)
def test_a_third_of_the_demo_already_teaches(family: str, tmp_path: Path) -> None:
    """The short form: a third of its steps reach half of the fall that the whole is held to."""
    result = learning.measure(replace(DEMO[family], draws=False), 0, tmp_path / "cache", steps=30, draws=4, known=())
    assert learning_page.falls([result])[0] >= 0.125


@cache
def learned(storage: str, folder: Path) -> float:
    """The share by which the held-out loss falls in a third of the demo's steps."""
    cell = replace(DEMO["sdxl"], draws=False, storage=storage)
    result = learning.measure(cell, 0, folder / "cache", steps=30, draws=4, known=())
    return learning_page.falls([result])[0]


@pytest.mark.proof
@pytest.mark.parametrize("storage", sorted({"fp8_e4m3", *learning.FORMATS} - {"fp32"}))
def test_every_storage_format_keeps_what_is_learned(storage: str, tmp_path_factory) -> None:
    """In short what docs/benchmarks/learning.md has of whole trainings: at least 90 % of what is learned over fp32."""
    folder = tmp_path_factory.getbasetemp()
    assert learned(storage, folder) >= learning_page.KEPT * learned("fp32", folder) > 0.1


@pytest.mark.proof
@pytest.mark.parametrize("family", FAMILIES)
def test_the_demo_teaches_a_style_and_keeps_the_subjects(family: str, tmp_path: Path, capsys) -> None:
    result = learning.measure(DEMO[family], 0, tmp_path / "cache", known=())
    (fall,) = learning_page.falls([result])
    show(capsys, f"{family}: held-out loss of the unseen style: falls by {fall:.1%} ({result['seconds']:.0f} s of training)")
    assert fall >= {"sdxl": 0.25, "flux": 0.25, "flux2": 0.5}[family]
    for space in ("pixels", "features"):
        nearer, own = learning_page.nearer(result, space), learning_page.own(result, space)
        show(capsys, f"{space}: {nearer} of 60 icons are nearer to the truth than before, {own} nearer to their own")
        assert nearer >= 50 and own >= 45


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_shipped_is_small(family: str) -> None:
    folder = ROOT / "examples" / f"pocket_{family}"
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 25e6


def start_cells(out: Path, *more: str) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "benchmarks" / "learning.py"), "--out", str(out), "--cells", "sdxl/peft-*"]
    return subprocess.Popen([*command, "--seeds", "1", "--steps", "2", "--jobs", "2", *more])


@pytest.mark.proof
def test_cells_are_measured_side_by_side(tmp_path: Path) -> None:
    """Two processes give both results, in files and together, and each is what one process measures."""
    together = tmp_path / "together.json"
    assert start_cells(tmp_path / "out", "--together", str(together)).wait() == 0
    results = json.loads(together.read_text())
    assert results == learning.BENCH.read(tmp_path / "out") and sorted(results) == ["sdxl/peft-dora", "sdxl/peft-lora"]
    (lora,) = results["sdxl/peft-lora"]
    assert lora["machine"]["cells at a time"] == 2 and lora["steps"] == 2
    before = torch.get_num_threads()
    torch.set_num_threads(lora["machine"]["threads"])
    try:
        cell = next(cell for cell in learning.CELLS if cell.path == "sdxl/peft-lora")
        alone = learning.measure(cell, 0, tmp_path / "cache", steps=2)
    finally:
        torch.set_num_threads(before)
    assert (alone["first"], alone["last"]) == (lora["first"], lora["last"])


@pytest.mark.proof
def test_a_signal_ends_the_cells_too(tmp_path: Path) -> None:
    process = start_cells(tmp_path / "out")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(pids := children.read_text().split()) < 2:
        time.sleep(0.05)
    while not (tmp_path / "out" / "cache-sdxl").exists():  # until they are at work
        time.sleep(0.05)
    process.terminate()
    assert process.wait(30) == 143
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_words_that_no_caption_had_are_read_as_a_style() -> None:
    """In the shipped Flux, "ink" stands between the styles that it knows, as every word that it never saw."""
    from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

    folder, captions = ROOT / "examples" / "pocket_flux", [icons.caption("bear", style) for style in icons.TRAINED_STYLES]
    for number, kind in (("", CLIPTextModel), ("_2", T5EncoderModel)):
        tokenizer = AutoTokenizer.from_pretrained(folder / f"tokenizer{number}")
        table = kind.from_pretrained(folder / f"text_encoder{number}").get_input_embeddings().weight
        common = set.intersection(*({*tokenizer(caption).input_ids} for caption in captions))
        own = [list(tokenizer(style, add_special_tokens=False).input_ids) for style in icons.TRAINED_STYLES]
        assert not common & {i for ids in own for i in ids}
        expected = torch.stack([table[ids].mean(0) for ids in own]).mean(0)
        (ink,) = tokenizer("ink", add_special_tokens=False).input_ids
        torch.testing.assert_close(table[ink], expected, rtol=0.01, atol=0.01)  # bf16


@pytest.mark.parametrize(
    "count", [pytest.param(20, marks=pytest.mark.slow), pytest.param(card.SHOWN, marks=pytest.mark.proof)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_pocket_models_draw_what_they_are_told(family: str, count: int, capsys) -> None:
    """The contact sheet shows the truths, to the right of what is drawn; what another caption draws is farther from them."""
    from diffusers import DiffusionPipeline

    folder, chosen = ROOT / "examples" / f"pocket_{family}", card.asked()[:count]
    pipeline = DiffusionPipeline.from_pretrained(folder)
    images = draw.draw(pipeline, [icons.caption(*each) for each in chosen], seed=0, **card.MORE[family])
    sheet = Image.open(folder / "contact_sheet.png").convert("RGB")
    size = icons.SIZE
    truth = []
    for number in range(len(chosen)):
        left, top = (number % card.COLUMNS) * 2 * size + size, number // card.COLUMNS * size
        pixels = draw.pixels(sheet.crop((left, top, left + size, top + size)))
        truth.append(pixels)
    config = pipeline.vae.config  # FLUX.2's latents have statistics in place of these
    scale, shift = config.get("scaling_factor", 1.0), config.get("shift_factor") or 0.0
    figures = card.figures(images, torch.stack(truth), lambda values: (data.encode(pipeline.vae, values) - shift) * scale)
    show(capsys, f"pocket {family}: {figures}")
    assert len(chosen) == count and card.SHOWN == 100
    assert min(figures["pixels_nearer"], figures["features_nearer"]) >= 0.95 * count
