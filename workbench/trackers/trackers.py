"""Trackers of a run's numbers, besides metrics.jsonl: TensorBoard's event files, and Weights & Biases."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError
from trainer.checkpoint.state import Progress
from trainer.config import Config
from trainer.monitoring.metrics import Tracker, measured
from trainer.runtime.context import RunContext

Numbers = dict[str, float]

NOT_NUMBERS = ("step", "time")
OFFLINE = "WANDB_MODE=offline and send the run later with `wandb sync`; or set logging.wandb = false"


def by_step(line: Mapping[str, Any]) -> Iterator[tuple[int, Numbers]]:
    """(step, numbers by name) of a line of the log; the numbers "at_start" belong to the step before it. Items of a list are
    named by their index, counted from 1."""
    for step, fields in measured([line]):
        values: dict[str, Any] = {}
        for key, value in fields.items():
            values |= (
                {f"{key}/{index}": item for index, item in enumerate(value, 1)} if isinstance(value, list) else {key: value}
            )
        if numbers := {f"train/{k}": v for k, v in values.items() if k not in NOT_NUMBERS and isinstance(v, (int, float))}:
            yield step, numbers


class TensorBoard:
    """Event files. Values that an earlier start logged from the first line's step on are hidden."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def add(self, line: Mapping[str, Any]) -> None:
        if self._writer is None:
            # Imported with the first line, so that it does not delay the first step. accelerate's tracker flushes after
            # every step, which costs a small model two milliseconds of it.
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=line["step"])
        for step, numbers in by_step(line):
            for name, number in numbers.items():
                self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def check_trackers(config: Config) -> None:
    """Raises UserError if `logging.wandb = true` lacks its package."""
    if config.logging.wandb and find_spec("wandb") is None:
        raise UserError("logging.wandb = true needs the package wandb: run `pip install -e '.[wandb]'`, or set it to false")


def sign_in(config: Config) -> None:
    """Raises UserError if the config asks for Weights & Biases, and nobody is logged in here or it cannot be reached."""
    if not config.logging.wandb or os.environ.get("WANDB_MODE", "online") != "online":
        return
    import wandb
    from wandb.errors import Error

    try:
        wandb.setup(settings=wandb.Settings(silent=True))
        signed_in, problem = wandb.login(prompt=False), "nobody is logged in; run `wandb login`, set WANDB_API_KEY"
    except Error as error:
        signed_in, problem = False, f"{_first_line(error)}; check the key and the network"
    if not signed_in:
        raise UserError(f"logging.wandb = true: Weights & Biases: {problem}, or set {OFFLINE}")


class WeightsAndBiases:
    """One W&B run for one run here, however often it is resumed. Lines that a killed start logged after its last checkpoint
    appear twice.

    folder: of the library's files. about: hashed to the W&B run's id: the run's name, its first start, and a fork's folder.
    say: prints the run's address, and once why nothing more is sent. Raises UserError if the service refuses the run.
    """

    def __init__(
        self, folder: Path, *, about: tuple[str, ...], config: Mapping[str, Any], say: Callable[[str], None]
    ) -> None:
        import wandb
        from wandb.errors import Error

        self._errors, self._say = Error, say
        try:
            self._run: Any = wandb.init(
                name=about[0],
                id=hashlib.sha256("\n".join(about).encode()).hexdigest()[:16],
                resume="allow",
                dir=str(folder),
                config=dict(config),
                # Neither the run's output nor source code of the working directory is sent.
                settings=wandb.Settings(silent=True, console="off", disable_code=True, disable_git=True),
            )
        except Error as error:
            raise UserError(f"logging.wandb = true: Weights & Biases: {_first_line(error)}; set {OFFLINE}") from None
        # W&B's own step counter only grows; a resumed run may go back.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        if not self._run.offline and self._run.url:
            say(f"Weights & Biases: {self._run.url}")

    def add(self, line: Mapping[str, Any]) -> None:
        if self._run is None:
            return
        try:
            for step, numbers in by_step(line):
                self._run.log({"step": step} | numbers)
        except self._errors as error:
            self._say(f"warning: Weights & Biases takes no more of this run: {_first_line(error)}")
            self._run = None

    def close(self) -> None:
        if self._run is not None:
            try:
                self._run.finish()
            except self._errors as error:
                self._say(f"warning: Weights & Biases may lack the end of this run: {_first_line(error)}")


def open_trackers(config: Config, context: RunContext, progress: Progress) -> list[Tracker]:
    """The trackers of the config, in the main process."""
    processes, layout = context.processes, context.layout
    if not processes.is_main:
        return []
    trackers: list[Tracker] = [TensorBoard(layout.tensorboard)] if config.logging.tensorboard else []
    if config.logging.wandb:
        values = config.model_dump(mode="json", exclude_none=True)
        # A fork inherits its name and start date from its original.
        about = (config.run.name, progress.started, *((str(layout.root),) if layout.original.exists() else ()))
        trackers.append(WeightsAndBiases(layout.root, about=about, config=values, say=processes.say))
    return trackers


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
