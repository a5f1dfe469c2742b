"""What a run does when a value is not finite, memory or the disk runs out, or a signal comes: decided, said, nothing lost."""

from __future__ import annotations

import builtins
import errno
import hashlib
import io
import json
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.harness import Workbench, built, metrics_of, take_step
from trainer import config as configs
from trainer.adapters import export
from trainer.artifacts import sampling
from trainer.base import files, signals
from trainer.base.errors import DataError, UserError, is_out_of_memory
from trainer.base.signals import Signals
from trainer.base.tensorfile import TensorFile
from trainer.base.types import Batch
from trainer.checkpoint import state, store
from trainer.data.batches import loader
from trainer.data.cache import entries
from trainer.engine.components import Components
from trainer.engine.step import Losses, Step, StepResult
from trainer.plan.run_plan import make_plan, open_source, resolve
from trainer.run import run as runs
from trainer.run.checkpointing import Saves
from trainer.runtime.jobs import Job, Position
from workbench.commands import launch
from workbench.commands import main as cli
from workbench.planning.remedies import what_would_fit
from workbench.summary.plan import describe

LENGTH = 6  # two updates an epoch
TARGETS = ["single_transformer_blocks.*attn.to_q"]  # late layers: what is before them needs no backward pass


def tree(bench: Workbench, out: str = "out", **overrides) -> dict:
    return bench.tree(
        "flux",
        **{
            "run__output_dir": str(bench.tmp / out), "run__max_steps": LENGTH, "step__accumulation": 2,
            "adapter__type": "dora", "adapter__targets": TARGETS, "optimizer__lr": 1e-2,
            "schedule__name": "linear", "data__caption_dropout": 0.0,
        } | overrides
    )  # fmt: skip


def start(bench: Workbench, config: dict, *arguments: str) -> int:
    return cli.main(["--config", str(bench.write(config)), "--resume_from", "auto", *arguments])


def files_of(out: Path, step: int = LENGTH) -> list[bytes]:
    folder = out / "checkpoints" / store.folder_name(step)
    return [(folder / name).read_bytes() for name in state.TENSOR_FILES.values()]


@pytest.fixture(scope="module")
def whole(models: Path, tmp_path_factory) -> Path:
    """The folder of a run that met with nothing: neither when it saves nor what it draws changes its last bytes."""
    bench = Workbench(models, tmp_path_factory.mktemp("whole"))
    assert start(bench, tree(bench, "whole", **SAMPLES)) == 0
    return bench.tmp / "whole"


SAMPLES = {"validation__every_steps": 4, "validation__prompts": ["a bear", "bears"], "validation__steps": 2}


def around_losses(monkeypatch, change: Callable[[Batch, torch.Tensor], torch.Tensor]) -> None:
    """Let `change` see every micro-batch's losses, and give others."""
    real = Losses.__call__
    monkeypatch.setattr(Losses, "__call__", lambda self, batch, update=(): change(batch, real(self, batch, update)))


def spoil(sample: str, epoch: int) -> Callable[[Batch, torch.Tensor], torch.Tensor]:
    """A NaN where a photo comes up in an epoch (None: in all)."""

    def change(batch: Batch, losses: torch.Tensor) -> torch.Tensor:
        bad = [o.sample == sample and epoch in (o.epoch, None) for o in batch.occurrences]
        return torch.where(torch.tensor(bad), torch.nan, losses)

    return change


class _Overflow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.inf


# --- values that are not finite -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run_before_the_update(
    bench: Workbench, whole: Path, monkeypatch, capsys
) -> None:
    with monkeypatch.context() as patch:
        around_losses(patch, spoil("0/02.jpg", epoch=1))
        assert start(bench, tree(bench)) == 4
    said = capsys.readouterr().err
    (last,) = store.steps(bench.tmp / "out" / "checkpoints")
    assert 2 <= last < 4, "epoch 1 is steps 3 and 4"
    assert f"step {last + 1}: the loss of 0/02.jpg is not finite; the adapter is unchanged" in said
    assert "step.non_finite = 'skip'" in said and "Traceback" not in said
    # What was trained before it is whole: the run goes on as if it had been stopped there.
    assert start(bench, tree(bench)) == 0
    assert files_of(bench.tmp / "out") == files_of(whole)
    assert metrics_of(bench.tmp / "out") == metrics_of(whole)


