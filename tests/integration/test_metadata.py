"""What people's programs read in an adapter file: kohya's entries, ModelSpec's, a thumbnail, hashes."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from pathlib import Path

import safetensors.torch
import torch
from PIL import Image

from scripts import adapter as script
from tests.harness import PHOTOS, Workbench
from trainer import cli
from trainer.adapters.export import with_hash
from trainer.tensorfile import TensorFile, write_tensors


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


def test_the_header_of_a_runs_files(bench: Workbench, monkeypatch) -> None:
    """Stopped after each step, a run leaves the bytes of one that was not, thumbnails included; so does the checkpoint."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")  # 2023-11-14 22:13:20

    def start(out: str, **more) -> None:
        tree = bench.tree(
            run__output_dir=str(bench.tmp / out), run__max_steps=3, adapter__targets=["*attn1.to_q"], ema__kind="constant",
            data__sources=[{"path": str(PHOTOS), "repeats": 2, "trigger": "sks"}], validation__every_steps=1,
            validation__samples=[{"prompt": "a bear", "width": 64, "height": 64, "steps": 1}], export__every_steps=2,
            export__license="cc-by-4.0", checkpoint__every_steps=1, **more,
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
    for step, name in ((2, "bear-00000002"), (3, "bear")):
        made = bench.tmp / f"made-{step}"
        assert script.main(["export", str(bench.tmp / f"whole/checkpoints/step-{step:08d}"), str(made)]) == 0
        for end in ("", "_comfyui", "_ema", "_ema_comfyui"):
            assert (made / f"bear{end}.safetensors").read_bytes() == (whole / f"{name}{end}.safetensors").read_bytes()
