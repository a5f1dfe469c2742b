"""Images of scripts/sample.py: those of the run for the same request, and of a stock pipeline, also of the merged model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from scripts import adapter, sample
from tests.harness import ROOT, Workbench, built, train_built
from trainer.base.tensorfile import write_tensors
from workbench.adapters.base_weights import BaseWeights, whole_model_at
from workbench.pages import rendering

pytestmark = pytest.mark.tool("drawing")

ENCODER = [{"component": "text_encoder", "match": "*q_proj", "rank": 2}]
# A text encoder that is adapted encodes while it draws, else prompts are encoded first.
KINDS = [pytest.param("lora", [], id="lora"), pytest.param("dora", ENCODER, id="dora-and-encoder", marks=pytest.mark.slow)]


def pixels(path_or_image) -> torch.Tensor:
    from PIL import Image

    image = path_or_image if not isinstance(path_or_image, Path) else Image.open(path_or_image)
    image = image.convert("RGB")
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).int()


def drawn(*arguments: object) -> None:
    assert sample.main([*map(str, arguments)]) == 0


@pytest.mark.parametrize(("kind", "rules"), KINDS)
def test_an_image_is_the_one_that_the_run_draws(bench: Workbench, kind: str, rules: list) -> None:
    """Pixel by pixel, from the run's config and its file, at every strength; 0 is the model before the training."""
    asked = {"prompt": "a bear", "seed": 3}
    config = bench.config(
        "sdxl", adapter__type=kind, adapter__rules=rules, optimizer__lr=1e-2, run__max_steps=2, validation__every_steps=2,
        validation__steps=2, validation__samples=[asked, {**asked, "strength": 0.5}, {**asked, "width": 64}],
        validation__resolution=32,
    )  # fmt: skip
    with built(config) as run:
        assert train_built(run)
    out, own = bench.tmp / "out", bench.tmp / "drawn"
    file = out / "adapters" / "bear.safetensors"
    drawn(out / "config.toml", file, "--prompt", "a bear", "--seeds", 3, "--strengths", 1, 0.5, 0, "--out", own, "--grid")
    theirs = [out / "samples" / f"step-{step:08d}" / f"{index:02d}.png" for step, index in ((2, 0), (2, 1), (0, 0))]
    for index, path in enumerate(theirs):
        assert torch.equal(pixels(own / f"{index:02d}.png"), pixels(path)), index
    assert not torch.equal(pixels(theirs[0]), pixels(theirs[2]))
    from PIL import Image

    sizes = [Image.open(path).size for path in (theirs[0], own / "00.png", theirs[0].with_name("02.png"))]
    assert sizes == [(32, 32), (32, 32), (64, 32)], "what a sample names, then validation.resolution, then the data"
    with Image.open(theirs[1]) as of_run, Image.open(own / "01.png") as image:
        wanted, said = json.loads(of_run.info["request"]), json.loads(image.info["request"])
    assert said == wanted | {"model": config.model.path, "adapters": ["bear.safetensors"]}
    assert sorted(path.name for path in own.iterdir()) == ["00.png", "01.png", "02.png", "grid.png"]


@pytest.mark.slow
def test_the_adapters_of_a_runs_steps_are_drawn_side_by_side(bench: Workbench, capsys) -> None:
    """Each is the picture that the run drew then; the layers hold one adapter after another. The run's report shows the grid,
    also where it is written anew."""
    config = bench.config(
        "sdxl", adapter__type="dora", optimizer__lr=1e-2, run__max_steps=3, export__every_steps=1, export__from=2,
        validation__every_steps=1, validation__steps=2, validation__prompts=["a bear"], validation__resolution=32,
    )  # fmt: skip
    with built(config) as run:
        assert train_built(run)
    out = bench.tmp / "out"
    drawn(out, "--steps", "all", "--strengths", "1,0")
    pictures = [pixels(out / "grid" / f"{index:02d}.png") for index in range(4)]
    shown = [pixels(out / "samples" / f"step-{step:08d}" / "00.png") for step in (2, 0, 3, 0)]
    assert all(map(torch.equal, pictures, shown)) and not torch.equal(pictures[0], pictures[2])
    (figure,) = re.findall(r'<div id="grid">(.*?)</div>', (out / "report.html").read_text(), re.DOTALL)
    assert "data:image/jpeg;base64," in figure and 'href="grid/grid.png"' in figure
    assert (
        rendering.render("grid.html", sheet=rendering.embedded(out / "grid" / "grid.png")).strip()
        in (out / "report.html").read_text()
    )
    for arguments, said in (
        ([out, "--steps", "1"], "has no file of it, only of 2; export.every_steps or"),
        ([out, "--steps", "first"], "give all, or numbers of steps"),
        ([out, out / "adapters" / "bear.safetensors", "--steps", "all"], "leave out the files, or --steps"),
        ([out / "config.toml", "--steps", "all"], "--sampling_steps is the sampler's"),
        ([out, "--steps", "all"], "remove it, or give another folder with --out"),
    ):
        assert sample.main([*map(str, arguments)]) == 2
        assert said in capsys.readouterr().err


