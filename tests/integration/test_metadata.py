"""What people's programs read in an adapter file: kohya's entries, ModelSpec's, a thumbnail, hashes."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from PIL import Image

from scripts import adapter as script
from tests.harness import PHOTOS, Workbench, built
from trainer.adapters.export import with_hash
from trainer.base.tensorfile import TensorFile, write_tensors
from workbench.commands import main as cli


def kohyas_hashes(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> tuple[str, str]:
    """sd-scripts' precalculate_safetensors_hashes, written again; the file is safetensors' own."""
    file = safetensors.torch.save(tensors, {key: value for key, value in metadata.items() if key.startswith("ss_")})
    header = 8 + int.from_bytes(file[:8], "little")
    return hashlib.sha256(file[header:]).hexdigest(), hashlib.sha256(file[0x100000:0x110000]).hexdigest()[:8]


def test_the_hashes_are_those_of_kohyas_trainer(tmp_path: Path) -> None:
    """Of a file that ends before, within and behind the part of which the old hash is."""
    fields = {"ss_output_name": "Bär", "ss_tag_frequency": json.dumps({"captions": {"a": 1}}), "modelspec.title": "not in it"}
    seen = set()
    for count in (10, 270_000, 700_000):
        g = torch.Generator().manual_seed(count)
        tensors = {"b": torch.randn(count, generator=g), "a": torch.randn(7, 3, generator=g).to(torch.bfloat16)}
        told = with_hash(tensors, fields)
        model, legacy = kohyas_hashes(tensors, fields)
        assert (told["sshs_model_hash"], told["sshs_legacy_hash"]) == (model, legacy)
        write_tensors(tmp_path / "made.safetensors", tensors, told)
        data = (tmp_path / "made.safetensors").read_bytes()
        assert (
            told["modelspec.hash_sha256"] == "0x" + hashlib.sha256(data[8 + int.from_bytes(data[:8], "little") :]).hexdigest()
        )
        seen.add(legacy)
    assert len(seen) == 3


def a1111_shows(path: Path) -> dict[str, str]:
    """The rows of A1111's card of an adapter, by its rules (extensions-builtin/Lora/ui_edit_user_metadata.py)."""
    with safetensors.safe_open(path, "pt") as file:
        metadata = {key: json.loads(text) if text[:1] == "{" else text for key, text in file.metadata().items()}
    buckets = metadata["ss_bucket_info"]["buckets"].values()
    return {
        "output name": metadata["ss_output_name"],
        "trained": float(metadata["ss_training_started_at"]),
        "resolutions": {tuple(bucket["resolution"]): int(bucket["count"]) for bucket in buckets},
        "dataset size": sum(int(folder.get("img_count", 0)) for folder in metadata["ss_dataset_dirs"].values()),
        "tags": {tag: int(count) for tags in metadata["ss_tag_frequency"].values() for tag, count in tags.items()},
    }


@pytest.mark.slow
def test_entries_for_one_value_are_left_out_where_there_are_several(bench: Workbench) -> None:
    rules = [
        {"component": "unet", "match": "*.to_q", "lr": 1e-3},
        {"component": "text_encoder", "match": "*.q_proj", "rank": 2},
    ]
    sources = [{"path": str(PHOTOS)}, {"path": str(PHOTOS), "caption_dropout": 0.5}]
    several = bench.config(adapter__rules=rules, data__sources=sources, data__caption_dropout=0.25, schedule__warmup=2)
    with built(several) as run:
        told = run.origin.about().entries
    assert not {"ss_unet_lr", "ss_caption_dropout_rate"} & told.keys() and told["ss_text_encoder_lr"] == "0.0001"
    assert told["ss_lr_scheduler"] == "constant_with_warmup" and told["ss_lr_warmup_steps"] == "2"
    assert json.loads(told["ss_dataset_dirs"])["source 0"] == {"n_repeats": 1, "img_count": 5}
    with built(bench.config(run__output_dir=str(bench.tmp / "one"), data__caption_dropout=0.25)) as run:
        told = run.origin.about().entries
    assert (told["ss_unet_lr"], told["ss_text_encoder_lr"]) == ("0.0001", "None")
    assert told["ss_caption_dropout_rate"] == "0.25" and told["ss_lr_scheduler"] == "constant"


