"""Stopped and resumed equals uninterrupted, whatever is combined: byte for byte, and in every number of the log.

Fourteen runs, in which every two levels of two factors meet. That each piece of a checkpoint goes to its file and back is
shown alone (unit/checkpoint/test_state.py), as is every optimizer (unit/optim/test_state.py); stops at every step, by signals
and by kills in test_resume.py, test_signals.py and test_kill.py.
"""

from __future__ import annotations

import json
import tarfile
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageOps

from tests.harness import DENOISER, PHOTOS, Workbench, metrics_of
from tests.integration.test_objectives import EVERYTHING
from tests.integration.test_weighed import with_masks
from trainer import config as configs
from trainer.base.errors import UserError
from trainer.base.tensorfile import TensorFile
from trainer.plan import fixed_draws
from trainer.runtime import precision
from workbench.commands.launch import train

LENGTH = 5
LAST = Path("checkpoints") / f"step-{LENGTH:08d}"
# The first level of each is the plain one.
FACTORS: dict[str, tuple[str, ...]] = {
    "family": ("sdxl", "flux"),
    "storage": ("bf16", "fp8_e4m3", "nf4"),
    "compute": ("fp32", "bf16", "fp16"),
    "adapter": ("lora", "dropouts", "dora", "lokr"),
    "targets": ("attention", "others"),
    "optimizer": ("adamw", "adamw8bit", "prodigy"),
    "schedule": ("constant", "cosine"),
    "average": ("none", "constant"),
    "accumulation": ("1", "2"),
    "cache": ("disk", "none"),
    "data": ("plain", "every key"),
    "objective": ("plain", "every key"),
    "encoder": ("frozen", "adapted", "stops"),
    "held-out loss": ("off", "on"),
    "checkpointing": ("off", "on"),
    "meanwhile": ("nothing", "samples, files, workers"),
}
# A run in each line, the level of each factor in its order.
RUNS = (
    "1021011101011000", "1003121111101111", "1213110111010100", "0123100110102110", "0012000000100010", "1113021001111011",
    "1222020000011001", "1102111111112111", "1101120000110101", "0010101000101011", "0120020111010010", "1200001111010100",
    "0000110000002000", "0211001011102111",
)  # fmt: skip
# Two levels that the program refuses together.
REFUSED = (("optimizer", "prodigy"), ("encoder", "stops"))
QUICK = ("1222020000011001", "0000110000002000")


def levels_of(run: str) -> dict[str, str]:
    return {factor: levels[int(digit)] for (factor, levels), digit in zip(FACTORS.items(), run, strict=True)}


CAPTIONS = {
    "caption_lines": True, "wildcards": True, "separator": ",", "keep": 1, "tag_dropout": 0.3, "shuffle": True,
    "prefix": "a photo of", "suffix": ", outside", "trigger": "sks plush bear", "caption_dropout": 0.2,
}  # fmt: skip
CAPTION = f"bear, {{sun|rain}}, {', '.join(f'tag {i}' for i in range(30))}\nplush, {{red|blue}} fur, grass"
TARGETS = {
    ("sdxl", "attention"): ["*attn1.to_q", "*attn2.to_v"],
    ("sdxl", "others"): ["conv_in", "*ff.net.2"],
    ("flux", "attention"): ["*.attn.to_q"],
    ("flux", "others"): ["single_transformer_blocks.*.proj_out"],
}


def photos(folder: Path, change) -> list[Path]:
    """Two photos, changed, so that they are other images than those of the other sources."""
    folder.mkdir()
    for path in sorted(PHOTOS.glob("*.jpg"))[:2]:
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


def settings(bench: Workbench, levels: dict[str, str]) -> dict[str, Any]:
    """The keys of a run of these levels, but for what may change when it is resumed."""
    family = levels["family"]
    keys: dict[str, Any] = {
        "run__max_steps": LENGTH, "precision__compute": levels["compute"], "optimizer__name": levels["optimizer"],
        "model__components": {DENOISER[family]: {"dtype": levels["storage"]}},
        "adapter__type": levels["adapter"] if levels["adapter"] in ("dora", "lokr") else "lora",
        "adapter__targets": TARGETS[family, levels["targets"]],
        "optimizer__lr": 1.0 if levels["optimizer"] == "prodigy" else 1e-2,
        "step__accumulation": int(levels["accumulation"]), "data__cache": levels["cache"], "data__flip": True,
        "data__caption_dropout": 0.3, "memory__gradient_checkpointing": 2 if levels["checkpointing"] == "on" else False,
    }  # fmt: skip
    if family == "flux":
        keys["data__text_length"] = 16  # fp16 on a CPU notices
    if levels["compute"] == "fp16":  # overflows at once, falls, and rises again
        keys["precision__loss_scale"] = 2.0 ** (26 if levels["adapter"] == "lora" else 20)
    if levels["cache"] == "none":
        keys["data__cache_dir"] = None
    if levels["adapter"] == "dropouts":
        keys |= {"adapter__rank_dropout": 0.3, "adapter__module_dropout": 0.2, "adapter__dropout": 0.1}
    elif levels["adapter"] == "dora":
        keys["adapter__max_norm"] = 0.02
    if levels["optimizer"] == "adamw8bit":  # the state of smaller tensors would not have 8 bits
        keys |= {"adapter__factor": 1, "adapter__rank": 999} if levels["adapter"] == "lokr" else {"adapter__rank": 8}
    elif levels["optimizer"] == "prodigy":
        keys["optimizer__options"] = {"d0": 1e-3}
    if levels["schedule"] == "cosine":
        keys |= {"schedule__name": "cosine", "schedule__warmup": 0.3}
    if levels["average"] == "constant":
        keys |= {"ema__kind": "constant", "ema__decay": 0.5}
    if levels["data"] == "every key":
        keys |= {
            "data__sources": sources(bench.tmp), "data__held_out": 2, "data__resolution": [48, 64], "data__enlarge": True,
            "data__batch_size": 2, "data__short_batches": "merge", "data__background": "#102030", "data__crop_jitter": 0.1,
            "data__colour_jitter": 0.2, "data__image_variants": 2, "data__caption_variants": 2,
        }  # fmt: skip
        if family == "sdxl":
            keys["data__clip_chunks"] = 2
    if levels["objective"] == "every key":
        keys["objective"] = EVERYTHING[family]
    if levels["encoder"] != "frozen":
        stops = {"stop_step": 3} if levels["encoder"] == "stops" else {}
        keys["adapter__rules"] = [{"component": "text_encoder", "match": "*self_attn.q_proj"} | stops]
    if levels["held-out loss"] == "on":
        keys |= {"data__held_out": 2, "validation__loss_every_steps": 2}
    return keys


