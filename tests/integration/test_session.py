"""`trainer.Session`: the door for Python. What is trained by it is what the command line trains."""

from __future__ import annotations

import gc
import re
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.harness import ROOT, Workbench
from trainer import Session
from trainer import config as configs
from trainer.base.errors import UserError
from trainer.base.tensorfile import TensorFile
from trainer.runtime.jobs import Job, Position
from workbench.commands import launch
from workbench.compare.comparison import COLUMNS

MORE = {"checkpoint__every_steps": 0, "run__max_steps": 4}


def saved(folder: Path, step: int) -> bytes:
    return (folder / "checkpoints" / f"step-{step:08d}" / "adapter.safetensors").read_bytes()


def opened(bench: Workbench, out: str, **more) -> Session:
    given = {name: more.pop(name) for name in ("resume_from", "loss", "jobs") if name in more}
    return Session.open(bench.config("sdxl", run__output_dir=str(bench.tmp / out), **MORE | more), **given)


def test_steps_are_those_of_the_command_line_however_often_a_block_is_left(bench: Workbench) -> None:
    """Left by `break`, by an error in the body, and by the end: each time the last whole step is saved."""
    assert launch.train(bench.config("sdxl", run__output_dir=str(bench.tmp / "whole"), **MORE), resume_from=None)
    with opened(bench, "parts") as session:
        for line in session:
            assert (line.step, session.step) == (1, 1) and line.loss > 0
            break
    assert (bench.tmp / "parts" / "adapters" / "bear.safetensors").exists(), "as after run.stop_after"
    with pytest.raises(ZeroDivisionError), opened(bench, "parts", resume_from="auto") as session:
        for _ in session:
            _ = 1 / 0
    with opened(bench, "parts", resume_from="auto") as session:
        assert [line.step for line in session] == [3, 4]
        (file, *_) = session.export(bench.tmp / "mine" / "bear.safetensors")
    assert saved(bench.tmp / "parts", 4) == saved(bench.tmp / "whole", 4)
    mine, theirs = TensorFile(file), TensorFile(bench.tmp / "whole" / "adapters" / "bear.safetensors")
    assert all(torch.equal(mine.read(name), theirs.read(name)) for name in theirs.shapes)


@pytest.mark.slow
def test_the_rate_can_be_changed_and_a_sample_drawn(bench: Workbench) -> None:
    with opened(bench, "out", optimizer__lr=1e-3, schedule__name="constant") as session:
        rates = []
        for line in session:
            rates.append(line.lr)
            session.lr = 1e-3 / 2**line.step
            picture = session.sample("a bear", steps=1)
        assert rates == pytest.approx([1e-3, 5e-4, 2.5e-4, 1.25e-4]) and picture.size == (64, 64)
        with pytest.raises(UserError, match="a rate above 0"):
            session.lr = 0


@pytest.mark.slow
def test_a_sample_has_the_fields_of_the_configs_and_is_refused_alike(bench: Workbench) -> None:
    """Drawn as the run draws those of the config."""
    wanted = {"prompt": "a bear", "width": 48, "height": 64, "seed": 7, "steps": 1, "cfg": 2.0, "negative": "fur"}
    config = bench.config("flux", validation__samples=[wanted], validation__every_steps=1, run__max_steps=1)
    with Session.open(config) as session:
        for _ in session:
            picture = session.sample(**wanted)
        (drawn,) = sorted((bench.tmp / "out" / "samples" / "step-00000001").glob("*.png"))
        assert picture.size == (48, 64) and picture.tobytes() == Image.open(drawn).tobytes()
        assert session.sample(**wanted | {"negative": "a"}).tobytes() != picture.tobytes()
        for fields, refusal in (
            ({"negative": "fur"}, "validation.samples.0.negative = 'fur' has no effect on flux without cfg"),
            ({"cfg": 1.0}, "session.sample: cfg"), ({"size": (64, 64)}, "session.sample: unknown key size"),
            ({"width": 50}, "50"), ({"references": ["a.png"]}, r"references"),
        ):  # fmt: skip
            with pytest.raises(UserError, match=refusal):
                session.sample("a bear", **fields)


