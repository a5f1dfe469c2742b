"""objective.preserve: its gradient against fp64, what it leaves alone, resume in the same bytes, plan, refusals."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from torch.func import functional_call

from tests.harness import PHOTOS, Workbench, built, metrics_of
from trainer import config as configs
from trainer.base.errors import UserError
from trainer.engine.step import draw_time_and_noise
from trainer.kernels import dora_torch
from trainer.plan.run_plan import make_plan, open_source, resolve
from workbench.commands import main as cli
from workbench.planning.estimate import STEP, forecast

TRIGGER = "sks plush bear"
FP32 = {name: {"dtype": "fp32"} for name in ("transformer", "text_encoder", "text_encoder_2", "vae")}


@pytest.fixture
def photos(bench: Workbench) -> Path:
    """Two square photos of one bucket, whose captions have the trigger."""
    folder = bench.tmp / "photos"
    folder.mkdir()
    for name in ("01.jpg", "02.jpg"):
        shutil.copy(PHOTOS / name, folder / name)
        (folder / name).with_suffix(".txt").write_text(f"a photo of {TRIGGER} number {name[:2]}")
    return folder


def tree(bench: Workbench, photos: Path, out: str = "out", **more: Any) -> dict[str, Any]:
    sources = [{"path": str(photos), "trigger": TRIGGER}]
    usual = {"data__sources": sources, "run__output_dir": str(bench.tmp / out), "optimizer__lr": 1e-2}
    preserve = {"objective__preserve": 0.7, "objective__preserve_as": "toy"}
    return bench.tree("flux", **(usual | preserve | more))


def moved(run: Any, seed: int) -> None:
    """B is not zero, so that there is something to hold back."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in run.adapter.named_parameters().items():
            if name.endswith("lora_B.weight"):
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    run.adapter.mark_stale()


@pytest.mark.slow
def test_loss_and_gradient_are_the_formulas_in_fp64(bench: Workbench, photos: Path) -> None:
    """mean |v - target|^2 + 40 mean |v' - v0'|^2: of v' the caption has "toy" in the trigger's place, and v0' is the frozen
    model's, which has no gradient. On the photo's own latents, noise and time, also where the caption itself is dropped."""
    keys = {"model__components": FP32, "data__caption_dropout": 0.5, "adapter__targets": "attention+mlp"}
    keys |= {"objective__preserve": 40.0}
    with built(configs.parse(tree(bench, photos, **keys))) as run:
        moved(run, 0)
        updates = run.updates()
        (occurrences,) = next(update for update in updates if any(run.reader[update[0]].captions[i] == "" for i in (0, 1)))
        batch, losses = run.reader[occurrences], run.step.losses
        names = [occurrence.sample[2:4] for occurrence in occurrences]
        assert batch.preserved_captions == tuple(f"a photo of toy number {name}" for name in names)
        assert torch.equal(batch.preserved.sequence, run.reader.conditioning(batch.preserved_captions).sequence)
        ours = losses(batch, occurrences)
        ours.mean().backward()
        time, noise = draw_time_and_noise(batch, objective=losses.objective, tokens=16, seed=losses.seed, update=occurrences)

        model = FluxTransformer2DModel.from_pretrained(bench.models / "flux" / "transformer").double().requires_grad_(False)
        leaves = {name: t.detach().double().requires_grad_() for name, t in run.adapter.state_dict().items()}
        adapted = {}
        for layer in {name.rpartition(".lora_")[0] for name in leaves}:
            inside = layer.removeprefix("transformer.")
            change = 0.5 * leaves[f"{layer}.lora_B.weight"] @ leaves[f"{layer}.lora_A.weight"]  # alpha 2 / rank 4
            adapted[f"{inside}.weight"] = model.get_submodule(inside).weight + change
        t, x = time.double(), batch.latents.double()
        seen = (1 - t).view(-1, 1, 1, 1) * x + t.view(-1, 1, 1, 1) * noise.double()

        def velocity(weights: dict[str, torch.Tensor], text: Any) -> torch.Tensor:
            inputs = {
                "hidden_states": FluxPipeline._pack_latents(seen, 2, 16, 8, 8), "timestep": t,
                "guidance": torch.ones(2, dtype=torch.float64), "encoder_hidden_states": text.sequence.double(),
                "pooled_projections": text.pooled.double(), "txt_ids": torch.zeros(text.sequence.shape[1], 3).double(),
                "img_ids": FluxPipeline._prepare_latent_image_ids(2, 4, 4, "cpu", torch.float64),
            }  # fmt: skip
            return FluxPipeline._unpack_latents(functional_call(model, weights, (), inputs).sample, 64, 64, 8)

        photo = (velocity(adapted, batch.conditioning) - (noise.double() - x)).square().flatten(1).mean(1)
        drift = (velocity(adapted, batch.preserved) - velocity({}, batch.preserved).detach()).square().flatten(1).mean(1)
        wanted = photo + 40 * drift
        wanted.mean().backward()
        assert 40 * drift.min() > 0.1 * photo.max()
        torch.testing.assert_close(ours.double(), wanted.detach(), rtol=1e-5, atol=0)
        for name, parameter in run.adapter.named_parameters().items():
            expected = leaves[name].grad
            assert (parameter.grad - expected).norm() <= 2e-4 * expected.norm(), name


