"""The report is there from the start, says at every end what ended it, and never ends or changes a run."""

from __future__ import annotations

import errno
import json
import re
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Workbench
from trainer.artifacts.exports import Artifacts
from trainer.base import progress
from trainer.base.errors import NonFiniteError, UserError
from trainer.base.progress import last_sign
from trainer.base.run_layout import Layout
from trainer.monitoring import course
from trainer.run import run
from trainer.run.loop import Loop
from workbench.commands import main as cli
from workbench.pages import live, run_report
from workbench.pages.history import Standing, read_standing

pytestmark = pytest.mark.usefixtures("few_draws")


def start(bench: Workbench, *arguments: str, **more) -> int:
    settings = {
        "run__max_steps": 4, "adapter__targets": ["*attn.to_q"], "checkpoint__every_steps": 2,
        "validation__every_steps": 2, "validation__steps": 1, "validation__prompts": ["a bear"],
    }  # fmt: skip
    return cli.main(["--config", str(bench.write(bench.tree("flux", **(settings | more)))), *arguments])


def said(bench: Workbench) -> str:
    """The text of the page."""
    page = (bench.tmp / "out" / "report.html").read_text(encoding="utf-8")
    return re.sub(r"<[^>]*>", " ", page.partition("</style>")[2].partition("<script>")[0])


def at_step(monkeypatch, act, step: int = 3) -> None:
    """Do something while the line of a step is written."""
    real = Loop._count

    def count(self, *arguments) -> dict[str, Any]:
        line = real(self, *arguments)
        if self.state.progress.step == step:
            act()
        return line

    monkeypatch.setattr(Loop, "_count", count)


@pytest.mark.slow
def test_the_page_goes_with_the_run(bench: Workbench, monkeypatch, capsys) -> None:
    """Before the first sample, in the middle, at a signal, resumed with --allow, and at the end."""
    monkeypatch.setattr(live, "SHARE", 1e9)
    pages: list[str] = []
    told: list[Standing] = []
    phases = bench.tmp / "out" / "phases.jsonl"
    real = live.LiveReport.write

    def write(self, *arguments) -> None:
        real(self, *arguments)
        pages.append(said(bench))
        told.append(read_standing(phases))

    monkeypatch.setattr(live.LiveReport, "write", write)
    with monkeypatch.context() as patch:
        at_step(patch, lambda: signal.raise_signal(signal.SIGTERM))
        assert start(bench) == 143
    end = read_standing(phases)
    assert told[0] == told[4] and (told[0].total, told[0].ended) == (4, False), "for who reads from outside"
    assert (end.total, end.ended, end.reason) == (4, True, "stopped by SIGTERM")
    assert "Starting: 4 steps to make" in pages[0] and "No sample is drawn yet" in pages[0]
    assert "The photos are being looked at" in pages[0]
    # While the samples of a step are drawn, all else of it is there.
    assert "No sample is drawn yet" in pages[1] and "As they are cropped" in pages[1]
    assert "step 0" not in pages[2] and "before training" in pages[2]
    assert "Training: step 1 of 4 (25%)" in pages[3] and "No step had been made" in pages[2]
    assert "Training: step 2 of 4 (50%)" in pages[4] and "Too early to tell" in pages[4]
    assert "Stopped at step 3 of 4. Go on with --resume_from auto." in pages[-1]
    assert re.search(
        r"Checkpoints: step 2, 3. To make the files of one: +python scripts/adapter.py export \S+/step-00000003", pages[-1]
    )
    assert start(bench, "--resume_from", "auto", "--allow", "optimizer.lr", optimizer__lr=2e-4) == 0
    assert (
        "resumed after step 3" in pages[-1]
        and "changed after step 3: optimizer.lr: 0.0001 \N{RIGHTWARDS ARROW} 0.0002" in pages[-1]
    )
    assert "Finished: step 4 of 4" in pages[-1] and "Did it take?" in pages[-1]
    # Another way from step 2 on: what was set aside is told, and not shown.
    checkpoint = bench.tmp / "out" / "checkpoints" / "step-00000002"
    assert start(bench, "--resume_from", str(checkpoint), validation__prompts=["a cat"], run__stop_after=3) == 0
    assert "superseded-after-step-00000002" in pages[-1] and "Stopped at step 3 of 4" in pages[-1]
    assert "resumed after step 2" in pages[-1] and "after step 3" not in pages[-1].replace("Stopped at step 3", "")