def made_adapter(folder: Path, path: Path, *, dora: bool) -> Path:
    """Of some Linears and a convolution of the denoiser, a third of each weight's size; diffusers' keys, scale 1."""
    model, tensors = whole_model_at(str(folder)), {}
    assert model.source is not None
    weights = BaseWeights(model.source)
    chosen = [n for n in model.layers("unet") if n.endswith(("attn1.to_q", "attn2.to_v", "mid_block.resnets.0.conv1"))]
    for name in chosen[:8] + chosen[-1:]:
        w = weights.weight(f"unet.{name}")
        generator = torch.Generator().manual_seed(len(name))
        a = torch.randn(2, *w.shape[1:], generator=generator)
        b = torch.randn(w.shape[0], 2, *(1 for _ in w.shape[2:]), generator=generator)
        v = b.flatten(1) @ a.flatten(1)
        b *= 0.3 * w.norm() / v.norm()
        tensors |= {f"unet.{name}.lora_A.weight": a, f"unet.{name}.lora_B.weight": b}
        if dora:
            m = (w.flatten(1) + b.flatten(1) @ a.flatten(1)).norm(dim=1) * 1.2
            tensors[f"unet.{name}.lora_magnitude_vector"] = m.view(1, -1, 1, 1) if w.dim() == 4 else m
    write_tensors(path, tensors, {"format": "pt"})
    return path


def stock(folder: Path, file: Path | None, steps: int) -> torch.Tensor:
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline

    pipe = StableDiffusionXLPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    if file is not None:
        pipe.load_lora_weights(str(file))
    generator = torch.Generator("cpu").manual_seed(5)
    sizes = {"width": 64, "height": 64, "num_inference_steps": steps, "guidance_scale": 5.0}
    return pixels(pipe("a cat", negative_prompt="", generator=generator, **sizes).images[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dora"), [("tiny", True), pytest.param("pocket", True, marks=pytest.mark.proof)], ids=["tiny", "pocket"]
)
def test_a_stock_pipeline_draws_the_same(models: Path, tmp_path: Path, model: str, dora: bool) -> None:
    """With the file, and as the merged model: no pixel is off by more than one of 255 levels, which is fp32's rounding."""
    folder = models / "sdxl" if model == "tiny" else ROOT / "examples" / "pocket_sdxl"
    file, merged = made_adapter(folder, tmp_path / "a.safetensors", dora=dora), tmp_path / "merged"
    assert adapter.main(["merge", str(folder), str(file), str(merged), "--dtype", "fp32"]) == 0
    asked = ("--prompt", "a cat", "--seeds", 5, "--width", 64, "--height", 64, "--sampling_steps", 3, "--compute", "fp32")
    drawn(folder, file, *asked, "--strengths", 1, 0, "--out", tmp_path / "own")
    ours, plain = (pixels(tmp_path / "own" / f"{index:02d}.png") for index in (0, 1))
    for theirs in (stock(folder, file, 3), stock(merged, None, 3)):
        assert int((ours - theirs).abs().max()) <= 1
    assert int((ours - plain).abs().max()) > 8


def test_what_cannot_be_drawn_is_refused(models: Path, tmp_path: Path, capsys) -> None:
    file, out = made_adapter(models / "sdxl", tmp_path / "a.safetensors", dora=True), tmp_path / "out"
    for arguments, said in (
        ([models / "sdxl", file, file, "--prompt", "a"], "a DoRA beside others is not drawn"),
        ([models / "sdxl", file, "--prompt", "a", "--width", "60"], "not a multiple of 8"),
        ([models / "flux", "--prompt", "a", "--negative", "b"], "has no effect on flux without --cfg"),
        ([models / "flux", file, "--prompt", "a"], "of no model that is known here"),
    ):
        assert sample.main([*map(str, arguments), "--out", str(out)]) == 2
        assert said in capsys.readouterr().err
        assert not out.exists()
    out.mkdir()
    assert sample.main([str(models / "sdxl"), "--prompt", "a", "--out", str(out)]) == 2
    assert "remove it, or give another folder with --out" in capsys.readouterr().err
