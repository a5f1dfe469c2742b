"""Measuring many cells with several seeds: each result is a file, what is there is kept, and cells may run side by side.

A cell is one way of training. Its results may come together in one file, which carries them to another machine.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

Result = dict[str, Any]
Results = dict[str, list[Result]]  # a cell's path -> what each seed measured


class Cell(Protocol):
    """path: the name that the results are kept under, unique in its bench."""

    @property
    def path(self) -> str: ...


@dataclass(frozen=True)
class Bench:
    """What is measured.

    script: the file that `main` is called from, for processes of its own. cells: all that there are, in the order of the
    tables. measure: (cell, seed, asked) -> what was measured, with "cell", "seed", and "machine" as a dictionary. settings:
    (cell, asked) -> what a result must agree with, by its own keys, to stand for the cell. told: (result) -> a line.
    """

    script: Path
    about: str
    cells: Sequence[Any]
    measure: Callable[[Any, int, argparse.Namespace], Result]
    settings: Callable[[Any, argparse.Namespace], Mapping[str, Any]]
    told: Callable[[Result], str]

    def read(self, out: Path) -> Results:
        """What was measured so far."""
        results: Results = {}
        for cell in self.cells:
            own = re.compile(re.escape(cell.path.replace("/", "-")) + r"-\d+\.json")
            files = sorted(file for file in out.glob("*.json") if own.fullmatch(file.name))
            if files:
                results[cell.path] = [json.loads(file.read_text()) for file in files]
        return results

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """The command line. Returns the exit status."""
        parser = argparse.ArgumentParser(description=self.about, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument(
            "--out", type=Path, required=True, help="one JSON file for each cell and seed; those there are kept"
        )
        parser.add_argument("--cells", metavar="GLOB[,GLOB]", default="*", help="only those whose name matches one of them")
        parser.add_argument("--seeds", type=int, default=3)
        parser.add_argument("--steps", type=int, help="in place of the demo's")
        parser.add_argument("--jobs", type=int, default=1, metavar="N", help="cells at a time, each in a process of its own")
        parser.add_argument(
            "--together", type=Path, metavar="FILE", help="all results in one JSON file as well; those that it holds are kept"
        )
        parser.add_argument("--beside", type=int, help=argparse.SUPPRESS)  # the --jobs of which this process is one
        asked = parser.parse_args(arguments)
        wanted = [cell for cell in self.cells if any(fnmatchcase(cell.path, glob) for glob in asked.cells.split(","))]
        if not wanted:
            parser.error(f"--cells {asked.cells!r} matches none of {', '.join(cell.path for cell in self.cells)}")
        asked.out.mkdir(parents=True, exist_ok=True)
        if asked.together and asked.together.exists():
            for path, runs in json.loads(asked.together.read_text()).items():
                for run in runs:
                    write_whole(result_file(asked.out, path, run["seed"]), run)
        missing = []
        for cell in wanted:
            files = [result_file(asked.out, cell.path, seed) for seed in range(asked.seeds)]
            settings = json.loads(json.dumps(self.settings(cell, asked)))
            for file in (file for file in files if file.exists()):
                there = json.loads(file.read_text())
                for key, value in settings.items():
                    if there[key] != value:
                        parser.error(f"{file} is of {there[key]} {key}, not of {value}: choose another --out, or delete it")
            if not all(file.exists() for file in files):
                missing.append(cell)
        failed = []
        if asked.jobs > 1:
            failed = self._side_by_side(missing, asked)
        else:
            self._one_after_the_other(missing, asked)
        if asked.together:
            write_whole(asked.together, self.read(asked.out))
        if failed:
            print(f"failed: {', '.join(failed)}", file=sys.stderr)
        return 1 if failed else 0

    def _one_after_the_other(self, cells: Sequence[Any], asked: argparse.Namespace) -> None:
        for seed in range(asked.seeds):
            for cell in cells:
                path = result_file(asked.out, cell.path, seed)
                if path.exists():
                    continue
                with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # what a run says of itself
                    result = self.measure(cell, seed, asked)
                gc.collect()
                result["machine"]["cells at a time"] = asked.beside or 1
                write_whole(path, result)
                print(f"{cell.path:<28} seed {seed}: {self.told(result)}", flush=True)
                if asked.together:
                    write_whole(asked.together, self.read(asked.out))

    def _side_by_side(self, cells: Sequence[Any], asked: argparse.Namespace) -> list[str]:
        """Each cell, with all its seeds, in a process of its own. Returns those that failed; the others go on."""
        command = [sys.executable, str(self.script.resolve()), "--out", str(asked.out), "--seeds", str(asked.seeds)]
        command += ["--beside", str(asked.jobs)] + (["--steps", str(asked.steps)] if asked.steps else [])
        environment = os.environ | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // asked.jobs))}
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the cells, below
        waiting, running, failed, there = list(cells), {}, [], None
        try:
            while waiting or running:
                while waiting and len(running) < asked.jobs:
                    cell = waiting.pop(0)
                    running[cell.path] = subprocess.Popen([*command, "--cells", cell.path], env=environment)
                time.sleep(0.2)
                for path in [path for path, process in running.items() if process.poll() is not None]:
                    if running.pop(path).returncode:
                        failed.append(path)
                # A run may be cut off at any time: what it measured so far is together already.
                if asked.together and there != (there := sorted(asked.out.glob("*.json"))):
                    write_whole(asked.together, self.read(asked.out))
        finally:
            for process in running.values():
                process.kill()  # while it builds a run it would only note a signal; results are written whole
            for process in running.values():
                process.wait()
        return failed


def result_file(out: Path, path: str, seed: int) -> Path:
    return out / f"{path.replace('/', '-')}-{seed}.json"


def write_whole(path: Path, value: Any) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    temporary.rename(path)
