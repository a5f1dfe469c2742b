"""An adapter that is not finite, or was never trained, gets no file under its name, neither by a run nor by a tool."""

from __future__ import annotations

import pytest
import torch

from scripts import adapter as script
from tests.harness import Workbench, built, take_step
from trainer.adapters import sd_scripts
from trainer.artifacts.exports import Artifacts
from trainer.base.errors import UserError
from trainer.base.run_layout import folder_name
from trainer.checkpoint import store
from workbench.commands import main as cli


def start(bench: Workbench, *arguments: str, **more) -> int:
    config = bench.write(bench.tree(adapter__targets=["*attn1.to_q"], run__max_steps=2, **more))
    return cli.main(["--config", str(config), *arguments])


@pytest.mark.slow
def test_an_adapter_that_no_update_reached_is_not_published(bench: Workbench, capsys) -> None:
    """At this rate every update is less than the smallest fp32 number, so that every B stays zero."""
    out = bench.tmp / "out"
    assert start(bench, optimizer__lr=1e-60, export__every_steps=1, run__stop_after=1) == 0
    said = capsys.readouterr().out
    assert said.count("warning: every B of the adapter is zero after step 1") == 2, "the step's files and the stop's"
    assert start(bench, "--resume_from", "auto", optimizer__lr=1e-60, export__every_steps=1) == 2
    said = capsys.readouterr()
    assert "error: every B of the adapter is zero after step 2" in said.err and "optimizer.lr is 1e-60" in said.err
    assert "Traceback" not in said.err and "nothing was learned" in (out / "report.html").read_text()
    assert script.main(["export", str(out / "checkpoints" / folder_name(2)), str(bench.tmp / "made")]) == 2
    assert "every B of the adapter is zero" in capsys.readouterr().err
    assert not list((out / "adapters").glob("*")) and not (bench.tmp / "made").exists()


@pytest.mark.slow
def test_only_an_untrained_adapter_is_passed_over(bench: Workbench, monkeypatch, capsys) -> None:
    """Files that cannot be made for another reason end the run, with that reason."""

    def refused(*_, **__):
        raise UserError("magnitudes cannot be put together")

    monkeypatch.setattr(sd_scripts, "kohya_tensors", refused)
    assert start(bench, export__every_steps=1) == 2
    said = capsys.readouterr()
    assert "error: magnitudes cannot be put together" in said.err and "warning: magnitudes" not in said.out
    assert not list((bench.tmp / "out" / "adapters").glob("*")), "the file that could be made is not left alone, either"


@pytest.mark.parametrize("value", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)])
def test_an_adapter_that_is_not_finite_is_not_published(bench: Workbench, monkeypatch, capsys, value: float) -> None:
    real = Artifacts.export

    def export(self, stem: str, *more):
        """Between the last checkpoint, which would refuse it, and the files."""
        layer = next(iter(self.state.adapter.layers.values()))
        with torch.no_grad():
            layer.lora_B["default"].weight[-1, -1] = value
        return real(self, stem, *more)

    monkeypatch.setattr(Artifacts, "export", export)
    assert start(bench) == 4
    said = capsys.readouterr().err
    assert "the adapter's B of unet." in said and "is not finite; it was not exported" in said and "Traceback" not in said
    assert not list((bench.tmp / "out" / "adapters").glob("*"))


@pytest.mark.slow
def test_a_checkpoint_that_is_not_finite_gives_no_file(bench: Workbench, capsys) -> None:
    with built(bench.config(adapter__targets=["*attn1.to_q"])) as run:
        take_step(run, 1, next(run.updates()))
        with torch.no_grad():
            next(iter(run.adapter.layers.values())).lora_A["default"].weight[0, 0] = float("nan")
        run.progress.step = 1
        store.save(run.context.layout.checkpoints, 1, run.pieces.pack())
    assert script.main(["export", str(bench.tmp / "out" / "checkpoints" / folder_name(1)), str(bench.tmp / "made")]) == 4
    assert "the adapter's A of unet." in capsys.readouterr().err and not (bench.tmp / "made").exists()
