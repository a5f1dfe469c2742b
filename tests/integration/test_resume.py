"""A run goes on from any step, checkpoint and folder, in the same bytes. What is combined: test_resume_pairs.py."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

from tests.harness import ROOT, Workbench, built, metrics_of
from trainer import config as configs
from trainer.base import files
from trainer.base.errors import UserError
from trainer.base.tensorfile import TensorFile
from trainer.checkpoint import store
from trainer.monitoring import metrics
from trainer.resume import allowed_changes, pins
from trainer.run.loop import Loop
from workbench.commands import main as cli


def run_tree(bench: Workbench, out: str, **overrides) -> dict:
    return bench.tree(
        **{
            "run__output_dir": str(bench.tmp / out), "run__max_steps": 9, "step__accumulation": 2,
            "adapter__type": "dora", "adapter__targets": ["*attn1.to_q", "*attn2.to_v"], "data__flip": True,
            "data__cache_dir": str(bench.tmp / "cache"), "optimizer__lr": 1e-2, "schedule__name": "cosine",
            "schedule__warmup": 0.3, "data__caption_dropout": 0.3,
        } | overrides
    )  # fmt: skip


def train(tree: dict, resume_from: str | None = None, allow: str | None = None) -> None:
    from workbench.commands.launch import train

    train(configs.parse(tree), resume_from=resume_from, allowed=allowed_changes.parse(allow, resume_from))


def adapter_bytes(bench: Workbench, out: str) -> bytes:
    return (bench.tmp / out / "adapters" / "bear.safetensors").read_bytes()


@pytest.mark.slow
def test_metrics_are_cut_to_the_checkpoint(bench: Workbench) -> None:
    """A run killed after its last checkpoint repeats the steps in between: no gap, no repeat, no half line."""
    tree = run_tree(bench, "out", run__stop_after=1, step__accumulation=1)
    train(tree)
    before = metrics_of(bench.tmp / "out")
    log = bench.tmp / "out" / "metrics.jsonl"
    log.write_text(log.read_text() + '{"step": 2, "epoch": 1, "loss": 9.9}\n{"step": 3, "lo')
    tree["run"]["stop_after"] = 3
    train(tree, "auto")
    after = metrics_of(bench.tmp / "out")
    assert after[:1] == before and after[1]["loss"] != 9.9 and [entry["step"] for entry in after] == [1, 2, 3]


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over(bench: Workbench, capsys) -> None:
    tree = run_tree(bench, "out", run__stop_after=2, checkpoint__every_steps=1, step__accumulation=1)
    train(tree)
    root = bench.tmp / "out" / "checkpoints"
    assert store.steps(root) == [1, 2]
    damaged = root / "step-00000002" / "adapter.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    train(tree, "auto")
    printed = capsys.readouterr().out
    assert "step-00000002 is not valid: adapter.safetensors does not match" in printed
    assert "at step 1" in printed
    assert store.problem(root / "step-00000002") is None


@pytest.mark.slow
def test_resume_finished_run_only_writes_the_adapter_again(bench: Workbench, capsys) -> None:
    tree = run_tree(bench, "out", run__max_steps=2, step__accumulation=1)
    train(tree)
    first = adapter_bytes(bench, "out")
    (bench.tmp / "out" / "adapters" / "bear.safetensors").unlink()
    assert "nothing is left to train" not in capsys.readouterr().out
    train(tree, "auto")
    assert adapter_bytes(bench, "out") == first
    assert "step-00000002 at step 2; it is done, and nothing is left to train\n" in capsys.readouterr().out


@pytest.mark.slow
def test_longer_run_continues_with_the_frozen_schedule_or_another_one(bench: Workbench) -> None:
    """Where that has fallen to 0 it has to be allowed to change: what the refusal names leads on."""
    tree = run_tree(bench, "out", run__max_steps=2, step__accumulation=1)
    train(tree)
    tree["run"]["max_steps"] = 3
    with pytest.raises(
        UserError, match=r"steps 3 to 3 would train nothing: .*total_steps = 3.*--resume_from auto --allow schedule"
    ):
        train(tree, "auto")
    tree["schedule"]["total_steps"] = 3
    train(tree, "auto", "schedule")
    tree["run"]["max_steps"], tree["schedule"]["end"] = 4, 0.25
    train(tree, "auto", "schedule")
    entries = metrics_of(bench.tmp / "out")
    assert [e["step"] for e in entries] == [1, 2, 3, 4]
    assert entries[2]["lr"] > 0 and entries[3]["lr"] == pytest.approx(0.25 * tree["optimizer"]["lr"]), "frozen at 3 steps"


@pytest.mark.slow
def test_resume_at_every_step_of_three_epochs(bench: Workbench, monkeypatch) -> None:
    """As a user would: one start a step. Every draw, loss, rate and byte is that of the run that was never stopped."""
    from trainer.engine import step as steps

    drawn: list[tuple] = []
    draw = steps.draw_time_and_noise

    def watched(batch, **more):
        time, noise = draw(batch, **more)
        drawn.append((batch.occurrences, batch.captions, time.tolist(), noise.flatten().tolist()))
        return time, noise

    monkeypatch.setattr(steps, "draw_time_and_noise", watched)
    length = 5  # two updates an epoch
    tree = run_tree(bench, "whole", run__max_steps=length, adapter__targets=["*attn1.to_q"], export__every_steps=1)
    train(tree)
    whole, drawn[:] = list(drawn), []
    tree["data"]["num_workers"] = 2
    assert {occurrence.epoch for update in whole for occurrence in update[0]} == {0, 1, 2}
    for stop in range(1, length + 1):
        train(tree | {"run": tree["run"] | {"output_dir": str(bench.tmp / "parts"), "stop_after": stop}}, "auto")
        assert store.steps(bench.tmp / "parts" / "checkpoints")[-1] == stop
        left = bench.tmp / "parts" / "adapters" / "bear.safetensors"
        if stop == 1:  # of the warm-up, at a rate of zero
            assert not left.exists()
        else:
            assert TensorFile(left).metadata["ss_steps"] == str(stop)
    assert drawn == whole
    assert metrics_of(bench.tmp / "parts") == metrics_of(bench.tmp / "whole")
    for file in (
        "adapters/bear.safetensors",
        *(f"checkpoints/step-{length:08d}/{n}.safetensors" for n in ("adapter", "optimizer")),
    ):
        assert (bench.tmp / "parts" / file).read_bytes() == (bench.tmp / "whole" / file).read_bytes(), file


@pytest.mark.slow
def test_what_may_change_changes_no_byte(bench: Workbench) -> None:
    tree = run_tree(bench, "whole", run__max_steps=4)
    train(tree)
    train(run_tree(bench, "parts", run__max_steps=4, run__stop_after=2))
    changed = run_tree(
        bench, "parts", run__max_steps=4, data__num_workers=1, data__cache_dir=str(bench.tmp / "elsewhere"),
        data__cache_limit="1GB",
        memory__gradient_checkpointing=2, step__non_finite="skip", step__max_skipped=1, checkpoint__background=False,
        checkpoint__every_steps=1, checkpoint__every_minutes=0.01, checkpoint__keep_last=1, run__lost_after=9.0,
        model__cache_dir=str(bench.tmp / "converted"),
        export__every_steps=1, validation__every_steps=3, validation__steps=1, validation__prompts=["a bear"],
        logging__tensorboard=True,
    )  # fmt: skip
    del changed["run"]["max_steps"]
    changed["run"]["epochs"] = 2
    old, new = (configs.flatten(configs.tree(configs.parse(each))) for each in (tree, changed))
    touched = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
    elsewhere = {
        "run.output_dir": "test_resume_from_a_foreign_folder", "step.accumulation": "test_two_processes_and_one",
        "data.cache": "test_another_cache_changes_no_byte",
        # It changes the last bits, and says so.
        "step.attention": "test_choices.py: test_attention_may_change_where_no_bytes_are_promised",
        "model.allow_distilled": "test_flux2.py: test_a_distilled_model_that_is_allowed_is_drawn_without_guidance",
        "step.graphs": "test_gpu.py: test_graphs_leave_the_bytes_of_eager_steps",
    }  # fmt: skip
    for pattern in {*pins.MAY_CHANGE} - {*elsewhere}:
        assert any(fnmatchcase(key, pattern) for key in touched | {"run.stop_after"}), f"{pattern} is not shown"
    assert all(any(fnmatchcase(key, pattern) for pattern in pins.MAY_CHANGE) for key in touched)
    train(changed, "auto")
    name = "checkpoints/step-00000004/{}.safetensors"
    for file in (name.format("adapter"), name.format("optimizer"), "adapters/bear.safetensors"):
        assert (bench.tmp / "parts" / file).read_bytes() == (bench.tmp / "whole" / file).read_bytes(), file


@pytest.mark.slow
def test_another_cache_changes_no_byte(bench: Workbench) -> None:
    """A run that is stopped and goes on with each other cache ends as the one that kept its own."""
    tree = run_tree(bench, "whole", run__max_steps=3, step__accumulation=1)
    train(tree)
    for stop, kind in enumerate(("memory", "none", "disk"), 1):
        parts = {"output_dir": str(bench.tmp / "parts"), "stop_after": stop}
        data = {key: value for key, value in tree["data"].items() if kind == "disk" or key != "cache_dir"}
        train(tree | {"data": data | {"cache": kind}, "run": tree["run"] | parts}, "auto")
    for file in ("checkpoints/step-00000003/optimizer.safetensors", "adapters/bear.safetensors"):
        assert (bench.tmp / "parts" / file).read_bytes() == (bench.tmp / "whole" / file).read_bytes(), file


@pytest.mark.slow
def test_another_environment_is_told_or_refused(bench: Workbench, monkeypatch, capsys) -> None:
    tree = run_tree(bench, "out", run__max_steps=2, run__stop_after=1, step__accumulation=1)
    train(tree)
    del tree["run"]["stop_after"]
    version = pins._version
    monkeypatch.setattr(pins, "_version", lambda library: "2.0" if library == "torch" else version(library))
    train(tree, "auto")
    said = capsys.readouterr().out
    assert f"warning: another environment than the checkpoint's: torch: {torch.__version__.partition('+')[0]}" in said
    assert "-> 2.0. State and draws are the same" in said

    tree["run"]["deterministic"] = True
    config, cpu = configs.parse(tree), torch.device("cpu")
    pin = pins.pin_environment(config, cpu, kernels="torch", attention="math", processes=1, say=pytest.fail)
    pin.load_state_dict(dict(pin.value))
    with pytest.raises(ValueError, match=r"deterministic = true, and this is another .*: processes: 2 -> 1; restore it"):
        pin.load_state_dict({**pin.value, "processes": 2})


@pytest.mark.slow
def test_command_line_statuses(bench: Workbench, monkeypatch, capsys) -> None:
    path = bench.write(run_tree(bench, "out", run__max_steps=2))
    assert cli.main(["--config", str(path), "--resume_from", "latest"]) == 2
    said = capsys.readouterr().err
    assert "there is no checkpoint" in said and "Traceback" not in said
    assert not (bench.tmp / "out" / "config.toml").exists(), "half-written"

    write = files.write

    def broken(path, pieces, *more, **keys):
        if "checkpoints" in str(path):
            raise OSError(28, "No space left on device")
        return write(path, pieces, *more, **keys)

    monkeypatch.setattr(files, "write", broken)
    assert cli.main(["--config", str(path)]) == 6
    monkeypatch.undo()
    assert store.steps(bench.tmp / "out" / "checkpoints") == []
    assert not list((bench.tmp / "out" / "checkpoints").iterdir()), "a leftover"


@pytest.mark.slow
def test_non_finite_gradient_stops_before_the_update(bench: Workbench) -> None:
    with built(configs.parse(run_tree(bench, "out"))) as run:
        update = next(run.updates())
        batches = [run.reader[micro] for micro in update]
        before = {name: p.clone() for name, p in run.adapter.named_parameters().items()}
        bad = type(batches[0])(**{**vars(batches[0]), "latents": batches[0].latents * float("nan")})
        result = run.step.run(1, [bad, *batches[1:]], [o for micro_batch in update for o in micro_batch])
        assert not result.updated
        assert result.refused == f"the latents of {', '.join(sorted(o.sample for o in bad.occurrences))} are not finite"
        assert all(torch.equal(p, before[name]) for name, p in run.adapter.named_parameters().items())
        assert not any(run.step.optimizer.state.values())


@pytest.mark.slow
def test_no_pickle_anywhere(bench: Workbench, monkeypatch) -> None:
    import pickle

    def refuse(*args, **kwargs):
        raise AssertionError("pickle was used")

    for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    for name in ("load", "save"):
        monkeypatch.setattr(torch, name, refuse)
    tree = run_tree(
        bench, "out", run__max_steps=3, run__stop_after=2, checkpoint__every_steps=1, export__every_steps=1,
        optimizer__name="adamw8bit", validation__every_steps=2, validation__steps=1,
        validation__prompts=["a bear"], model__components={"unet": {"dtype": "nf4"}}, logging__tensorboard=True,
        model__cache_dir=str(bench.tmp / "converted"),
    )  # fmt: skip
    train(tree)
    del tree["run"]["stop_after"]
    train(tree, "auto")
    assert Path(bench.tmp / "out" / "adapters" / "bear.safetensors").exists()


# --- from elsewhere ---------------------------------------------------------------------------------------------------


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("end", ["stop", "signal"])
@pytest.mark.slow
def test_a_run_from_elsewhere_has_a_checkpoint_of_its_own_at_once(bench: Workbench, monkeypatch, end: str) -> None:
    """Or the next `auto` would begin at step 0."""
    tree = run_tree(bench, "source", run__max_steps=4, run__stop_after=2, adapter__targets=["*attn1.to_q"])
    train(tree)
    source = bench.tmp / "source" / "checkpoints" / store.folder_name(2)
    branch = run_tree(bench, "branch", run__max_steps=4, adapter__targets=["*attn1.to_q"])
    with monkeypatch.context() as patch:
        if end == "signal":
            patch.setattr(Loop, "_read", lambda self: (signal.raise_signal(signal.SIGTERM), ([], []))[1])
            assert cli.main(["--config", str(bench.write(branch)), "--resume_from", f"{source}/"]) == 143
        else:
            branch["run"]["stop_after"] = 2
            train(branch, str(source))
    own = bench.tmp / "branch" / "checkpoints"
    assert folders(own) == [store.folder_name(2)]
    for file in ("adapter.safetensors", "norms.safetensors", "optimizer.safetensors", "quantization.json"):
        assert (own / store.folder_name(2) / file).read_bytes() == (source / file).read_bytes()
    train(run_tree(bench, "branch", run__max_steps=4, adapter__targets=["*attn1.to_q"]), "auto")
    train(run_tree(bench, "source", run__max_steps=4, adapter__targets=["*attn1.to_q"]), "auto")
    assert adapter_bytes(bench, "branch") == adapter_bytes(bench, "source")


class Killed(BaseException):
    """Nothing of the run sees it, as nothing sees SIGKILL."""


@pytest.mark.parametrize(("call", "given"), [("set_aside", "step-00000002"), ("truncate", "superseded-step-00000002")])
@pytest.mark.slow
def test_a_kill_while_later_checkpoints_are_set_aside(bench: Workbench, monkeypatch, call: str, given: str) -> None:
    tree = run_tree(bench, "out", run__max_steps=4, checkpoint__every_steps=1, checkpoint__keep_last=9)
    train(tree)
    root = bench.tmp / "out" / "checkpoints"
    if given.startswith("superseded"):
        (root / store.folder_name(2)).rename(root / given)
    before = metrics_of(bench.tmp / "out")

    def killed(*args, **kwargs):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(*{"set_aside": (store, "set_aside"), "truncate": (metrics, "truncate")}[call], killed)
        with pytest.raises(Killed):
            train(tree, str(root / given))
    assert store.problem(root / store.folder_name(2)) is None, "what is resumed is one of the run's own by now"
    train(tree, "auto")
    assert metrics_of(bench.tmp / "out") == before
    assert store.problem(root / store.folder_name(4)) is None


@pytest.mark.slow
def test_only_what_was_set_aside_is_no_fresh_start(bench: Workbench) -> None:
    tree = run_tree(bench, "out", run__max_steps=1)
    train(tree)
    root = bench.tmp / "out" / "checkpoints"
    (root / store.folder_name(1)).rename(root / "superseded-step-00000001")
    with pytest.raises(ValueError, match="holds only checkpoints that were set aside; go on from one with"):
        train(tree, "auto")
    for folder in (root.parent, root):
        with pytest.raises(ValueError, match="holds checkpoints, it is none: give one of its step-... folders"):
            (root / store.folder_name(1)).mkdir(exist_ok=True)
            train(tree, str(folder))


@pytest.mark.slow
def test_an_export_that_was_cut_off_is_finished(bench: Workbench) -> None:
    tree = run_tree(bench, "out", run__max_steps=2, run__stop_after=1, export__every_steps=1)
    train(tree)
    lost = bench.tmp / "out" / "adapters" / "bear-00000001_comfyui.safetensors"
    whole = lost.read_bytes()
    lost.unlink()
    del tree["run"]["stop_after"]
    train(tree, "auto")
    assert lost.read_bytes() == whole


LOCKED = """
import sys
from pathlib import Path
from trainer.base import files
with files.locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there are no record locks on Windows")
def test_a_second_run_in_the_same_folder_is_refused(bench: Workbench, capsys) -> None:
    """The lock is another process's; it ends with that, and a later run finds none."""
    path, out = bench.write(run_tree(bench, "out", run__max_steps=1, step__accumulation=1)), bench.tmp / "out"
    out.mkdir()
    command = [sys.executable, "-c", LOCKED, str(out / ".lock")]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "locked\n"
        assert cli.main(["--config", str(path)]) == 2
        said = capsys.readouterr().err
        assert "another run writes to" in said and "Traceback" not in said
        assert not (out / "metrics.jsonl").exists()
    assert cli.main(["--config", str(path)]) == 0


