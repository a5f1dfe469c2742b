"""Runs several configs of one command line, each in its own process, one after the other."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer import config
from trainer.base import signals
from trainer.base.console import write
from trainer.base.errors import UserError
from trainer.base.progress import duration
from trainer.config import Config
from workbench.commands.tools import handling

PROGRAM = Path(__file__).resolve().parents[2] / "train.py"
POLL = 0.1  # seconds until a signal is passed on


@dataclass
class Queued:
    """A run of a queue. status: the exit status of its process; None: not started."""

    file: str
    config: Config
    status: int | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        result = f"status {self.status} after {duration(self.seconds)}, {self.config.run.output_dir}"
        return f"{self.file}: {'not started' if self.status is None else result}"


def queue_of(files: Sequence[str], overrides: Sequence[str]) -> list[Queued]:
    """The runs of these configs. Raises UserError for a wrong config, two with one folder, and a run of several processes."""
    if (count := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise UserError(f"--config names {len(files)} files, and WORLD_SIZE is {count}; start each run by its own command")
    runs, folders = [], dict[Path, str]()
    for file in files:
        try:
            run = Queued(file, config.load(file, list(overrides)))
        except UserError as error:
            raise UserError(f"{error}\nno run of the queue was started: --config {file}") from error
        folder = Path(run.config.run.output_dir).resolve()
        if folder in folders:
            conflict = f"--config {folders[folder]} {file}: both have run.output_dir = {run.config.run.output_dir!r}"
            raise UserError(f"{conflict}; give each its own, or write run.output_dir = 'auto'")
        folders[folder] = file
        runs.append(run)
    return runs


def run_queue(runs: Sequence[Queued], arguments: Sequence[str]) -> int:
    """Run one after the other, each in its own process; returns the largest of their statuses. A stop signal goes to the
    current run, and ends the queue. arguments: the command line's, without --config."""
    relay = Relay()
    with handling(signals.HANDLED, relay.pass_on):
        for number, run in enumerate(runs, 1):
            if relay.stop:
                break
            write(f"run {number} of {len(runs)}: {run.file} -> {run.config.run.output_dir}", whole=True)
            start = time.monotonic()
            run.status = relay.run([sys.executable, str(PROGRAM), "--config", run.file, *arguments])
            run.seconds = time.monotonic() - start
    statuses = [run.status for run in runs if run.status is not None]
    head = f"queue: {statuses.count(0)} of {len(runs)} runs ended with status 0"
    write("\n".join([head, *(f"  {run}" for run in runs)]), whole=True)
    return 128 + relay.stop if relay.stop else max(statuses)


class Relay:
    """Forwards this process's signals to a child, each once: the child has its own process group, so that a terminal's Ctrl+C
    does not reach it, too. stop: the number of the first stop signal; 0 before one."""

    def __init__(self) -> None:
        self.stop = 0
        self._waiting: list[int] = []

    def run(self, command: Sequence[str]) -> int:
        """The exit status of a command; 128 plus the signal's number if a signal ended it."""
        sys.stdout.flush()
        with subprocess.Popen(command, **({"process_group": 0} if os.name == "posix" else {})) as child:
            while True:
                while self._waiting and child.poll() is None:
                    child.send_signal(self._waiting.pop(0))
                try:
                    status = child.wait(POLL)
                except subprocess.TimeoutExpired:
                    continue
                return status if status >= 0 else 128 - status

    def pass_on(self, signum: int, frame: object) -> None:
        """Handle a signal: keep it for the child."""
        self._waiting.append(signum)
        if signum in signals.STOP:
            self.stop = self.stop or signum
