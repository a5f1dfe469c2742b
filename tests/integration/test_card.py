"""The model card beside a run's adapter files: what its header says to the hub, and its code, which is run as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from PIL import Image

from tests.harness import ROOT, Workbench
from trainer import card, cli

PROMPT = 'a "bear": on | a `beach` --- it\'s'


def run(bench: Workbench, family: str = "sdxl", steps: int = 2, **more) -> Path:
    """Returns the folder of the adapter files."""
    tree = bench.tree(
        family, run__max_steps=steps, optimizer__lr=1e-2, adapter__type="dora", adapter__targets="attention", **more,
        validation__every_steps=2, validation__samples=[{"prompt": PROMPT, "width": 64, "height": 64, "steps": 2}],
    )  # fmt: skip
    assert cli.main(["--config", str(bench.write(tree)), "--resume_from", "auto"]) == 0
    return bench.tmp / "out" / "adapters"


@pytest.mark.parametrize("family", ["sdxl", pytest.param("flux", marks=pytest.mark.slow)])
def test_the_code_of_a_card_draws(bench: Workbench, family: str) -> None:
    """In a process that has the published model's name for the tiny one: there is no network."""
    folder = run(bench, family, export__trigger_phrase="sks bear")
    written = (folder / "README.md").read_text()
    base = {"sdxl": "stabilityai/stable-diffusion-xl-base-1.0", "flux": "black-forest-labs/FLUX.1-dev"}[family]
    (code,) = re.findall(r"```python\n(.*?)```", written, re.DOTALL)
    assert code.count(f'"{base}"') == 1
    code = code.replace(base, str(bench.models / family)).replace('"cuda"', '"cpu"')
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    with Image.open(folder / "drawn.png") as image:
        assert image.size == (64, 64) and len(image.getcolors(64 * 64)) > 1
    assert "    cp bear_comfyui.safetensors ComfyUI/models/loras/" in written


def test_the_header_is_what_the_hub_reads(bench: Workbench) -> None:
    folder = run(bench, export__trigger_phrase="sks: bear", export__license="cc-by-4.0", ema__kind="constant")
    told = ModelCard.load(folder / "README.md")
    data = told.data.to_dict()
    assert data["base_model"] == "stabilityai/stable-diffusion-xl-base-1.0" and data["base_model_relation"] == "adapter"
    assert data["license"] == "cc-by-4.0" and data["instance_prompt"] == "sks: bear"
    assert data["library_name"] == "diffusers" and data["pipeline_tag"] == "text-to-image"
    assert data["tags"] == ["text-to-image", "diffusers", "lora", "dora", "sdxl", "template:sd-lora"]
    assert data["widget"] == [{"text": PROMPT, "output": {"url": "images/00.png"}}]
    for name in re.findall(r"\(images/(\S+)\)", told.text):
        assert (folder / "images" / name).read_bytes() == (bench.tmp / "out/samples/step-00000002" / name).read_bytes()
    for name in re.findall(r"`(\S+\.safetensors)`", told.text):
        assert (folder / name).is_file()
    assert "It was trained over a local copy of that" in told.text
    assert "| photos | 5, shown 5 times an epoch |" in told.text and "DoRA, made for ComfyUI's released versions" in told.text
    assert str(bench.tmp) not in (folder / "README.md").read_text(), "no path of this machine"
    # Another licence of one's own, no samples any more, one format: nothing of the card before is left.
    run(bench, export__license="My terms", export__license_link="https://example.org/terms", export__formats=["comfyui"],
        ema__kind="constant", export__base_model="somebody/tuned-xl", run__stop_after=3, steps=4)  # fmt: skip
    told = ModelCard.load(folder / "README.md")
    assert (told.data.license, told.data.license_name, told.data.license_link) == (
        "other", "My terms", "https://example.org/terms"
    )  # fmt: skip
    assert "local copy" not in told.text
    assert told.data.base_model == "somebody/tuned-xl" and "widget" not in told.data.to_dict()
    assert "as it was after step 3 of 4" in told.text and "diffusers" not in told.text and not list(folder.glob("images/*"))


@pytest.mark.parametrize(("said", "shown"), [("a bear", "`a bear`"), ("a `b`", "`` a `b` ``"), ("two\nlines", "`two lines`")])
def test_a_text_is_one_span_of_code(said: str, shown: str) -> None:
    assert card.code(said) == shown
