"""Pocket runs at the right learning rate, far above it and far below are called what they are."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.divergence import RIGHT, run
from tests.harness import Workbench, metrics_of
from trainer.data.batches.loader import Reader
from trainer.engine.step import Losses
from trainer.monitoring.metrics import read_lines
from workbench.commands import main as cli
from workbench.pages import diagnosis

STEPS = 30
HELD_OUT = ("validation.loss_every_steps=15", "data.held_out=4", "data.batch_size=10")


@pytest.mark.proof
@pytest.mark.parametrize("rate", [RIGHT, 10 * RIGHT, 100 * RIGHT, 1000 * RIGHT, 1e-9])
def test_a_run_is_called_what_it_is(tmp_path: Path, rate: float) -> None:
    found = run(tmp_path, rate, steps=STEPS, settings=HELD_OUT)
    rows = read_lines(tmp_path / f"rate-{rate:g}" / "metrics.jsonl")
    report = tmp_path / f"rate-{rate:g}" / "report.html"
    if rate == RIGHT:
        assert found.verdict == "learned" and "warning: " not in found.said
        assert diagnosis.judge(rows).kind == "learned", "from the log alone"
    elif rate < RIGHT:
        assert found.verdict == "nothing" and found.warned is None and "warning: nothing was learned" in found.said
        assert diagnosis.judge(rows).kind == "nothing", "from the log alone"
    else:
        assert re.search(rf"learning rate .* \(optimizer\.lr was {rate:.3g} at step", found.said)
        if found.verdict:
            # At ten times the rate it may come back in the end, and the held-out loss, which decides, shows it.
            held_out = [row["held_out_loss"] for row in rows if "held_out_loss" in row]
            back = rate == 10 * RIGHT and held_out[-1] < rows[0]["at_start"]["held_out_loss"]
            assert found.verdict == ("recovered" if back else "diverged")
            assert ("came back" if back else "diverged") in report.read_text()
        else:  # it may end before its first two windows did
            assert rate == 1000 * RIGHT and "not finite" in found.said
        if found.verdict or found.warned:
            assert found.said.count("the run is diverging") == 1
            assert diagnosis.judge(rows).kind == (found.verdict or "diverged"), "from the log alone"


@pytest.mark.slow
@pytest.mark.parametrize(("cause", "rate"), [("latents", 1e-4), ("loss", 10.0)])
def test_a_value_that_is_not_finite_ends_a_run_with_its_likely_cause(
    bench: Workbench, monkeypatch, capsys, cause: str, rate: float
) -> None:
    """Exit status 4, with the verdict of a run that has diverged. What latents are is no rate's doing."""
    owner, name = {"latents": (Reader, "__getitem__"), "loss": (Losses, "__call__")}[cause]
    real, calls = getattr(owner, name), itertools.count(1)

    def spoilt(*given, **more):
        found = real(*given, **more)
        if next(calls) < 18:
            return found
        return found * torch.nan if cause == "loss" else replace(found, latents=found.latents * torch.nan)

    monkeypatch.setattr(owner, name, spoilt)
    tree = bench.tree(run__max_steps=20, optimizer__lr=rate, adapter__targets=["*attn1.to_q"], data__batch_size=1)
    assert cli.main(["--config", str(bench.write(tree))]) == 4
    said = capsys.readouterr()
    assert f"step 18: the {cause} of " in said.err
    if cause == "loss":
        assert "\n  verdict  diverged\n" in said.out
        assert "warning: the training has diverged: at step 16 layers changed by up to " in said.out
        assert "the run has diverged since step 16: most often the learning rate is too high" in said.err
    else:
        assert "  verdict  " not in said.out and "learning rate" not in said.err


@pytest.mark.slow
def test_a_run_that_diverges_says_so_once_also_when_it_is_resumed(bench: Workbench, capsys) -> None:
    """By its weights, which are looked at after step 16; a stop there leaves the line as it would be."""
    changes = {"run__max_steps": 18, "optimizer__lr": 10.0, "adapter__targets": ["*attn1.to_q"]}
    said = []
    for out, stops in (("whole", [18]), ("parts", [16, 17, 18])):
        for stop in stops:
            tree = bench.tree(run__output_dir=str(bench.tmp / out), run__stop_after=stop, **changes)
            assert cli.main(["--config", str(bench.write(tree)), "--resume_from", "auto"]) == 0
        said.append(capsys.readouterr().out)
    assert metrics_of(bench.tmp / "whole") == metrics_of(bench.tmp / "parts")
    assert [row["step"] for row in metrics_of(bench.tmp / "whole") if "weight_change" in row] == [16]
    for text in said:
        assert text.count("the run is diverging") == 1 and "optimizer.lr was 10" in text
        assert text.count("warning: the training has probably diverged: ") == 1
