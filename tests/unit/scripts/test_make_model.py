"""Checkpoints with random weights: reproducible, and the real thing to the stock libraries; the tiny and the full ones."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline, StableDiffusionXLPipeline
from transformers import AutoTokenizer

from scripts import make_model as script
from tests.harness import DENOISER, ROOT
from trainer.base.tensorfile import TensorFile
from trainer.models import FAMILIES
from trainer.models.opening import open_model

SCRIPT = ROOT / "scripts" / "make_model.py"
MEGABYTE = 1_000_000
CAPTION = "a photo of sks plush bear on a beach, 12:30!"


def make(*options: object, size: str = "tiny") -> int:
    return script.main(["--size", size, *map(str, options)])


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Layers this small are slower on several threads, many times so on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """sdxl/, flux/ and NAME.safetensors of each with its folder."""
    root = tmp_path_factory.mktemp("tiny")
    for family in ("sdxl", "flux"):
        assert make("--family", family, "--layout", "diffusers", root / family) == 0
        assert make("--family", family, "--layout", "single_file", root / f"{family}-1.safetensors") == 0
    return root


@pytest.fixture(scope="module")
def pipelines(models) -> dict:
    classes = {"sdxl": StableDiffusionXLPipeline, "flux": FluxPipeline}
    return {name: cls.from_pretrained(models / name, local_files_only=True) for name, cls in classes.items()}


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.mark.slow
def test_a_second_process_writes_the_same_bytes(models, tmp_path):
    arguments = ["--size", "tiny", "--family", "sdxl", "--layout", "diffusers", str(tmp_path / "sdxl")]
    environment = os.environ | {"PYTHONHASHSEED": "99"}
    subprocess.run([sys.executable, str(SCRIPT), *arguments], env=environment, check=True, cwd=tmp_path)
    assert contents(tmp_path / "sdxl") == contents(models / "sdxl")
    assert [path.name for path in tmp_path.iterdir()] == ["sdxl"]


@pytest.mark.slow
def test_flux_again_gives_the_same_bytes_and_another_seed_others(models, tmp_path):
    for seed in ("0", "1"):
        out = tmp_path / seed / "flux-1.safetensors"
        assert make("--family", "flux", "--layout", "single_file", out, "--seed", seed) == 0
    assert (tmp_path / "0" / "flux-1.safetensors").read_bytes() == (models / "flux-1.safetensors").read_bytes()
    assert contents(tmp_path / "0" / "flux-1") == contents(models / "flux-1")
    assert (tmp_path / "1" / "flux-1.safetensors").read_bytes() != (models / "flux-1.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["sdxl", "sdxl-1", "flux", "flux-1"])
def test_size(models, name):
    total = sum(len(data) for data in contents(models / name).values())
    file = models / f"{name}.safetensors"
    assert total + (file.stat().st_size if file.exists() else 0) < 15 * MEGABYTE


def test_stored_dtypes(models):
    for family, denoiser in DENOISER.items():
        dtypes = {denoiser: torch.bfloat16, "text_encoder": torch.bfloat16, "text_encoder_2": torch.bfloat16}
        for component, dtype in (dtypes | {"vae": torch.float32}).items():
            entries = TensorFile(models / family / script.file_name(component)).entries.values()
            assert {entry.dtype for entry in entries} == {dtype}, component


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_stock_pipeline_draws(pipelines, family):
    pipe = pipelines[family]
    pipe.set_progress_bar_config(disable=True)
    options = {} if family == "sdxl" else {"max_sequence_length": 32}
    result = pipe(CAPTION, num_inference_steps=1, height=64, width=64, output_type="np", **options)
    (image,) = result.images
    assert image.shape == (64, 64, 3)
    assert 0.05 < image.std() < 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_outputs_are_of_order_one_and_gradients_flow(pipelines, family, dtype):
    pipe = pipelines[family]
    noise = torch.Generator().manual_seed(0)
    if family == "sdxl":
        with torch.no_grad():
            sequence, _, pooled, _ = pipe.encode_prompt(CAPTION, do_classifier_free_guidance=False)
        model, inputs = pipe.unet, torch.randn(1, 4, 8, 8, generator=noise)
        ids = torch.tensor([[64.0, 64, 0, 0, 64, 64]])
        extras = {"added_cond_kwargs": {"text_embeds": pooled.to(dtype), "time_ids": ids.to(dtype)}, "timestep": 500}
    else:
        with torch.no_grad():
            sequence, pooled, text_ids = pipe.encode_prompt(CAPTION, None, max_sequence_length=32)
        model, inputs = pipe.transformer, torch.randn(1, 16, 64, generator=noise)
        image_ids = torch.zeros(16, 3)
        image_ids[:, 1], image_ids[:, 2] = torch.arange(16) // 4, torch.arange(16) % 4
        extras = {"pooled_projections": pooled.to(dtype), "timestep": torch.tensor([0.5], dtype=dtype)}
        extras |= {"img_ids": image_ids, "txt_ids": text_ids, "guidance": torch.ones(1, dtype=dtype)}
    assert 0.3 < sequence.std() < 3 and 0.3 < pooled.std() < 3
    model.to(dtype).zero_grad()
    output = model(inputs.to(dtype), encoder_hidden_states=sequence.to(dtype), **extras).sample.float()
    output.square().mean().backward()
    norms = {name: parameter.grad.float().norm() for name, parameter in model.named_parameters()}
    model.to(torch.float32)
    assert 0.3 < output.std() < 3
    assert all(torch.isfinite(norm) and norm > 0 for norm in norms.values())


@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_latents_have_the_published_scale(pipelines, family):
    vae = pipelines[family].vae
    pixels = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        mean = vae.encode(pixels).latent_dist.mean
        decoded = vae.decode(mean).sample
    assert mean.shape == (2, 4 if family == "sdxl" else 16, 8, 8)
    latents = (mean - (vae.config.shift_factor or 0)) * vae.config.scaling_factor
    assert 0.3 < latents.std() < 3 and abs(latents.mean()) < 0.5
    assert decoded.shape == pixels.shape and 0.1 < decoded.std() < 3


@pytest.mark.parametrize(
    ("folder", "name"),
    [(folder, f"tokenizer{second}") for folder in ("sdxl", "sdxl-1") for second in ("", "_2")]
    + [("flux", "tokenizer"), ("flux-1", "tokenizer")],  # its second one is T5's
)
def test_clip_tokenizers(models, folder, name):
    tokenizer = AutoTokenizer.from_pretrained(models / folder / name)
    config = json.loads((models / folder / name.replace("tokenizer", "text_encoder") / "config.json").read_text())
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (config["bos_token_id"], config["eos_token_id"])
    assert len(tokenizer) == config["vocab_size"] and tokenizer.model_max_length == 77
    for text in (CAPTION, "Über 東京 🐻 naïve <tag> & ünïcode"):
        ids = tokenizer(text, padding="max_length", truncation=True).input_ids
        end = ids.index(tokenizer.eos_token_id)
        assert len(ids) == 77 and ids[0] == tokenizer.bos_token_id
        padding = 0 if name == "tokenizer_2" else tokenizer.eos_token_id
        assert end < 60 and set(ids[end + 1 :]) == {padding}
        decoded = tokenizer.decode(ids[1:end])
        assert decoded.replace(" ", "") == text.lower().replace(" ", "")


@pytest.mark.parametrize("folder", ["flux", "flux-1"])
def test_t5_tokenizer(models, folder):
    tokenizer = AutoTokenizer.from_pretrained(models / folder / "tokenizer_2")
    config = json.loads((models / folder / "text_encoder_2" / "config.json").read_text())
    assert len(tokenizer) <= config["vocab_size"] and tokenizer.model_max_length == 512
    ids = tokenizer(CAPTION, padding="max_length", max_length=64).input_ids
    end = ids.index(config["eos_token_id"])
    assert set(ids[end + 1 :]) == {config["pad_token_id"]} and tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == CAPTION
    assert tokenizer.tokenize("a photo of plush bear") == ["▁a", "▁photo", "▁of", "▁plush", "▁bear"]


@pytest.mark.slow
def test_v_prediction_is_said_where_real_files_say_it(models, tmp_path):
    options = ["--family", "sdxl", "--prediction", "v"]
    assert make(*options, "--layout", "diffusers", tmp_path / "v") == 0
    assert make(*options, "--layout", "single_file", tmp_path / "s.safetensors") == 0
    scheduler = json.loads((tmp_path / "v" / "scheduler" / "scheduler_config.json").read_text())
    assert scheduler["prediction_type"] == "v_prediction"
    assert scheduler["rescale_betas_zero_snr"] is True and scheduler["timestep_spacing"] == "trailing"
    markers = set(TensorFile(tmp_path / "s.safetensors").entries) - set(TensorFile(models / "sdxl-1.safetensors").entries)
    assert markers == {"v_pred", "ztsnr"}


def test_schnell_has_no_guidance(tmp_path):
    assert make("--family", "flux", "--layout", "diffusers", "--variant", "schnell", tmp_path / "s") == 0
    names = TensorFile(tmp_path / "s" / script.file_name("transformer")).entries
    assert not any("guidance" in name for name in names)
    scheduler = json.loads((tmp_path / "s" / "scheduler" / "scheduler_config.json").read_text())
    assert scheduler["use_dynamic_shifting"] is False


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--family", "sdxl", "--layout", "diffusers", "{models}/sdxl"], "sdxl exists"),
        (["--family", "sdxl", "--layout", "single_file", "{models}/sdxl.safetensors"], "sdxl exists"),
        (["--family", "sdxl", "--layout", "single_file", "{models}/new"], "must end in .safetensors"),
        (
            ["--family", "sdxl", "--layout", "diffusers", "{models}/new", "--variant", "schnell"],
            "--variant schnell is none of sdxl",
        ),
        (["--family", "flux", "--layout", "diffusers", "{models}/new", "--prediction", "v"], "--prediction v"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(models, capsys, options, said):
    before = sorted(models.iterdir())
    assert make(*(option.format(models=models) for option in options)) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert sorted(models.iterdir()) == before


# --- the published sizes ----------------------------------------------------------------------------------------------


# Of diffusers' and transformers' own classes, without their buffers: test_names counts them.
FULL_BYTES = {
    "sdxl": {"unet": 5_134_927_368, "text_encoder": 246_120_960, "text_encoder_2": 1_389_319_680, "vae": 334_615_452},
    "flux": {"transformer": 23_802_816_640, "text_encoder": 246_120_960, "text_encoder_2": 9_524_621_312, "vae": 335_278_732},
    "flux2": {"transformer": 7_751_089_152, "text_encoder": 8_044_936_192, "vae": 336_185_492},
    "flux3": {"transformer": 11_076_916_736, "text_encoder": 8_875_631_616, "vae": 336_185_492},
    "zimage": {"transformer": 12_309_817_472, "text_encoder": 8_044_936_192, "vae": 335_278_732},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FULL_BYTES)
def test_a_full_model_has_the_published_size_in_shards_of_five_gigabytes(tmp_path, family):
    assert make("--family", family, "--layout", "diffusers", "--sparse", tmp_path / family, size="full") == 0
    source = open_model(FAMILIES[family], str(tmp_path / family))
    for component, wanted in FULL_BYTES[family].items():
        source.verify(component)  # every tensor is there once and in its shape
        files = sorted((tmp_path / family / component).glob("*.safetensors"))
        held = [sum(entry.bytes for entry in TensorFile(file).entries.values()) for file in files]
        assert sum(held) == wanted and max(held) <= script.SHARD_BYTES
        count = -(-wanted // script.SHARD_BYTES)
        assert len(files) == count
        if count > 1:
            stem = "model" if component.startswith("text") else "diffusion_pytorch_model"
            assert [f.name for f in files] == [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
            index = json.loads((tmp_path / family / component / f"{stem}.safetensors.index.json").read_text())
            assert index["metadata"] == {"total_size": wanted}
            assert index["weight_map"] == {name: f.name for f in files for name in TensorFile(f).entries}
    if family in ("sdxl", "flux"):  # whose tokenizer is no published one
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / family / "tokenizer")
        assert len(tokenizer) == 49408 and tokenizer.eos_token_id == 49407


@pytest.mark.slow
@pytest.mark.parametrize("family", FULL_BYTES)
def test_a_full_single_file_holds_what_the_published_one_does(tmp_path, family):
    out = tmp_path / f"{family}.safetensors"
    assert make("--family", family, "--layout", "single_file", "--sparse", out, size="full") == 0
    held = FULL_BYTES[family]
    total = sum(held.values()) if family == "sdxl" else held["transformer"]
    extra = 77 * 8 + 4 if family == "sdxl" else 0  # position ids and a logit scale
    assert sum(entry.bytes for entry in TensorFile(out).entries.values()) == total + extra
    source = open_model(FAMILIES[family], str(out))
    for component in held:
        source.verify(component)


def test_a_large_tensors_numbers_are_one_block_repeated(monkeypatch):
    """Bytes that depend on seed and name alone; rows that differ; mean and deviation as those of a tiny model's."""
    monkeypatch.setattr(script, "BLOCK_NUMBERS", 10_007)
    config = {"hidden_size": 64, "intermediate_size": 256} | {"num_hidden_layers": 1, "vocab_size": 500}
    config = script.published("sdxl", "text_encoder/config.json") | config
    weights, again, other = (
        {
            name: recipe.make()
            for name, recipe in script.random_weights("t", "CLIPTextModel", config, script.repeated_block(seed)).items()
        }
        for seed in (0, 0, 1)
    )
    own = script.random_weights("t", "CLIPTextModel", config, script.own_stream(0))
    assert all(torch.equal(tensor, again[name]) for name, tensor in weights.items())
    assert not any(torch.equal(tensor, other[name]) for name, tensor in weights.items())
    for name, tensor in weights.items():
        twin = own[name].make().float()
        assert tensor.dtype == own[name].dtype and tensor.shape == twin.shape
        # Of n numbers the mean strays by 1 / sqrt(n) deviations and the deviation by 1 / sqrt(2 n) of itself: five of these.
        room = 5 / math.sqrt(min(tensor.numel(), 10_007))
        assert abs(tensor.float().std() / twin.std() - 1) < room and abs(tensor.float().mean() - twin.mean()) < 2 * room
    table = next(tensor for name, tensor in weights.items() if name.endswith("token_embedding.weight"))
    assert table.numel() > 10_007 and len(torch.unique(table, dim=0)) == len(table)
    assert torch.linalg.matrix_rank(table.float()) == 64


def test_a_disk_without_room_is_named_before_anything_is_written(monkeypatch, capsys, tmp_path):
    usage = shutil.disk_usage(tmp_path)._replace(free=10_000_000_000)
    monkeypatch.setattr(script.shutil, "disk_usage", lambda path: usage)
    assert make("--family", "flux", "--layout", "diffusers", tmp_path / "deep" / "flux", size="full") == 2
    said = capsys.readouterr().err
    assert "needs 33.9 GB, and its disk has 10.0 GB free" in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())
