"""Weights & Biases: what a run sends there, read back from the file that its library writes when it is offline."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Workbench
from trainer.monitoring.metrics import read_lines
from workbench.commands import main as cli
from workbench.trackers import trackers
from workbench.trackers.trackers import by_step

pytestmark = pytest.mark.usefixtures("few_draws")

pytest.importorskip("wandb", reason="the package wandb is an extra; dev has it")


@pytest.fixture(autouse=True)
def apart(monkeypatch, tmp_path: Path) -> Iterator[None]:
    """What one test sets of the library must not hold in the next one, and what this machine's owner has set in none."""
    import wandb

    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "NETRC"):
        monkeypatch.setenv(name, str(tmp_path / "nobody"))
    wandb.teardown()
    yield
    wandb.teardown()


def records_in(file: Path) -> Iterator[bytes]:
    """A header of 7 bytes, then LevelDB's log: blocks of 32 KiB of (crc32, length, type, data); types 2, 3, 4 are parts."""
    data, place, whole = file.read_bytes(), 7, b""
    while place < len(data):
        left = 2**15 - place % 2**15
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def sent(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(the run's id, what was logged), line by line, of every start."""
    from wandb.proto import wandb_internal_pb2 as records

    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for data in records_in(file):
            record = records.Record()
            record.ParseFromString(data)
            if record.HasField("history"):
                items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                yield file.stem.removeprefix("run-"), {k: v for k, v in items.items() if not k.startswith("_")}


@pytest.mark.slow
def test_a_resumed_run_is_one_run_there_with_every_number_of_the_log(bench: Workbench, monkeypatch, capfd) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    tree = bench.tree(run__max_steps=4, logging__wandb=True, validation__loss_every_steps=2, data__held_out=1)
    for stop in (2, 4):
        tree["run"]["stop_after"] = stop
        assert cli.main(["--config", str(bench.write(tree)), "--resume_from", "auto"]) == 0
    told = list(sent(bench.tmp / "out"))
    assert len({run for run, _ in told}) == 1
    expected = [
        {"step": step} | numbers
        for line in read_lines(bench.tmp / "out" / "metrics.jsonl")
        for step, numbers in by_step(line)
    ]
    assert expected and [line for _, line in told] == expected
    said = "".join(capfd.readouterr())
    assert "wandb:" not in said, "the library speaks for itself"


def test_what_keeps_a_run_from_it_is_said_before_anything_is_written(bench: Workbench, monkeypatch, capsys) -> None:
    config = str(bench.write(bench.tree(logging__wandb=True)))
    assert cli.main(["--config", config]) == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]  # below slow phases
    assert said.startswith("error: logging.wandb = true: Weights & Biases: nobody is logged in; run `wandb login`")
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    assert cli.main(["--config", config, "--plan"]) == 2
    assert "pip install -e '.[wandb]'" in capsys.readouterr().err
    assert not (bench.tmp / "out").exists()


def test_numbers_are_told_of_the_step_that_they_are_of() -> None:
    """What a line has "at_start" is of the step before. Lists have a place each; what is no number is left out."""
    line = {
        "step": 11, "time": 1e9, "loss": None, "lr": 0.5, "quarters": [4.0, None, 2.0], "measured_photos": "m",
        "at_start": {"held_out_loss": 0.25},
    }  # fmt: skip
    numbers = {"train/lr": 0.5, "train/quarters/1": 4.0, "train/quarters/3": 2.0}
    assert list(by_step(line)) == [(10, {"train/held_out_loss": 0.25}), (11, numbers)]
    assert list(by_step({"step": 3, "loss": None})) == []


def test_what_the_service_is_told_of_a_run(tmp_path: Path, monkeypatch) -> None:
    """However often it starts it is one run there; one of the same name that began at another time is another."""
    import wandb

    asked: list[dict[str, Any]] = []
    real = wandb.init
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr(wandb, "init", lambda **more: asked.append(more) or real(**more))
    for about in (("bear", "2026"), ("bear", "2026"), ("bear", "2027"), ("cat", "2026")):
        trackers.WeightsAndBiases(tmp_path, about=about, config={"run": {"name": about[0]}}, say=print).close()
    assert asked[0]["id"] == asked[1]["id"] and len({more["id"] for more in asked}) == 3
    assert all(re.fullmatch(r"\w{8,64}", more["id"]) and more["resume"] == "allow" for more in asked)
    assert asked[0]["config"] == {"run": {"name": "bear"}} and asked[0]["name"] == "bear" and asked[0]["dir"] == str(tmp_path)
    kept_here = {"console": "off", "disable_code": True, "disable_git": True}
    assert {name: getattr(asked[0]["settings"], name) for name in kept_here} == kept_here


def test_a_service_that_fails_at_the_end_fails_no_run(tmp_path: Path, monkeypatch) -> None:
    from wandb.errors import CommError

    monkeypatch.setenv("WANDB_MODE", "disabled")
    said: list[str] = []
    tracker = trackers.WeightsAndBiases(tmp_path, about=("bear", "2026"), config={}, say=said.append)
    assert said == [], "there is no address to tell"
    real = tracker._run

    def fail(*given: object) -> None:
        raise CommError("gone")

    monkeypatch.setattr(real, "finish", fail)
    tracker.close()
    monkeypatch.setattr(real, "log", fail)
    for step in (1, 2):
        tracker.add({"step": step, "loss": 0.5})
    tracker.close()
    assert [line.partition(":")[0] for line in said] == ["warning", "warning"]
    assert "may lack the end of this run: gone" in said[0] and "takes no more of this run: gone" in said[1]