MEANWHILE: dict[str, Any] = {
    "data__num_workers": 1, "export__every_steps": 2, "checkpoint__every_steps": 2, "validation__every_steps": 2,
    "validation__steps": 1, "validation__prompts": ["a bear"],
}  # fmt: skip


def start(bench: Workbench, out: str, family: str, keys: dict[str, Any], resume_from: str | None = None, **more: Any) -> None:
    tree = bench.tree(family, run__output_dir=str(bench.tmp / out), **keys | more)
    tree["data"] = {key: value for key, value in tree["data"].items() if value is not None}
    train(configs.parse(tree), resume_from=resume_from)


@pytest.mark.parametrize("run", [run if run in QUICK else pytest.param(run, marks=pytest.mark.slow) for run in RUNS])
def test_stopped_and_resumed_equals_uninterrupted(bench: Workbench, monkeypatch, run: str) -> None:
    monkeypatch.setattr(fixed_draws, "FEWEST", 8)  # draws
    monkeypatch.setattr(precision, "GROWTH_INTERVAL", 1)
    levels, stop = levels_of(run), 1 + RUNS.index(run) % (LENGTH - 1)
    meanwhile = {} if levels["meanwhile"] == "nothing" else MEANWHILE
    family, keys = levels["family"], settings(bench, levels)
    start(bench, "whole", family, keys)
    start(bench, "parts", family, keys, run__stop_after=stop, **meanwhile)
    start(bench, "parts", family, keys, "latest", **meanwhile)
    whole, parts = bench.tmp / "whole", bench.tmp / "parts"
    log = metrics_of(whole)
    assert metrics_of(parts) == log and [entry["step"] for entry in log] == list(range(1, LENGTH + 1))
    averaged = levels["average"] != "none"
    pieces = {"adapter", "norms", "optimizer", "data"} | ({"ema"} if averaged else set())
    assert {path.stem for path in (whole / LAST).glob("*.safetensors")} == pieces
    files = [*(LAST / f"{piece}.safetensors" for piece in pieces), LAST / "quantization.json"]
    files += [path.relative_to(whole) for path in (whole / "adapters").glob("*.safetensors")]
    each = 1 if levels["adapter"] == "lokr" else 2  # diffusers reads no LoKr of these families
    assert len(files) == len(pieces) + 1 + each * (1 + averaged)
    for file in files:
        assert (whole / file).read_bytes() == (parts / file).read_bytes(), file

    # What the levels ask for was at work.
    state = TensorFile(whole / LAST / "optimizer.safetensors").entries
    assert any(entry.dtype == torch.uint8 for entry in state.values()) == (levels["optimizer"] == "adamw8bit")
    stored = json.loads((whole / LAST / "quantization.json").read_text())
    assert levels["storage"] in {layer.get("format") for layer in stored.values()}
    if levels["compute"] == "fp16":
        scales = [entry["loss_scale"] for entry in log]
        assert len(set(scales)) > 1 and {entry["skipped"] for entry in log} == {True, False}
    assert (len({entry["lr"] for entry in log}) > 1) == (levels["schedule"] == "cosine")
    assert any("held_out_loss" in entry for entry in log) == (levels["held-out loss"] == "on")
    assert ("layers_limited" in log[-1]) == (levels["adapter"] == "dora")
    trained = {name.partition(".")[0] for name in TensorFile(whole / LAST / "adapter.safetensors").entries}
    assert ("text_encoder" in trained) == (levels["encoder"] != "frozen")
    assert bool(list(parts.glob("samples/*/*.png"))) == bool(meanwhile)


def test_every_two_levels_of_two_factors_meet(bench: Workbench) -> None:
    """All 674 pairs of two levels of the 16 factors, but for the one that is refused."""
    met = {pair for run in RUNS for pair in combinations(levels_of(run).items(), 2)}
    wanted = {
        ((one, a), (other, b))
        for (one, some), (other, more) in combinations(FACTORS.items(), 2)
        for a, b in product(some, more)
    }
    assert len(wanted) == 674 and met == wanted - {REFUSED} and set(QUICK) < set(RUNS)
    with pytest.raises(UserError, match=r"prodigy estimates .* leave out adapter.rules\[0\].stop_step"):
        start(bench, "out", "sdxl", settings(bench, levels_of("0" * len(FACTORS)) | dict(REFUSED)))
