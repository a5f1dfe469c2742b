"""`train.py --fork_from`: a new run that goes on from a checkpoint with something changed, and every draw the same."""

from __future__ import annotations

import errno
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Workbench, metrics_of
from trainer.base.errors import Interrupted
from trainer.base.run_layout import Layout
from trainer.run import output_folder
from workbench.commands import launch
from workbench.commands import main as cli

pytestmark = pytest.mark.usefixtures("few_draws")

DRAWN = {"logging__draws": True, "data__held_out": 2, "validation__loss_every_steps": 5, "data__flip": True}


@pytest.fixture
def original(bench: Workbench) -> Path:
    """The checkpoint of step 2 of a run of 5."""
    tree = bench.tree("flux", run__max_steps=5, adapter__type="dora", checkpoint__every_steps=2, **DRAWN)
    assert cli.main(["--config", str(bench.write(tree))]) == 0
    return bench.tmp / "out" / "checkpoints" / "step-00000002"


def fork(checkpoint: Path, *overrides: str) -> int:
    return cli.main(["--fork_from", str(checkpoint), *(word for each in overrides for word in ("--set", each))])


def draws_of(folder: Path) -> list[str]:
    return [json.loads(line)["draws"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_with_nothing_changed_it_is_the_original(bench: Workbench, original: Path, capsys) -> None:
    """In the folder that it names by itself. Its page says that nothing differs."""
    out, new = bench.tmp / "out", bench.tmp / "out-from-2"
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert fork(original) == 0
    last = "checkpoints/step-00000005"
    for name in ("adapters/bear.safetensors", f"{last}/adapter.safetensors", f"{last}/optimizer.safetensors"):
        assert (new / name).read_bytes() == (out / name).read_bytes(), name
    assert metrics_of(new) == metrics_of(out)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    page = Layout(new).report.read_text()
    assert "It goes on from step 2 of another run" in page
    assert "Its held-out loss is equal to that of the original at step 5." in page
    assert "Its loss of a step is equal to that of the original on average over 3 steps." in page


@pytest.mark.slow
def test_with_another_rate_every_draw_is_the_same_and_the_page_shows_both(bench: Workbench, original: Path) -> None:
    out, new = bench.tmp / "out", bench.tmp / "wild"
    assert fork(original, "optimizer.lr=1e-2", f"run.output_dir={new}", "run.stop_after=4") == 0
    assert cli.main(["--config", str(new / "config.toml"), "--set", "run.stop_after=", "--resume_from", "auto"]) == 0
    assert draws_of(new) == draws_of(out) and len(set(draws_of(out))) == 5
    losses = [[line["loss"] for line in metrics_of(folder)] for folder in (new, out)]
    assert losses[0][:3] == losses[1][:3] and losses[0][3:] != losses[1][3:], "the rate is first felt after step 3"
    page = Layout(new).report.read_text()
    assert "the original</" in page and "Difference of the held-out loss" in page
    assert "optimizer.lr: 0.0001" in page


@pytest.mark.slow
def test_where_its_loss_measures_something_else_the_log_and_the_page_say_so(bench: Workbench, original: Path, capsys) -> None:
    """Here, and in a fork of the fork, whose own is the only other level."""
    new, later, what = bench.tmp / "huber", bench.tmp / "later", "objective.loss: 'mse' -> 'huber'"
    capsys.readouterr()
    assert fork(original, "objective.loss=huber", f"run.output_dir={new}", "checkpoint.every_steps=1") == 0
    assert "from step 3 on the loss measures something else: its level begins anew there" in capsys.readouterr().out
    assert [line.get("loss_changed") for line in metrics_of(new)] == [None, None, what, None, None]
    page = Layout(new).report.read_text()
    assert "Its loss of a step is not compared: it measures something else" in page and "Its held-out loss is" in page
    assert fork(new / "checkpoints" / "step-00000004", "objective.huber_c=0.5", f"run.output_dir={later}") == 0
    lines = metrics_of(later)
    assert [line.get("loss_changed") for line in lines] == [None, None, what, None, "objective.huber_c: 0.1 -> 0.5"]
    assert {line["measured_photos"] for line in [*lines, *metrics_of(new)] if "measured_photos" in line} == {
        lines[-1]["measured_photos"]
    }, "the held-out loss has none of these keys"


@pytest.mark.slow
@pytest.mark.parametrize("at", ["its config", "the first page", "its first checkpoint"])
def test_the_same_command_goes_on_after_a_kill_before_its_first_checkpoint(
    bench: Workbench, original: Path, capsys, monkeypatch, at: str
) -> None:
    """Whatever the killed start had written by then. Afterwards the fork is a run of its own."""
    new = Layout(bench.tmp / "out-from-2")

    def killed(*given: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "somewhere")

    with monkeypatch.context() as patch:
        if at == "the first page":
            new.root.mkdir()
            new.report.write_text("of a start that was killed")
            (new.root / ".report.html.1.tmp").write_text("half")
        else:
            patch.setattr(*{
                "its config": (output_folder.configs, "dumps"), "its first checkpoint": (output_folder.store, "save")
            }[at], killed)  # fmt: skip
            assert fork(original) == 6
            assert f"go on: python train.py --fork_from {original}" in capsys.readouterr().err
    assert new.original.exists() == (at != "the first page")
    assert fork(original, "run.stop_after=3") == 0
    said = capsys.readouterr().out
    assert f"go on: python train.py --config {new.config} --resume_from auto" in said
    shutil.rmtree(original.parent.parent)
    assert cli.main(["--config", str(new.config), "--set", "run.stop_after=", "--resume_from", "auto"]) == 0
    assert [line["step"] for line in metrics_of(new.root)] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_stop_before_its_first_step_names_the_one_command_that_goes_on(original: Path, capsys, monkeypatch) -> None:
    def stopped(*given: Any, **more: Any) -> bool:
        raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr(launch, "train", stopped)
    assert fork(original) == 143
    said = capsys.readouterr().err
    assert "this command goes on" in said and said.count("go on:") == 1 and "--resume_from" not in said


REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("adapter.rank=2",), "adapter.rank cannot change in mid-run: the saved adapter would not fit"),
    (("model.family=sdxl",), "model.family cannot change in mid-run: the adapter was trained on that model"),
    (("data.sources=[]",), "data.sources: a fork keeps photos and draws"),
    (("run.seed=3",), "run.seed: a fork keeps photos and draws"),
    (("data.batch_size=1",), "data.batch_size: a fork keeps photos and draws"),
    (('run={name="x", output_dir="y", seed=9, max_steps=5}',), "run.seed: a fork keeps photos and draws"),
    (("optimizer.rl=1",), "unknown key optimizer.rl; did you mean optimizer.lr?"),
    (("run.max_steps=1",), "the run's length is 1 steps, but"),
]


@pytest.mark.slow
def test_what_a_fork_cannot_be_is_refused_in_one_message(bench: Workbench, original: Path, capsys) -> None:
    there = set(bench.tmp.rglob("*"))
    for overrides, said in REFUSED:
        assert fork(original, *overrides) == 2
        assert said in capsys.readouterr().err
    assert fork(original, f"run.output_dir={bench.tmp}/out") == 2
    assert f"run.output_dir = '{bench.tmp}/out' is there already; go on with that run by --config" in capsys.readouterr().err
    for path, said in (
        (original.parent, f"'{original.parent}' holds checkpoints, it is none"),
        (bench.tmp / "gone", f"'{bench.tmp}/gone' is not a folder"),
        (Path("auto"), "auto: give a checkpoint's folder"),
    ):
        assert fork(path) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: --fork_from {said}") and "resume_from" not in error
    assert set(bench.tmp.rglob("*")) == there


@pytest.mark.parametrize("option", ["--config", "--resume_from", "--allow"])
def test_it_stands_alone(capsys, option: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--fork_from", "x", option, "y"])
    assert f"--fork_from and {option} do not go together" in capsys.readouterr().err