@pytest.mark.slow
def test_skipped_updates_change_nothing_are_logged_and_counted_over_restarts(bench: Workbench, monkeypatch, capsys) -> None:
    around_losses(monkeypatch, spoil("0/02.jpg", epoch=None))
    skip = {"step__non_finite": "skip"}
    assert start(bench, tree(bench, "whole", **skip)) == 0
    for stop in (2, None):
        more = {} if stop is None else {"run__stop_after": stop}
        assert start(bench, tree(bench, "parts", **skip, **more)) == 0
    assert files_of(bench.tmp / "parts") == files_of(bench.tmp / "whole")
    entries = metrics_of(bench.tmp / "whole")
    assert metrics_of(bench.tmp / "parts") == entries
    skipped = [entry for entry in entries if entry["skipped"]]
    assert len(skipped) == 3, "once an epoch"
    for entry in skipped:
        assert entry["loss"] is entry["grad_norm"] is None
        assert entry["non_finite"] == "the loss of 0/02.jpg is not finite"
    folder = bench.tmp / "whole" / "checkpoints" / store.folder_name(LENGTH)
    assert TensorFile(folder / "optimizer.safetensors").read("group.0|step") == LENGTH - 3
    assert state.Saved(folder, state.PIECES).state("schedule")["last_epoch"] == LENGTH - 3, (
        "the schedule waits for the optimizer"
    )
    assert state.Saved(folder, state.PIECES).state("progress")["non_finite"] == 3
    assert "the update is skipped (3 of at most 10)" in capsys.readouterr().out
    report = (bench.tmp / "whole" / "report.html").read_text()
    assert "updates skipped because a value was not finite" in report and "3 of 6" in report


@pytest.mark.slow
def test_the_limit_of_skipped_updates_holds_over_restarts(bench: Workbench, monkeypatch, capsys) -> None:
    around_losses(monkeypatch, spoil("0/02.jpg", epoch=None))
    limited = {"step__non_finite": "skip", "step__max_skipped": 2}
    assert start(bench, tree(bench, run__stop_after=3, **limited)) == 0
    assert start(bench, tree(bench, **limited)) == 4
    said = capsys.readouterr().err
    assert "2 updates were skipped before it, and step.max_skipped = 2 allows no more" in said
    assert start(bench, tree(bench, **limited | {"step__max_skipped": 3})) == 0


@pytest.mark.slow
@pytest.mark.parametrize("scale", [None, 1.0, 8.0])
def test_an_overflow_is_the_scalers_business_above_scale_1_only(bench: Workbench, monkeypatch, scale) -> None:
    """The loss is finite, the gradient is not."""
    around_losses(monkeypatch, lambda batch, losses: _Overflow.apply(losses))
    half = {} if scale is None else {"precision__compute": "fp16", "precision__loss_scale": scale}
    with built(bench.config(**{"adapter__targets": ["*attn1.to_q"], **half})) as run:
        before = {name: p.clone() for name, p in run.adapter.named_parameters().items()}
        update = next(run.updates())
        result = take_step(run, 1, update)
        assert not result.updated and result.grad_norm is None and result.loss is not None
        assert run.step.scaler.get_scale() == (4.0 if scale == 8.0 else 1.0)
        names = ", ".join(sorted(o.sample for micro_batch in update for o in micro_batch))
        expected = "" if scale == 8.0 else f"the gradient is not finite (samples {names})"
        assert result.refused == expected
        assert all(torch.equal(p, before[name]) for name, p in run.adapter.named_parameters().items())
        assert not any(run.step.optimizer.state.values()) and run.step.schedule.last_epoch == 0


@pytest.mark.slow
def test_latents_that_are_not_finite(bench: Workbench, monkeypatch, capsys) -> None:
    """Refused with the photo's name, or kept out of every update; and never taken for sound by a later start."""
    own = {"data__cache_dir": str(bench.tmp / "cache")}
    encode, count = Components.encode_images, []

    def broken(self, pixels):
        count.append(None)
        return encode(self, pixels) * (torch.nan if len(count) == 3 else 1)

    with monkeypatch.context() as patch:
        patch.setattr(Components, "encode_images", broken)
        assert start(bench, tree(bench, **own)) == 4
        said = capsys.readouterr().err
        assert "the latents of 0/02.jpg (" in said and "are not finite" in said and "step.non_finite = 'skip'" in said
        assert not (bench.tmp / "out" / "config.toml").exists()
        count[:] = [None, None]  # two are cached
        assert start(bench, tree(bench, **own, step__non_finite="skip")) == 0
    assert "warning: the latents of 0/02.jpg (" in capsys.readouterr().out
    skipped = [entry["non_finite"] for entry in metrics_of(bench.tmp / "out") if entry["skipped"]]
    assert skipped == ["the latents of 0/02.jpg are not finite"] * 3
    assert start(bench, tree(bench, "again", **own)) == 4
    assert "the latents of 0/02.jpg (" in capsys.readouterr().err


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_out_of_memory_is_reported_and_what_was_trained_is_kept(bench: Workbench, whole: Path, monkeypatch, capsys) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    seen: list[Batch] = []

    def grow(batch: Batch, losses: torch.Tensor) -> torch.Tensor:
        seen.append(batch)
        if len(seen) == 6:  # the last micro-batch of step 3: the gradients of the first are there already
            raise error
        return losses

    with monkeypatch.context() as patch:
        around_losses(patch, grow)
        assert start(bench, tree(bench)) == 5
    said = capsys.readouterr().err
    height, width = seen[-1].target_size[0].tolist()
    names = ", ".join(o.sample for o in seen[-1].occurrences)
    assert f"step 3: out of memory in micro-batch 2 of 2: {len(seen[-1].occurrences)} photo(s) of {width}x{height}" in said
    assert f"({names})" in said and str(error) in said and "Traceback" not in said
    assert "--set memory.gradient_checkpointing=true" in said and "data.batch_size below 2" in said
    assert store.steps(bench.tmp / "out" / "checkpoints") == [2]
    # The remedy keeps the run, and its bytes.
    assert start(bench, tree(bench), "--set", "memory.gradient_checkpointing=true") == 0
    assert files_of(bench.tmp / "out") == files_of(whole)


