"""CPU time of the page of many runs (scripts/watch.py): made first, loaded again without news, and after one run went on.

    python benchmarks/watching.py [--runs 100] [--steps 2000]

Each run has a log of so many steps, and every third another seed alone. Prints seconds of CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.base.run_layout import Layout
from workbench.watch.server import Runs


def row(step: int, drawn: random.Random) -> str:
    """A line of metrics.jsonl."""
    numbers = {"loss": drawn.random(), "lr": 1e-4, "grad_norm": drawn.random(), "seconds": 0.5, "peak_bytes": 2**30}
    return json.dumps({"step": step, "epoch": step // 100, "images": step, "time": 1.7e9 + step / 2, **numbers}) + "\n"


def write_run(folder: Path, place: int, steps: int) -> None:
    layout, drawn = Layout(folder), random.Random(place)
    folder.mkdir()
    rate = 1e-5 * (1 + place // 3)
    layout.config.write_text(f"[run]\nseed = {place % 3}\nmax_steps = {steps}\n\n[optimizer]\nlr = {rate}\n")
    layout.metrics.write_text("".join(row(step, drawn) for step in range(1, steps + 1)))


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=2000)
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        for place in range(asked.runs):
            write_run(Path(folder) / f"run-{place:03}", place, asked.steps)
        runs = Runs([Path(folder)])
        print(f"first page: {seconds(runs.page):.2f} s")
        print(f"reload: {min(seconds(runs.page) for _ in range(5)):.3f} s")
        with open(Layout(Path(folder) / "run-000").metrics, "a") as log:
            log.write(row(asked.steps + 1, random.Random()))
        print(f"reload, one run went on: {seconds(runs.page):.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
