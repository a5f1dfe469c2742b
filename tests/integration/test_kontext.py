"""Kontext on a tiny model: trained beside references, resumed, exported, loaded by the stock pipeline, in pairs of choices.

What Flux's room computes, bit by bit, with the pipeline's own 17 sizes: unit/models/test_flux.py. Here references have
small ones, as a million pixels of a reference take most of the time.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxKontextPipeline
from PIL import Image

from scripts import make_model
from tests.harness import Workbench, built, metrics_of, pairs
from tests.integration.test_edits import NAMES, save
from trainer import config as configs
from trainer.base.errors import UserError
from trainer.base.run_layout import Layout
from trainer.base.tensorfile import TensorFile
from trainer.base.types import ReferenceRule
from trainer.engine.step import draw_time_and_noise
from trainer.models import FAMILIES
from workbench.commands import main as cli
from workbench.pages import model_card

FACTORS = (("bf16", "fp8_e4m3", "int8", "nf4"), ("fp32", "bf16"), ("lora", "dora"), ("attention+mlp", "all"), (False, True))
CELLS = sorted(pairs(*FACTORS))
QUICK = ("fp8_e4m3", "fp32", "dora", "all", True)
STREAMED = {"gradient_checkpointing": True, "offload": "blocks", "resident_blocks": 1}
SIZES = ((64, 64), (48, 80), (80, 48))


@pytest.fixture(scope="module", autouse=True)
def kontext(models: Path) -> None:
    """A tiny Kontext beside the other tiny models."""
    wanted = ["--size", "tiny", "--family", "flux", "--variant", "kontext", "--layout", "diffusers", str(models / "kontext")]
    assert (models / "kontext").exists() or make_model.main(wanted) == 0


@pytest.fixture(autouse=True)
def small_references(monkeypatch) -> None:
    flux = FAMILIES["flux"]
    monkeypatch.setitem(FAMILIES, "flux", replace(flux, images=replace(flux.images, references=ReferenceRule(SIZES, most=1))))


@pytest.fixture
def photos(bench: Workbench) -> Path:
    """Four photos, each with a reference of 100 x 66 pixels."""
    folder = bench.tmp / "photos"
    folder.mkdir()
    for index, name in enumerate(NAMES):
        save(folder / f"{name}.png", (64, 64), index)
        save(folder / f"{name}.ref.png", (100, 66), 10 + index)
        (folder / f"{name}.txt").write_text(f"make it {name}")
    return folder


def tree(bench: Workbench, photos: Path, **more: Any) -> dict[str, Any]:
    sources = [{"path": str(photos), "references": "files"}]
    kept = {"model__path": str(bench.models / "kontext"), "data__sources": sources, "data__caption_dropout": 0.0}
    return bench.tree("flux", **(kept | more))


def train(bench: Workbench, config: dict[str, Any], *arguments: str) -> int:
    return cli.main(["--config", str(bench.write(config)), *arguments])


@pytest.mark.parametrize("cell", [QUICK, *(pytest.param(cell, marks=pytest.mark.slow) for cell in CELLS if cell != QUICK)])
def test_it_trains_resumes_and_loads_in_the_stock_pipeline(bench: Workbench, photos: Path, cell: tuple) -> None:
    storage, compute, kind, targets, streamed = cell

    def wanted(out: str, **run: Any) -> dict[str, Any]:
        return tree(
            bench, photos, run__output_dir=str(bench.tmp / out), precision__compute=compute, adapter__type=kind,
            adapter__targets=targets, model__components={"transformer": {"dtype": storage}}, optimizer__lr=1e-2,
            checkpoint__every_steps=2, memory=STREAMED if streamed else {}, data__flip=True, **run,
        )  # fmt: skip

    assert train(bench, wanted("whole")) == train(bench, wanted("parts", run__stop_after=2)) == 0
    assert train(bench, wanted("parts"), "--resume_from", "auto") == 0
    whole, again, last = bench.tmp / "whole", bench.tmp / "parts", "checkpoints/step-00000003"
    for name in ("adapters/bear.safetensors", "adapters/bear_comfyui.safetensors", f"{last}/adapter.safetensors",
                 f"{last}/optimizer.safetensors"):  # fmt: skip
        assert (whole / name).read_bytes() == (again / name).read_bytes(), name
    assert metrics_of(whole) == metrics_of(again)

    file = TensorFile(whole / "adapters" / "bear.safetensors")
    assert file.metadata["modelspec.architecture"] == "flux-1-kontext/lora"
    pipe = FluxKontextPipeline.from_pretrained(bench.models / "kontext", torch_dtype=torch.float32)
    pipe.load_lora_weights(str(whole / "adapters" / "bear.safetensors"))
    loaded = {name: value for name, value in pipe.transformer.named_parameters() if "lora_" in name}
    assert len(loaded) == len(file.entries)  # each key has found its layer, and no layer lacks one
    with built(configs.parse(wanted("whole") | {"memory": {}}), resume_from="auto") as run:
        for name, layer in run.adapter.layers.items():
            stock = pipe.transformer.get_submodule(name.partition(".")[2])
            for part in ("lora_A", "lora_B"):
                ours = getattr(layer, part)["default"].weight.detach().double()
                assert ours.any() and torch.equal(ours, getattr(stock, part)["default_0"].weight.detach().double()), name


@pytest.mark.slow
def test_the_loss_is_that_of_the_stock_pipelines_inputs(bench: Workbench, photos: Path) -> None:
    """On the same draw: the pipeline reads, encodes, packs and numbers the reference; what is predicted of it is cut off."""
    pipe = FluxKontextPipeline.from_pretrained(bench.models / "kontext", torch_dtype=torch.float32)
    keys = {"precision__compute": "fp32", "model__components": {"transformer": {"dtype": "fp32"}}, "objective__guidance": 1.5}
    with built(configs.parse(tree(bench, photos, **keys))) as run, torch.no_grad():
        (occurrences,) = next(run.updates())
        batch, losses = run.reader[occurrences], run.step.losses
        ours = losses(batch, occurrences)
        time, noise = draw_time_and_noise(batch, objective=losses.objective, tokens=16, seed=losses.seed, update=occurrences)
        for index, occurrence in enumerate(occurrences):
            name = occurrence.sample[2:].removesuffix(".png")
            model_input, sigma = batch.latents[index : index + 1], time[index : index + 1].view(-1, 1, 1, 1)
            noisy = (1.0 - sigma) * model_input + sigma * noise[index : index + 1]
            image = pipe.image_processor.resize(Image.open(photos / f"{name}.ref.png"), 48, 80)
            pixels = pipe.image_processor.preprocess(image, 48, 80)
            _, reference, ids, more = pipe.prepare_latents(pixels, 1, 16, 64, 64, torch.float32, pipe.device, None, noisy)
            embeds, pooled, text_ids = pipe.encode_prompt(f"make it {name}", None)
            packed = pipe._pack_latents(noisy, 1, 16, 8, 8)
            pred = pipe.transformer(
                hidden_states=torch.cat([packed, reference], dim=1), timestep=time[index : index + 1],
                guidance=torch.tensor([1.5]), pooled_projections=pooled, encoder_hidden_states=embeds, txt_ids=text_ids,
                img_ids=torch.cat([ids, more]), return_dict=False,
            )[0][:, : packed.size(1)]  # fmt: skip
            pred = pipe._unpack_latents(pred, 64, 64, 8)
            wanted = ((pred - (noise[index : index + 1] - model_input)) ** 2).reshape(1, -1).mean(1)
            torch.testing.assert_close(ours[index : index + 1], wanted, rtol=1e-5, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("shown", [True, False])
def test_a_sample_is_the_stock_pipelines_with_the_adapter(bench: Workbench, photos: Path, monkeypatch, shown: bool) -> None:
    """With its reference, and without any: by the card's code, whose picture the pipeline does not resize again."""
    sizes = "diffusers.pipelines.flux.pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS"
    monkeypatch.setattr(sizes, [*SIZES])
    sample = {"prompt": "make it a", "steps": 2, "width": 48, "references": [str(photos / "a.ref.png")] if shown else []}
    fp32 = {name: {"dtype": "fp32"} for name in ("transformer", "text_encoder", "text_encoder_2")}
    keys = {"validation__every_steps": 3, "validation__samples": [sample], "optimizer__lr": 1e-2, "model__components": fp32}
    assert train(bench, tree(bench, photos, precision__compute="fp32", **keys)) == 0
    layout = Layout(bench.tmp / "out")
    (code,) = re.findall(r"```python\n(.*?)```", layout.card.read_text(), re.DOTALL)
    assert ('image=[load_image("images/00-01.png")]' in code) == shown and "max_area=3072, guidance_scale=2.5" in code
    monkeypatch.chdir(layout.adapters)
    code = code.replace(model_card.PLACEHOLDER, str(bench.models / "kontext")).replace('"cuda"', '"cpu"')
    exec(code.replace("torch.bfloat16", "torch.float32"), {})
    ours, theirs = (np.asarray(Image.open(path)).astype(int) for path in (layout.samples_of(3) / "00.png", "drawn.png"))
    before = np.asarray(Image.open(layout.samples_of(0) / "00.png")).astype(int)
    assert ours.shape == (64, 48, 3) and abs(ours - theirs).max() <= 1, "one of 256 levels, where sums round otherwise"
    assert abs(ours - before).max() > 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"data__sources": 0}, r"the model is kontext, .* no source has any; .* model\.variant = 'dev' to train it without"),
        ({"model__path": "flux"}, r"data\.sources\.0\.references = 'files' has no effect on this model; .* 'kontext'"),
        ({"model__variant": "dev"}, r"data\.sources\.0\.references = 'files' has no effect on this model"),
        ({"second": 1}, r"a\.png has 2 references, and this model is shown 1 at a time"),
        ({"validation__samples": [{"prompt": "a", "references": 2}]}, r"validation sample 0 has 2 references"),
    ],
)
def test_what_is_refused(bench: Workbench, photos: Path, changed: dict, said: str) -> None:
    if changed.pop("second", None):
        for index, name in enumerate(NAMES):
            save(photos / f"{name}.ref2.png", (64, 64), 20 + index)
    if "data__sources" in changed:
        for path in photos.glob("*.ref.png"):
            path.rename(bench.tmp / path.name)
        changed = {"data__sources": [{"path": str(photos)}]}
    if "model__path" in changed:
        changed = {"model__path": str(bench.models / "flux")}
    if "validation__samples" in changed:
        files = [str(photos / "a.ref.png")] * 2
        changed = {"validation__samples": [{"prompt": "a", "references": files}], "validation__every_steps": 1}
    with pytest.raises(UserError, match=said), built(configs.parse(tree(bench, photos, **changed))):
        pass


@pytest.mark.slow
def test_kontext_is_trained_without_references_where_that_is_said(bench: Workbench, photos: Path) -> None:
    """And a folder that says FluxPipeline with them. A resumed run is shown what it was shown."""
    for path in photos.glob("*.ref.png"):
        path.rename(bench.tmp / path.name)
    alone = {"data__sources": [{"path": str(photos)}]}
    with built(configs.parse(tree(bench, photos, model__variant="dev", run__max_steps=1, **alone))) as run:
        assert run.step.losses(run.reader[next(run.updates())[0]]).isfinite().all()
    for path in bench.tmp.glob("*.ref.png"):
        path.rename(photos / path.name)
    dev = {"model__path": str(bench.models / "flux"), "model__variant": "kontext", "run__max_steps": 2}
    assert train(bench, tree(bench, photos, **dev, run__stop_after=1)) == 0
    references = bench.tmp / "references"
    references.mkdir()
    for path in photos.glob("*.ref.png"):
        path.rename(references / path.name)
    assert train(bench, tree(bench, photos, **dev | {"model__variant": "dev"}, **alone), "--resume_from", "auto") == 2
