"""What a start asks of this machine before it needs a weight."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer import config as configs
from trainer.models import FAMILIES
from trainer.plan.run_plan import Length
from trainer.run import setup
from trainer.run.setup import disk_needs, shortages, to_write
from trainer.runtime.attention import ORDER, Attention

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize("download", [0, 7000])
@pytest.mark.parametrize("cache", ["disk", "memory"])
def test_all_that_a_run_writes_is_counted(tmp_path: Path, download: int, cache: str) -> None:
    config = configs.parse(
        {
            "run": {"name": "a", "output_dir": str(tmp_path / "out"), "max_steps": 40},
            "model": {"family": "sdxl", "path": "a/b"},
            "data": {"sources": [{"path": "photos"}], "cache": cache, "cache_dir": str(tmp_path / "cache")},
            "checkpoint": {"keep_last": 2},
            "export": {"every_steps": 10},
            "validation": {"every_steps": 20},
            "ema": {"kind": "constant"},
        }
    )
    source = SimpleNamespace(to_fetch=lambda: download, repository=SimpleNamespace(blobs=tmp_path / "hub" / "blobs"))
    data = SimpleNamespace(requests=[SimpleNamespace(width=8, height=16), SimpleNamespace(width=4, height=4)])
    plan: Any = SimpleNamespace(config=config, length=Length(1, 5, 40), model=SimpleNamespace(source=source), data=data)
    # Three checkpoints; files of 5 times in 2 formats, images of 0, 20 and 40, both of the weights and of their average.
    output = 3 * 100 + 5 * 2 * 2 * 7 + 4 * 2 * 2 * (8 * 16 + 4 * 4)
    assert disk_needs(plan, 100, 7, 50) == (
        {"run.output_dir": (tmp_path / "out", output)}
        | ({"data.cache_dir": (tmp_path / "cache", 50)} if cache == "disk" else {})
        | ({"HF_HUB_CACHE": (tmp_path / "hub" / "blobs", 7000)} if download else {})
    )


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("auto", "attention: cudnn, flash, efficient, math (step.attention = 'auto'; the largest photo takes flash)"),
        ("flash", "attention: flash (step.attention = 'flash')"),
    ],
)
def test_the_start_says_which_attention_the_card_takes(monkeypatch, asked: str, told: str) -> None:
    """Of the first kind that can take it: on this CPU no card's, which stands for one that is refused."""
    monkeypatch.setattr(setup, "choose", lambda *_: Attention(ORDER if asked == "auto" else (asked,)))
    monkeypatch.setattr(setup, "head_sizes", lambda denoiser: {8})
    images, config = FAMILIES["sdxl"].images, SimpleNamespace(step=SimpleNamespace(attention=asked))
    model: Any = SimpleNamespace(
        source=SimpleNamespace(build=str),
        family=SimpleNamespace(denoiser="unet", images=images),
        storage={"unet": SimpleNamespace(compute=torch.bfloat16)},
    )
    data = SimpleNamespace(examples=[SimpleNamespace(layout=((64, 64),))])
    plan: Any = SimpleNamespace(config=config, model=model, data=data)
    card, said = SimpleNamespace(type="cuda"), []
    selected = Attention.selected
    monkeypatch.setattr(Attention, "selected", lambda self, device, *given: selected(self, torch.device("cpu"), *given))
    setup.choose_attention(plan, card, said.append)
    assert said == [told]


@pytest.mark.parametrize(("free", "told"), [(2**30 + 2**29, True), (3 * 2**30, False)])
def test_what_two_folders_of_one_disk_need_is_added_up(tmp_path: Path, monkeypatch, free: int, told: bool) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 2**40 - free, free))
    needs = {"run.output_dir": (tmp_path / "not" / "yet", 2**30), "data.cache_dir": (tmp_path, 2**30)}
    assert shortages(needs) == (
        [
            f"run.output_dir and data.cache_dir need about 2.00 GiB, and the disk of {tmp_path} has 1.50 GiB free; "
            "free some, give another folder, or lower checkpoint.keep_last"
        ]
        if told
        else []
    )
    for key, (folder, size) in needs.items():  # each alone would fit
        assert not shortages({key: (folder, size)})


def test_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert to_write(1000, folder) == 1000
    (folder / "step-00000001").mkdir(parents=True)
    (folder / "step-00000001" / "adapter.safetensors").write_bytes(b"a" * 300)
    (folder / "odd").write_bytes(b"a" * 100)
    assert to_write(1000, folder) == 600 and to_write(300, folder) == 0
    (folder / "superseded-step-00000002").mkdir()
    (folder / "superseded-step-00000002" / "adapter.safetensors").write_bytes(b"a" * 200)
    assert to_write(1000, folder) == 600, "it stays, and nothing takes its place"
