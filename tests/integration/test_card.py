"""The model card beside a run's adapter files: what its header says to the hub, and its code, which is run as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard
from PIL import Image

from tests.harness import ROOT, Workbench
from trainer.adapters.export import About
from trainer.base.pictures import THUMBNAIL, thumbnail
from trainer.base.tensorfile import TensorFile
from trainer.plan.run_plan import make_plan, open_source, resolve
from workbench.commands import main as cli
from workbench.pages import model_card

PROMPT = 'a "bear": on | a `beach` --- it\'s'


def run(bench: Workbench, family: str = "sdxl", steps: int = 2, **more) -> Path:
    """Returns the folder of the adapter files."""
    negative = {"negative": "ugly | `bad`"} if family == "sdxl" else {}  # Flux is sampled without one
    tree = bench.tree(
        family, run__max_steps=steps, optimizer__lr=1e-2, adapter__type="dora", adapter__targets="attention", **more,
        validation__every_steps=2, validation__samples=[
            {"prompt": "half of it", "width": 64, "height": 64, "steps": 1, "strength": 0.5},
            {"prompt": PROMPT, **negative, "seed": 5, "width": 64, "height": 64, "steps": 2},
        ],
    )  # fmt: skip
    assert cli.main(["--config", str(bench.write(tree)), "--resume_from", "auto"]) == 0
    return bench.tmp / "out" / "adapters"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_the_code_of_a_card_draws(bench: Workbench, monkeypatch, family: str) -> None:
    """With the tiny model's folder in place of the name of the base."""
    folder = run(bench, family, export__trigger_phrase="sks bear")
    written = (folder / "README.md").read_text()
    assert "stabilityai" not in written and "black-forest" not in written, "a local model has no known name"
    (code,) = re.findall(r"```python\n(.*?)```", written, re.DOTALL)
    assert code.count(f'"{model_card.PLACEHOLDER}"') == 1 and "half of it" not in code
    assert (
        f"negative_prompt={'ugly | `bad`' if family == 'sdxl' else ''!r}" in code
        and 'torch.Generator("cpu").manual_seed(5)' in code
    )
    code = code.replace(model_card.PLACEHOLDER, str(bench.models / family)).replace('"cuda"', '"cpu"')
    monkeypatch.chdir(folder)
    exec(code, {})
    with Image.open(folder / "drawn.png") as image:
        assert image.size == (64, 64) and len(image.getcolors(64 * 64)) > 1
    assert "    cp bear_comfyui.safetensors ComfyUI/models/loras/" in written


@pytest.mark.slow
def test_the_code_of_the_guide_draws(bench: Workbench, monkeypatch) -> None:
    """With the tiny model's folder and this run's in place of those that it names, and fewer steps."""
    folder = run(bench)
    first, weaker = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guide/use.md").read_text(encoding="utf-8"), re.DOTALL)
    for theirs, ours in {
        "stabilityai/stable-diffusion-xl-base-1.0": str(bench.models / "sdxl"), "outputs/my_photos/adapters": str(folder),
        "my_photos.safetensors": "bear.safetensors", '"cuda"': '"cpu"', "steps=30": "steps=1, width=64, height=64",
        "image = pipe(": f"{weaker}image = pipe(",
    }.items():  # fmt: skip
        assert theirs in first, theirs
        first = first.replace(theirs, ours)
    monkeypatch.chdir(folder)
    exec(first, {})
    with Image.open(folder / "bear.png") as image:
        assert image.size == (64, 64) and len(image.getcolors(64 * 64)) > 1


