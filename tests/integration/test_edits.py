"""Runs whose photos have references, on a tiny klein: the loss of the library's own script, resume, samples, report, plan.

How references are found, shown and batched: unit/data/layouts/test_beside.py; what the model makes of them:
unit/models/test_flux2.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import Flux2KleinPipeline
from PIL import Image

from scripts import make_model
from tests.harness import Workbench, built, metrics_of
from trainer import config as configs
from trainer.base.run_layout import Layout
from trainer.engine.step import draw_time_and_noise
from trainer.kernels import dora_torch
from trainer.plan.run_plan import make_plan, open_source, resolve
from workbench.commands import main as cli
from workbench.compare.page import compare
from workbench.pages import model_card
from workbench.planning.estimate import STEP, Forecast, forecast
from workbench.planning.suggestions import ladder, lowered
from workbench.summary.outcome import by_request
from workbench.watch.server import Runs

NAMES = ("a", "b", "c", "d")


@pytest.fixture(scope="module", autouse=True)
def flux2(models: Path) -> None:
    """A tiny klein beside the other tiny models."""
    wanted = ["--size", "tiny", "--family", "flux2", "--layout", "diffusers", str(models / "flux2")]
    assert (models / "flux2").exists() or make_model.main(wanted) == 0


def save(path: Path, size: tuple[int, int], seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def photos(bench: Workbench) -> Path:
    """Four photos, each with a reference of 83 x 70 pixels."""
    folder = bench.tmp / "photos"
    folder.mkdir()
    for index, name in enumerate(NAMES):
        save(folder / f"{name}.png", (64, 64), index)
        save(folder / f"{name}.ref.png", (83, 70), 10 + index)
        (folder / f"{name}.txt").write_text(f"make it {name}")
    return folder


def second_references(photos: Path, seed: int = 20) -> None:
    for index, name in enumerate(NAMES):
        save(photos / f"{name}.ref2.png", (64, 97), seed + index)


def tree(bench: Workbench, photos: Path, **more: Any) -> dict[str, Any]:
    sources = [{"path": str(photos), "references": "files"}]
    return bench.tree("flux2", **({"data__sources": sources, "data__caption_dropout": 0.0} | more))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_the_loss_is_that_of_the_librarys_script(bench: Workbench, photos: Path, count: int) -> None:
    """Of its image-to-image training (train_dreambooth_lora_flux2_klein_img2img.py), on the same draw: references are
    normalised as the target is and follow its tokens; what is predicted of them is cut off. They are read, shown and encoded
    by the stock pipeline here."""
    if count == 2:
        second_references(photos)
    pipe = Flux2KleinPipeline.from_pretrained(bench.models / "flux2", torch_dtype=torch.float32)
    with built(configs.parse(tree(bench, photos)), resume_from=None) as run, torch.no_grad():
        (occurrences,) = next(run.updates())
        batch, losses = run.reader[occurrences], run.step.losses
        ours = losses(batch, occurrences)
        time, noise = draw_time_and_noise(batch, objective=losses.objective, tokens=16, seed=losses.seed, update=occurrences)
        for index, occurrence in enumerate(occurrences):
            name = occurrence.sample[2:].removesuffix(".png")
            model_input, sigma = batch.latents[index : index + 1], time[index : index + 1].view(-1, 1, 1, 1)
            noisy = (1.0 - sigma) * model_input + sigma * noise[index : index + 1]
            files = [photos / f"{name}.ref{number}.png" for number in ("", "2")[:count]]
            images = [Image.open(file) for file in files]
            pixels = [
                pipe.image_processor.preprocess(i, height=i.height // 16 * 16, width=i.width // 16 * 16, resize_mode="crop")
                for i in images
            ]
            cond, cond_ids = pipe.prepare_image_latents(pixels, 1, None, pipe.device, torch.float32)
            embeds, text_ids = pipe.encode_prompt(f"make it {name}")
            packed, ids = pipe._pack_latents(noisy), pipe._prepare_latent_ids(noisy)
            pred = pipe.transformer(
                hidden_states=torch.cat([packed, cond], dim=1), timestep=time[index : index + 1], guidance=None,
                encoder_hidden_states=embeds, txt_ids=text_ids, img_ids=torch.cat([ids, cond_ids], dim=1), return_dict=False,
            )[0][:, : packed.size(1)]  # fmt: skip
            pred = pipe._unpack_latents_with_ids(pred, ids)
            wanted = ((pred - (noise[index : index + 1] - model_input)) ** 2).reshape(1, -1).mean(1)
            torch.testing.assert_close(ours[index : index + 1], wanted, rtol=1e-5, atol=0)


@pytest.mark.slow
def test_a_run_goes_on_in_the_same_bytes_and_its_report_shows_what_the_model_was_shown(
    bench: Workbench, photos: Path, capsys, monkeypatch
) -> None:
    second_references(photos)
    sample = {"prompt": "make it a", "steps": 1, "references": [str(photos / f"a.ref{n}.png") for n in ("", "2")]}
    more = {
        "validation__every_steps": 3, "validation__samples": [sample | {"truth": str(photos / "a.png")}],
        "validation__loss_every_steps": 3, "data__held_out": 1, "data__flip": True, "checkpoint__every_steps": 2,
    }  # fmt: skip

    def train(out: str, *arguments: str, **keys: Any) -> int:
        config = tree(bench, photos, run__output_dir=str(bench.tmp / out), **(more | keys))
        return cli.main(["--config", str(bench.write(config)), *arguments])

    assert train("whole") == train("parts", run__stop_after=2) == 0
    said = capsys.readouterr().out
    assert said.count("2 references beside each photo") == 2 and "64x64 beside 80x64 and 64x96: 3" in said
    last = bench.tmp / "parts" / "checkpoints"
    second_references(photos, 30)
    assert train("parts", "--resume_from", "auto") == 2
    assert capsys.readouterr().err.count("other contents: 0/") == 3, "of those that are trained on"
    second_references(photos)
    assert train("parts", "--resume_from", "auto") == 0
    for name in ("adapters/bear.safetensors", "checkpoints/step-00000003/optimizer.safetensors",
                 "samples/step-00000003/00.png"):  # fmt: skip
        assert (bench.tmp / "whole" / name).read_bytes() == (bench.tmp / "parts" / name).read_bytes(), name
    assert metrics_of(bench.tmp / "whole") == metrics_of(bench.tmp / "parts") and last.exists()

    layout = Layout(bench.tmp / "whole")
    kept = sorted(layout.references.glob("*.png"))
    assert [Image.open(each).size for each in kept] == [(83, 70), (64, 97)]
    (request,) = by_request(layout.samples_of(3))
    assert '"references": ["' in request and set(by_request(layout.references)) == {request}
    page = layout.report.read_text()
    order = [page.index(f"{name}</figcaption>") for name in ("reference 1", "reference 2", "before training", "the truth")]
    assert order == sorted(order)
    # The card's code draws with them, from the card's own folder.
    (code,) = re.findall(r"```python\n(.*?)```", layout.card.read_text(), re.DOTALL)
    assert 'image=[load_image("images/00-01.png"), load_image("images/00-02.png")]' in code
    monkeypatch.chdir(layout.adapters)
    exec(code.replace(model_card.PLACEHOLDER, str(bench.models / "flux2")).replace('"cuda"', '"cpu"'), {})
    assert Image.open("drawn.png").size == (64, 64)
    said = compare(Runs([layout.root, bench.tmp / "parts"]).runs()[0], {})
    assert said.count("shown to the model</figcaption>") == 2, "once for both runs"


@pytest.mark.slow
def test_captions_as_prompts_show_the_photos_references_and_their_truth(bench: Workbench, photos: Path) -> None:
    """At the size at which the photo is trained, whatever that of the samples is."""
    second_references(photos)
    config = configs.parse(tree(bench, photos, validation__every_steps=1, validation__prompts="captions"))
    source = open_source(config)
    plan = make_plan(resolve(config, source), source, processes=1)
    for request, truth, name in zip(plan.data.requests, plan.truths, "ac", strict=True):
        files = [photos / f"{name}.ref{number}.png" for number in ("", "2")]
        assert (request.prompt, request.references) == (f"make it {name}", tuple(map(str, files)))
        assert [image.tobytes() for image in request.images] == [Image.open(file).tobytes() for file in files]
        assert (
            truth.tobytes() == Image.open(photos / f"{name}.png").tobytes() and (request.width, request.height) == truth.size
        )


@pytest.mark.slow
def test_latents_of_a_reference_that_are_not_finite_are_named_as_latents(bench: Workbench, photos: Path) -> None:
    with built(configs.parse(tree(bench, photos)), resume_from=None) as run:
        (occurrences,) = next(run.updates())
        batch = run.reader[occurrences]
        batch.references[0][1, 0, 0, 0] = float("nan")
        assert batch.describe().startswith("2 photo(s) of 64x64 with references of 5x4 latents (0/")
        assert run.step.run(1, [batch], occurrences).refused == f"the latents of {occurrences[1].sample} are not finite"


@pytest.mark.slow
def test_a_plan_counts_what_is_shown(bench: Workbench, photos: Path) -> None:
    """A step takes in the tokens of the references, and the cache their latents."""

    def planned(**more: Any):
        config = configs.parse(tree(bench, photos, adapter__type="dora", memory__gradient_checkpointing=False, **more))
        source = open_source(config)
        return forecast(make_plan(resolve(config, source), source, processes=1), dora_torch)

    def step(found) -> Any:
        (phase,) = [phase for phase in found.phases if phase.name.startswith(STEP)]
        return phase

    one = planned()
    for path in photos.glob("*.ref.png"):
        path.rename(bench.tmp / path.name)
    alone = planned(data__sources=[{"path": str(photos)}])
    assert step(one).name == f"{STEP} 64x64 beside 80x64, batch 2" and step(alone).name == f"{STEP} 64x64, batch 2"
    assert one.cache - alone.cache == 4 * 4 * 16 * (5 * 4)
    # 16 tokens and 20 of a reference are a photo of 36: only what the loss is made of is smaller.
    large = planned(data__sources=[{"path": str(photos)}], data__resolution=96, data__enlarge=True)
    assert step(large).name == f"{STEP} 96x96, batch 2"
    saved = [step(each).parts["saved"] for each in (alone, one, large)]
    assert saved[0] < 0.98 * saved[1] and saved[1] == pytest.approx(saved[2], rel=1e-3)


@pytest.mark.slow
def test_advice_counts_the_photos_share_of_the_tokens_alone(bench: Workbench, photos: Path) -> None:
    """References keep their sizes at a smaller resolution."""
    for name in NAMES:
        save(photos / f"{name}.ref.png", (640, 640), 1)

    def saved(found: Forecast) -> int:
        (phase,) = [phase for phase in found.phases if phase.name.startswith(STEP)]
        return phase.parts["saved"]

    plans = []
    for resolution in (1024, 512):
        config = configs.parse(tree(bench, photos, data__resolution=resolution, data__enlarge=True))
        source = open_source(config)
        plans.append(make_plan(resolve(config, source), source, processes=1))
    large, small = (forecast(plan, dora_torch) for plan in plans)
    (shares,) = [shares for remedy, _, shares in ladder(plans[0], dora_torch, large) if remedy.name == "resolution"]
    assert saved(lowered(large, shares)) == pytest.approx(saved(small), rel=0.1) and saved(small) > 0.4 * saved(large)