@pytest.mark.parametrize("graphs", [True, False, "auto"])
@pytest.mark.parametrize("recomputed", [True, False])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_what_keeps_the_run_comes_first_of_what_would_fit(
    bench: Workbench, graphs: bool | str, recomputed: bool, on_cpu: bool
) -> None:
    made = configs.parse(bench.tree(step__graphs=graphs, memory__gradient_checkpointing=recomputed))
    source = open_source(made)
    *ways, last = what_would_fit(make_plan(resolve(made, source), source, processes=1), on_cpu=on_cpu).split("\nor ")
    wanted = ["memory.gradient_checkpointing=true"] * (not recomputed)  # graphs are let go by the run itself
    wanted += ["memory.offload=blocks"] * (not on_cpu and graphs is not True)
    assert ways == [f"go on with --resume_from auto --set {change}" for change in wanted]
    assert last.startswith("start a new run")


@pytest.mark.slow
def test_compiled_blocks_keep_their_recomputation_and_what_is_smallest_is_not_made_smaller(bench: Workbench) -> None:
    """A compiler makes other sums of a block that is recomputed: a resume with another key would be refused."""
    smallest = {"model__components__unet": {"dtype": "nf4"}, "data__batch_size": 1, "optimizer__name": "adamw8bit"}
    made = configs.parse(bench.tree(step__compile="blocks", **smallest))
    source = open_source(made)
    going_on, anew = what_would_fit(make_plan(resolve(made, source), source, processes=1), on_cpu=False).split("\nor ")
    assert going_on == "go on with --resume_from auto --set memory.offload=blocks"
    assert anew.endswith("with memory.gradient_checkpointing = true, data.resolution below 64, adapter.rank below 4")


@pytest.mark.slow
@pytest.mark.parametrize(("resident", "on_cpu", "wanted"), [(2, False, True), (0, False, False), (2, True, False)])
def test_of_streamed_blocks_all_could_pass(bench: Workbench, resident: int, on_cpu: bool, wanted: bool) -> None:
    made = configs.parse(bench.tree(memory__offload="blocks", memory__resident_blocks=resident))
    source = open_source(made)
    said = what_would_fit(make_plan(resolve(made, source), source, processes=1), on_cpu=on_cpu)
    assert ("--resume_from auto --set memory.resident_blocks=0" in said) is wanted and "memory.offload=blocks" not in said


@pytest.mark.slow
def test_out_of_memory_in_a_sample_keeps_what_was_trained(bench: Workbench, monkeypatch, capsys) -> None:
    samples = {"validation__every_steps": 4, "validation__prompts": ["a bear"], "validation__steps": 1}
    draw = sampling.draw_samples

    def grow(requests, *, sample, folder, weights):
        if folder.name == "step-00000004":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        draw(requests, sample=sample, folder=folder, weights=weights)

    with monkeypatch.context() as patch:
        patch.setattr(sampling, "draw_samples", grow)
        assert start(bench, tree(bench, **samples)) == 5
    said = capsys.readouterr().err
    assert "step 4: out of memory while samples were drawn" in said and "validation.every_steps = 0" in said
    assert store.steps(bench.tmp / "out" / "checkpoints") == [4]
    assert start(bench, tree(bench, **samples | {"validation__every_steps": 0})) == 0


def test_what_is_taken_for_want_of_memory() -> None:
    for_cpu = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried 1 bytes"
    assert all(map(is_out_of_memory, (torch.OutOfMemoryError("CUDA"), RuntimeError(for_cpu), MemoryError())))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("memory"))


# --- storage --------------------------------------------------------------------------------------------------------


def full_disk(monkeypatch, *steps: int) -> None:
    """Checkpoints of these steps meet with a full disk."""
    write = files.write

    def broken(path: Path, pieces, *more, **keys):
        if any(store.folder_name(step) in str(path) for step in steps) and path.name == "optimizer.safetensors":
            raise OSError(28, "No space left on device", str(path))
        return write(path, pieces, *more, **keys)

    monkeypatch.setattr(files, "write", broken)