@pytest.mark.slow
def test_the_header_is_what_the_hub_reads(bench: Workbench) -> None:
    folder = run(
        bench, export__trigger_phrase="sks: bear", export__license="cc-by-4.0", ema__kind="constant", export__thumbnail=True
    )
    told = ModelCard.load(folder / "README.md")
    data = told.data.to_dict()
    assert not data.keys() & {"base_model", "base_model_relation"} and "local model of the sdxl architecture" in told.text
    assert data["license"] == "cc-by-4.0" and data["instance_prompt"] == "sks: bear"
    assert data["library_name"] == "diffusers" and data["pipeline_tag"] == "text-to-image"
    assert data["tags"] == ["text-to-image", "diffusers", "lora", "dora", "sdxl", "template:sd-lora"]
    assert data["widget"] == [  # not the sample at half of its strength
        {"text": PROMPT, "parameters": {"negative_prompt": "ugly | `bad`"}, "output": {"url": "images/01.png"}}
    ]
    for name in re.findall(r"\(images/(\S+)\)", told.text):
        assert (folder / "images" / name).read_bytes() == (bench.tmp / "out/samples/step-00000002" / name).read_bytes()
    for name in re.findall(r"`(\S+\.safetensors)`", told.text):
        assert (folder / name).is_file()
    assert "| `half of it` |  | 0 | 0.5 | ![sample](images/00.png) |" in told.text
    assert "`` ugly \\| `bad` `` | 5 | 1 | ![sample](images/01.png) |" in told.text
    header = TensorFile(folder / "bear.safetensors").metadata["modelspec.thumbnail"]
    assert header == thumbnail(bench.tmp / "out/samples/step-00000002/01.png", THUMBNAIL), "of the first at full strength"
    assert "| photos | 5; an epoch shows 5 |" in told.text and "DoRA, made for ComfyUI's released versions" in told.text
    assert str(bench.tmp) not in (folder / "README.md").read_text(), "no path of this machine"
    # Another licence, no samples any more, one format: nothing of the card before is left.
    run(bench, export__license="other", export__formats=["comfyui"],
        ema__kind="constant", export__base_model="somebody/tuned-xl", run__stop_after=3, steps=4)  # fmt: skip
    told = ModelCard.load(folder / "README.md")
    assert told.data.license == "other" and "\nThe adapter: other. " in told.text
    assert told.data.base_model == "somebody/tuned-xl" and "widget" not in told.data.to_dict()
    assert "as it was after step 3 of 4" in told.text and "diffusers" not in told.text and not list(folder.glob("images/*"))


def text_of(config) -> str:
    """Of a run that has not begun."""
    source = open_source(config)
    plan = make_plan(resolve(config, source), source, processes=1)
    about = About(
        name="bear", started="2026-01-01T00:00:00+00:00", step=3, epoch=1, learning_rate=1e-4, train_images=5,
        resolution="64x64", trigger_phrase="", seed=0, dora_base="", entries={},
    )  # fmt: skip
    return model_card.text(plan, about, {"diffusers": "bear.safetensors"}, [])


def test_the_base_is_what_was_trained_on(bench: Workbench) -> None:
    config, hub = bench.config(), SimpleNamespace(hub_id="somebody/their-xl")

    def base(config, **source) -> str | None:
        return model_card.base_model(SimpleNamespace(config=config, model=SimpleNamespace(source=SimpleNamespace(**source))))

    assert base(config, repository=None, overrides={}) is None
    assert base(config, repository=hub, overrides={}) == "somebody/their-xl"
    assert base(config, repository=hub, overrides={"unet": Path("other")}) is None
    named = bench.config(export__base_model="somebody/named")
    assert base(named, repository=hub, overrides={"unet": Path("other")}) == "somebody/named"


@pytest.mark.slow
def test_a_model_that_predicts_v_is_used_as_one(bench: Workbench) -> None:
    written = text_of(bench.config(model__prediction="v"))
    assert "predicts v" in written and 'from_config(pipe.scheduler.config, prediction_type="v_prediction")' in written
    written = text_of(bench.config(model__prediction="v", model__zero_terminal_snr=True))
    assert 'rescale_betas_zero_snr=True, timestep_spacing="trailing")' in written
    assert "scheduler" not in text_of(bench.config())


def test_no_code_for_what_diffusers_does_not_load(bench: Workbench) -> None:
    rule = {"component": "text_encoder", "match": "*.fc1", "rank": 2}
    written = text_of(bench.config(adapter__rules=[rule]))
    assert "Diffusers does not load the adapter of text_encoder: none of its layers" in written
    assert "```" not in written and "load_lora_weights" not in written


@pytest.mark.parametrize(("said", "shown"), [("a bear", "`a bear`"), ("a `b`", "`` a `b` ``"), ("two\nlines", "`two lines`")])
def test_a_text_is_one_span_of_code(said: str, shown: str) -> None:
    assert model_card.code(said) == shown
