"""A run takes hold of its folder: what steps beyond its own left is gone or set aside, and no more than that."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer import config as configs
from trainer.base.errors import UserError
from trainer.base.progress import QUIET
from trainer.base.run_layout import Layout
from trainer.run.output_folder import open_output

CONFIG = configs.parse(
    {
        "run": {"name": "bear", "output_dir": "out", "max_steps": 9},
        "model": {"family": "sdxl", "path": "model"},
        "data": {"sources": [{"path": "photos"}]},
    }
)


def held(root: Path, step: int, **more: Any) -> Any:
    """The folder of a run at that step. Nothing of it is saved yet, so that nothing is set aside."""
    processes = SimpleNamespace(is_main=True, wait=lambda **_: None, say=pytest.fail)
    context: Any = SimpleNamespace(processes=processes, phases=QUIET, layout=Layout(root))
    plan = SimpleNamespace(config=CONFIG, length=SimpleNamespace(max_steps=9))
    known = {"plan": plan, "context": context, "progress": SimpleNamespace(step=step), "pieces": SimpleNamespace()}
    return open_output(SimpleNamespace(**{"resumed": None, "changed": False} | known | more))  # type: ignore[arg-type]


def left_by_a_killed_start(root: Path) -> None:
    """Samples and a log of five steps, and what was half-written."""
    for step in (0, 2, 3, 5):
        (root / "samples" / f"step-{step:08d}").mkdir(parents=True)
    (root / "samples" / ".step-00000006.1.tmp").mkdir()
    (root / "samples" / "truth").mkdir()
    (root / f".report.html.{os.getpid()}.0f.tmp").touch()  # of a process that had our number
    (root / "metrics.jsonl").write_text("".join(f"{json.dumps({'step': step})}\n" for step in range(1, 6)))


@pytest.mark.parametrize(("step", "samples"), [(3, [0, 2, 3]), (2, [0, 2]), (0, []), (5, [0, 2, 3, 5])])
def test_a_start_finds_what_steps_up_to_its_own_left(tmp_path: Path, step: int, samples: list[int]) -> None:
    """A fresh one draws its first samples itself: an earlier one may have had other prompts."""
    left_by_a_killed_start(tmp_path)
    with held(tmp_path, step):
        there = sorted(path.name for path in (tmp_path / "samples").iterdir())
        assert there == [*(f"step-{each:08d}" for each in samples), "truth"]
        assert (tmp_path / "metrics.jsonl").read_text().splitlines() == [f'{{"step": {n}}}' for n in range(1, step + 1)]
        assert not list(tmp_path.glob(".*.tmp"))
        assert configs.read_resolved(tmp_path / "config.toml") == configs.tree(CONFIG)


def test_what_cannot_be_held_stays_as_it_is(tmp_path: Path, monkeypatch) -> None:
    """The lock comes first: another run's log is not cut, nor are its files leftovers."""
    left_by_a_killed_start(tmp_path)

    def refuse(path: Path) -> None:
        raise UserError("another run writes there")

    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr("trainer.base.files.locked", refuse)
    with pytest.raises(UserError, match="another run"), held(tmp_path, 0):
        raise AssertionError("it is held")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert (tmp_path / "samples" / "step-00000005").exists()
