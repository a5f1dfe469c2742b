"""How tests build configs, run the command line and look inside a run."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch

from trainer import config as configs
from trainer.base import files
from trainer.base.signals import Signals
from trainer.checkpoint import store
from trainer.data.batches.sampler import MicroBatch
from trainer.engine.step import StepResult
from trainer.run import run as runs
from trainer.run.session import Session
from workbench.commands.launch import make_launch

ROOT = Path(__file__).resolve().parent.parent
PHOTOS = ROOT / "examples" / "bear_plushie"
DENOISER = {"sdxl": "unet", "flux": "transformer"}


@dataclass(frozen=True)
class Workbench:
    """Tiny models in `models`, everything a test writes under `tmp`."""

    models: Path
    tmp: Path

    def tree(self, family: str = "sdxl", **overrides: Any) -> dict[str, Any]:
        """A config tree for a short run; overrides are `table__key=value`, dots in names as further `__`."""
        tree: dict[str, Any] = {
            "run": {"name": "bear", "output_dir": str(self.tmp / "out"), "seed": 7, "max_steps": 3},
            "model": {"family": family, "path": str(self.models / family), "components": {}},
            "precision": {"compute": "fp32"},
            "adapter": {"type": "lora", "rank": 4, "alpha": 2.0, "targets": "attention"},
            "data": {
                "resolution": 64,
                "batch_size": 2,
                "sources": [{"path": str(PHOTOS)}],
                # One for the session: its entries are found by what went into them.
                "cache_dir": str(self.models / "cache"),
            },
            "schedule": {"warmup": 0},
            "checkpoint": {"every_steps": 0, "every_minutes": 0},
            "validation": {"every_steps": 0},
            "logging": {"tensorboard": False},
        }
        for key, value in overrides.items():
            *tables, leaf = key.split("__")
            node = tree
            for table in tables:
                node = node.setdefault(table, {})
            node[leaf] = value
        return tree

    def config(self, family: str = "sdxl", **overrides: Any) -> configs.Config:
        return configs.parse(self.tree(family, **overrides))

    def write(self, tree: Mapping[str, Any], name: str = "run.toml") -> Path:
        import tomli_w

        path = self.tmp / name
        path.write_text(tomli_w.dumps(dict(tree)))
        return path


def pairs(*factors: Sequence[Any]) -> set[tuple[Any, ...]]:
    """Cells of a product, few of them, in which every two levels of two factors meet. The same ones each time."""
    cells = list(product(*factors))
    met = {cell: set(combinations(enumerate(cell), 2)) for cell in cells}
    missing, chosen = set().union(*met.values()), set()
    while missing:
        best = max(cells, key=lambda cell: len(met[cell] & missing))
        chosen.add(best)
        missing -= met[best]
    return chosen


@contextmanager
def built(config: configs.Config, resume_from: str | None = None) -> Iterator[runs.Run]:
    """What train.py builds before its loop, with the output folder opened; nothing trained yet."""
    with Session(config, "train", make_launch(resume_from)) as session:
        yield session.run


def train_built(run: runs.Run) -> bool:
    """The loop of a built run, and where it gets there the end. Returns whether it did."""
    with Signals() as signals:
        loop = runs.make_loop(run, signals)
        deque(loop.steps(), maxlen=0)
        finished = loop.finished
        if finished:
            runs.close(run, signals, finished=True)
    return finished


def take_step(run: runs.Run, step: int, update: Sequence[MicroBatch]) -> StepResult:
    """One update of a built run, without the loop's log and checkpoints."""
    occurrences = [occurrence for micro_batch in update for occurrence in micro_batch]
    return run.step.run(step, [run.reader[micro_batch] for micro_batch in update], occurrences)


def assert_merged_alike(layer: Any) -> None:
    """An adapted layer computes what its merged weight does, and something else than its base."""
    shape = layer.get_base_layer().weight_shape
    x = torch.randn(2, 5, shape[1]) if len(shape) == 2 else torch.randn(2, shape[1], 8, 8)
    with torch.no_grad():
        computed = layer(x)
        layer.merge()
        merged = layer(x)
        layer.unmerge()
        base = layer.get_base_layer()(x)
    moved = (merged - base).norm()
    assert moved > 0 and (computed - merged).norm() <= 1e-3 * moved


def command_line(*arguments: str, timeout: float = 120, **kwargs: Any) -> subprocess.CompletedProcess:
    """`python train.py ARGUMENTS` in a process of its own."""
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *arguments],
        capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=os.environ | {"HF_HUB_OFFLINE": "1"}, **kwargs,
    )  # fmt: skip


def reseal(folder: Path) -> None:
    """The manifest of what a checkpoint holds now."""
    listed = json.loads((folder / store.MANIFEST).read_text())["files"]
    told = {}
    for name in listed:
        data = (folder / name).read_bytes()
        told[name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    (folder / store.MANIFEST).write_bytes(files.json_bytes({"files": told}))


def metrics_of(output_dir: Path | str) -> list[dict[str, Any]]:
    """metrics.jsonl without times and rates, which two equal runs do not share."""
    entries = [json.loads(line) for line in (Path(output_dir) / "metrics.jsonl").read_text().splitlines()]
    for entry in entries:
        for key in ("seconds", "images_per_second", "time"):
            del entry[key]
    return entries


def by_photo(loss: float | None, place: int, photos: int = 6) -> dict[str, float | None]:
    """What a log has of each held-out photo at its measurement `place`: their mean is the loss, and each jitters by 0.4 %."""
    noise = [random.Random(1000 * place + photo).gauss(0, 0.004) for photo in range(photos)]
    mean = sum(noise) / photos
    return {f"{photo:016x}": None if loss is None else loss * (1 + each - mean) for photo, each in enumerate(noise)}