@pytest.mark.parametrize("background", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_checkpoint_that_cannot_be_written_ends_the_run_at_the_next_step(
    bench: Workbench, whole: Path, monkeypatch, capsys, background: bool
) -> None:
    config = tree(bench, checkpoint__every_steps=2, checkpoint__background=background)
    with monkeypatch.context() as patch:
        full_disk(patch, 4)
        assert start(bench, config) == 6
    said = capsys.readouterr().err
    assert "No space left on device" in said and "optimizer.safetensors" in said and "--resume_from auto" in said
    assert [p.name for p in (bench.tmp / "out" / "checkpoints").iterdir()] == [store.folder_name(2)]
    # The next step, where its writing takes longer than a step.
    assert len(metrics_of(bench.tmp / "out")) in ((4, 5, 6) if background else (4,))
    assert start(bench, config) == 0
    assert files_of(bench.tmp / "out") == files_of(whole)


@pytest.mark.slow
@pytest.mark.parametrize("background", [True, False])
def test_a_run_may_go_on_without_a_checkpoint_but_not_without_its_last(
    bench: Workbench, monkeypatch, background: bool
) -> None:
    lenient = {
        "checkpoint__every_steps": 1, "checkpoint__on_failure": "continue", "checkpoint__background": background,
    }  # fmt: skip
    with monkeypatch.context() as patch:
        full_disk(patch, 3, 4)
        assert start(bench, tree(bench, **lenient)) == 0
    assert store.steps(bench.tmp / "out" / "checkpoints") == [2, 5, 6]
    with monkeypatch.context() as patch:
        full_disk(patch, LENGTH)
        assert start(bench, tree(bench, "last", **lenient)) == 6
    assert store.steps(bench.tmp / "last" / "checkpoints") == [3, 4, 5]
    assert not (bench.tmp / "last" / "adapters").exists()


@pytest.mark.parametrize("background", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mended", [True, False])
def test_a_save_that_failed_is_made_again_at_the_end(bench: Workbench, monkeypatch, background, mended: bool) -> None:
    """SIGTERM in the very step whose checkpoint failed: it is written now, or the failure is the status."""
    lenient = {
        "checkpoint__every_steps": 3, "checkpoint__on_failure": "continue", "checkpoint__background": background,
    }  # fmt: skip
    write, failures = files.write, []

    def broken(path: Path, pieces, *more, **keys):
        if "checkpoints" in str(path) and not (mended and failures):
            failures.append(path)
            os.kill(os.getpid(), signal.SIGTERM)
            raise OSError(28, "No space left on device", str(path))
        return write(path, pieces, *more, **keys)

    monkeypatch.setattr(files, "write", broken)
    assert start(bench, tree(bench, **lenient)) == (143 if mended else 6)
    steps = store.steps(bench.tmp / "out" / "checkpoints")
    assert steps == [len(metrics_of(bench.tmp / "out"))] if mended else not steps


@pytest.mark.slow
def test_the_clock_saves_between_steps_and_changes_no_byte_of_the_training(bench: Workbench, capsys) -> None:
    """Beside every_steps, the one restarting the other; keep_last counts both kinds; no other word between the processes."""
    seen, asked = {}, {}
    for out, minutes_a_step, every in (("none", 0.0, 0), ("some", 4.0, 4), ("all", 11.0, 0)):
        config = tree(bench, out, checkpoint__every_minutes=10.0, checkpoint__every_steps=every, checkpoint__keep_last=2)
        with built(configs.parse(config)) as run, Signals() as heard:
            loop = runs.make_loop(run, heard)
            loop.saves.clock = lambda run=run, pace=minutes_a_step: 60 * pace * run.progress.step
            loop.saves._last = loop.saves.clock()
            done = seen[out] = []
            loop.saves.saver.after = done.append
            peers, calls = run.context.processes, []
            peers.largest = lambda *numbers, calls=calls, real=peers.largest: calls.append(numbers) or real(*numbers)
            deque(loop.steps(), maxlen=0)
            assert loop.finished
            asked[out] = len(calls)
    assert seen == {"none": [6], "some": [3, 4, 6], "all": [1, 2, 3, 4, 5, 6]}
    assert [store.steps(bench.tmp / out / "checkpoints") for out in seen] == [[6], [4, 6], [5, 6]]
    assert len({*asked.values()}) == 1
    for out in ("some", "all"):
        assert files_of(bench.tmp / out) == files_of(bench.tmp / "none")
        assert metrics_of(bench.tmp / out) == metrics_of(bench.tmp / "none")
    assert "SIGUSR1" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("minutes", "told"), [(0, True), (0.5, False)])
def test_the_start_says_where_only_the_end_is_saved(bench: Workbench, capsys, minutes: float, told: bool) -> None:
    path = str(bench.write(tree(bench, checkpoint__every_minutes=minutes, checkpoint__every_steps=0)))
    assert cli.main(["--config", path, "--plan"]) == 0
    note = "note: only the end and a stop are saved (checkpoint.every_steps = 0, checkpoint.every_minutes = 0)"
    assert (note in " ".join(capsys.readouterr().out.split())) == told


@pytest.mark.slow
@pytest.mark.parametrize(("every", "told"), [(3, False), (4, True)])
def test_the_start_says_which_rhythm_is_longer_than_the_run(bench: Workbench, every: int, told: bool) -> None:
    asked = {"export__every_steps": every, "validation__every_steps": every, "validation__prompts": ["a bear"]}
    with built(bench.config(**asked)) as run:
        said = describe(run.plan, sizes=False)
    notes = [
        "export.every_steps = 4, and the run has 3 steps: files are written at the end alone",
        "validation.every_steps = 4, and the run has 3 steps: samples are drawn before the first step and at the end alone",
    ]
    assert [note in said for note in notes] == [told, told]


@pytest.mark.slow
def test_adapter_files_that_the_user_has_to_mend_lose_no_step(bench: Workbench, monkeypatch, capsys) -> None:
    def refused(*_, **more):
        raise UserError("a header of 200 MB; shorten the captions")

    config = tree(bench, export__every_steps=3)
    with monkeypatch.context() as patch:
        patch.setattr(export, "write_files", refused)
        assert start(bench, config) == 2
    assert "error: a header of 200 MB" in capsys.readouterr().err
    assert store.steps(bench.tmp / "out" / "checkpoints") == [3]
    assert start(bench, config) == start(bench, tree(bench, "whole")) == 0
    assert files_of(bench.tmp / "out") == files_of(bench.tmp / "whole")


@pytest.mark.slow
def test_what_is_being_written_when_the_run_breaks_is_finished(bench: Workbench, monkeypatch) -> None:
    write, seen = files.write, []

    def slow(path: Path, pieces, *more, **keys):
        if path.name == "optimizer.safetensors":
            time.sleep(0.5)
        return write(path, pieces, *more, **keys)

    def broken(batch: Batch, losses: torch.Tensor) -> torch.Tensor:
        seen.append(None)
        if len(seen) == 9:
            raise RuntimeError("a bug")
        return losses

    monkeypatch.setattr(files, "write", slow)
    around_losses(monkeypatch, broken)
    with pytest.raises(RuntimeError, match="a bug"):
        start(bench, tree(bench, checkpoint__every_steps=4))
    assert store.steps(bench.tmp / "out" / "checkpoints") == [4]


@pytest.mark.slow
def test_an_update_that_spoils_the_adapter_is_not_saved(bench: Workbench, monkeypatch, capsys) -> None:
    with monkeypatch.context() as patch:
        step = Step.run

        def spoilt(self, number, batches, occurrences):
            result = step(self, number, batches, occurrences)
            if number == 4:
                self.parameters[0].data[7] = torch.inf
            return result

        patch.setattr(Step, "run", spoilt)
        assert start(bench, tree(bench, checkpoint__every_steps=2, checkpoint__keep_last=1)) == 4
    said = capsys.readouterr().err
    assert "step 4: the adapter or the optimizer's state is not finite" in said and "optimizer.lr than 0.01" in said
    assert store.steps(bench.tmp / "out" / "checkpoints") == [2]


@pytest.mark.slow
def test_background_and_foreground_saves_are_the_same_bytes(bench: Workbench) -> None:
    for background in (True, False):
        out = f"background-{background}"
        assert start(bench, tree(bench, out, checkpoint__every_steps=2, checkpoint__background=background)) == 0
    for step in (2, 4, 6):
        assert files_of(bench.tmp / "background-True", step) == files_of(bench.tmp / "background-False", step)
        one, other = (
            json.loads((bench.tmp / f"background-{b}" / "checkpoints" / store.folder_name(step) / "state.json").read_text())
            for b in (True, False)
        )
        del one["pieces"]["config"], other["pieces"]["config"]
        assert one == other


# --- signals --------------------------------------------------------------------------------------------------------


def signal_at(monkeypatch, micro_batch: int, *signums: int) -> None:
    seen = []

    def change(batch: Batch, losses: torch.Tensor) -> torch.Tensor:
        seen.append(None)
        if len(seen) == micro_batch:
            for signum in signums:
                signal.raise_signal(signum)
        return losses

    around_losses(monkeypatch, change)


@pytest.mark.slow
@pytest.mark.skipif(signals.SAVE is None, reason="there is no SIGUSR1 on Windows")
def test_sigusr1_saves_now_and_the_run_goes_on(bench: Workbench, whole: Path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        signal_at(patch, 5, signals.SAVE, signals.SAVE)
        assert start(bench, tree(bench)) == 0
    assert store.steps(bench.tmp / "out" / "checkpoints") == [3, LENGTH]
    assert files_of(bench.tmp / "out") == files_of(whole)


@pytest.mark.skipif(signals.SAVE is None, reason="there is no SIGUSR1 on Windows")
def test_sigusr1_before_there_is_anything_to_save_does_no_harm() -> None:
    before = signal.getsignal(signals.SAVE)
    try:
        signals.hold_save()
        signal.raise_signal(signals.SAVE)
    finally:
        signal.signal(signals.SAVE, before)


@pytest.mark.slow
@pytest.mark.parametrize("signum", signals.STOP)
def test_a_signal_ends_the_step_and_saves(bench: Workbench, monkeypatch, capsys, signum: int) -> None:
    with monkeypatch.context() as patch:
        signal_at(patch, 5, signum)
        assert start(bench, tree(bench)) == 128 + signum
    assert store.steps(bench.tmp / "out" / "checkpoints") == [3] and len(metrics_of(bench.tmp / "out")) == 3
    name = signal.Signals(signum).name
    expected = f"stopped by {name} after step 3, which is saved; go on with --resume_from auto"
    assert expected in capsys.readouterr().err.splitlines()


@pytest.mark.slow
def test_a_second_sigint_stops_at_once(bench: Workbench, whole: Path, monkeypatch, capsys) -> None:
    with monkeypatch.context() as patch:
        signal_at(patch, 5, signal.SIGINT, signal.SIGINT)
        assert start(bench, tree(bench, checkpoint__every_steps=2)) == 130
    assert "stopped at once" in capsys.readouterr().err
    assert len(metrics_of(bench.tmp / "out")) == 2, "the step was not finished"
    for thread in threading.enumerate():  # a save that a process would have taken with it
        if thread.name.startswith("checkpoint"):
            thread.join()
    assert start(bench, tree(bench)) == 0
    assert files_of(bench.tmp / "out") == files_of(whole)


@pytest.mark.slow
def test_a_damaged_cache_entry_in_mid_run_loses_no_step(bench: Workbench, monkeypatch, capsys) -> None:
    get, count = entries.Cache.get, []

    def broken(self, key):
        count.append(None)
        if len(count) == 20:
            raise DataError(f"cache entry {self.path(key)} is missing or damaged")
        return get(self, key)

    with monkeypatch.context() as patch:
        patch.setattr(entries.Cache, "get", broken)
        assert start(bench, tree(bench)) == 6
    assert store.steps(bench.tmp / "out" / "checkpoints") == [len(metrics_of(bench.tmp / "out"))] != [0]


@pytest.mark.slow
def test_what_a_worker_meets_with_is_told_in_plain_words(bench: Workbench, monkeypatch, capfd) -> None:
    read = loader.Reader.read

    def broken(self, occurrences):
        if occurrences[0].epoch == 2:
            raise DataError(f"cache entry {self.cache.directory} is missing or damaged")
        return read(self, occurrences)

    monkeypatch.setattr(loader.Reader, "read", broken)
    assert start(bench, tree(bench, data__num_workers=1)) == 6
    assert not multiprocessing.active_children(), "the program would wait for it without end"
    said = capfd.readouterr().err
    assert "error: cache entry" in said and "is missing or damaged" in said and "Traceback" not in said
    assert store.steps(bench.tmp / "out" / "checkpoints") == [4], "two epochs were trained, and are kept"


@pytest.mark.slow
def test_a_scale_that_is_no_power_of_two_ends_at_1(bench: Workbench, monkeypatch) -> None:
    around_losses(monkeypatch, lambda batch, losses: _Overflow.apply(losses))
    half = {"precision__compute": "fp16", "precision__loss_scale": 3.0}
    with built(bench.config(adapter__targets=["*attn1.to_q"], **half)) as run:
        update = next(run.updates())
        assert [take_step(run, step, update).loss_scale for step in (1, 2, 3, 4)] == [3.0, 1.5, 1.0, 1.0]


@pytest.mark.slow
def test_a_process_without_a_micro_batch_in_its_first_step_unscales_the_others_gradients(bench: Workbench) -> None:
    """Fresh, and resumed: then the scaler is loaded, and has scaled nothing in this process either."""
    config = configs.parse(tree(bench, precision__compute="fp16", run__stop_after=1))
    for resume_from in (None, "auto"):
        with built(config, resume_from) as run:
            step, update = run.progress.step, next(run.updates())
            result = run.step.run(step + 1, [], [o for micro_batch in update for o in micro_batch])
            assert result.updated and result.grad_norm == 0
        if resume_from is None:
            launch.train(config, resume_from=None)


@pytest.mark.slow
def test_peak_bytes_is_of_one_step(bench: Workbench, monkeypatch) -> None:
    """Each step's own: with a card that counts 10 bytes a step, and 100 before the first."""
    used = [100]
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: used.__setitem__(0, 0))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: used[0])
    entries = []
    with built(configs.parse(tree(bench, run__max_steps=3))) as run, Signals() as signals:
        loop = runs.make_loop(run, signals)
        loop.context.processes.device, loop.measurements.log.log = torch.device("cuda"), entries.append
        loop.step = SimpleNamespace(
            run=lambda step, *_: used.__setitem__(0, used[0] + 10) or StepResult(1.0, 1.0, (0.1,), True, 1.0),
            scaler=run.step.scaler,
        )
        deque(loop.steps(), maxlen=0)
    assert [entry["peak_bytes"] for entry in entries] == [10, 10, 10]