# --- what later steps left --------------------------------------------------------------------------------------------


def with_results(bench: Workbench, prompt: str, **overrides) -> dict:
    return run_tree(
        bench, "out", run__max_steps=4, adapter__targets=["*attn1.to_q"], adapter__type="lora", step__accumulation=1,
        checkpoint__every_steps=1, checkpoint__keep_last=9, export__every_steps=1, export__formats=["diffusers"],
        validation__every_steps=2, validation__steps=1, validation__prompts=[prompt], **overrides,
    )  # fmt: skip


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def next_second() -> None:
    """TensorBoard reads its files in the order of their names: the second, and a number that is compared as text."""
    now = int(time.time())
    while int(time.time()) == now:
        time.sleep(0.05)


@pytest.mark.slow
def test_an_abandoned_course_is_set_aside_whole(bench: Workbench, capsys) -> None:
    """Going on from an earlier checkpoint with other prompts: no image, file or curve of the old course is left."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(with_results(bench, "a bear", logging__tensorboard=True))
    out = bench.tmp / "out"
    aside, first = out / "superseded-after-step-00000002", files_in(out)
    tree = with_results(bench, "a cat", logging__tensorboard=True, run__stop_after=3, export__on_stop=False)
    capsys.readouterr()
    next_second()
    train(tree, str(out / "checkpoints" / "step-00000002"))
    assert f"are set aside in {aside}; delete it when" in capsys.readouterr().out
    gone = ["adapters/bear-00000003.safetensors", "adapters/bear.safetensors", "before_after.png", "report.html"]
    gone += ["adapters/README.md", "adapters/images/00.png", "samples/step-00000004/00.png"]
    assert files_in(aside) == {name: first[name] for name in [*gone, "metrics.jsonl"]}
    left = {name for name in files_in(out) if name.startswith(("adapters", "samples"))}
    assert left == {
        # Of step 1 there is none: its rate is the warm-up's first, zero.
        *(f"adapters/bear-0000000{step}.safetensors" for step in (2, 3)),
        *(f"samples/step-0000000{step}/00.png" for step in (0, 2)),
    }
    page = (out / "report.html").read_text()
    assert "Stopped at step 3 of 4" in page and 'data-step="2"' in page and 'data-step="4"' not in page
    assert (out / gone[0]).read_bytes() == first[gone[0]], "the same course, so the same bytes"
    del tree["run"]["stop_after"]
    capsys.readouterr()
    next_second()
    train(tree, "auto")
    assert "moved by" not in capsys.readouterr().out, "samples of two prompts were compared"
    page = (out / "report.html").read_text()
    cards = [card.partition("</h3>")[0].rpartition(">")[2] for card in page.split('<article class="card"')[1:]]
    assert cards == ["a cat", "a bear"]
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]
    # A second time, to the same step: nothing takes another's place.
    again = files_in(out)
    train(with_results(bench, "a cat", run__stop_after=2), str(out / "checkpoints" / "step-00000002"))
    assert (out / "superseded-after-step-00000002-2" / "report.html").read_bytes() == again["report.html"]
    assert files_in(aside) == {name: first[name] for name in [*gone, "metrics.jsonl"]}


@pytest.mark.slow
def test_what_a_killed_start_made_after_its_last_checkpoint_is_made_again(bench: Workbench) -> None:
    train(with_results(bench, "a bear", run__stop_after=2))
    out = bench.tmp / "out"
    stale = [out / "adapters" / "bear-00000003.safetensors", out / "samples" / "step-00000004" / "00.png"]
    stale[1].parent.mkdir()
    for path in stale:
        path.write_bytes(b"stale")
    train(with_results(bench, "a bear"), "auto")
    assert all(path.read_bytes() != b"stale" for path in stale)
    assert not list(out.glob("superseded*"))
