"""What the pocket SDXL's loss, gradient norm and weights do at the right learning rate, far above it and far below.

    python scripts/bench/divergence.py FOLDER [--steps 90] [--set KEY=VALUE ...]

Prints a row for each rate: the largest loss and gradient norm, as windows of trainer/verdict.py, in those of the first
window; how far the block that moved most is from where it was; when the run warned; what it was called in the end.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from trainer.metrics import read_lines
from trainer.verdict import Course

ROOT = Path(__file__).resolve().parents[2]
RIGHT = 2e-3  # of configs/pocket_sdxl.toml
RATES = (RIGHT, 10 * RIGHT, 100 * RIGHT, 1000 * RIGHT, 1e-9)


@dataclass(frozen=True)
class Run:
    """loss, norm: the largest, in those of the first window. moved: as the last table has it, None where there is none.

    verdict: "" of a run that ended before its end. said: all that the run printed.
    """

    rate: float
    loss: float
    norm: float
    moved: float | None
    warned: int | None
    verdict: str
    said: str


def run(folder: Path, rate: float, *, steps: int, settings: Sequence[str] = ()) -> Run:
    """Train the pocket SDXL at this rate; nothing is drawn."""
    out = folder / f"rate-{rate:g}"
    given = [
        f"run.output_dir={out}", f"optimizer.lr={rate}", f"run.max_steps={steps}", "validation.every_steps=0",
        "checkpoint.every_steps=0", "logging.tensorboard=false", f"data.cache_dir={folder / 'cache'}", *settings,
    ]  # fmt: skip
    command = [sys.executable, "train.py", "--config", "pocket_sdxl.toml"]
    for setting in given:
        command += ["--set", setting]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    course, losses, norms = Course(), [1.0], [1.0]
    for row in read_lines(out / "metrics.jsonl"):
        course.add(row)
        if course.now and course.first:
            losses.append(course.now[0] / course.first[0])
            norms.append(course.now[1] / course.first[1])
    said = done.stdout + done.stderr
    numbers = [float(text) / 100 for row in re.findall(r"^  unet\.\S* .*$", said, re.MULTILINE) for text in _percent(row)]
    warned = re.search(r"warning: step (\d+): the run is diverging", said)
    verdict = re.search(r"^  verdict +(\w+)", said, re.MULTILINE)
    return Run(
        rate, max(losses), max(norms), max(numbers, default=None), int(warned[1]) if warned else None,
        verdict[1] if verdict else "", said,
    )  # fmt: skip


def _percent(row: str) -> list[str]:
    return re.findall(r"([\d.]+)%", row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    given = parser.parse_args()
    print("| learning rate | largest loss | largest gradient norm | largest change of weights | warned at step | called |")
    print("|---|---|---|---|---|---|")
    for rate in RATES:
        found = run(given.folder, rate, steps=given.steps, settings=given.settings)
        moved = "-" if found.moved is None else f"{found.moved:.3%}"
        called = found.verdict or "stopped: not finite"
        print(f"| {rate:g} | {found.loss:.3g} | {found.norm:.3g} | {moved} | {found.warned or '-'} | {called} |", flush=True)


if __name__ == "__main__":
    main()