@pytest.mark.slow
def test_a_page_is_there_while_the_model_is_read_and_gone_where_the_run_is_refused(bench: Workbench, monkeypatch) -> None:
    real, seen = run.load_trained, []

    def load(*arguments) -> None:
        seen.append(said(bench))
        if len(seen) == 1:
            raise UserError("refused")
        real(*arguments)

    monkeypatch.setattr(run, "load_trained", load)
    cache = str(bench.tmp / "cache")
    assert start(bench, data__cache_dir=cache, run__max_steps=1, validation__every_steps=0) == 2
    assert "Preparing: model and photos are read." in seen[0] and not (bench.tmp / "out").exists()
    assert start(bench, data__cache_dir=cache, run__max_steps=1, validation__every_steps=0) == 0
    assert "Preparing" in seen[1] and "Finished: step 1 of 1" in said(bench)
    page = said(bench)
    assert start(bench, data__cache_dir=cache, run__max_steps=1, validation__every_steps=0) == 2, "a run is there"
    assert said(bench) == page


@pytest.mark.slow
@pytest.mark.parametrize("what", ["memory", "not finite", "nobody foresaw"])
def test_what_ends_a_run_is_on_its_page(bench: Workbench, monkeypatch, what: str) -> None:
    errors = {
        "memory": MemoryError(),
        "not finite": NonFiniteError("a loss"),
        "nobody foresaw": ZeroDivisionError("<b>division</b>"),
    }
    error = errors[what]

    def fail() -> None:
        raise error

    at_step(monkeypatch, fail)
    if what == "memory":
        assert start(bench) == 5
        assert read_standing(bench.tmp / "out" / "phases.jsonl").reason == "out of memory"
        assert "Ended at step 3 of 4: out of memory." in said(bench) and "met a value" not in said(bench)
    elif what == "not finite":
        assert start(bench) == 4
        assert "Ended at step 3 of 4: a value was not finite." in said(bench)
        assert "It met a value that is not finite." in said(bench) and "jitters" not in said(bench).partition("Loss")[0]
    else:
        with pytest.raises(ZeroDivisionError):
            start(bench)
        assert "Ended at step 3 of 4: an error." in said(bench) and "said last: &lt;b&gt;division" in said(bench)


@pytest.mark.slow
def test_a_page_that_cannot_be_written_ends_no_training(bench: Workbench, monkeypatch, capsys) -> None:
    monkeypatch.setattr(live, "SHARE", 1e9)
    real, calls = live.write_page, []

    def write(path, html):
        calls.append(path)
        if len(calls) < 4:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return real(path, html)

    monkeypatch.setattr(live, "write_page", write)
    assert start(bench) == 0
    assert capsys.readouterr().out.count("warning: the report could not be written") == 1 and len(calls) > 4
    assert "Finished: step 4 of 4" in said(bench)


@pytest.mark.slow
def test_damaged_files_of_a_run_do_not_end_it(bench: Workbench, monkeypatch, capsys) -> None:
    """Neither what was drawn before, nor the newest samples, of which thumbnail, card and the picture are made."""
    real = Artifacts.finish

    def finish(self) -> None:
        for folder in (bench.tmp / "out" / "samples").glob("step-*"):
            (folder / "00.png").write_bytes((folder / "00.png").read_bytes()[:-200])
            (folder / "01.png").write_bytes(b"")
            (folder / "._00.png").write_bytes(b"x")
        with (bench.tmp / "out" / "metrics.jsonl").open("a") as file:
            file.write('{"step": 5, "loss": 0.5}\n')
        real(self)

    monkeypatch.setattr(Artifacts, "finish", finish)
    assert start(bench, validation__prompts=["a bear", "a bear", "a hare"]) == 0
    assert "6 image(s) of samples/ could not be read" in said(bench) and "a hare" in said(bench)
    assert "1 line(s) of metrics.jsonl could not be read" in said(bench) and "Finished: step 4 of 4" in said(bench)
    assert "sample 02 moved by" in capsys.readouterr().out
    assert [file.name for file in sorted((bench.tmp / "out" / "adapters" / "images").iterdir())] == ["02.png"]


