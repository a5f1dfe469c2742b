"""Several configs of one command line: a process a run, one after the other."""

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
    """A run of a queue. file: of its config. status: of its process; None where it was not started."""

    file: str
    config: Config
    status: int | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        ended = f"status {self.status} after {duration(self.seconds)}, {self.config.run.output_dir}"
        return f"{self.file}: {'not started' if self.status is None else ended}"


def queue_of(files: Sequence[str], overrides: Sequence[str]) -> list[Queued]:
    """The runs of these configs. Raises UserError, also where two have one folder, and beside other processes."""
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
            both = f"--config {folders[folder]} {file}: both have run.output_dir = {run.config.run.output_dir!r}"
            raise UserError(f"{both}; give each its own, or write run.output_dir = 'auto'")
        folders[folder] = file
        runs.append(run)
    return runs


def run_queue(runs: Sequence[Queued], arguments: Sequence[str]) -> int:
    """Run one after the other, each in a process of its own; returns the worst of their statuses. A signal that stops goes
    to the run at hand, and ends the queue. arguments: of the command line, but for --config."""
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
    """Passes this process's signals on to a child, each once: the child's group is its own, so that a terminal's Ctrl+C does
    not reach it beside this one. stop: the number of the first signal that asked to stop; 0 before one."""

    def __init__(self) -> None:
        self.stop = 0
        self._waiting: list[int] = []

    def run(self, command: Sequence[str]) -> int:
        """The exit status of a command; where a signal ended it, 128 and the signal's number."""
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
        """Keep a signal for the child."""
        self._waiting.append(signum)
        if signum in signals.STOP:
            self.stop = self.stop or signum
