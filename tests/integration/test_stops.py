"""What a stopped run leaves: its checkpoint and, when time allows, the adapter files and the report as of that step."""

from __future__ import annotations

import errno
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.harness import Workbench, metrics_of
from trainer.adapters import export
from trainer.artifacts import exports
from trainer.base import signals
from trainer.base.errors import PeerStopped
from trainer.base.progress import Phase, Phases
from trainer.base.tensorfile import TensorFile
from trainer.run.loop import Loop
from workbench.commands import main as cli

LATE = 20  # of the moments at which the work of a stop hears of a signal: after the first file was written


def tree(bench: Workbench, out: str, **more) -> dict:
    return bench.tree(**{
        "run__output_dir": str(bench.tmp / out), "run__max_steps": 4, "adapter__type": "dora",
        "adapter__targets": ["*attn1.to_q"], "ema__kind": "constant", "optimizer__lr": 1e-2,
    } | more)  # fmt: skip


def start(bench: Workbench, out: str, **more) -> int:
    return cli.main(["--config", str(bench.write(tree(bench, out, **more))), "--resume_from", "auto"])


def files(bench: Workbench, out: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (bench.tmp / out / "adapters").rglob("*") if path.is_file()}


def signalled(patch, step: int, signum: int = signal.SIGTERM) -> None:
    """The signal comes while the step's line is written."""
    real = Loop._count

    def count(self, *arguments) -> dict[str, Any]:
        line = real(self, *arguments)
        if self.state.progress.step == step:
            signal.raise_signal(signum)
        return line

    patch.setattr(Loop, "_count", count)


@pytest.mark.slow
def test_a_stopped_run_leaves_files_and_ends_as_one_that_never_was(bench: Workbench, monkeypatch, capsys) -> None:
    out = bench.tmp / "parts"
    assert start(bench, "whole", export__formats=["diffusers"]) == 0
    assert start(bench, "parts", run__stop_after=1) == 0
    assert "adapter files of step 1 (" in (said := capsys.readouterr().out) and "adapter (comfyui): " in said
    assert len(files(bench, "parts")) == 5 and "Stopped at step 1 of 4" in (out / "report.html").read_text()
    with monkeypatch.context() as patch:
        signalled(patch, 2)
        patch.setattr(exports, "STOP_SECONDS", 600.0)  # of a machine that is busy with something else, too
        assert start(bench, "parts") == 143
    for name in ("bear.safetensors", "bear_comfyui.safetensors", "bear_ema.safetensors", "bear_ema_comfyui.safetensors"):
        assert TensorFile(out / "adapters" / name).metadata["ss_steps"] == "2", name
    said = capsys.readouterr()
    assert (
        "adapter files of step 2 (" in said.out
        and "adapter (diffusers, average): " in said.out
        and "after step 2, which is saved" in said.err
    )
    # The files of a format that is not asked for any more would be those of step 2 for ever.
    assert start(bench, "parts", export__formats=["diffusers"]) == 0
    assert files(bench, "parts") == files(bench, "whole") and set(files(bench, "whole")) == {
        "README.md",
        "bear.safetensors",
        "bear_ema.safetensors",
    }
    assert metrics_of(out) == metrics_of(bench.tmp / "whole")
    assert not [path for path in out.iterdir() if path.name.startswith("superseded")]


@pytest.mark.slow
def test_files_of_a_stop_can_be_left_out(bench: Workbench, monkeypatch) -> None:
    assert start(bench, "out", run__stop_after=1, export__on_stop=False) == 0
    with monkeypatch.context() as patch:
        signalled(patch, 2)
        assert start(bench, "out", export__on_stop=False) == 143
    assert (
        not (bench.tmp / "out" / "adapters").exists() and "Stopped at step 2" in (bench.tmp / "out/report.html").read_text()
    )


@pytest.mark.parametrize(
    "why", ["second signal", *(pytest.param(why, marks=pytest.mark.slow) for why in ("second signal while saving", "time"))]
)
def test_a_stop_ends_at_a_second_signal_and_when_its_time_is_over(bench: Workbench, monkeypatch, capsys, why: str) -> None:
    """The checkpoint and the status are those of the first signal. Files and card stay those of one step, the earlier one,
    whichever file the work was cut off at."""
    out, at, check, phases = bench.tmp / "out", [], Phase.check, Phases.__call__
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)  # a machine's own speed has no part in it
    assert start(bench, "out", run__stop_after=1) == 0
    before = files(bench, "out")
    with monkeypatch.context() as patch:
        signalled(patch, 2)
        patch.setattr(signals, "time", clock)
        if why == "time":
            patch.setattr(exports, "STOP_SECONDS", 0.5)

        def checked(self, **more: bool) -> None:
            if self.name == "exporting":
                at.append(clock.now)
                if why == "time":
                    clock.now += 0.2
                elif len(at) == LATE:
                    signal.raise_signal(signal.SIGHUP)
            check(self, **more)

        def begun(self, name, *more, **settings):
            if name == "saving step 2" and why == "second signal while saving":
                signal.raise_signal(signal.SIGHUP)
            return phases(self, name, *more, **settings)

        patch.setattr(Phase, "check", checked)
        patch.setattr(Phases, "__call__", begun)
        assert start(bench, "out") == 143
    assert len(at) == {"second signal": LATE, "second signal while saving": 0, "time": 3}[why]
    assert why != "time" or clock.now == pytest.approx(0.6), "it went on after its time was over"
    said = capsys.readouterr()
    assert "a second signal, or too little time" in said.out and "after step 2, which is saved" in said.err
    assert "bear.safetensors, bear_comfyui.safetensors, bear_ema.safetensors" in said.out
    assert "README.md are still those of an earlier step" in said.out
    assert (out / "checkpoints" / "step-00000002" / "manifest.json").exists()
    assert files(bench, "out") == before and not list(out.rglob("*.tmp"))
    assert "Stopped at step 2 of 4" in (out / "report.html").read_text()


