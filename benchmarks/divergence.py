"""What the pocket SDXL's loss, gradient norm and weights do at the right learning rate, far above it and far below.

    python benchmarks/divergence.py FOLDER [--steps 90] [--rates RATE ...] [--samples] [--set KEY=VALUE ...]

Prints a row for each rate: the largest loss and gradient norm, as windows of trainer/monitoring/course.py, in those of the
first window; how far the layer that moved most is from where it was; with --samples how far the images have moved, from the
least to the most; when the run warned; what it was called in the end. Below the table stands what each run said of itself.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.monitoring.course import Course
from trainer.monitoring.metrics import read_lines

ROOT = Path(__file__).resolve().parents[1]
RIGHT = 2e-3  # of configs/pocket_sdxl.toml
RATES = (RIGHT, 10 * RIGHT, 100 * RIGHT, 1000 * RIGHT, 1e-9)


@dataclass(frozen=True)
class Run:
    """loss, norm: the largest, in those of the first window. moved: the largest ||dW|| / ||W|| of the last table, None where
    there is none. samples: by how much of their pixels images moved.

    verdict: "" of a run that ended before its end. said: all that the run printed.
    """

    rate: float
    loss: float
    norm: float
    moved: float | None
    samples: tuple[float, ...]
    warned: int | None
    verdict: str
    said: str

    @property
    def sentences(self) -> list[str]:
        """What it said of how it went."""
        return re.findall(r"^(?:warning|verdict|error): .*$", self.said, re.MULTILINE)


def run(folder: Path, rate: float, *, steps: int, samples: bool = False, settings: Sequence[str] = ()) -> Run:
    """Train the pocket SDXL at this rate. samples: whether its images are drawn, before and after."""
    out = folder / f"rate-{rate:g}"
    given = [
        f"run.output_dir={out}", f"optimizer.lr={rate}", f"run.max_steps={steps}",
        f"validation.every_steps={steps * samples}", "checkpoint.every_steps=0", "logging.tensorboard=false",
        f"data.cache_dir={folder / 'cache'}", *settings,
    ]  # fmt: skip
    command = [sys.executable, "train.py", "--config", "pocket_sdxl.toml"]
    for setting in given:
        command += ["--set", setting]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    course, losses, norms = Course(), [1.0], [1.0]
    for row in read_lines(out / "metrics.jsonl"):
        course.add(row)
        if course.latest and course.first:
            losses.append(course.latest[0] / course.first[0])
            norms.append(course.latest[1] / course.first[1])
    said = done.stdout + done.stderr
    moved = [float(text) / 100 for text in re.findall(r"^  unet\.\S* +\d+ +([\d.]+)%", said, re.MULTILINE)]
    images = [float(text) / 100 for text in re.findall(r"^  sample .* moved by .*?([\d.]+)%", said, re.MULTILINE)]
    warned = re.search(r"warning: step (\d+): the run is diverging", said)
    verdict = re.search(r"^  verdict +(\w+)", said, re.MULTILINE)
    return Run(
        rate, max(losses), max(norms), max(moved, default=None), tuple(images), int(warned[1]) if warned else None,
        verdict[1] if verdict else "", said,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, metavar="RATE")
    parser.add_argument("--samples", action="store_true")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    given = parser.parse_args()
    columns = ["learning rate", "largest loss", "largest gradient norm", "largest change of weights"]
    columns += [*(["samples moved by"] if given.samples else []), "warned at step", "called"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    sentences = []
    for rate in given.rates:
        found = run(given.folder, rate, steps=given.steps, samples=given.samples, settings=given.settings)
        row = [f"{rate:g}", f"{found.loss:.3g}", f"{found.norm:.3g}", "-" if found.moved is None else f"{found.moved:.3%}"]
        if given.samples:
            row.append(f"{min(found.samples):.2%} to {max(found.samples):.2%}" if found.samples else "-")
        row += [str(found.warned or "-"), found.verdict or "stopped: not finite"]
        print(f"| {' | '.join(row)} |", flush=True)
        sentences += ["", f"{rate:g}:", *found.sentences]
    print("\n".join(sentences))


if __name__ == "__main__":
    main()