@pytest.mark.slow
def test_every_sample_that_is_not_finite_is_named(bench: Workbench, monkeypatch) -> None:
    around_losses(monkeypatch, lambda batch, losses: losses * torch.nan)
    with built(configs.parse(tree(bench))) as run:
        update = next(run.updates())
        names = ", ".join(sorted(o.sample for micro_batch in update for o in micro_batch))
        assert len(update) == 2 and take_step(run, 1, update).refused == f"the loss of {names} is not finite"


@pytest.mark.skipif(signals.HANGUP is None, reason="there is no SIGHUP on Windows")
def test_a_sighup_that_is_ignored_at_the_start_stays_so() -> None:
    before = signal.signal(signals.HANGUP, signal.SIG_IGN)  # as nohup does
    try:
        with signals.Signals() as arrived:
            signal.raise_signal(signals.HANGUP)
            assert arrived.stop is None
        assert signal.getsignal(signals.HANGUP) == signal.SIG_IGN
    finally:
        signal.signal(signals.HANGUP, before)


@pytest.mark.slow
def test_a_signal_is_acknowledged_while_python_waits_for_a_long_computation(capfd) -> None:
    """Without waiting for the next instruction of Python, before which no handler runs."""
    ended, said = threading.Event(), []

    def watch() -> None:
        while not said and not ended.is_set():
            if "SIGTERM: a promise\n" in capfd.readouterr().err:
                said.append(not ended.is_set())
            time.sleep(0.01)

    with signals.Signals() as arrived:
        arrived.promise = "a promise"
        threads = [threading.Thread(target=watch), threading.Timer(0.2, signal.raise_signal, (signal.SIGTERM,))]
        for thread in threads:
            thread.start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)  # a second in C, which leaves Python's lock
        ended.set()
        for thread in threads:
            thread.join()
        assert arrived.stop == signal.SIGTERM
    assert said == [True], "acknowledged when the computation was over"


