"""Runs with masks, weights, priors and jitter: white masks and weights of one change no byte, and what changes is told."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests.harness import PHOTOS, Workbench, built, metrics_of
from tests.integration.test_resume import run_tree, train
from trainer.base import draws
from trainer.base.errors import UserError
from trainer.base.tensorfile import TensorFile
from trainer.config import parse

STATE = ("adapter.safetensors", "optimizer.safetensors")


def with_masks(folder: Path, colour: int | None) -> str:
    """The photos, each with a mask: of one grey, or of noise in blocks."""
    shutil.copytree(PHOTOS, folder)
    rng = random.Random(0)
    for path in sorted(folder.glob("*.jpg")):
        with Image.open(path) as photo:
            mask = Image.new("L", photo.size, colour or 0)
            if colour is None:
                noise = Image.frombytes("L", (6, 6), rng.randbytes(36))
                mask = noise.resize(photo.size, Image.Resampling.NEAREST)
        mask.save(path.with_suffix(".mask.png"))
    return str(folder)


def state(bench: Workbench, out: str, step: int) -> list[bytes]:
    return [(bench.tmp / out / "checkpoints" / f"step-{step:08d}" / name).read_bytes() for name in STATE]


@pytest.mark.slow
def test_white_masks_and_weights_of_one_change_no_byte(bench: Workbench) -> None:
    white, noise = with_masks(bench.tmp / "white", 255), with_masks(bench.tmp / "noise", None)
    states = {}
    for out, source in {
        "plain": {"path": white},
        "white": {"path": white, "masks": "files", "unmasked_weight": 0.3, "loss_weight": 1.0},
        "noise": {"path": noise, "masks": "files"},
        "light": {"path": white, "loss_weight": 0.5},
    }.items():
        train(run_tree(bench, out, data__sources=[source], run__max_steps=2, step__max_grad_norm=0.0))
        states[out] = state(bench, out, 2)
    assert states["white"] == states["plain"]
    assert all(
        other != mine for name in ("noise", "light") for other, mine in zip(states[name], states["plain"], strict=True)
    )
    loss = {out: metrics_of(bench.tmp / out)[0]["loss"] for out in states}
    assert loss["light"] == pytest.approx(loss["plain"] / 2) and 0 < loss["noise"] < loss["plain"] == loss["white"]


@pytest.mark.slow
def test_every_such_key_is_told_and_a_mask_that_changed_refused(bench: Workbench, capsys) -> None:
    sources = [
        {"path": with_masks(bench.tmp / "photos", None), "masks": "files", "unmasked_weight": 0.2, "loss_weight": 1.5},
        {"path": str(PHOTOS), "regularisation": True, "loss_weight": 0.5, "flip": False},
    ]
    tree = run_tree(
        bench, "out", data__sources=sources, data__image_variants=3, data__crop_jitter=0.1, run__max_steps=3,
        schedule__warmup=0, run__stop_after=1,
    )  # fmt: skip
    train(tree)
    printed = capsys.readouterr().out
    assert "data 5 images + 5 regularisation images: " in printed
    assert f"{sources[0]['path']}: loss weight 1.5; 5 of 5 photos with a mask, unmasked parts weigh 0.2" in printed
    assert f"{sources[1]['path']}: loss weight 0.5, regularisation images" in printed
    assert "image variants: 3 of each photo" in printed
    about = TensorFile(bench.tmp / "out" / "adapters" / "bear.safetensors").metadata
    assert about["ss_num_train_images"] == "5", "the prior is not the subject"
    assert sum(json.loads(about["ss_tag_frequency"])["captions"].values()) == 5
    mask = sorted((bench.tmp / "photos").glob("*.mask.png"))[0]
    with Image.open(mask) as image:
        image.point(lambda level: 255 - level).save(mask)
    with pytest.raises(UserError, match=r"other contents: 0/00\.jpg"):
        train(tree, resume_from="latest")


@pytest.mark.slow
def test_a_model_is_told_the_crop_that_was_taken(bench: Workbench) -> None:
    config = parse(run_tree(bench, "out", data__crop_jitter=0.2, data__image_variants=6, data__flip=False))
    crops = set()
    with built(config) as run:
        for _, update in zip(range(8), run.updates(), strict=False):
            for micro_batch in update:
                batch = run.reader[micro_batch]
                for i, occurrence in enumerate(micro_batch):
                    example = run.reader.examples[occurrence.sample]
                    number = int(
                        draws.uniform(7, "image_variant", occurrence.epoch, occurrence.sample, occurrence.repeat) * 6
                    )
                    crops.add((occurrence.sample, number, *batch.crop_top_left[i].tolist()))
                    assert batch.target_size[i].tolist() == [example.bucket[1], example.bucket[0]]
    assert len({(sample, number) for sample, number, *_ in crops}) == len(crops), "one crop for each variant"
    assert len({(sample, *crop) for sample, _, *crop in crops}) > 5, "no crop was moved"
