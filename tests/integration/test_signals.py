"""A signal in each phase of a run: obeyed there and then, with its status, and nothing is lost."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.harness import Workbench, metrics_of
from trainer.base import signals
from trainer.base.progress import Phase, Phases
from workbench.commands import main as cli

# Before the first step, after the last, and where a checkpoint is gone on from.
STARTING = [
    "scanning photos", "hashing", "encoding photos", "loading vae", "encoding captions", "loading unet",
    "hashing the frozen weights", "injecting the adapter", "norms of the adapted layers",
]  # fmt: skip
CLOSING = ["exporting", "measuring the adapter", "reading the adapter file back", "writing the report"]
RESUMING = ["checking step-00000001", "reading the checkpoint's optimizer"]


def signalled(monkeypatch, phase: str, signum: int) -> list[str]:
    """Raise the signal where that phase begins; returns where that phase and those that begin after it will stand."""
    real, begun = Phases.__call__, []

    def watched(self, name: str, *more, **settings):
        if begun or name.startswith(phase):
            begun.append(name)
        if len(begun) == 1:
            signal.raise_signal(signum)
        return real(self, name, *more, **settings)

    monkeypatch.setattr(Phases, "__call__", watched)
    return begun


@pytest.mark.slow
def test_a_signal_in_each_phase_is_obeyed_in_it(bench: Workbench, monkeypatch, capsys) -> None:
    tree = bench.tree(
        run__max_steps=1, adapter__targets=["*attn1.to_q"], adapter__type="dora", data__cache_dir=str(bench.tmp / "cache"),
        model__path=str(bench.models / "sdxl"),
    )  # fmt: skip
    path, out = str(bench.write(tree)), bench.tmp / "out"
    for index, phase in enumerate([*STARTING, *CLOSING, *RESUMING]):
        signum = signals.STOP[index % len(signals.STOP)]
        with monkeypatch.context() as patch:
            begun = signalled(patch, phase, signum)
            assert cli.main(["--config", path, "--resume_from", "auto"]) == 128 + signum, phase
        assert len(begun) == 1, f"after the signal began {begun[1:]}"
        said = capsys.readouterr().err
        assert f"stopped by {signal.Signals(signum).name}" in said and "Traceback" not in said
        if phase in STARTING:
            assert "before the first step of this start" in said and not (out / "checkpoints").exists(), phase
        elif phase in RESUMING:
            assert "before the first step of this start" in said, phase
        else:
            assert "after the last step, which is saved" in said and len(metrics_of(out)) == 1, phase
            assert "Stopped at step 1 of 1" in (out / "report.html").read_text(), phase
    assert cli.main(["--config", path, "--resume_from", "auto"]) == 0
    assert "Finished" in page(out) and (out / "adapters" / "bear.safetensors").exists()
    assert len(metrics_of(out)) == 1


@pytest.mark.slow
def test_inside_a_phase_each_piece_is_a_place_to_stop_at(bench: Workbench, monkeypatch, capsys) -> None:
    """The signal comes after the first piece, not where the phase begins; nothing half-written is left."""
    tree = bench.tree(
        run__max_steps=1, adapter__targets=["*attn1.to_q"], adapter__type="dora",
    )  # fmt: skip
    path, out = str(bench.write(tree)), bench.tmp / "out"
    real = Phase.check
    for name in ("injecting the adapter", "norms of the adapted layers", "exporting", "measuring the adapter",
                 "checking step-00000001", "reading the adapter file back", "writing the report"):  # fmt: skip
        checks = []

        def check(self, name=name, checks=checks, **more: bool) -> None:
            if self.name == name:
                checks.append(self.done)
                if len(checks) == 2:
                    signal.raise_signal(signal.SIGTERM)
            real(self, **more)

        with monkeypatch.context() as patch:
            patch.setattr(Phase, "check", check)
            assert cli.main(["--config", path, "--resume_from", "auto"]) == 128 + signal.SIGTERM, name
        assert len(checks) == 2, f"{name} went on"
        said = capsys.readouterr().err
        assert "\nstopped by SIGTERM" in f"\n{said}" and "error:" not in said, "to be stopped is no error"
        assert not list(out.rglob("*.tmp")) and (not page(out) or "Stopped at step " in page(out)), name
    assert cli.main(["--config", path, "--resume_from", "auto"]) == 0
    assert "Finished" in page(out)


def page(out: Path) -> str:
    path = out / "report.html"
    return path.read_text() if path.exists() else ""


@pytest.mark.skipif(signals.HANGUP is None, reason="there is no SIGHUP on Windows")
def test_sighup_is_a_signal_to_stop() -> None:
    assert signals.HANGUP in signals.STOP and signals.HANGUP in signals.HANDLED
