"""A family that the program does not know (tests/third_family) trains, resumes, samples and exports like its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.harness import Workbench, built, metrics_of, take_step
from tests.third_family import FAMILY
from tests.third_family.make import make
from trainer import models
from trainer.base.tensorfile import TensorFile
from trainer.models.opening import open_model
from workbench.commands import main as cli

STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("third")
    make(folder)
    return folder


@pytest.fixture
def third(bench: Workbench, folder: Path, monkeypatch) -> Workbench:
    monkeypatch.setitem(models.FAMILIES, "third", FAMILY)
    return Workbench(bench.models, bench.tmp)


def tree(third: Workbench, folder: Path, out: str, **overrides: Any) -> dict[str, Any]:
    photos = third.tmp / "photos"
    if not photos.exists():
        photos.mkdir()
        captions = ("a photo of sks plush bear", "bear", "a small red bear on the beach in snow", "")
        for number, caption in enumerate(captions):
            colour = (60 * number, 200 - 40 * number, 90)
            Image.new("RGB", (64, 64), colour).save(photos / f"{number}.png")
            (photos / f"{number}.txt").write_text(caption)
    settings = {
        "model__path": str(folder), "run__output_dir": str(third.tmp / out), "run__max_steps": STEPS,
        "data__sources": [{"path": str(photos)}], "data__cache_dir": str(third.tmp / "cache"), "data__batch_size": 4,
        "validation__every_steps": STEPS, "validation__steps": 2,
        "validation__samples": [{"prompt": "a bear on the beach", "negative": "snow", "width": 64, "height": 64}],
        "checkpoint__every_steps": 2,
    }  # fmt: skip
    return third.tree("third", **(settings | overrides))


def run(third: Workbench, tree: dict, *arguments: str) -> int:
    return cli.main(["--config", str(third.write(tree)), *arguments])


@pytest.mark.slow
@pytest.mark.parametrize(
    "choices",
    [
        pytest.param({"adapter__type": "dora", "model__components": {"transformer": {"dtype": "fp8_e4m3"}}}, id="cached"),
        pytest.param(
            {"adapter__rules": [{"component": "text_encoder", "match": "*_proj"}], "memory__gradient_checkpointing": True},
            id="text_encoder_adapted",
        ),
    ],
)
def test_a_third_family_trains_resumes_samples_and_exports(third: Workbench, folder: Path, choices) -> None:
    out, whole = third.tmp / "out", third.tmp / "whole"
    assert run(third, tree(third, folder, "out", **choices)) == 0
    if "adapter__rules" in choices:
        shutil.copytree(out, whole)
        assert run(third, tree(third, folder, "out", **choices), "--resume_from", str(out / "checkpoints/step-00000002")) == 0
        for file in ("adapter", "optimizer"):
            one, other = (each / f"checkpoints/step-0000000{STEPS}/{file}.safetensors" for each in (whole, out))
            assert one.read_bytes() == other.read_bytes()
        assert metrics_of(whole) == metrics_of(out)
    before, after = (Image.open(out / f"samples/step-{step:08d}/00.png") for step in (0, STEPS))
    assert before.size == after.size == (64, 64)
    exported = TensorFile(out / "adapters/bear.safetensors").read_all()
    kohya = TensorFile(out / "adapters/bear_comfyui.safetensors").entries
    assert "lora_unet_transformer_blocks_0_attn_to_q.lora_down.weight" in kohya
    assert ("lora_te1_layers_0_self_attn_q_proj.alpha" in kohya) == ("adapter__rules" in choices)
    assert any(tensor.any() for name, tensor in exported.items() if name.endswith("lora_B.weight"))
    # The library that the denoiser is of takes the file.
    from diffusers import QwenImageTransformer2DModel

    denoiser = QwenImageTransformer2DModel.from_pretrained(folder / "transformer")
    denoiser.load_lora_adapter({n: t for n, t in exported.items() if n.startswith("transformer.")}, prefix="transformer")
    # What a run wrote as its config starts the same run.
    assert cli.main(["--config", str(out / "config.toml"), "--plan"]) == 0


@pytest.mark.slow
def test_captions_of_differing_length_are_padded_and_masked(third: Workbench, folder: Path) -> None:
    """A caption's loss beside a longer one is its loss alone."""
    from trainer import config as configs

    config = configs.parse(tree(third, folder, "out", data__caption_dropout=0.0))
    with built(config) as training:
        (update,) = next(zip(training.updates(), strict=False))
        batch = training.reader[update[0]]
        lengths = batch.conditioning.mask.sum(1)
        assert len(set(lengths.tolist())) > 1 and batch.conditioning.sequence.shape[1] == lengths.max()
        alone = torch.cat([training.step.losses(training.reader[(o,)]) for o in update[0]])
        torch.testing.assert_close(training.step.losses(batch), alone, rtol=1e-5, atol=1e-6)
        assert take_step(training, 1, update).updated


def test_what_a_module_makes_itself_is_there(third: Workbench, folder: Path) -> None:
    """Rotary tables, in buffers and beside them, are as the libraries' own loading leaves them."""
    from diffusers import QwenImageTransformer2DModel
    from transformers import Qwen2Model

    source = open_model(FAMILY, str(folder))
    loaded = {
        name: source.load(name, swap=lambda module: None, device=torch.device("cpu"))
        for name in ("text_encoder", "transformer")
    }
    text = Qwen2Model.from_pretrained(folder / "text_encoder")
    assert torch.equal(loaded["text_encoder"].rotary_emb.inv_freq, text.rotary_emb.inv_freq)
    assert text.rotary_emb.inv_freq.any() and "rotary_emb.inv_freq" not in text.state_dict()
    image = QwenImageTransformer2DModel.from_pretrained(folder / "transformer")
    assert torch.equal(loaded["transformer"].pos_embed.pos_freqs, image.pos_embed.pos_freqs)


@pytest.mark.parametrize(
    ("key", "value"), [("objective__min_snr_gamma", 5.0), ("objective__shift", 3.0), ("data__text_length", 32)]
)
def test_a_key_of_other_families_is_refused(third: Workbench, folder: Path, capsys, key: str, value: float) -> None:
    assert run(third, tree(third, folder, "out", **{key: value})) == 2
    message = capsys.readouterr().err
    assert f"{key.replace('__', '.')} = {value!r} has no effect on third; " in message and "leave it out" in message
    assert not (third.tmp / "out").exists()