@pytest.mark.slow
def test_a_run_is_resumed_in_the_same_bytes_wherever_captions_are_encoded(bench: Workbench, photos: Path) -> None:
    """An adapter that changes nothing yet is not held back: the first loss is that of the photo alone."""

    def train(out: str, *arguments: str, **more: Any) -> int:
        config = tree(bench, photos, out, checkpoint__every_steps=2, **more)
        return cli.main(["--config", str(bench.write(config)), *arguments])

    recomputed = {"memory__gradient_checkpointing": True, "data__num_workers": 1}
    assert train("whole") == train("off", objective__preserve=0.0, objective__preserve_as="") == 0
    assert train("parts", run__stop_after=2) == train("parts", "--resume_from", "auto") == 0
    assert train("live", data__cache="none") == train("recomputed", **recomputed) == 0
    for name in ("adapters/bear.safetensors", "checkpoints/step-00000003/optimizer.safetensors"):
        whole = (bench.tmp / "whole" / name).read_bytes()
        assert all((bench.tmp / other / name).read_bytes() == whole for other in ("parts", "live", "recomputed")), name
        assert (bench.tmp / "off" / name).read_bytes() != whole
    ours, off = (metrics_of(bench.tmp / name) for name in ("whole", "off"))
    assert ours == metrics_of(bench.tmp / "parts")
    assert ours[0]["loss"] == off[0]["loss"] and ours[1]["loss"] != off[1]["loss"]
    assert train("parts", "--resume_from", "auto", objective__preserve_as="bear") == 2


@pytest.mark.slow
def test_a_plan_counts_its_passes(bench: Workbench, photos: Path) -> None:
    """What the photo's pass keeps for its gradient, the other caption's keeps too."""

    def saved(**more: Any) -> int:
        config = configs.parse(tree(bench, photos, **more))
        source = open_source(config)
        found = forecast(make_plan(resolve(config, source), source, processes=1), dora_torch)
        return next(each for each in found.phases if each.name.startswith(STEP)).parts["saved"]

    assert saved() > 1.8 * saved(objective__preserve=0.0, objective__preserve_as="")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"data__sources": [{"path": "photos"}]}, r"objective\.preserve = 0\.7: the source .* has no trigger"),
        (
            {"adapter__rules": [{"component": "text_encoder", "match": "*q_proj"}]},
            r"objective\.preserve = 0\.7 needs captions",
        ),
        ({"objective__preserve": 0.0}, r"objective\.preserve_as = 'toy' has no effect without objective\.preserve"),
        ({"objective__preserve_as": f"a {TRIGGER}"}, r"the trigger 'sks plush bear' is not replaced"),
    ],
)
def test_what_is_refused(bench: Workbench, photos: Path, changed: dict, said: str) -> None:
    if "data__sources" in changed:
        changed = {"data__sources": [{"path": str(photos)}]}
    with pytest.raises(UserError, match=said), built(configs.parse(tree(bench, photos, **changed))):
        pass
