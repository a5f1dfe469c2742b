"""A signal in each phase of a run: obeyed there and then, with its status, and nothing is lost."""

from __future__ import annotations

import signal
import time

import pytest

from tests.harness import Workbench, metrics_of
from trainer import cli, signals
from trainer.phases import Phases

# Before the first step, and after the last.
STARTING = [
    "scanning photos", "hashing", "encoding photos", "loading vae", "encoding captions", "loading unet",
    "hashing the frozen weights", "injecting the adapter",
]  # fmt: skip
CLOSING = ["exporting", "measuring the adapter", "writing the report"]


def signalled(monkeypatch, phase: str, signum: int) -> list[float]:
    """Raise the signal where that phase begins; returns where the time of it will stand."""
    real, at = Phases.__call__, []

    def watched(self, name: str, *more, **settings):
        if name.startswith(phase) and not at:
            at.append(time.monotonic())
            signal.raise_signal(signum)
        return real(self, name, *more, **settings)

    monkeypatch.setattr(Phases, "__call__", watched)
    return at


def test_a_signal_in_each_phase_is_obeyed_in_it(bench: Workbench, monkeypatch, capsys) -> None:
    tree = bench.tree(
        run__max_steps=1, adapter__targets=["*attn1.to_q"], data__cache_dir=str(bench.tmp / "cache"),
        model__path=str(bench.models / "sdxl"),
    )  # fmt: skip
    path, out = str(bench.write(tree)), bench.tmp / "out"
    for index, phase in enumerate([*STARTING, *CLOSING]):
        signum = signals.STOP[index % len(signals.STOP)]
        with monkeypatch.context() as patch:
            at = signalled(patch, phase, signum)
            assert cli.main(["--config", path, "--resume_from", "auto"]) == 128 + signum, phase
        assert time.monotonic() - at[0] < 2, phase
        said = capsys.readouterr().err
        assert f"stopped by {signal.Signals(signum).name}" in said and "Traceback" not in said
        if phase in STARTING:
            assert "before a step was made" in said and not (out / "checkpoints").exists(), phase
        else:
            assert "after the last step, which is saved" in said and len(metrics_of(out)) == 1, phase
            assert not (out / "report.html").exists(), phase
    assert cli.main(["--config", path, "--resume_from", "auto"]) == 0
    assert (out / "report.html").exists() and (out / "adapters" / "bear.safetensors").exists()
    assert len(metrics_of(out)) == 1


@pytest.mark.skipif(signals.HANGUP is None, reason="there is no SIGHUP on Windows")
def test_sighup_is_a_signal_to_stop() -> None:
    assert signals.HANGUP in signals.STOP and signals.HANGUP in signals.HANDLED
