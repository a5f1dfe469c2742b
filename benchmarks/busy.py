"""The demo beside other programs: what a step takes while N endless loops want the cores, as before and as now.

    python benchmarks/busy.py [--loops 0 2 4] [--rounds 5] [--steps 30] [--limit 90] [--json FILE]

The two sides differ in how OpenMP's threads wait for one another (workbench/commands/environment.py): "spinning" is the
default of GNU's OpenMP, "chosen" is what the program chooses. They run in turns, each in a process of its own, on two cores.
A run is the demo's, without its samples; its figure is the median of --steps steps beside the loops, or of those that were
done within --limit seconds. Printed are the medians of the rounds, now / before within a round, and each side over its own
median without loops.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SIDES = {"spinning": {"GOMP_SPINCOUNT": "300000"}, "chosen": {}}
CHOSEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # what a user may have set
SKIPPED = 2  # steps before the loops begin: the first ones also fill caches
LOOP = "while True: pass"


@contextmanager
def endless_loops(count: int) -> Iterator[Callable[[signal.Signals], None]]:
    """`count` processes that want a core each, with this process's priority; what is given sends each a signal."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(count)]
    time.sleep(0.5)  # they have begun

    def signalled(signum: signal.Signals) -> None:
        for loop in loops:
            loop.send_signal(signum)

    try:
        yield signalled
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def seconds_of_a_step(side: str, loops: int, steps: int, limit: float) -> float:
    """Train the demo's DoRA in a process of its own; the median seconds of its steps beside the loops.

    The loops run for the program's first second, since it chooses by them, and again after SKIPPED steps: a start beside
    four, spinning, takes minutes. One more step is not counted. After `limit` seconds beside them the run is ended: the
    figure is then of the steps that were done, or the limit itself, less than the truth, where none was.
    """
    with tempfile.TemporaryDirectory(prefix="busy-") as folder:
        command = [sys.executable, str(ROOT / "train.py"), "--config", "pocket_sdxl.toml"]
        for key, value in {
            "run.max_steps": SKIPPED + 1 + steps, "run.output_dir": folder, "validation.every_steps": 0,
            "validation.samples": "[]", "checkpoint.every_steps": 0, "checkpoint.every_minutes": 0, "run.device": "cpu",
        }.items():  # fmt: skip
            command += ["--set", f"{key}={value}"]
        inherited = {key: value for key, value in os.environ.items() if key not in CHOSEN}
        log, said = Path(folder) / "metrics.jsonl", Path(folder) / "said.txt"
        with endless_loops(loops) as all_of_them, said.open("w") as out:
            run = subprocess.Popen(command, cwd=ROOT, env=inherited | SIDES[side], stdout=out, stderr=out)
            try:
                time.sleep(1)
                all_of_them(signal.SIGSTOP)
                waited(run, log, SKIPPED, limit=math.inf)
                all_of_them(signal.SIGCONT)
                waited(run, log, SKIPPED + 1 + steps, limit=limit)
            finally:
                run.kill()
                run.wait()
        taken = [json.loads(line)["seconds"] for line in lines_of(log)]
        if len(taken) < SKIPPED:
            sys.exit(f"{' '.join(command)}\nended before its steps:\n{said.read_text()[-4000:]}")
    return statistics.median(taken[SKIPPED + 1 :] or [limit])


def waited(run: subprocess.Popen[bytes], log: Path, steps: int, *, limit: float) -> None:
    """Return once the log has so many steps, the run has ended, or `limit` seconds have passed."""
    end = time.monotonic() + limit
    while len(lines_of(log)) < steps and run.poll() is None and time.monotonic() < end:
        time.sleep(0.2)


def lines_of(log: Path) -> list[str]:
    """The whole lines of a file that may still be written, or not be there yet."""
    return log.read_text(encoding="utf-8").rpartition("\n")[0].splitlines() if log.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--loops", type=int, nargs="+", default=[0, 2, 4], help="with 0 first: the others are compared with it"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--limit", type=float, default=90, help="seconds of a run beside the loops")
    parser.add_argument("--json", type=Path, help="write the figures of all rounds to this file")
    args = parser.parse_args()
    if args.steps < 1 or args.limit <= 0 or args.rounds < 1 or args.loops[0] != 0:
        parser.error("give at least one step and one round, some seconds, and 0 as the first number of loops")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])

    took: dict[int, dict[str, list[float]]] = {count: {side: [] for side in SIDES} for count in args.loops}
    for number in range(args.rounds):
        for count in args.loops:
            for side in SIDES if number % 2 else reversed(SIDES):
                took[count][side].append(seconds_of_a_step(side, count, args.steps, args.limit))
                print(f"round {number + 1}, {count} loops, {side}: {took[count][side][-1]:.3f} s a step", file=sys.stderr)
    if args.json:
        about = {"date": datetime.now(UTC).date().isoformat(), "steps": args.steps, "cores": 2, "seconds of a step": took}
        args.json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    medians = {count: {side: statistics.median(of) for side, of in sides.items()} for count, sides in took.items()}
    print("| loops | spinning | chosen | chosen / spinning | spinning / without loops | chosen / without loops |")
    print("|---|---|---|---|---|---|")
    for count, of in medians.items():
        within = statistics.median(b / a for a, b in zip(took[count]["spinning"], took[count]["chosen"], strict=True))
        over = " | ".join(f"{of[side] / medians[0][side]:.2f}" for side in SIDES)
        print(f"| {count} | {of['spinning']:.3f} s | {of['chosen']:.3f} s | {within:.3f} | {over} |")


if __name__ == "__main__":
    main()