@pytest.mark.slow
def test_a_loss_and_a_job_come_from_outside(bench: Workbench, capsys) -> None:
    """A squared error given as one's own trains the same bytes; another one does not."""
    seen: list[int] = []

    def look(at: Position) -> None:
        seen.append(at.step)

    job = Job(name="I looked", due=lambda at: at.due(2), run=look, remedy="look less")
    for out, loss in (("none", None), ("same", lambda p, t: (p - t).square()), ("other", lambda p, t: (p - t).abs())):
        with opened(bench, out, loss=loss, jobs=[job]) as session:
            assert session.train()
    assert seen == [2, 4] * 3
    assert capsys.readouterr().out.count("the steps train on the caller's loss; the held-out loss is objective.loss") == 2
    assert saved(bench.tmp / "same", 4) == saved(bench.tmp / "none", 4) != saved(bench.tmp / "other", 4)


@pytest.mark.slow
def test_one_session_trains_at_a_time_and_others_measure_beside_it(bench: Workbench) -> None:
    with opened(bench, "out") as session:
        with pytest.raises(UserError, match="a Session is training in this process already"):
            opened(bench, "second").__enter__()
        with pytest.raises(UserError, match="leave out resume_from, loss and jobs"):
            Session.open(bench.config("flux"), only="measure", resume_from="auto")
        beside = Session.open(bench.config("flux"), only="measure")
        assert beside.plan().length.max_steps == 3 and session.step == 0
        with pytest.raises(UserError, match="a Session that trains"):
            _ = beside.run
    with opened(bench, "third") as session:  # the first one let go
        assert session.step == 0


@pytest.mark.slow
@pytest.mark.parametrize("error", [None, ZeroDivisionError("in the body")])
def test_the_model_goes_with_the_block(bench: Workbench, error: Exception | None) -> None:
    """Though the session, and the error with its traceback, are still there, as in a notebook; so do the signal handlers."""
    handlers = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    session, caught = opened(bench, "out"), None
    try:
        with session:
            model = weakref.ref(session.run.components.load("unet"))
            for _ in session:
                if error is not None:
                    raise error
    except ZeroDivisionError as raised:
        caught = raised
    gc.collect()
    assert model() is None and caught is error and session.config.run.max_steps == 4
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.slow
def test_a_mistake_is_an_exception_and_leaves_nothing(bench: Workbench) -> None:
    with pytest.raises(UserError, match=r"adapter\.rules"):
        opened(bench, "out", adapter__rules=[{"component": "unet", "match": "nothing.*", "rank": 2}]).__enter__()
    assert not (bench.tmp / "out").exists()
    with opened(bench, "out") as session:
        assert session.step == 0 and repr(session).endswith("out': step 0 of 4)")
        photos = len(session.run.plan.data.photos)
        assert repr(session.run.plan).endswith(f"out': 4 steps, {photos} photos)")
    assert repr(session).endswith("out': not open)")


def test_the_door_is_opened_without_the_libraries() -> None:
    code = """
import sys, trainer
assert "torch" not in sys.modules
trainer.accelerate_peft_dora
assert "trainer.run.session" not in sys.modules and "diffusers" not in sys.modules
trainer.Session
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.slow
def test_the_lines_of_the_page_run(bench: Workbench, monkeypatch) -> None:
    """docs/api.md: each block of Python, on the tiny model."""
    monkeypatch.chdir(bench.tmp)
    Path("outputs/rates").mkdir(parents=True)
    Path("outputs/rates/comparison.csv").write_text(
        "\n".join(",".join(COLUMNS.split()) for _ in range(2))
    )  # one of them reads it
    Path("bear.toml").write_text(configs.dumps(bench.config("sdxl", run__output_dir="out", **MORE)))
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 3
    for number, block in enumerate(blocks):
        exec(compile(block.replace('"outputs/bear"', f'"out{number}"'), f"docs/api.md, block {number}", "exec"), {})
    assert (bench.tmp / "adapters" / "bear.safetensors").exists() and (bench.tmp / "bear-4.png").exists()
