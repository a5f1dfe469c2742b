"""train.py beside a plain diffusers + PEFT loop (plain_loop.py): time to the first step, time to train, memory.

    python benchmarks/bench_cli.py                                    # three rounds of LoRA and DoRA, 200 steps each
    python benchmarks/bench_cli.py --against COMMIT [--json FILE]     # this tree beside an earlier one, 15 rounds

Both sides train the same tiny SDXL checkpoint on the same photos with the same settings, each run in a fresh process
with fresh folders, one after the other in turns. The printed ratios are ours / plain within a round, so that a machine
that slows down over the benchmark does not favour a side. One uncounted run of each side comes first: it fills the page
cache and the bytecode files. Both sides must have trained on as many images, else the comparison is refused.

--against takes the other side from a git worktree of COMMIT, each with its own trainer and the same model, the one of a
round that goes first in turn. For a figure with values now_i and then_i in round i it prints exp(mean of log(now_i / then_i))
and its 95 % interval by Student's t: exp(mean +- t(0.975, n - 1) s / sqrt(n)), s the standard deviation of the n logarithms.
An interval whose lower end is above 1 says that this tree is slower; a slow spell of the machine makes it wider.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import pages  # noqa: E402
from tests.proofs.shared import PHOTOS, make_models, worktree  # noqa: E402
from workbench.pages.student import critical  # noqa: E402

RESOLUTION, BATCH, RANK, LR, SEED = 64, 2, 8, 1e-4, 0
WARM_UP = 10  # steps of a process whose time is not counted to a step's

# As plain_loop.py does it: square crops (a bucket step as large as the resolution leaves one bucket), no caption
# dropout, no validation, one checkpoint at the end. TensorBoard and the second adapter format stay on, as by default.
CONFIG = (ROOT / "benchmarks" / "templates" / "bench_cli.toml").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Measured:
    """One process. Seconds from its start; peak_bytes: the largest resident memory of the process and its children.

    step: median seconds of a step after the first WARM_UP, as metrics.jsonl has them; None for the plain loop.
    """

    first_step: float
    saved: float
    exit: float
    peak_bytes: int
    images: int
    step: float | None = None

    @property
    def training(self) -> float:
        """From the end of step 1 to the saved adapter."""
        return self.saved - self.first_step


# What the table shows: label, value of a run, unit.
FIGURES = (
    ("process start to end of step 1", lambda run: run.first_step, "s"),
    ("end of step 1 to saved adapter", lambda run: run.training, "s"),
    ("whole process", lambda run: run.exit, "s"),
    ("peak resident memory", lambda run: run.peak_bytes / 2**20, "MiB"),
)
AGAINST = (
    ("process start to end of step 1", lambda run: run.first_step),
    ("a step", lambda run: run.step),
    ("whole process", lambda run: run.exit),
)


def run_process(command: list[str], log: Path, tree: Path = ROOT) -> tuple[float, float, int]:
    """Run `command` in `tree`; (start, end) as Unix times, and its peak resident bytes. On failure exits with the log."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(tree)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # a fresh worktree would compile itself anew in each process
    with open(log, "wb") as output:
        start = time.time()
        process = subprocess.Popen(command, cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        end = time.time()
    process.returncode = os.waitstatus_to_exitcode(status)  # wait4 has reaped it, Popen must not wait again
    if process.returncode:
        sys.exit(f"{' '.join(command)}\nended with status {process.returncode}:\n{log.read_text(errors='replace')[-4000:]}")
    return start, end, usage.ru_maxrss * 1024  # kibibytes on Linux


def run_plain(folder: Path, *, model: Path, data: Path, kind: str, steps: int) -> Measured:
    command = [
        sys.executable, str(ROOT / "benchmarks" / "plain_loop.py"), "--model", str(model), "--data", str(data),
        "--out", str(folder / "out"), "--steps", str(steps), "--rank", str(RANK), "--type", kind, "--lr", str(LR),
        "--batch_size", str(BATCH), "--resolution", str(RESOLUTION), "--dtype", "bf16", "--seed", str(SEED),
    ]  # fmt: skip
    log = folder / "log.txt"
    start, end, peak = run_process(command, log)
    events = {}
    for line in log.read_text(errors="replace").replace("\r", "\n").splitlines():
        # The progress bar shares the file; an event is found wherever its line begins.
        if "EVENT " in line:
            *name, value = line.partition("EVENT ")[2].split()
            events[" ".join(name)] = float(value)
    return Measured(events["step 1"] - start, events["saved"] - start, end - start, peak, int(events["images"]))


def run_ours(folder: Path, *, model: Path, data: Path, kind: str, steps: int, tree: Path = ROOT) -> Measured:
    output = folder / "out"
    config = folder / "bench.toml"
    values = {"output_dir": output, "cache_dir": folder / "cache", "model": model, "data": data}
    quoted = {key: json.dumps(str(path)) for key, path in values.items()}
    numbers = {"steps": steps, "seed": SEED, "rank": RANK, "resolution": RESOLUTION, "batch": BATCH, "lr": LR}
    config.write_text(CONFIG.format(kind=kind, **quoted, **numbers), encoding="utf-8")
    command = [sys.executable, str(tree / "train.py"), "--config", str(config)]
    start, end, peak = run_process(command, folder / "log.txt", tree)
    entries = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [entry["step"] for entry in entries] == list(range(1, steps + 1))
    saved = max(file.stat().st_mtime for file in (output / "adapters").glob("*.safetensors"))
    first, last = entries[0]["time"] - start, entries[-1]["images"]
    step = statistics.median([entry["seconds"] for entry in entries[WARM_UP:]] or [math.nan])
    return Measured(first, saved - start, end - start, peak, last, step)


def compare(
    work: Path, sides: dict[str, Callable[..., Measured]], *, kind: str, steps: int, rounds: int
) -> list[dict[str, Measured]]:
    """The sides' runs in each round, the one that goes first in turn. A side: (folder, kind=, steps=) -> Measured."""
    done = []
    for round_number in range(rounds + 1):
        warming_up = round_number == 0
        runs = {}
        for side in sides if round_number % 2 else reversed(sides):
            folder = work / f"{kind}-{round_number}-{side}"
            folder.mkdir()
            runs[side] = shown = sides[side](folder, kind=kind, steps=2 if warming_up else steps)
            label = "warm-up" if warming_up else f"round {round_number}"
            times = f"first step {shown.first_step:.2f} s, then {shown.training:.2f} s, in all {shown.exit:.2f} s"
            print(f"{kind} {label} {side}: {times}", file=sys.stderr)
        images = {side: run.images for side, run in runs.items()}
        if len(set(images.values())) > 1:
            sys.exit(f"not comparable: the sides trained on different numbers of images: {images}")
        if not warming_up:
            done.append(runs)
    return done


def table(kind: str, rounds: list[dict[str, Measured]]) -> str:
    rows = []
    for label, value, unit in FIGURES:
        plain, ours = ([value(runs[side]) for runs in rounds] for side in ("plain", "ours"))
        ratios = [b / a for a, b in zip(plain, ours, strict=True)]
        digits = 2 if unit == "s" else 0
        shown = [f"{statistics.median(side):.{digits}f} {unit}" for side in (plain, ours)]
        rows.append([label, *shown, ", ".join(f"{ratio:.2f}" for ratio in ratios), f"{statistics.median(ratios):.2f}"])
    return pages.table([kind, "plain", "ours", "ours / plain by round", "median ratio"], rows)


# --- against an earlier commit ------------------------------------------------------------------------------------------


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """(geometric mean, lower and upper end of its 95 % interval) of at least two ratios; see the top of this file."""
    logs = [math.log(ratio) for ratio in ratios]
    mean, half = statistics.mean(logs), statistics.stdev(logs) * critical(len(logs) - 1) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def ratios_of(rounds: list[dict[str, Measured]]) -> dict[str, dict[str, Any]]:
    """By figure: the ratio now / then with its interval, and what it is made of, by round, in seconds."""
    found = {}
    for label, value in AGAINST:
        then, now = ([value(runs[side]) for runs in rounds] for side in ("then", "now"))
        ratios = [b / a for a, b in zip(then, now, strict=True)]
        ratio, low, high = interval(ratios)
        found[label] = {"ratio": ratio, "low": low, "high": high, "ratios": ratios, "then": then, "now": now}
    return found


def against_table(kind: str, figures: dict[str, dict[str, Any]]) -> str:
    rows = []
    for label, of in figures.items():
        medians = [f"{statistics.median(of[side]):.4g} s" for side in ("then", "now")]
        rows.append([label, *medians, f"{of['ratio']:.3f}", f"{of['low']:.3f} to {of['high']:.3f}"])
    return pages.table([kind, "then", "now", "now / then", "95 % interval"], rows)


def revision(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", metavar="COMMIT", help="compare with this commit in place of the plain loop")
    parser.add_argument("--rounds", type=int, help="3; with --against 15")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--types", nargs="+", choices=("lora", "dora"), default=["lora", "dora"])
    parser.add_argument("--data", type=Path, default=PHOTOS)
    parser.add_argument(
        "--limit", type=float, default=1.02, help="with --against: exit status 1 where an interval's lower end is above it"
    )
    parser.add_argument("--json", type=Path, help="with --against: write the figures of all rounds to this file")
    args = parser.parse_args()
    rounds = args.rounds or (15 if args.against else 3)
    if rounds < (2 if args.against else 1) or args.steps < (2 * WARM_UP if args.against else 2):
        parser.error(f"--rounds and --steps must be at least 1 and 2; with --against at least 2 and {2 * WARM_UP}")

    with tempfile.TemporaryDirectory(prefix="bench-cli-") as temporary, ExitStack() as stack:
        work = Path(temporary)
        model = make_models(work, ["sdxl"]) / "sdxl"
        given = {"model": model, "data": args.data.resolve()}
        if args.against:
            earlier = stack.enter_context(worktree(args.against, work / "then"))
            sides = {"then": partial(run_ours, **given, tree=earlier), "now": partial(run_ours, **given)}
        else:
            sides = {"plain": partial(run_plain, **given), "ours": partial(run_ours, **given)}
        done = {kind: compare(work, sides, kind=kind, steps=args.steps, rounds=rounds) for kind in args.types}
    print(
        f"Tiny SDXL, {args.steps} steps, batch {BATCH}, {RESOLUTION} px, rank {RANK}, attention+mlp, bf16 base; "
        f"{os.cpu_count()} CPU cores, medians of {rounds} rounds.\n"
    )
    if not args.against:
        print("\n\n".join(table(kind, each) for kind, each in done.items()))
        return
    figures = {kind: ratios_of(each) for kind, each in done.items()}
    print("\n\n".join(against_table(kind, each) for kind, each in figures.items()))
    if args.json:
        about = {
            "then": revision("rev-parse", f"{args.against}^{{commit}}"), "now": revision("rev-parse", "HEAD"),
            "now has uncommitted changes": bool(revision("status", "--porcelain", "--untracked-files=no")),
            "rounds": rounds, "steps": args.steps, "warm-up steps": WARM_UP, "cpu cores": os.cpu_count(),
            "date": datetime.now(UTC).date().isoformat(),
            "interval": "95 %, Student's t over the logarithms of the rounds' ratios",
        }  # fmt: skip
        args.json.write_text(json.dumps(about | {"figures": figures}, indent=1) + "\n", encoding="utf-8")
    slower = [f"{kind}: {label}" for kind, each in figures.items() for label, of in each.items() if of["low"] > args.limit]
    if slower:
        sys.exit(f"slower than {args.against} by more than chance, {args.limit:g} allowed: {'; '.join(slower)}")


if __name__ == "__main__":
    main()
