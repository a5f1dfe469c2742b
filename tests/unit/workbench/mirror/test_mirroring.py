"""Which checkpoint a start with a mirror goes on from, what it refuses, and how long an end waits."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.faulty_store import URL, FaultyStore
from tests.unit.workbench.mirror.test_store import saved
from trainer import config as configs
from trainer.base import files
from trainer.base.errors import Interrupted, NonFiniteError, PeerStopped, UserError
from trainer.base.progress import QUIET
from trainer.base.run_layout import Layout, folder_name
from trainer.checkpoint import store
from trainer.monitoring import metrics
from workbench.mirror import copier, mirroring
from workbench.mirror.mirroring import ask_mirror

OWNER = {"run": "bear", "id": "5"}


class Machine:
    """An output folder, a mirror, and what a start says there. waited: how often for other processes."""

    def __init__(self, folder: Path, monkeypatch, *, is_main: bool = True) -> None:
        self.fs, self.layout, self.folder = FaultyStore(), Layout(folder / "out"), folder
        self.said, self.waited, self.stop = list[str](), 0, None
        monkeypatch.setattr(mirroring, "open_mirror", lambda url: self.fs.mirror())
        monkeypatch.setattr(copier, "FIRST_PAUSE", 0.001)
        monkeypatch.setattr(copier, "POLL_SECONDS", 0.005)
        processes = SimpleNamespace(is_main=is_main, main_first=nullcontext, say=self.said.append, check=self.check,
                                    wait=self.wait)  # fmt: skip
        self.context: Any = SimpleNamespace(processes=processes, phases=QUIET, layout=self.layout)
        self.signals: Any = SimpleNamespace(promise="", check=lambda: None, last_work=lambda seconds: nullcontext())

    def check(self) -> None:
        if self.stop is not None:
            raise self.stop

    def wait(self) -> None:
        self.waited += 1

    def config(self, wait: float = 20.0) -> configs.Config:
        return configs.parse(
            {
                "run": {"name": "bear", "output_dir": str(self.layout.root), "max_steps": 9},
                "model": {"family": "sdxl", "path": "model"},
                "data": {"sources": [{"path": "photos"}]},
                "checkpoint": {"mirror": URL, "mirror_wait": wait},
            }
        )

    def ask(self, resume_from: str | None = "auto", wait: float = 20.0) -> Any:
        return ask_mirror(self.config(wait), self.context, resume_from)

    def here(self, *steps: int, owned: bool = True) -> None:
        for step in steps:
            saved(self.layout.checkpoints, step)
        if owned:
            files.write_atomic(self.layout.mirror, [files.json_bytes({"id": "5"})])

    def there(self, *steps: int) -> None:
        self.fs.mirror().claim(OWNER)
        for step in steps:
            self.fs.mirror().put(saved(self.folder / "first", step), step, b'{"step": %d}\n' % step)

    def damage(self, *steps: int) -> None:
        for step in steps:
            self.fs.mirror().write(f"checkpoints/{folder_name(step)}/adapter.safetensors", b"other bytes...")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("here", "there", "damaged", "newest"),
    [
        ((), (3, 5), (), 5), ((3,), (4, 5), (), 5), ((5,), (3,), (), 5), ((5,), (4, 5), (), 5), ((), (4, 5), (5,), 4),
        ((3,), (4, 5), (5,), 4), ((3,), (4, 5), (4, 5), 3), ((4,), (3, 5), (5,), 4),
    ],
)  # fmt: skip
def test_of_all_that_verify_here_and_there_the_highest_step_wins(
    machine: Machine, here: tuple[int, ...], there: tuple[int, ...], damaged: tuple[int, ...], newest: int
) -> None:
    machine.there(*there)
    machine.damage(*damaged)
    machine.here(*here, owned=bool(here))
    machine.ask()
    folder, _ = store.find(machine.layout.checkpoints, "auto")
    assert folder == machine.layout.checkpoints / folder_name(newest)
    came = newest not in here
    assert (f"{folder_name(newest)} came from {URL}" in machine.said) == came
    assert machine.layout.metrics.exists() == came
    passed = [step for step in damaged if step > max(here, default=0)]
    assert sum("is not valid: adapter.safetensors" in line for line in machine.said) == len(passed)
    assert files.read_json(machine.layout.mirror) == {"id": "5"}


def test_one_that_is_damaged_here_is_taken_from_there(machine: Machine) -> None:
    machine.there(4, 5)
    machine.here(4, 5)
    (machine.layout.checkpoints / folder_name(5) / "adapter.safetensors").write_bytes(b"bad")
    machine.ask()
    assert store.problem(machine.layout.checkpoints / folder_name(5)) is None
    assert machine.said == [f"{folder_name(5)} came from {URL}"]


def test_only_damaged_ones_are_no_fresh_start(machine: Machine) -> None:
    machine.there(4, 5)
    machine.damage(4, 5)
    with pytest.raises(UserError, match=r"holds no valid checkpoint \(2 are damaged, or set aside here\), and"):
        machine.ask()
    assert store.steps(machine.layout.checkpoints) == []


def test_an_empty_mirror_is_a_fresh_start(machine: Machine) -> None:
    assert machine.ask() is not None and machine.ask(None) is not None
    machine.there()  # of a start that was killed before its first checkpoint
    assert machine.ask() is not None and machine.ask(None) is not None
    assert not machine.layout.root.exists() and not machine.said


@pytest.mark.parametrize("there", ["its log", "another loss", "a line less", "no log", "an earlier version's"])
def test_a_log_that_the_run_did_not_write_is_named_and_left(machine: Machine, there: str) -> None:
    log = b'{"step": 1, "loss": 0.5, "time": 1.0}\n{"step": 2, "loss": 0.25, "time": 2.0}\n'
    digest = ""
    for line in log.splitlines():
        digest = metrics.chained(digest, json.loads(line))
    earlier = there == "an earlier version's"
    later = {"another loss": log.replace(b"0.5", b"0.4"), "a line less": log.splitlines(keepends=True)[1], "no log": b""}
    put = later.get(there, log.replace(b"1.0", b"9.0"))
    machine.fs.mirror().claim(OWNER)
    machine.fs.mirror().put(saved(machine.folder / "first", 2, log="" if earlier else digest), 2, put + b'{"step": 3}\n')
    machine.ask()
    assert machine.said[-1] == f"{folder_name(2)} came from {URL}"
    if there in later:
        assert machine.said[0] == (
            f"warning: metrics.jsonl of {folder_name(2)} in {URL} is not the log that the run wrote: it is not taken, and "
            "lines up to step 2 are missing here"
        )
        assert not machine.layout.metrics.exists()
    else:
        assert len(machine.said) == 1 and machine.layout.metrics.read_bytes() == put
    assert store.steps(machine.layout.checkpoints) == [2]


def test_two_starts_on_one_prefix_do_not_share_it(machine: Machine, tmp_path: Path, monkeypatch) -> None:
    """Both ask while it is empty: the first says that it lost it, and writes nothing there."""
    other = Machine(tmp_path / "other", monkeypatch)
    other.fs = machine.fs
    first, second = machine.ask(), other.ask()
    with second.running(other.signals, 0):
        other.here(1, owned=False)
        second.offer(1)
    before = machine.fs.mirror().listing()
    with first.running(machine.signals, 0):
        machine.here(2, owned=False)
        first.offer(2)
    assert machine.fs.mirror().listing() == before and machine.fs.mirror().steps() == [1]
    claimed, alone = machine.said
    assert "is claimed by another run now" in claimed and alone == (
        f"warning: {URL} is another start's: what this run made since it was claimed is in {machine.layout.root} alone"
    )
    assert other.said == [f"mirror {URL}: all is copied, up to {folder_name(1)}"]
    with pytest.raises(UserError, match="holds another run"):
        machine.ask()


def test_a_start_that_may_be_refused_yet_takes_no_checkpoints_from_their_run(machine: Machine) -> None:
    machine.there(3)
    before = machine.fs.mirror().read("run.json")
    machine.ask()
    assert machine.fs.mirror().read("run.json") == before


def test_what_the_run_went_back_from_is_not_fetched_before_the_mirror_has_obeyed(machine: Machine) -> None:
    machine.there(2, 3, 6)
    machine.here(2, 3, 6)
    store.set_aside(machine.layout.checkpoints, after=2)
    copying = replace(machine.ask("out/step-00000002"), wait=0.0)
    machine.fs.fails = lambda what, name: what == "copy"
    with copying.running(machine.signals, 2):
        saved(machine.layout.checkpoints, 3, "of the new timeline")
    assert files.read_json(machine.layout.mirror) == {"id": "5", "back_to": 2}
    machine.fs.fails = lambda what, name: False
    shutil.rmtree(machine.layout.checkpoints / f"superseded-{folder_name(6)}")  # the note alone counts
    machine.said.clear()
    copying = machine.ask()
    assert store.steps(machine.layout.checkpoints) == [2, 3] and not machine.said
    with copying.running(machine.signals, 3):
        pass
    assert machine.fs.mirror().steps() == [2, 3] and files.read_json(machine.layout.mirror) == {"id": "5"}
    here = store.MANIFEST, machine.layout.checkpoints / folder_name(3)
    assert machine.fs.mirror().read(f"checkpoints/{folder_name(3)}/{here[0]}") == (here[1] / here[0]).read_bytes()


def test_other_processes_ask_nothing(tmp_path: Path, monkeypatch) -> None:
    other = Machine(tmp_path, monkeypatch, is_main=False)
    assert other.ask().copier is None and not other.fs.asked


@pytest.mark.parametrize(
    ("owner", "here", "owned", "resume_from", "message"),
    [
        ({"run": "cat", "id": "5"}, (), False, "auto", "holds another run"),
        ({"run": "bear", "id": "6"}, (3,), True, "auto", "holds another run"),
        ({"run": "bear", "id": "5"}, (3,), False, "auto", "holds another run"),
        ({"run": "bear", "id": "5"}, (), False, None, "add --resume_from auto"),
        ({"run": "bear", "id": "5"}, (), False, "elsewhere/step-00000003", "add --resume_from auto"),
        ({"run": "bear", "id": "5"}, (3,), True, "auto", ""),
        ({"run": "bear", "id": "5"}, (3,), True, "out/step-00000003", ""),
    ],
)
def test_another_runs_content_is_refused(
    machine: Machine, owner: dict[str, str], here: tuple[int, ...], owned: bool, resume_from: str | None, message: str
) -> None:
    machine.there(3)
    machine.fs.mirror().claim(owner)
    machine.here(*here, owned=owned)
    before, there = sorted(machine.layout.root.rglob("*")), machine.fs.mirror().listing()
    if message:
        with pytest.raises(UserError, match=message):
            machine.ask(resume_from)
        assert sorted(machine.layout.root.rglob("*")) == before
    else:
        assert machine.ask(resume_from) is not None
    assert machine.fs.mirror().listing() == there


def run(machine: Machine, ending: BaseException | None = None, copying: Any = None) -> None:
    """A run that saves step 1 and ends so."""
    copying = copying or machine.ask()
    with copying.running(machine.signals, 0):
        machine.here(1, owned=False)
        copying.offer(1)
        if ending is not None:
            raise ending


def test_an_end_waits_until_all_is_there(machine: Machine) -> None:
    run(machine)
    assert machine.fs.mirror().steps() == [1] and machine.waited == 1
    assert machine.said == [f"mirror {URL}: all is copied, up to {folder_name(1)}"]
    assert machine.fs.mirror().owner() == {"run": "bear", "id": files.read_json(machine.layout.mirror)["id"]}


@pytest.mark.parametrize("ending", [Interrupted(15), NonFiniteError("nan"), PeerStopped("gone", 143)])
def test_a_run_that_is_ended_is_copied_too(machine: Machine, ending: Exception) -> None:
    with pytest.raises(type(ending)):
        run(machine, ending)
    assert machine.fs.mirror().steps() == [1] and machine.waited == (not isinstance(ending, PeerStopped))
    assert machine.said == [f"mirror {URL}: all is copied, up to {folder_name(1)}"]


def test_a_second_ctrl_c_waits_for_nothing(machine: Machine) -> None:
    machine.fs.fails = lambda what, name: what == "write" and name not in ("probe.tmp", "run.json")
    copying = machine.ask(wait=1e9)
    with pytest.raises(KeyboardInterrupt):
        run(machine, KeyboardInterrupt(), copying)
    assert machine.waited == 0
    copying.copier.finish(0, lambda: None)


@pytest.mark.parametrize("ending", [None, NonFiniteError("nan")])
def test_a_signal_while_files_are_copied_leaves_them(machine: Machine, ending: Exception | None) -> None:
    """It is what the run ends by, where nothing else ended it."""
    failed: list[str] = []

    def fails(what: str, name: str) -> bool:
        down = what == "write" and name not in ("probe.tmp", "run.json")
        failed.extend([name] * down)
        if len(failed) > 1:  # what failed first has been said
            machine.stop = Interrupted(15)
        return down

    machine.fs.fails = fails
    with pytest.raises(Interrupted if ending is None else NonFiniteError) as caught:
        run(machine, ending, machine.ask(wait=1e9))
    if ending is None:
        assert "stopped by SIGTERM while files were copied to the mirror; the last step is saved" in str(caught.value)
    assert f"{URL} lacks {folder_name(1)} (" in machine.said[-1] and machine.waited == 1


def test_an_end_without_a_network_is_a_warning(machine: Machine) -> None:
    machine.fs.fails = lambda what, name: what == "write" and name not in ("probe.tmp", "run.json")
    run(machine, copying=machine.ask(wait=0.05))
    assert machine.said[-1].startswith(
        f"warning: {URL} lacks {folder_name(1)} after 0.1 s (checkpoint.mirror_wait) ([Errno 104] the connection was cut); "
    )
