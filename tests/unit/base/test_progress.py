"""What a phase says, where it stops, and what is kept of it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import psutil
import pytest
import torch

from tests.terminal import Shown, in_terminal
from trainer.base import console
from trainer.base import progress as phases
from trainer.base.errors import Interrupted
from trainer.base.progress import QUIET, Phases, Record
from trainer.monitoring.metrics import Metrics


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(phases.time, "monotonic", lambda: self.now)

    def advance(self, phase: phases.Phase, seconds: float, count: int = 1) -> None:
        self.now += seconds
        phase.advance(count)


def test_a_log_gets_a_line_after_two_seconds_and_then_in_the_pace_that_was_asked_for(monkeypatch, capsys) -> None:
    clock = Clock(monkeypatch)
    with Phases(show=True, every=5)("loading unet", total=5_000_000_000, unit="B") as phase:
        for _ in range(10):
            clock.advance(phase, 1.0, 500_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "loading unet: 1.00 of 5.00 GB, 0.50 GB/s, 8.0 s left",
        "loading unet: 3.50 of 5.00 GB, 0.50 GB/s, 3.0 s left",
        "loading unet: 5.00 GB in 10 s, 0.50 GB/s",
    ]


def test_without_a_pace_it_is_every_ten_seconds(monkeypatch, capsys) -> None:
    clock = Clock(monkeypatch)
    with Phases(show=True)("encoding", total=30, unit="photo") as phase:
        for _ in range(30):
            clock.advance(phase, 1.0)
    told = [line.partition(" of")[0] for line in capsys.readouterr().err.splitlines()]
    assert told == ["encoding: 2", "encoding: 12", "encoding: 22", "encoding: 30 photos in 30 s, 1.0 photos/s"]


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


def line(step: int, **fields: object) -> dict:
    return {"step": step, "epoch": 2, "loss": 0.5, "lr": 1e-4, "images_per_second": 3.0, "peak_bytes": 3 * 2**30} | fields


def test_a_training_is_told_from_where_it_stood_with_all_that_a_reader_asks_for(monkeypatch, tmp_path, capsys) -> None:
    """The loss is the mean of the last steps; the held-out one is the last that was measured."""
    clock, path, phases = Clock(monkeypatch), tmp_path / "metrics.jsonl", Phases(show=True, every=5)
    path.write_text("".join(json.dumps(line(step)) + "\n" for step in (9, 10)))
    log = Metrics(path, total_steps=20, initial_step=10, enabled=True, phases=phases)
    for step, loss in ((11, 0.8), (12, None), (13, 1.0)):
        clock.now += 4
        log.log(line(step, loss=loss) | ({"at_start": {"held_out_loss": 0.25}, "held_out_loss": 0.125} if step == 11 else {}))
        if step == 12:
            with phases("drawing samples", 1, "evaluation", event="samples step 12"):
                pass
    log.close()
    assert capsys.readouterr().err.split("\n") == [
        "step 11/20, epoch 2, loss 0.6000, held-out 0.1250, lr 1.00e-04, 3 images/s, memory 3.00 GiB, 36 s left, "
        "last held-out loss 0.1250 (best, step 11)",
        "step 13/20, epoch 2, loss 0.7000, held-out 0.1250, lr 1.00e-04, 3 images/s, memory 3.00 GiB, 28 s left, "
        "last samples step 12",
        "training: 3 steps in 12 s, 4.0 s a step",
        "",
    ]


def test_a_machine_without_an_accelerator_tells_its_own_memory(monkeypatch, tmp_path, capsys) -> None:
    clock = Clock(monkeypatch)
    log = Metrics(tmp_path / "m", total_steps=2, initial_step=0, enabled=True, phases=Phases(show=True))
    clock.now += 4
    log.log({"step": 1, "epoch": 1, "loss": None, "lr": 1e-4})
    log.close()
    told = float(re.search(r"memory (\S+) GiB", capsys.readouterr().err)[1]) * 2**30
    assert 0.5 < told / psutil.Process().memory_info().rss < 2


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


@pytest.mark.parametrize(
    "columns, shown",
    [(80, "loading unet: 2 of 4 layers, 1.7 layers/s, 1.2 s left"), (40, "loading unet: 2 of 4 layers, 1.2 s left")],
)
def test_a_terminal_shows_one_line_that_leaves_nothing_but_the_last(tmp_path: Path, columns: int, shown: str) -> None:
    script = tmp_path / "line.py"
    script.write_text(
        "import time\nfrom types import SimpleNamespace\nfrom trainer.base import progress\n"
        "now = 1000.0\n"
        "progress.time = SimpleNamespace(time=time.time, monotonic=lambda: now)\n"
        "with progress.Phases(show=True)('loading unet', total=4, unit='layer') as phase:\n"
        "    for _ in range(4):\n        now += 0.6\n        phase.advance()\n"
    )
    said = in_terminal([sys.executable, str(script)], columns)
    assert shown in said.seen
    assert " ".join("\n".join(said.lines).split()) == "loading unet: 4 layers in 2.4 s, 1.7 layers/s"


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


def test_a_line_of_a_log_stays_one_line(monkeypatch, capsys) -> None:
    """What does not fit into 160 characters is left out."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(console, "WIDTH", 160)
    with Phases(show=True)("training", total=9, unit="step") as phase:
        phase.fields = lambda: [(0, "step 1/9"), (2, "a" * 100), (3, "b" * 100), (1, "36 s left")]
        clock.advance(phase, 3)
        (said,) = capsys.readouterr().err.splitlines()
    assert said == f"step 1/9, {'a' * 100}, 36 s left"


def test_a_phase_within_another_gives_the_live_line_back(monkeypatch) -> None:
    """And says where that one stands."""
    clock, screen = Clock(monkeypatch), Shown()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    for module in (phases, console):
        monkeypatch.setattr(module, "LIVE", console.LiveLine() if module is phases else phases.LIVE)
    told = Phases(show=True)
    with told("training", total=30, unit="step") as training:
        training.fields = lambda: [(0, f"step {training.done}/30"), (1, "9 s left")]
        clock.advance(training, 1, 11)
        with told("drawing samples", total=4, unit="image") as drawing:
            clock.advance(drawing, 1)
        clock.advance(training, 1)
    drawn = [state for state in re.split(r"[\r\n]|\x1b\[K", screen.getvalue()) if state]
    assert drawn[:3] == [
        "step 11/30, 9 s left",
        "drawing samples: 1 of 4 images, 1.0 images/s, 3.0 s left, step 11/30",
        "step 11/30, 9 s left",
    ]
    assert drawn[3] == "step 12/30, 9 s left"


def test_what_is_recorded_of_a_resumed_start(tmp_path: Path) -> None:
    """What it did itself, of what had anything to do, and not what has a log of its own."""
    record, path = Record(), tmp_path / "phases.jsonl"
    record.open(path)
    told = Phases(record=record)
    with told("encoding photos", total=10, unit="photo", before=7) as phase:
        phase.advance(2)
    for name, more in (("training", {"keep": False, "total": 5}), ("encoding prompts", {"total": 0})):
        with told(name, unit="piece", **more):
            pass
    (entry,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert (entry["phase"], entry["done"]) == ("encoding photos", 2)


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


@pytest.mark.parametrize(
    "seconds, words",
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (3599.7, "1 h 0 min"),
        (180_000, "2.1 days"),
    ],
)
def test_a_duration_is_told_as_people_read_it(seconds: float, words: str) -> None:
    assert phases.duration(seconds) == words