@pytest.mark.slow
def test_a_signal_in_the_last_step_leaves_files_and_a_report_that_is_open(bench: Workbench, monkeypatch, capsys) -> None:
    out = bench.tmp / "out"
    rule = {"component": "text_encoder", "match": "*.fc1", "rank": 2}
    settings = {"run__max_steps": 1, "ema__kind": "none", "adapter__rules": [rule], "adapter__type": "lora"}
    with monkeypatch.context() as patch:
        signalled(patch, 1)
        patch.setattr(exports, "STOP_SECONDS", 600.0)
        assert start(bench, "out", **settings) == 143
    said = capsys.readouterr().out
    assert set(files(bench, "out")) == {"README.md", "bear.safetensors", "bear_comfyui.safetensors"}
    assert "this one has not been" in (out / "report.html").read_text()
    assert "note: diffusers does not load the adapter of text_encoder" in said, "as the end of a run says it"
    assert start(bench, "out", **settings) == 0
    assert "Did it take?" in (report := (out / "report.html").read_text()) and "this one has not been" not in report


@pytest.mark.slow
def test_a_signal_after_stop_after_names_its_step(bench: Workbench, monkeypatch, capsys) -> None:
    check = Phase.check

    def checked(self, **more: bool) -> None:
        if self.name == "exporting":
            signal.raise_signal(signal.SIGTERM)
        check(self, **more)

    monkeypatch.setattr(Phase, "check", checked)
    assert start(bench, "out", run__stop_after=1) == 143
    said = capsys.readouterr().err
    assert "after step 1, which is saved" in said and "the last step" not in said.partition("error:")[2]


HINDERED = {
    "full disk": (OSError(errno.ENOSPC, "No space left on device", "bear.safetensors"), "No space left on device", 6),
    "device memory": (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
        "(out of memory: CUDA out of memory",
        5,
    ),
    "memory": (MemoryError(), "(out of memory: MemoryError)", 5),
    "a picture": (ValueError("buffer is not large enough"), "(buffer is not large enough)", None),
}


@pytest.mark.parametrize(
    "what", [what if what == "device memory" else pytest.param(what, marks=pytest.mark.slow) for what in HINDERED]
)
def test_what_hinders_the_work_of_a_stop_leaves_the_status_of_the_signal(bench: Workbench, monkeypatch, capsys, what) -> None:
    error, told, status = HINDERED[what]

    def hindered(*_, **__):
        raise error

    monkeypatch.setattr(export, "write_tensors", hindered)
    with monkeypatch.context() as patch:
        signalled(patch, 1)
        patch.setattr(exports, "STOP_SECONDS", 600.0)  # of a machine that is busy with something else, too
        assert start(bench, "out") == 143
    said = capsys.readouterr()
    assert told in said.out and "step 1 is saved, and" in said.out and "there are none" in said.out
    lines = [line for line in said.err.splitlines() if not line.startswith("step ")]  # a slow step says what memory it takes
    assert not any("memory" in line or "Traceback" in line for line in lines)
    if status is not None:
        assert start(bench, "out", run__stop_after=2) == status


@pytest.mark.slow
def test_a_peer_that_has_stopped_is_not_hidden(bench: Workbench, monkeypatch) -> None:
    def gone(*_, **__):
        raise PeerStopped("process 1 is gone", 7)

    monkeypatch.setattr(export, "write_tensors", gone)
    signalled(monkeypatch, 1)
    assert start(bench, "out") == 7


@pytest.mark.slow
def test_nobodys_own_files_are_touched(bench: Workbench, capsys) -> None:
    """By a start of a run that is finished: a changed card, a picture beside the samples, a file of another tool's."""
    settings = {"ema__kind": "none", "run__max_steps": 1}
    assert start(bench, "out", **settings) == 0
    folder, before = bench.tmp / "out" / "adapters", files(bench, "out")
    assert start(bench, "out", **settings) == 0
    assert files(bench, "out") == before, "a card that nobody changed is written again"
    assert "changed by somebody" not in capsys.readouterr().out
    card = (folder / "README.md").read_text().replace("# bear", "# My bear")
    own = {"README.md": card.encode(), "mine.png": b"a picture", "bear_ema.safetensors": b"an average", "02_old.png": b"more"}
    (folder / "images").mkdir(exist_ok=True)
    for name, data in own.items():
        (folder / "images" / name if name.endswith(".png") else folder / name).write_bytes(data)
    (folder / "images" / "07.png").write_bytes(b"a sample of an earlier step")
    assert start(bench, "out", **settings) == 0
    assert files(bench, "out") == before | own | {"07.png": b"a sample of an earlier step"}, (
        "the card is left, and its pictures"
    )
    assert "README.md was written or changed by somebody, and stays as it is" in capsys.readouterr().out
    (folder / "README.md").unlink()
    assert start(bench, "out", **settings) == 0
    assert files(bench, "out") == own | before, "but what the run itself drew for an earlier card goes"
