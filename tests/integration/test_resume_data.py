"""A run with every key of the data that goes together, stopped and resumed: byte for byte the uninterrupted one."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from PIL import Image, ImageOps

from tests.harness import PHOTOS, Workbench, metrics_of
from tests.integration.test_resume import run_tree, train
from tests.integration.test_weighed import with_masks

STOPS, LENGTH = (2, 5), 8
CAPTIONS = {
    "caption_lines": True, "wildcards": True, "separator": ",", "keep": 1, "tag_dropout": 0.3, "shuffle": True,
    "prefix": "a photo of", "suffix": ", outside", "trigger": "sks plush bear", "caption_dropout": 0.2,
}  # fmt: skip
CAPTION = f"bear, {{sun|rain}}, {', '.join(f'tag {i}' for i in range(30))}\nplush, {{red|blue}} fur, grass"
FILES = ("adapters/bear.safetensors", "adapters/bear_comfyui.safetensors") + tuple(
    f"checkpoints/step-{LENGTH:08d}/{name}.safetensors" for name in ("adapter", "optimizer", "norms")
)


def photos(folder: Path, change) -> list[Path]:
    """The photos, changed, so that they are other images than those of the other sources."""
    folder.mkdir()
    for path in sorted(PHOTOS.glob("*.jpg")):
        with Image.open(path) as image:
            change(image).save(folder / f"{path.stem}.png")
    return sorted(folder.iterdir())


def sources(folder: Path) -> list[dict]:
    """A folder with masks, an archive, a table of images, and regularisation images."""
    masked = Path(with_masks(folder / "masked", None))
    for text in masked.glob("*.txt"):
        text.write_text(CAPTION)
    with tarfile.open(folder / "shard.tar", "w") as archive:
        for path in photos(folder / "packed", ImageOps.flip):
            path.with_suffix(".txt").write_text(CAPTION)
            archive.add(path, path.name)
            archive.add(path.with_suffix(".txt"), f"{path.stem}.txt")
    named = photos(folder / "table", ImageOps.invert)
    rows = [{"image": path.name, "words": f"sks plush bear {path.stem}"} for path in named]
    (folder / "table" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    photos(folder / "prior", lambda image: ImageOps.posterize(image, 2))
    return [
        {"path": str(masked), "masks": "files", "unmasked_weight": 0.2, "loss_weight": 1.5, "repeats": 2} | CAPTIONS,
        {"path": str(folder / "shard.tar"), "resolution": 48, "flip": False} | CAPTIONS,
        {"path": str(folder / "table"), "image_column": "image", "caption_column": "words"},
        {"path": str(folder / "prior"), "captions": "folder", "regularisation": True, "loss_weight": 0.5},
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["disk", "memory", "none"])
def test_stopped_and_resumed_with_every_key_of_the_data(bench: Workbench, kind: str, capsys) -> None:
    more = {
        "data__sources": sources(bench.tmp), "data__cache": kind, "data__held_out": 2, "data__resolution": [48, 64],
        "data__enlarge": True, "data__batch_size": 4, "data__short_batches": "merge", "data__background": "#102030",
        "data__crop_jitter": 0.1, "data__colour_jitter": 0.2, "data__image_variants": 2, "data__caption_variants": 2,
        "data__clip_chunks": 2, "data__num_workers": 1, "run__max_steps": LENGTH, "adapter__targets": ["*attn2.to_v"],
    }  # fmt: skip
    if kind == "disk":
        more["data__cache_limit"] = "1MB"  # less than the run needs: it keeps that all the same
    train(run_tree(bench, "whole", **more))
    printed = capsys.readouterr().out
    for said in ("held out, never trained on: 2 of 20", "short batches: none", "+ 5 regularisation images",
                 "photos with a mask", "image variants: 2 of each photo"):  # fmt: skip
        assert said in printed, said
    assert ("the cache holds" in printed) == (kind == "disk")
    for stop in STOPS:
        train(run_tree(bench, "parts", run__stop_after=stop, **more), resume_from="auto")
    train(run_tree(bench, "parts", **more), resume_from="latest")
    whole = metrics_of(bench.tmp / "whole")
    assert len({entry["epoch"] for entry in whole}) > 1
    assert metrics_of(bench.tmp / "parts") == whole
    for name in FILES:
        assert (bench.tmp / "parts" / name).read_bytes() == (bench.tmp / "whole" / name).read_bytes(), name
