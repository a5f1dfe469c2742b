"""Seconds from the start of `train.py` to what a person waits for: the help, the plan, the first config.

    python benchmarks/starts.py [--rounds 5] [--json FILE]        # four commands, each in a fresh process
    python benchmarks/starts.py --against COMMIT                  # the help and the plan beside an earlier tree, 15 rounds
    python benchmarks/starts.py --compiled --rounds 2             # one step with compiled blocks, about 5 minutes

"first line": until the first line of the help, or of the plan ("run NAME -> FOLDER"); for --new the config is on the disk
by then, which is checked. "end": until the process has ended. The models are the pocket SDXL and an SDXL checkpoint of
the published size in a sparse file (every weight is zero); --new has the ten photos of examples/bear_plushie and candle.
One uncounted round comes first: it fills the page cache and the bytecode files. --against prints now / then with its 95 %
interval as bench_cli.py does, and exits with status 1 where an interval's lower end is above --limit. --compiled trains the
pocket Flux for one step: "eager", with compiled blocks and an empty cache of programs ("cold"), and with what that left there
("warm").
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import pages  # noqa: E402
from benchmarks.bench_cli import against_table, interval, revision  # noqa: E402
from tests.proofs.shared import worktree  # noqa: E402

BOTH = ("help", "plan, pocket SDXL")  # what an earlier tree knows, too
PLAN = b"run "  # how a plan begins


@dataclass(frozen=True)
class Start:
    """One process: seconds of wall time from its start, and of user and system time to its end."""

    first_line: float
    end: float
    cpu: float


def commands(full_size: Path | None) -> dict[str, list[str]]:
    """By what is shown, the arguments of train.py, in a folder that has `photos` and `examples`."""
    plan = ["--config", "pocket_sdxl.toml", "--plan", "--set", "run.device=cpu"]
    made = {
        "help": ["--help"],
        "plan, pocket SDXL": plan,
        "new, pocket SDXL": ["--new", "photos", "--model", "examples/pocket_sdxl"],
    }
    if full_size:
        made["new, full-size SDXL"] = ["--new", "photos", "--model", str(full_size)]
    return made


def one_step(cache: Path, *, compiled: bool) -> list[str]:
    """One step of the pocket Flux. compiled: its blocks are, whose programs go to `cache` and are taken from there."""
    keys = {
        "run.device": "cpu",
        "run.max_steps": 1,
        "step.compile": "blocks" if compiled else "none",
        "data.cache_dir": cache,
    }
    return ["--config", "pocket_flux.toml", *(part for key, value in keys.items() for part in ("--set", f"{key}={value}"))]


def gather_photos(folder: Path) -> None:
    folder.mkdir()
    for source in ("bear_plushie", "candle"):
        for file in (ROOT / "examples" / source).iterdir():
            shutil.copy(file, folder / f"{source}_{file.name}")


def read_until(lines: Iterable[bytes], beginning: bytes) -> bytes:
    """The lines up to the first that begins so, with that one; all where none does."""
    found = b""
    for line in lines:
        found += line
        if line.startswith(beginning):
            break
    return found


def time_command(arguments: list[str], tree: Path, work: Path) -> Start:
    """Run train.py of `tree` in a fresh folder of `work`. Exits with what it said where it fails or leaves no config."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        (Path(folder) / "photos").symlink_to(work / "photos")
        (Path(folder) / "examples").symlink_to(tree / "examples")
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(tree), "PYTHONUNBUFFERED": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        with open(work / "errors.txt", "wb") as errors:
            started = time.monotonic()
            process = subprocess.Popen(
                [sys.executable, str(tree / "train.py"), *arguments],
                cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
            first = read_until(process.stdout, b"" if "--help" in arguments else PLAN)
            first_line = time.monotonic() - started
            config = (Path(folder) / "photos.toml").exists()
            rest = process.stdout.read()
            _, status, usage = os.wait4(process.pid, 0)
            end = time.monotonic() - started
        process.returncode = os.waitstatus_to_exitcode(status)  # wait4 has reaped it, Popen must not wait again
        if process.returncode:
            said = (first + rest + (work / "errors.txt").read_bytes()).decode(errors="replace")
            sys.exit(f"{' '.join(arguments)}\nended with status {process.returncode}:\n{said[-4000:]}")
        if "--help" not in arguments and b"\n" + PLAN not in b"\n" + first:
            sys.exit(f"{' '.join(arguments)}: there was no plan")
        if "--new" in arguments and not config:
            sys.exit(f"{' '.join(arguments)}: there was no config when the plan's first line was")
    return Start(first_line, end, usage.ru_utime + usage.ru_stime)


def measure(
    asked: Mapping[str, list[str]], trees: Mapping[str, Path], rounds: int, work: Path
) -> dict[str, dict[str, list[Start]]]:
    """By command and tree the starts of all rounds, the tree that goes first in turn."""
    took: dict[str, dict[str, list[Start]]] = {label: {side: [] for side in trees} for label in asked}
    for number in range(rounds + 1):
        for label, arguments in asked.items():
            for side in trees if number % 2 else reversed(trees):
                start = time_command(arguments, trees[side], work)
                print(f"round {number}, {label}, {side}: {start.first_line:.2f} s, {start.end:.2f} s", file=sys.stderr)
                if number:  # the first fills the caches
                    took[label][side].append(start)
    return took


FIGURES: dict[str, Callable[[Start], float]] = {
    "first line": lambda start: start.first_line,
    "end": lambda start: start.end,
    "processor": lambda start: start.cpu,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", metavar="COMMIT", help="compare the help and the plan with this commit's")
    parser.add_argument("--compiled", action="store_true", help="one step with compiled blocks, cold and warm")
    parser.add_argument("--rounds", type=int, help="5; with --against 15")
    parser.add_argument("--limit", type=float, default=1.02, help="with --against: what an interval's lower end may be")
    parser.add_argument("--json", type=Path, help="write the figures of all rounds to this file")
    args = parser.parse_args()
    rounds = args.rounds or (15 if args.against else 5)
    if rounds < 2:
        parser.error("--rounds must be at least 2")

    with tempfile.TemporaryDirectory(prefix="starts-") as temporary, ExitStack() as stack:
        work = Path(temporary)
        gather_photos(work / "photos")
        trees, full_size = {"now": ROOT}, None
        if args.compiled:
            took = {label: {"now": []} for label in ("eager", "cold", "warm")}
            for number in range(rounds):
                for label, of in took.items():
                    of["now"].append(time_command(one_step(work / f"{number}", compiled=label != "eager"), ROOT, work))
                    print(f"round {number + 1}, {label}: {of['now'][-1]}", file=sys.stderr)
        elif args.against:
            trees = {"then": stack.enter_context(worktree(args.against, work / "then")), **trees}
        else:
            full_size = work / "sdxl"
            make = ["--size", "full", "--family", "sdxl", "--layout", "diffusers", "--sparse", str(full_size)]
            subprocess.run([sys.executable, "scripts/make_model.py", *make], cwd=ROOT, check=True)
        if not args.compiled:
            asked = {label: each for label, each in commands(full_size).items() if label in BOTH or not args.against}
            took = measure(asked, trees, rounds, work)

    print(f"{os.cpu_count()} CPU cores, medians of {rounds} rounds, seconds.\n")
    slower = []
    if args.against:
        figures = {}
        for label, of in took.items():
            then, now = ([start.end for start in of[side]] for side in ("then", "now"))
            ratio, low, high = interval([b / a for a, b in zip(then, now, strict=True)])
            figures[label] = {"then": then, "now": now, "ratio": ratio, "low": low, "high": high}
            slower += [label] if low > args.limit else []
        print(against_table("command", figures))
    else:
        rows = [
            [label, *(f"{statistics.median(value(start) for start in of['now']):.2f}" for value in FIGURES.values())]
            for label, of in took.items()
        ]
        print(pages.table(["command", *FIGURES], rows))
    if args.json:
        figures = {
            label: {side: [asdict(start) for start in starts] for side, starts in of.items()} for label, of in took.items()
        }
        about = {
            "now": revision("rev-parse", "HEAD"), "against": args.against, "rounds": rounds, "cpu cores": os.cpu_count(),
            "date": datetime.now(UTC).date().isoformat(), "seconds": figures,
        }  # fmt: skip
        args.json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    if slower:
        sys.exit(f"slower than {args.against} by more than chance, {args.limit:g} allowed: {'; '.join(slower)}")


if __name__ == "__main__":
    main()
