"""Several processes and one: the same order, the same draws, the same decisions; losses differ by the order of a sum.

Started by torch.distributed.run. Not by `accelerate launch --cpu`: without an MPI that starts one process, whatever
--num_processes says.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness import ROOT, Workbench, built, metrics_of
from trainer import config as configs
from trainer.checkpoint import store
from trainer.data.cache import latent_key
from trainer.run import train
from trainer.tensorfile import TensorFile

LENGTH = 6
# The gradients of an update are summed in another order: fp32 rounding, a few steps of AdamW on.
LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-3


def tree(bench: Workbench, out: str, *, processes: int, **overrides) -> dict:
    """Four micro-batches to an update, or what an epoch leaves; adapter dropout, which is seeded by micro-batch."""
    return bench.tree(
        **{
            "run__output_dir": str(bench.tmp / out), "run__max_steps": LENGTH, "step__accumulation": 4 // processes,
            "adapter__targets": ["*attn1.to_q", "*attn2.to_v"], "adapter__dropout": 0.2, "optimizer__lr": 1e-2,
            "data__flip": True, "data__caption_dropout": 0.3, "data__batch_size": 1,
            "data__cache_dir": str(bench.tmp / "cache"), "checkpoint__every_steps": 2,
        } | overrides
    )  # fmt: skip


def two_processes(bench: Workbench, config: dict, *arguments: str, script: str = "train.py") -> subprocess.Popen:
    path = bench.write(config, f"{Path(config['run']['output_dir']).name}.toml")
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", script,
         "--config", str(path), *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def finish(process: subprocess.Popen, *, status: int = 0) -> str:
    _, errors = process.communicate(timeout=240)
    assert (process.returncode != 0) == (status != 0), errors[-3000:]
    return errors


def assert_same_course(bench: Workbench, out: str, other: str) -> None:
    one, two = metrics_of(bench.tmp / out), metrics_of(bench.tmp / other)
    assert [(e["step"], e["epoch"], e["images"], e["lr"]) for e in one] == [
        (e["step"], e["epoch"], e["images"], e["lr"]) for e in two
    ]
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=LOSS_TOLERANCE), a["step"]
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=NORM_TOLERANCE), a["step"]


def test_two_processes_and_one_take_turns(bench: Workbench) -> None:
    """1 -> 2 -> 1: every checkpoint goes on under the other number, with the losses of a run of one process."""
    train(configs.parse(tree(bench, "one", processes=1)), resume_from=None)
    train(configs.parse(tree(bench, "turns", processes=1, run__stop_after=2)), resume_from="auto")
    said = two_processes(bench, tree(bench, "turns", processes=2, run__stop_after=4), "--resume_from", "auto")
    finish(said)
    assert store.steps(bench.tmp / "turns" / "checkpoints")[-1] == 4
    train(configs.parse(tree(bench, "turns", processes=1)), resume_from="auto")
    assert_same_course(bench, "one", "turns")


def test_the_same_global_batch_in_other_micro_batches(bench: Workbench) -> None:
    """Five photos of one bucket, four to an update: the same samples in the same order however they are cut."""
    cuts = [(4, 1), (2, 2), (1, 4)]
    for batch_size, accumulation in cuts:
        out = f"{batch_size}-{accumulation}"
        # Dropout masks belong to micro-batches, so there is none here.
        overrides = {"data__bucket_step": 64, "data__batch_size": batch_size, "step__accumulation": accumulation}
        config = tree(bench, out, processes=1, adapter__dropout=0.0, **overrides)
        train(configs.parse(config), resume_from=None)
    assert [entry["images"] for entry in metrics_of(bench.tmp / "4-1")] == [4, 5, 9, 10, 14, 15]
    for batch_size, accumulation in cuts[1:]:
        assert_same_course(bench, "4-1", f"{batch_size}-{accumulation}")


def test_another_global_batch_is_refused(bench: Workbench) -> None:
    train(configs.parse(tree(bench, "out", processes=1, run__stop_after=1)), resume_from="auto")
    with pytest.raises(ValueError, match="an update had 4 micro-batches .step.accumulation x processes., now it has 2"):
        train(configs.parse(tree(bench, "out", processes=2)), resume_from="auto")


def poison(bench: Workbench, sample: str) -> None:
    """Put NaN into the cached latents of a photo."""
    with built(configs.parse(tree(bench, "unused", processes=1, step__non_finite="skip"))) as run:
        photo, bucket = run.reader.photos[sample]
        for flip in (False, True):
            key = latent_key(photo.sha256, bucket=bucket, flip=flip, fingerprint=run.reader.latent_fingerprint)
            latents = run.cache.get(key)["latents"]
            run.cache.put(key, {"latents": latents * float("nan")}, {"sample": sample})


def test_a_value_of_one_process_that_is_not_finite_is_skipped_by_both(bench: Workbench) -> None:
    """No process waits for a reduction that the other does not come to."""
    poison(bench, "0/02.jpg")
    train(configs.parse(tree(bench, "one", processes=1, step__non_finite="skip")), resume_from=None)
    finish(two_processes(bench, tree(bench, "two", processes=2, step__non_finite="skip")))
    one, two = (metrics_of(bench.tmp / out) for out in ("one", "two"))
    assert [e.get("non_finite") for e in one] == [e.get("non_finite") for e in two]
    assert [e["skipped"] for e in one].count(True) == 3 and not all(e["skipped"] for e in one)
    name = f"checkpoints/{store.folder_name(LENGTH)}/optimizer.safetensors"
    updates = [TensorFile(bench.tmp / out / name).read("group.0|step").item() for out in ("one", "two")]
    assert updates == [3, 3]


PATCHES = {
    # A loss that is not finite in one process only: both stop, with status 4.
    "loss": """
