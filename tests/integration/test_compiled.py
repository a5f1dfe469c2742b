"""step.compile = "blocks": whole runs of compiled blocks. One block: numerics/test_compiled_blocks.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.harness import PHOTOS, Workbench, metrics_of
from tests.numerics.test_compiled_blocks import AOT
from trainer import config as configs
from workbench.commands.launch import train

pytestmark = pytest.mark.usefixtures("few_draws")

# Of a loss in fp16, relative: its products round to 2^-11, compiled in other places than eager.
ENVELOPE = 2.0**-11


def adapter_bytes(out: Path) -> bytes:
    return (out / "adapters" / "bear.safetensors").read_bytes()


def traced_only(monkeypatch) -> None:
    """Have blocks traced and differentiated, but not compiled any further."""
    lookup = torch._dynamo.lookup_backend
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: lookup(AOT))


@pytest.mark.proof
def test_fp16_clipping_compile_validation_resume(bench: Workbench, capsys) -> None:
    """diffusers 10752 and its kind ("Attempting to unscale FP16 gradients"): all of them in one run, which overflows, too.
    Stopped and resumed it ends in the same bytes, and finds its programs where the first start left them."""
    losses = {}
    for out, compiled in (("eager", "none"), ("whole", "blocks"), ("parted", "blocks")):
        tree = bench.tree(
            "sdxl", run__output_dir=str(bench.tmp / out), run__max_steps=6, precision__compute="fp16", step__compile=compiled,
            precision__loss_scale=2.0**22, step__max_grad_norm=1e-3, step__accumulation=2, adapter__type="dora",
            memory__gradient_checkpointing=True, data__bucket_step=64, data__batch_size=1, data__held_out=1,
            validation__every_steps=2, validation__steps=1, validation__prompts=["a bear"], validation__loss_every_steps=2,
        )  # fmt: skip
        if out == "parted":
            for stop, resume in ((3, None), (6, "auto")):
                tree["run"]["stop_after"] = stop
                train(configs.parse(tree), resume_from=resume)
        else:
            train(configs.parse(tree), resume_from=None)
        losses[out] = metrics_of(bench.tmp / out)
    assert torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"] >= 1
    # Of a skipped update nothing is told.
    whole, parted = ([entry.pop("compiled", 0) for entry in losses[out]] for out in ("whole", "parted"))
    assert whole == [3, 0, 0, 0, 0, 0] and (sum(parted[:3]), sum(parted[3:])) == (3, 3)
    assert losses["parted"] == losses["whole"] and adapter_bytes(bench.tmp / "parted") == adapter_bytes(bench.tmp / "whole")
    for eager, compiled in zip(losses["eager"], losses["whole"], strict=True):
        assert eager["loss"] == pytest.approx(compiled["loss"], rel=ENVELOPE), eager["step"]
        assert (eager["skipped"], eager["loss_scale"]) == (compiled["skipped"], compiled["loss_scale"])
    assert {entry["skipped"] for entry in losses["whole"]} == {True, False}
    said = capsys.readouterr().out
    assert "blocks are compiled: each kind for 1 shape of micro-batches" in said
    assert "compiled 2 x BasicTransformerBlock of 1x16x48, BasicTransformerBlock of 1x4x48" in said


def in_shapes(folder: Path, sizes: tuple[tuple[int, int], ...]) -> Path:
    """Photos with captions, two of each size."""
    folder.mkdir()
    for place, size in enumerate(size for size in sizes for _ in range(2)):
        with Image.open(sorted(PHOTOS.glob("*.jpg"))[0]) as photo:
            photo.resize(size).rotate(place).save(folder / f"{place}.png")
        (folder / f"{place}.txt").write_text(f"photo {place}")
    return folder


def programs(bench: Workbench, monkeypatch, family: str, steps: int, **overrides: Any) -> list[int]:
    """How many programs were made in each step."""
    traced_only(monkeypatch)
    photos = in_shapes(bench.tmp / "photos", ((64, 64), (80, 48), (96, 32)))
    tree = bench.tree(
        family, run__max_steps=steps, step__compile="blocks", step__accumulation=2, data__batch_size=1,
        data__sources=[{"path": str(photos)}], memory__gradient_checkpointing=True, **overrides,
    )  # fmt: skip
    for stop, resume in ((steps // 2, None), (steps, "auto")):
        torch.compiler.reset()
        tree["run"]["stop_after"] = stop
        train(configs.parse(tree), resume_from=resume)
    return [entry.get("compiled", 0) for entry in metrics_of(bench.tmp / "out")]


@pytest.mark.parametrize(
    ("family", "steps", "each"),
    [
        pytest.param("sdxl", 8, 3, marks=pytest.mark.slow),
        pytest.param("sdxl", 200, 3, marks=pytest.mark.proof),
        pytest.param("flux", 200, 4, marks=pytest.mark.proof),
    ],
)
def test_a_shape_makes_its_programs_once(bench: Workbench, monkeypatch, family: str, steps: int, each: int) -> None:
    """Neither an update nor samples, a held-out loss, an encoder's adapter or a checkpoint makes a further one; a resumed
    run makes its own."""
    encoder = {"component": "text_encoder", "match": "*q_proj", "rank": 2}
    made = programs(
        bench, monkeypatch, family, steps, precision__compute="bf16", adapter__rules=[encoder], validation__every_steps=2,
        validation__steps=1, validation__prompts=["a bear"], validation__loss_every_steps=3, data__held_out=1,
        checkpoint__every_steps=2,
    )  # fmt: skip
    half = steps // 2
    for part in (made[:half], made[half:]):
        assert sum(part[:3]) == sum(part) == 3 * each  # of the three shapes of an epoch, in its three updates
