"""Whoever reads what a run says may leave in the middle of it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

from tests.harness import ROOT, Workbench, metrics_of
from trainer.checkpoint import store


def wait_for_a_step(output: Path) -> None:
    log = output / "metrics.jsonl"
    until = time.monotonic() + 100
    while not (log.exists() and log.read_bytes().count(b"\n")):
        assert time.monotonic() < until, "no step was made"
        time.sleep(0.02)


def command(bench: Workbench, **overrides) -> tuple[list[str], Path]:
    tree = bench.tree(adapter__targets=["*attn1.to_q"], data__batch_size=1, **overrides)
    return [sys.executable, str(ROOT / "train.py"), "--config", str(bench.write(tree))], Path(tree["run"]["output_dir"])


def test_a_terminal_that_closes_ends_the_run_with_129_and_a_checkpoint(bench: Workbench) -> None:
    """The hang-up came, and the next line to the closed terminal was an error: status 1, and no checkpoint."""
    arguments, output = command(bench, run__max_steps=100_000, checkpoint__background=False)
    process, terminal = pty.fork()
    if process == 0:
        os.execve(sys.executable, arguments, os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"})
    os.set_blocking(terminal, False)
    wait_for_a_step(output)
    os.close(terminal)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    (step,) = store.steps(output / "checkpoints")
    assert store.problem(output / "checkpoints" / store.folder_name(step)) is None
    assert metrics_of(output)[-1]["step"] == step > 0


def test_a_pipe_that_nobody_reads_any_more_stops_nothing(bench: Workbench) -> None:
    """As of `train.py | head` or a `tee` that was killed."""
    arguments, output = command(bench, run__max_steps=12, checkpoint__every_steps=4)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(120) == 0
    assert len(metrics_of(output)) == 12
    files = sorted(path.name for path in (output / "adapters").glob("*.safetensors"))
    assert files == ["bear.safetensors", "bear_comfyui.safetensors"]
    assert (output / "report.html").exists()