def test_sigint_sigterm_sigint_stops_at_once() -> None:
    with signals.Signals() as arrived, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert arrived.stop == signal.SIGINT
        signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_a_new_activity_is_a_job_and_one_line(bench: Workbench, whole: Path, monkeypatch, capsys) -> None:
    """It writes a file every 5 steps, and fails once: the run ends as the table of endings says, with the last whole step
    saved. The next start makes what is missing, and no byte of the training is another."""
    folder, failures = bench.tmp / "notes", [OSError(errno.ENOSPC, "No space left on device", "note")]

    def note(at: Position) -> None:
        if failures and at.step == 5:
            raise failures.pop()
        (folder / f"{at.step}").write_text("seen" if at.fresh else "found")

    def jobs_of(run: runs.Run, saves: Saves, real=runs.jobs_of) -> tuple[Job, ...]:
        return *real(run, saves), Job(name="a note was written", due=lambda at: at.due(5), run=note, remedy="write none")

    folder.mkdir()
    monkeypatch.setattr(runs, "jobs_of", jobs_of)
    assert start(bench, tree(bench)) == 6 and "No space left on device" in capsys.readouterr().err
    assert store.steps(bench.tmp / "out" / "checkpoints") == [5] and not list(folder.iterdir())
    assert start(bench, tree(bench)) == 0
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"5": "found"}
    assert files_of(bench.tmp / "out") == files_of(whole)