real = runs.batch_losses
def spoilt(batch, **more):
    bad = [rank == 1 and o.epoch == 1 for o in batch.occurrences]
    return torch.where(torch.tensor(bad), torch.nan, real(batch, **more))
runs.batch_losses = spoilt
""",
    # The main process alone asks for a checkpoint, and a slow disk outlasts the launcher's patience with the others.
    "usr1": """
step = Step.run
def asked(self, number, *more):
    if number == 2 and rank == 1:
        signal.raise_signal(signal.SIGUSR1)
    if number == 4 and rank == 1:
        signal.raise_signal(signal.SIGTERM)
    return step(self, number, *more)
Step.run = asked
save = store.save
def slow(*arguments):
    time.sleep(3)
    return save(*arguments)
store.save = slow
""",
    # A checkpoint that the main process cannot write ends both, with status 6.
    "disk": """
def full(*arguments):
    raise OSError(28, "No space left on device", "optimizer.safetensors")
store.save = full
""",
}


@pytest.mark.slow
@pytest.mark.parametrize(("patch", "status", "saved"), [("loss", 4, [2]), ("usr1", 143, [2, 4]), ("disk", 6, [])])
def test_what_one_process_meets_with_both_answer(bench: Workbench, patch: str, status: int, saved: list[int]) -> None:
    script = bench.tmp / "patched.py"
    script.write_text(
        "import os, signal, sys, time\nimport torch\nfrom trainer import cli, run as runs\n"
        "from trainer.checkpoint import store\nfrom trainer.step import Step\nrank = int(os.environ['RANK'])\n"
        + PATCHES[patch]
        + "status = cli.main(sys.argv[1:])\nprint(f'rank {rank} status {status}', file=sys.stderr)\nsys.exit(status)\n"
    )
    every = {"disk": 2}.get(patch, 0)
    config = tree(bench, "two", processes=2, checkpoint__every_steps=every)
    errors = finish(two_processes(bench, config, script=str(script)), status=status)
    for rank in (0, 1):
        assert f"rank {rank} status {status}" in errors, errors[-3000:]
    assert store.steps(bench.tmp / "two" / "checkpoints") == saved
    assert "the loss of" in errors if patch == "loss" else "No space left" in errors if patch == "disk" else True


@pytest.mark.slow
def test_a_signal_to_one_of_two_processes_stops_both_at_one_step(bench: Workbench) -> None:
    process = two_processes(bench, tree(bench, "two", processes=2, run__max_steps=400, checkpoint__every_steps=0))
    log = bench.tmp / "two" / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (log.exists() and log.read_text().count("\n") >= 3):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGTERM)
    process.communicate(timeout=60)
    (step,) = store.steps(bench.tmp / "two" / "checkpoints")
    assert step == len(metrics_of(bench.tmp / "two")) and step < 400