@pytest.mark.slow
def test_verdict_and_files_are_told_also_where_the_report_cannot_be_written(bench: Workbench, monkeypatch, capsys) -> None:
    def full(self, *arguments) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "report.html")

    monkeypatch.setattr(live.LiveReport, "finished", full)
    assert start(bench) == 6
    out, err = capsys.readouterr()
    assert re.search("^(verdict|warning): [^\0]*load_lora_weights[^\0]*^before and after: ", out, re.MULTILINE), out[-2000:]
    assert "\nreport: " not in out
    assert "error: storage: [Errno 28] No space left on device" in err


@pytest.mark.slow
def test_a_run_without_its_report_has_the_same_bytes(bench: Workbench, monkeypatch) -> None:
    """Nor samples, held-out losses or TensorBoard's events."""
    found = []
    shown = {"validation__loss_every_steps": 1, "data__held_out": 1, "logging__tensorboard": True}
    hidden = {"validation__every_steps": 0, "data__held_out": 1}
    for out, more in (("shown", shown), ("hidden", hidden)):
        if out == "hidden":
            monkeypatch.setattr(live.LiveReport, "write", lambda self, check=None: None)
            monkeypatch.setattr(run_report, "first_page", lambda layout, **more: nullcontext())
        assert start(bench, run__output_dir=str(bench.tmp / out), adapter__type="dora", **more) == 0
        folder = bench.tmp / out
        files = [*(folder / "adapters").glob("*.safetensors"), *(folder / "checkpoints").rglob("*.safetensors")]
        found.append({str(path.relative_to(folder)): path.read_bytes() for path in files})
    assert found[0] == found[1] and len(found[0]) > 6
    assert (bench.tmp / "shown" / "report.html").exists() and not (bench.tmp / "hidden" / "report.html").exists()


@pytest.mark.slow
def test_blocks_of_the_adapter_are_in_the_log(bench: Workbench) -> None:
    """So a page in mid-run has its heat map, and so has who reads from outside."""
    assert start(bench, run__max_steps=17, checkpoint__every_steps=0, validation__every_steps=0, run__stop_after=16) == 0
    last = json.loads(Path(bench.tmp / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    assert max(last[course.BLOCKS].values()) == last["weight_change"] and "after step 16" in said(bench)


@pytest.mark.slow
def test_signs_of_life_go_with_the_run(bench: Workbench, monkeypatch) -> None:
    """In every long phase, and gone however the run ends; a refused one leaves none. What is trained is the same."""
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.0)
    layout, doing = Layout(bench.tmp / "out"), []
    real = progress.Alive.sign

    def sign(self, what: str) -> None:
        real(self, what)
        assert (found := last_sign(layout.alive)) and found.doing == what
        doing.append(what)

    monkeypatch.setattr(progress.Alive, "sign", sign)
    with monkeypatch.context() as patch:
        at_step(patch, lambda: signal.raise_signal(signal.SIGTERM))
        assert start(bench, "--set", f"data.cache_dir={bench.tmp / 'cache'}", "--set", "checkpoint.background=false") == 143
    assert not layout.alive.exists() and not list(layout.root.glob(".*.tmp"))
    phases = {"hashing", "encoding photos", "loading transformer", "drawing samples", "training", "saving step 2"}
    assert phases <= {re.sub(r"^(hashing|drawing samples)\b.*", r"\1", what) for what in doing}, set(doing)
    doing.clear()
    with monkeypatch.context() as patch:
        at_step(patch, lambda: 1 / 0, step=4)
        with pytest.raises(ZeroDivisionError):
            start(bench, "--resume_from", "auto")
    assert "training" in doing and not layout.alive.exists()
    assert start(bench) == 2 and not layout.alive.exists(), "it holds checkpoints already"
    assert start(bench, "--set", f"run.output_dir={bench.tmp / 'new'}", "--set", f"model.path={bench.tmp}") == 2
    assert not (bench.tmp / "new").exists()