@pytest.mark.parametrize(
    ("module", "name", "error", "status"),
    [
        (export, "write_files", PermissionError(errno.EACCES, "Permission denied", "adapters"), 2),
        (sampling, "draw_samples", OSError(errno.ENOSPC, "No space left on device", "00.png"), 6),
    ],
)
@pytest.mark.slow
def test_what_people_get_cannot_be_written(bench: Workbench, monkeypatch, capfd, module, name, error, status) -> None:
    """Between two checkpoints: the steps since the last one are kept."""
    due = {"checkpoint__every_steps": 100, "export__every_steps": 3, "validation__every_steps": 3, "validation__steps": 1}
    due |= {"validation__prompts": ["a bear"]}
    config = tree(bench, "out", **due)
    write, calls = getattr(module, name), []

    def broken(*args, **kwargs):
        calls.append(name)
        if len(calls) == (1 if module is export else 2):  # samples are drawn before step 1, too
            raise error
        return write(*args, **kwargs)

    monkeypatch.setattr(module, name, broken)
    assert start(bench, config) == status
    assert error.strerror in capfd.readouterr().err
    assert [path.name for path in (bench.tmp / "out" / "checkpoints").iterdir()] == ["step-00000003"]
    # The next start makes what is missing, and ends as a run that met with nothing.
    assert start(bench, config) == start(bench, tree(bench, "whole", **due)) == 0
    assert files_of(bench.tmp / "out") == files_of(bench.tmp / "whole")
    outs = [bench.tmp / out for out in ("out", "whole")]
    made = [sorted(path.relative_to(out) for of in ("adapters", "samples") for path in (out / of).rglob("*")) for out in outs]
    assert made[0] == made[1] and Path("adapters/bear-00000003.safetensors") in made[0]


