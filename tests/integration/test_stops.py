"""What a stopped run leaves: its checkpoint and, when time allows, the adapter files and the report as of that step."""

from __future__ import annotations

import errno
import signal
import time

import pytest

from tests.harness import Workbench, metrics_of
from trainer import cli, stopped
from trainer.adapters import export
from trainer.loop import Loop
from trainer.phases import Phase, Phases
from trainer.tensorfile import TensorFile


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

    def count(self, *arguments) -> None:
        real(self, *arguments)
        if self.progress.step == step:
            signal.raise_signal(signum)

    patch.setattr(Loop, "_count", count)


def test_a_stopped_run_leaves_files_and_ends_as_one_that_never_was(bench: Workbench, monkeypatch, capsys) -> None:
    out = bench.tmp / "parts"
    assert start(bench, "whole", export__formats=["diffusers"]) == 0
    assert start(bench, "parts", run__stop_after=1) == 0
    assert "adapter as of step 1 (comfyui)" in capsys.readouterr().out
    assert len(files(bench, "parts")) == 5 and "has not reached it" in (out / "report.html").read_text()
    with monkeypatch.context() as patch:
        signalled(patch, 2)
        patch.setattr(stopped, "SECONDS", 600.0)  # of a machine that is busy with something else, too
        assert start(bench, "parts") == 143
    for name in ("bear.safetensors", "bear_comfyui.safetensors", "bear_ema.safetensors", "bear_ema_comfyui.safetensors"):
        assert TensorFile(out / "adapters" / name).metadata["ss_steps"] == "2", name
    said = capsys.readouterr()
    assert "adapter as of step 2 (diffusers, average)" in said.out and "after step 2, which is saved" in said.err
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
    assert not (bench.tmp / "out" / "adapters").exists() and not (bench.tmp / "out" / "report.html").exists()


@pytest.mark.parametrize(
    "why", ["second signal", *(pytest.param(why, marks=pytest.mark.slow) for why in ("second signal while saving", "time"))]
)
def test_a_stop_ends_at_a_second_signal_and_when_its_time_is_over(bench: Workbench, monkeypatch, capsys, why: str) -> None:
    """The checkpoint and the status are those of the first signal, and nothing half-written has a final name."""
    out, at, check, phases = bench.tmp / "out", [], Phase.check, Phases.__call__
    with monkeypatch.context() as patch:
        signalled(patch, 1)
        if why == "time":
            patch.setattr(stopped, "SECONDS", 0.5)

        def checked(self) -> None:
            if self.name == "exporting":
                at.append(time.monotonic())
                if why == "time":
                    time.sleep(0.2)
                elif len(at) == 3:
                    signal.raise_signal(signal.SIGHUP)
            check(self)

        def begun(self, name, *more, **settings):
            if name == "saving step 1" and why == "second signal while saving":
                signal.raise_signal(signal.SIGHUP)
            return phases(self, name, *more, **settings)

        patch.setattr(Phase, "check", checked)
        patch.setattr(Phases, "__call__", begun)
        assert start(bench, "out") == 143
    assert len(at) == {"second signal": 3, "second signal while saving": 0, "time": 3}[why]
    assert why != "time" or time.monotonic() - at[0] < 2
    said = capsys.readouterr()
    assert "a second signal, or too little time" in said.out and "after step 1, which is saved" in said.err
    assert (out / "checkpoints" / "step-00000001" / "manifest.json").exists()
    assert not list(out.glob("adapters/*")) and not (out / "report.html").exists() and not list(out.rglob("*.tmp"))


@pytest.mark.slow
def test_a_full_disk_after_the_checkpoint_leaves_the_status_of_the_signal(bench: Workbench, monkeypatch, capsys) -> None:
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", "bear.safetensors")

    monkeypatch.setattr(export, "write_tensors", full)
    with monkeypatch.context() as patch:
        signalled(patch, 1)
        assert start(bench, "out") == 143
    assert "No space left on device" in (said := capsys.readouterr().out) and "step 1 is saved, and" in said
    assert start(bench, "out", run__stop_after=2) == 6
    assert "storage:" in capsys.readouterr().err
