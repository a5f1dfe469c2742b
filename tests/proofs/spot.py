"""A spot machine without a cloud: taken away again and again, and each time a new one with an empty disk goes on.

    python tests/proofs/spot.py                 # 20 machines are taken away, with a mirror and with a volume; 20 minutes
    python tests/proofs/spot.py --keeps mirror --losses 5 --seed 3

A machine is a process with a folder of its own, which goes with it. Half of them get notice: SIGTERM, and SIGKILL 30 s
later. The others are gone at once. What is left is only the mirror (a folder behind a file:// URL, as a bucket would be), or
only the volume with the run's output. Every machine starts the same command, with --resume_from auto. The moments are drawn
from the seed: after so many steps of that machine, at a random time of the next.

At the end the adapter file and the last checkpoint are compared with those of a run that was never stopped. What was lost is
printed: steps that were made twice, and seconds between a loss and the first new step.

Exit status 1 where a byte differs. Linux, on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.harness import Workbench  # noqa: E402
from tests.proofs.shared import STARTED, make_models  # noqa: E402

NOTICE = 30.0  # seconds between SIGTERM and SIGKILL
KEEPS = ("mirror", "volume")
FILES = ("adapter.safetensors", "optimizer.safetensors", "norms.safetensors")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "SOURCE_DATE_EPOCH": STARTED, "CUDA_VISIBLE_DEVICES": "",
    "PYTHONUNBUFFERED": "1",
}  # fmt: skip
STEPS_OF_A_MACHINE = (2, 9)  # the fewest and the most that one makes before it is taken away


@dataclass(frozen=True)
class Machine:
    """What became of one. first, last: steps that it made. seconds: from its start to its first step. notice: whether it had
    any. status: how its process ended."""

    first: int
    last: int
    seconds: float
    notice: bool
    status: int


class Spot:
    """A run on machines that are taken away. keeps: what outlives them."""

    def __init__(self, bench: Workbench, keeps: str, steps: int) -> None:
        self.folder, self.keeps, self.count = bench.tmp / keeps, keeps, 0
        self.folder.mkdir(parents=True)
        tree = bench.tree(
            "flux", adapter__type="dora", run__max_steps=steps, checkpoint__every_steps=3, checkpoint__keep_last=2,
            data__cache_dir="cache", run__output_dir="outputs" if keeps == "mirror" else str(self.folder / "volume"),
            model__components={"transformer": {"dtype": "fp8_e4m3"}},
        )  # fmt: skip
        if keeps == "mirror":
            tree["checkpoint"]["mirror"] = f"file://{self.folder / 'bucket'}"
        self.config = bench.write(tree, f"{keeps}.toml")

    def start(self) -> tuple[subprocess.Popen[bytes], Path]:
        """(a new machine's process, its disk)."""
        self.count += 1
        disk = self.folder / f"machine-{self.count}"
        disk.mkdir()
        command = [sys.executable, str(ROOT / "train.py"), "--config", str(self.config), "--resume_from", "auto"]
        with open(self.folder / f"machine-{self.count}.log", "wb") as log:
            return subprocess.Popen(command, cwd=disk, env=os.environ | ENVIRONMENT, stdout=log, stderr=log), disk

    def output(self, disk: Path) -> Path:
        """The run's output, as a machine sees it."""
        return disk / "outputs" if self.keeps == "mirror" else self.folder / "volume"

    def take_away(self, drawn: random.Random) -> Machine | None:
        """One machine, from its start to its loss. None where the run ended before that."""
        process, disk = self.start()
        metrics, log, began = self.output(disk) / "metrics.jsonl", self.folder / f"machine-{self.count}.log", time.time()
        wanted, notice = drawn.randint(*STEPS_OF_A_MACHINE), drawn.random() < 0.5
        resumed, seconds = None, None
        while process.poll() is None:
            resumed = resumed_at(log) if resumed is None else resumed
            made = steps_in(metrics, began)
            seconds = time.time() - began if made and seconds is None else seconds
            if resumed is not None and made >= resumed + wanted:
                break
            time.sleep(0.02)
        if process.poll() is None:
            time.sleep(drawn.random() * 0.3)
            process.send_signal(signal.SIGTERM if notice else signal.SIGKILL)
            try:
                process.wait(NOTICE)
            except subprocess.TimeoutExpired:
                process.kill()
        status, last = process.wait(), steps_in(metrics, began)
        shutil.rmtree(disk)
        if status == 0:
            return None
        if resumed is None or seconds is None:
            sys.exit(f"machine {self.count} ended with status {status} before a step: {log}")
        return Machine(resumed + 1, last, seconds, notice, status)

    def finish(self) -> dict[str, bytes]:
        """Let the last machine run to its end. Returns what it leaves, by name."""
        process, disk = self.start()
        if process.wait():
            sys.exit(f"the last machine ended with status {process.returncode}: {self.folder / f'machine-{self.count}.log'}")
        return left(self.output(disk))


def steps_in(metrics: Path, since: float) -> int:
    """The last step of a log that was made since that time; 0 without one."""
    lines = metrics.read_bytes().splitlines(keepends=True) if metrics.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return max((entry["step"] for entry in entries if entry.get("time", 0) >= since), default=0)


def resumed_at(log: Path) -> int | None:
    """The step that a machine goes on from, 0 of a new run; None before it has the model."""
    said = log.read_text(errors="replace")
    if "layers stored as" not in said:
        return None
    at = [line for line in said.splitlines() if line.startswith("resuming ")]
    return int(at[0].rpartition(" at step ")[2].split(";")[0]) if at else 0


def left(output: Path) -> dict[str, bytes]:
    """The bytes that do not depend on the time: adapter files, and the last checkpoint."""
    last = max((output / "checkpoints").glob("step-*"))
    paths = [*(output / "adapters").glob("*.safetensors"), *(last / name for name in FILES)]
    return {str(path.relative_to(output)): path.read_bytes() for path in paths}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keeps", choices=KEEPS, action="append", help="what outlives a machine; both, one after the other")
    parser.add_argument("--losses", type=int, default=20, help="how many machines are taken away")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    steps, wrong = 12 + 9 * asked.losses, False
    with tempfile.TemporaryDirectory(prefix="spot-") as temporary:
        bench = Workbench(make_models(Path(temporary) / "models", ["flux"]), Path(temporary))
        whole = Spot(Workbench(bench.models, Path(temporary) / "whole"), "volume", steps)
        expected = whole.finish()
        for keeps in asked.keeps or KEEPS:
            spot, drawn, machines = Spot(bench, keeps, steps), random.Random(asked.seed), []
            while len(machines) < asked.losses and (machine := spot.take_away(drawn)) is not None:
                machines.append(machine)
                again = max(0, machines[-2].last - machine.first + 1) if len(machines) > 1 else 0
                print(
                    f"{keeps} {len(machines):>2}: steps {machine.first} to {machine.last}, {again} of them again, first step "
                    f"after {machine.seconds:.1f} s, {'notice' if machine.notice else 'none'}, status {machine.status}",
                    flush=True,
                )
            same = spot.finish() == expected
            wrong |= not same or len(machines) < asked.losses
            lost = [max(0, one.last - other.first + 1) for one, other in zip(machines, machines[1:], strict=False)]
            by = {told: [n for n, m in zip(lost, machines, strict=False) if m.notice == told] for told in (True, False)}
            print(
                f"{keeps}: {len(machines)} machines lost, {sum(lost)} of {steps} steps made again "
                f"({sum(by[True])} after notice, {sum(by[False])} without), "
                f"{statistics.median(machine.seconds for machine in machines):.1f} s to a new step, "
                f"{'the same bytes' if same else 'OTHER BYTES'}",
                flush=True,
            )
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