def test_a_converted_file_says_whose_module_it_is_for(tmp_path: Path) -> None:
    """As its own header did, where it stays what it was; else as the family says. And whose names its keys are."""
    layer, flat = "transformer.transformer_blocks.0.attn.to_out.0", tmp_path / "kohya.safetensors"
    tensors = {f"{layer}.lora_A.weight": torch.ones(2, 3072), f"{layer}.lora_B.weight": torch.ones(3072, 2)}

    def told(file: Path, to: str) -> dict[str, str]:
        assert script.main(["convert", str(file), str(tmp_path / f"{to}.safetensors"), "--to", to]) == 0
        return TensorFile(tmp_path / f"{to}.safetensors").metadata

    hint = {"modelspec.architecture": "flux-1-dev/lora"}
    write_tensors(tmp_path / "a.safetensors", tensors, hint | {"ss_network_module": "networks.of_somebody"})
    assert told(tmp_path / "a.safetensors", "kohya")["ss_network_module"] == "networks.of_somebody"
    flat.unlink()  # nothing is written over
    write_tensors(tmp_path / "b.safetensors", tensors, hint | {"modelspec.implementation": "diffusers"})
    made = told(tmp_path / "b.safetensors", "kohya")
    assert made["ss_network_module"] == "networks.lora_flux" and made.get("modelspec.implementation") != "diffusers"
    assert told(flat, "diffusers")["modelspec.implementation"] == "diffusers"


@pytest.mark.slow
def test_the_files_do_not_depend_on_samples_unless_they_show_one(bench: Workbench) -> None:
    sample = {"prompt": "a bear", "width": 64, "height": 64, "steps": 1}

    def made(out: str, **more) -> bytes:
        tree = bench.tree(run__output_dir=str(bench.tmp / out), run__max_steps=1, adapter__targets=["conv_in"],
                          optimizer__lr=1e-2, schedule__warmup=0, **more)  # fmt: skip
        assert cli.main(["--config", str(bench.write(tree))]) == 0
        return (bench.tmp / out / "adapters" / "bear.safetensors").read_bytes()

    without = made("without", validation__every_steps=0)
    assert made("drawn", validation__every_steps=1, validation__samples=[sample]) == without
    assert made("shown", validation__every_steps=1, validation__samples=[sample], export__thumbnail=True) != without


@pytest.mark.slow
def test_the_header_of_a_runs_files(bench: Workbench, monkeypatch) -> None:
    """Stopped after each step, a run leaves the bytes of one that was not, thumbnails included; so does the checkpoint."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")  # 2023-11-14 22:13:20

    def start(out: str, **more) -> None:
        tree = bench.tree(
            run__output_dir=str(bench.tmp / out), run__max_steps=3, adapter__targets=["*attn1.to_q"], ema__kind="constant",
            data__sources=[{"path": str(PHOTOS), "repeats": 2, "trigger": "sks"}], validation__every_steps=1,
            validation__samples=[{"prompt": "a bear", "width": 64, "height": 64, "steps": 1}], export__every_steps=2,
            export__license="cc-by-4.0", export__thumbnail=True, checkpoint__every_steps=1, **more,
        )  # fmt: skip
        assert cli.main(["--config", str(bench.write(tree)), "--resume_from", "auto"]) == 0

    start("whole")
    for stop in (1, 2, 3):
        start("parts", run__stop_after=stop)
    whole, parts = (bench.tmp / out / "adapters" for out in ("whole", "parts"))
    names = [
        f"bear{step}{ema}{end}.safetensors" for step in ("-00000002", "") for ema in ("", "_ema") for end in ("", "_comfyui")
    ]
    assert sorted(names) == sorted(path.name for path in parts.glob("*.safetensors"))
    for name in names:
        assert (whole / name).read_bytes() == (parts / name).read_bytes(), name
        told = TensorFile(whole / name).metadata
        picture = told["modelspec.thumbnail"].removeprefix("data:image/jpeg;base64,")
        with Image.open(io.BytesIO(base64.b64decode(picture, validate=True))) as image:
            assert image.format == "JPEG" and max(image.size) <= 256 and len(picture) < 2**16
    shown = a1111_shows(whole / "bear.safetensors")
    assert shown["output name"] == "bear" and shown["trained"] == 1699920000.0, "midnight of that day"
    photos = len(list(PHOTOS.glob("*.jpg")))
    assert shown["dataset size"] == photos and sum(shown["resolutions"].values()) == 2 * photos
    assert sum(shown["tags"].values()) == 2 * photos
    assert told["ss_resolution"] == "(64, 64)" and told["modelspec.resolution"] == "64x64"
    assert told["modelspec.trigger_phrase"] == "sks" and told["modelspec.license"] == "cc-by-4.0"
    assert told["ss_mixed_precision"] == "no" and told["ss_total_batch_size"] == "2" and told["ss_lr_scheduler"] == "constant"
    module, implementation = "ss_network_module", "modelspec.implementation"
    assert told[module] == "networks.lora" and told[implementation] == "https://github.com/Stability-AI/generative-models"
    assert TensorFile(whole / "bear.safetensors").metadata[implementation] == "diffusers"
    for step, name in ((2, "bear-00000002"), (3, "bear")):
        made = bench.tmp / f"made-{step}"
        assert script.main(["export", str(bench.tmp / f"whole/checkpoints/step-{step:08d}"), str(made)]) == 0
        for end in ("", "_comfyui", "_ema", "_ema_comfyui"):
            assert (made / f"bear{end}.safetensors").read_bytes() == (whole / f"{name}{end}.safetensors").read_bytes()