class ReadOnly:
    """`place`, from the moment on that `after` is there: what would change something below it meets with EROFS."""

    def __init__(self, place: Path, after: Path, monkeypatch) -> None:
        self.place, self.after = place, after
        self.refused: set[str] = set()
        for name in ("mkdir", "replace", "rename", "unlink", "rmdir", "utime"):
            monkeypatch.setattr(os, name, self.guarded(getattr(os, name)))
        monkeypatch.setattr(os, "open", self.guarded(os.open, lambda flags, *_, **__: flags & (os.O_WRONLY | os.O_RDWR)))
        writes = self.guarded(builtins.open, lambda mode="r", *_, **__: set(mode) & set("wax+"))
        monkeypatch.setattr(builtins, "open", writes)
        monkeypatch.setattr(io, "open", writes)

    def guarded(self, call: Callable, writes: Callable = lambda *_, **__: True) -> Callable:
        def checked(path, *args, **kwargs):
            paths = [Path(each).absolute() for each in (path, *args) if isinstance(each, (str, Path))]
            inside = any(each.is_relative_to(self.place) for each in paths)
            if inside and writes(*args, **kwargs) and self.after.exists():
                self.refused.add(str(path))
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return call(path, *args, **kwargs)

        return checked


@pytest.mark.parametrize(
    ("place", "after"),
    [
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("out", "."), ("out/checkpoints", "out/metrics.jsonl"), ("out/adapters", "."), ("its cache", "."),
                ("out", "out/checkpoints/step-00000002"),
            )
        ),
        *(
            pytest.param(*each, marks=pytest.mark.proof)
            for each in (
                ("out/config.toml", "."), ("out/samples", "out/metrics.jsonl"), ("out/metrics.jsonl", "."),
                ("out/phases.jsonl", "."), ("converted", "."),
            )
        ),
    ],
)  # fmt: skip
def test_a_read_only_file_system_ends_with_6(bench: Workbench, monkeypatch, capfd, place: str, after: str) -> None:
    """At each kind of write, from the start on or in mid-run, as where a broken disk is mounted anew. The next start goes
    on."""
    config = tree(
        bench, run__max_steps=4, checkpoint__every_steps=2, export__every_steps=3, **SAMPLES | {"validation__every_steps": 3},
        ema__kind="constant", data__cache_dir=str(bench.tmp / "its cache"),
        model__cache_dir=str(bench.tmp / "converted"), model__components__transformer__dtype="fp8_e4m3",
    )  # fmt: skip
    with monkeypatch.context() as patch:
        disk = ReadOnly(bench.tmp / place, bench.tmp / after, patch)
        assert start(bench, config) == 6
    said = capfd.readouterr().err
    assert (
        disk.refused and "storage: [Errno 30] Read-only file system: " in said and "give a folder that can be written" in said
    )
    assert start(bench, config) == 0


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 4, LENGTH])
def test_a_signal_while_samples_are_drawn(bench: Workbench, whole: Path, monkeypatch, step: int) -> None:
    """It does not wait for the image: the samples are drawn by the next start, which changes nothing else."""
    evaluations, find = [], sampling.draw_samples

    def watched(requests, *, sample, folder, weights):
        def interrupted(request):
            if folder.name == f"step-{step:08d}":
                signal.raise_signal(signal.SIGTERM)
            evaluations.append(folder.name)
            image = sample(request)
            evaluations.append("done")
            return image

        return find(requests, sample=interrupted, folder=folder, weights=weights)

    with monkeypatch.context() as patch:
        patch.setattr(sampling, "draw_samples", watched)
        assert start(bench, tree(bench, **SAMPLES)) == 143
    assert evaluations[-1] == f"step-{step:08d}", "the image was finished"
    assert store.steps(bench.tmp / "out" / "checkpoints") == ([step] if step else [])
    assert not (bench.tmp / "out" / "samples" / f"step-{step:08d}").exists()
    assert start(bench, tree(bench, **SAMPLES)) == 0
    out = bench.tmp / "out"
    assert files_of(out) == files_of(whole)
    drawn = [sorted(path.relative_to(of) for path in of.rglob("*.png")) for of in (out, whole)]
    assert drawn[0] == drawn[1] and len(drawn[0]) == 9  # two prompts at three steps and in the card, before_after.png
    for path in drawn[0]:
        assert (out / path).read_bytes() == (whole / path).read_bytes()
