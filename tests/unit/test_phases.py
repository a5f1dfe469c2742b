"""What a phase says, where it stops, and what is kept of it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch

from tests.harness import ROOT
from trainer import phases
from trainer.errors import Interrupted
from trainer.metrics import Metrics
from trainer.phases import QUIET, Phases, Record


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(phases.time, "monotonic", lambda: self.now)

    def advance(self, phase: phases.Phase, seconds: float, count: int = 1) -> None:
        self.now += seconds
        phase.advance(count)


def test_a_log_gets_a_line_after_two_seconds_and_then_every_five(monkeypatch, capsys) -> None:
    clock = Clock(monkeypatch)
    with Phases(show=True)("loading unet", total=5_000_000_000, unit="B") as phase:
        for _ in range(10):
            clock.advance(phase, 1.0, 500_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "loading unet: 1.00 of 5.00 GB, 0.50 GB/s, 8.0 s left",
        "loading unet: 3.50 of 5.00 GB, 0.50 GB/s, 3.0 s left",
        "loading unet: 5.00 GB in 10 s, 0.50 GB/s",
    ]


def test_a_slow_piece_is_told_by_the_piece(monkeypatch, capsys) -> None:
    clock = Clock(monkeypatch)
    with Phases(show=True)("encoding photos", total=5, unit="photo") as phase:
        clock.now += 3
        phase.check()  # nothing is done yet: no rate
        clock.advance(phase, 13)
        clock.advance(phase, 100)
    assert capsys.readouterr().err.splitlines() == [
        "encoding photos: 0 of 5 photos",
        "encoding photos: 1 of 5 photos, 16.0 s a photo, 1 min 4 s left",
        "encoding photos: 2 of 5 photos, 58.0 s a photo, 2 min 54 s left",
        "encoding photos: 2 photos in 1 min 56 s, 58.0 s a photo",
    ]


def test_a_resumed_training_is_told_from_where_it_stood_and_without_a_carriage_return(monkeypatch, tmp_path, capsys) -> None:
    clock = Clock(monkeypatch)
    log = Metrics(
        tmp_path / "metrics.jsonl", tensorboard=None, total_steps=20, initial_step=10, enabled=True, phases=Phases(show=True)
    )
    for step in (11, 12, 13):
        clock.now += 4
        log.log({"step": step, "loss": 0.5 if step < 13 else None, "lr": 1e-4})
    log.close()
    assert capsys.readouterr().err.split("\n") == [
        "training: 11 of 20 steps, 4.0 s a step, 36 s left, loss 0.5000, lr 1.00e-04",
        "training: 13 of 20 steps, 4.0 s a step, 28 s left, loss none, lr 1.00e-04",
        "training: 3 steps in 12 s, 4.0 s a step",
        "",
    ]


def test_a_short_phase_and_another_process_say_nothing(monkeypatch, capsys) -> None:
    clock = Clock(monkeypatch)
    with Phases(show=True)("hashing", total=3, unit="file") as phase:
        clock.advance(phase, 1.9)
    with Phases(show=False)("hashing", total=3, unit="file") as phase:
        clock.advance(phase, 60)
    assert capsys.readouterr().err == ""


def test_a_phase_that_is_cut_off_claims_no_end(monkeypatch, capsys) -> None:
    clock = Clock(monkeypatch)
    with pytest.raises(KeyError), Phases(show=True)("hashing", total=3, unit="file") as phase:
        clock.advance(phase, 1)
        clock.now += 9
        raise KeyError
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_a_bar_that_leaves_nothing_but_the_last_line(tmp_path: Path) -> None:
    script = tmp_path / "bar.py"
    script.write_text(
        "import time\nfrom trainer.phases import Phases\n"
        "with Phases(show=True)('loading unet', total=4, unit='layer') as phase:\n"
        "    for _ in range(4):\n        time.sleep(0.6)\n        phase.advance()\n"
    )
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    with subprocess.Popen([sys.executable, str(script)], stderr=theirs, env=os.environ | {"PYTHONPATH": str(ROOT)}):
        os.close(theirs)
        said = b""
        try:
            while piece := os.read(ours, 4096):
                said += piece
        except OSError:  # the other end is closed
            pass
    os.close(ours)
    shown = said.decode().replace("\r\n", "\n").split("\r")
    assert any("loading unet:  50%" in line and "2/4" in line for line in shown)
    assert shown[-1].strip().startswith("loading unet: 4 layers in 2.")


def test_every_place_to_stop_at_asks_and_raises(capsys) -> None:
    asked = []

    def check() -> None:
        asked.append(None)
        if len(asked) == 4:
            raise Interrupted(15)

    with pytest.raises(Interrupted), Phases(check=check)("scanning", unit="photo") as phase:  # 1
        phase.check()  # 2
        phase.advance()  # 3
        phase.advance()  # 4
        pytest.fail("went on")
    assert len(asked) == 4
    with Phases(check=check)("saving", obey=False) as phase:
        phase.advance()
    assert len(asked) == 4


def test_a_module_that_computes_is_a_place_to_stop_at() -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(5)))
    ran, asked = [], []
    for layer in layers:
        layer.register_forward_hook(lambda *_: ran.append(None))

    def check() -> None:
        asked.append(None)
        if len(ran) == 2:
            raise Interrupted(2)

    with pytest.raises(Interrupted), Phases(check=check)("encoding") as phase, phase.between_modules():
        layers(torch.ones(1, 2))
    assert len(ran) == 2
    before = len(asked)
    layers(torch.ones(1, 2))
    assert len(asked) == before, "the hook outlived its block"


def test_what_has_ended_is_kept_until_there_is_a_folder(monkeypatch, tmp_path: Path) -> None:
    clock, record, path = Clock(monkeypatch), Record(), tmp_path / "phases.jsonl"
    named = Phases(record=record)
    with named("hashing", total=2, unit="B") as phase:
        clock.advance(phase, 3, 2)
    assert not path.exists()
    record.open(path)
    with pytest.raises(KeyError), named("encoding photos", total=2, unit="photo") as phase:
        clock.advance(phase, 4)
        raise KeyError
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(type(entry.pop("started")) is float for entry in entries)
    assert entries == [
        {"phase": "hashing", "seconds": 3.0, "done": 2, "unit": "B"},
        {"phase": "encoding photos", "seconds": 4.0, "done": 1, "unit": "photo"},
    ]


def test_a_resumed_run_appends_also_after_a_line_that_a_kill_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "phases.jsonl"
    path.write_text('{"phase": "hashing"}\n{"pha')
    record = Record()
    with Phases(record=record)("report"):
        pass
    record.open(path)
    first, cut, last = path.read_text().splitlines()
    assert (json.loads(first)["phase"], cut, json.loads(last)["phase"]) == ("hashing", '{"pha', "report")


def test_the_quiet_one_keeps_nothing(capsys) -> None:
    with QUIET("anything", total=1, unit="B") as phase:
        phase.advance()
    assert capsys.readouterr() == ("", "")
