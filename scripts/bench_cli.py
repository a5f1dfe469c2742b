"""train.py beside a plain diffusers + PEFT loop (scripts/plain_loop.py): time to the first step, time to train, memory.

    python scripts/bench_cli.py                 # three rounds of LoRA and DoRA, 200 steps each

Both sides train the same tiny SDXL checkpoint on the same photos with the same settings, each run in a fresh process
with fresh folders, one after the other in turns. The printed ratios are ours / plain within a round, so that a machine
that slows down over the benchmark does not favour a side. One uncounted run of each side comes first: it fills the page
cache and the bytecode files. Both sides must have trained on as many images, else the comparison is refused.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
RESOLUTION, BATCH, RANK, LR, SEED = 64, 2, 8, 1e-4, 0

# As plain_loop.py does it: square crops (a bucket step as large as the resolution leaves one bucket), no caption
# dropout, no validation, one checkpoint at the end. TensorBoard and the second adapter format stay on, as by default.
CONFIG = """
[run]
name = "bench"
output_dir = {output_dir}
seed = {seed}
max_steps = {steps}

[model]
family = "sdxl"
path = {model}

[model.components.unet]
dtype = "bf16"

[model.components.text_encoder]
dtype = "bf16"

[model.components.text_encoder_2]
dtype = "bf16"

[precision]
compute = "bf16"

[adapter]
type = "{kind}"
rank = {rank}
alpha = {rank}
targets = "attention+mlp"

[data]
resolution = {resolution}
bucket_step = {resolution}
batch_size = {batch}
caption_dropout = 0.0
cache_dir = {cache_dir}

[[data.sources]]
path = {data}

[optimizer]
name = "adamw"
lr = {lr}

[schedule]
name = "constant"
warmup = 0

[step]
max_grad_norm = 1.0

[checkpoint]
every_steps = 0

[validation]
every_steps = 0
"""


@dataclass(frozen=True)
class Measured:
    """One process. Seconds from its start; peak_bytes: the largest resident memory of the process and its children."""

    first_step: float
    saved: float
    exit: float
    peak_bytes: int
    images: int

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


def run_process(command: list[str], log: Path) -> tuple[float, float, int]:
    """Run `command`; (start, end) as Unix times, and its peak resident bytes. On failure exits with the log."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with open(log, "wb") as output:
        start = time.time()
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        end = time.time()
    process.returncode = os.waitstatus_to_exitcode(status)  # wait4 has reaped it, Popen must not wait again
    if process.returncode:
        sys.exit(
            f"{' '.join(command)}\nended with status {process.returncode}:\n{log.read_text(errors='replace')[-4000:]}"
        )
    return start, end, usage.ru_maxrss * 1024  # kibibytes on Linux


def run_plain(folder: Path, model: Path, data: Path, kind: str, steps: int) -> Measured:
    command = [
        sys.executable, str(SCRIPTS / "plain_loop.py"), "--model", str(model), "--data", str(data),
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


def run_ours(folder: Path, model: Path, data: Path, kind: str, steps: int) -> Measured:
    output = folder / "out"
    config = folder / "bench.toml"
    values = {"output_dir": output, "cache_dir": folder / "cache", "model": model, "data": data}
    quoted = {key: json.dumps(str(path)) for key, path in values.items()}
    numbers = {"steps": steps, "seed": SEED, "rank": RANK, "resolution": RESOLUTION, "batch": BATCH, "lr": LR}
    config.write_text(CONFIG.format(kind=kind, **quoted, **numbers), encoding="utf-8")
    command = [sys.executable, str(ROOT / "train.py"), "--config", str(config)]
    start, end, peak = run_process(command, folder / "log.txt")
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    assert (first["step"], last["step"]) == (1, steps)
    saved = max(file.stat().st_mtime for file in (output / "adapters").glob("*.safetensors"))
    return Measured(first["time"] - start, saved - start, end - start, peak, last["images"])


def compare(work: Path, model: Path, data: Path, kind: str, steps: int, rounds: int) -> list[tuple[Measured, Measured]]:
    """(plain, ours) of each round, the two sides in turns."""
    sides = {"plain": run_plain, "ours": run_ours}
    pairs = []
    for round_number in range(rounds + 1):
        warming_up = round_number == 0
        runs = {}
        for side, run in sides.items():
            folder = work / f"{kind}-{round_number}-{side}"
            folder.mkdir()
            runs[side] = run(folder, model, data, kind, 2 if warming_up else steps)
            shown = runs[side]
            label = "warm-up" if warming_up else f"round {round_number}"
            times = f"first step {shown.first_step:.2f} s, then {shown.training:.2f} s, in all {shown.exit:.2f} s"
            print(f"{kind} {label} {side}: {times}", file=sys.stderr)
        if runs["plain"].images != runs["ours"].images:
            sys.exit(f"not comparable: plain trained on {runs['plain'].images} images, ours on {runs['ours'].images}")
        if not warming_up:
            pairs.append((runs["plain"], runs["ours"]))
    return pairs


def table(kind: str, pairs: list[tuple[Measured, Measured]]) -> str:
    rounds = "ours / plain by round"
    lines = [f"| {kind} | plain | ours | {rounds} | median ratio |", "|---|---|---|---|---|"]
    for label, value, unit in FIGURES:
        plain, ours = ([value(pair[side]) for pair in pairs] for side in (0, 1))
        ratios = [b / a for a, b in zip(plain, ours, strict=True)]
        digits = 2 if unit == "s" else 0
        lines.append(
            f"| {label} | {statistics.median(plain):.{digits}f} {unit} | {statistics.median(ours):.{digits}f} {unit} "
            f"| {', '.join(f'{ratio:.2f}' for ratio in ratios)} | {statistics.median(ratios):.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--types", nargs="+", choices=("lora", "dora"), default=["lora", "dora"])
    parser.add_argument("--data", type=Path, default=ROOT / "examples" / "bear_plushie")
    args = parser.parse_args()
    if args.rounds < 1 or args.steps < 2:
        parser.error("--rounds must be at least 1 and --steps at least 2")

    with tempfile.TemporaryDirectory(prefix="bench-cli-") as temporary:
        work = Path(temporary)
        model = work / "tiny-sdxl"
        maker = [sys.executable, str(SCRIPTS / "make_model.py"), "--size", "tiny"]
        maker += ["--family", "sdxl", "--layout", "diffusers"]
        run_process([*maker, str(model)], work / "make.txt")
        tables = [
            table(kind, compare(work, model, args.data.resolve(), kind, args.steps, args.rounds)) for kind in args.types
        ]
    print(
        f"Tiny SDXL, {args.steps} steps, batch {BATCH}, {RESOLUTION} px, rank {RANK}, attention+mlp, bf16 base; "
        f"{os.cpu_count()} CPU cores, medians of {args.rounds} rounds.\n"
    )
    print("\n\n".join(tables))


if __name__ == "__main__":
    main()
