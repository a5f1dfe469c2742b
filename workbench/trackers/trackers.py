"""Where a run's numbers are mirrored to, beside metrics.jsonl: TensorBoard's event files, and Weights & Biases."""

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


def numbers_of(fields: Mapping[str, Any]) -> Numbers:
    """The numbers in a line of the log by name; those in a list by name and place, counted from 1."""
    values: dict[str, Any] = {}
    for key, value in fields.items():
        values |= {f"{key}/{place}": each for place, each in enumerate(value, 1)} if isinstance(value, list) else {key: value}
    return {f"train/{k}": v for k, v in values.items() if k not in NOT_NUMBERS and isinstance(v, (int, float))}


def by_step(line: Mapping[str, Any]) -> Iterator[tuple[int, Numbers]]:
    """(step, numbers) of a line; what it has "at_start" is of the step before it."""
    for step, fields in measured([line]):
        if numbers := numbers_of(fields):
            yield step, numbers


class TensorBoard:
    """Event files. What an earlier start logged of the first line's step, and after it, is hidden."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def add(self, line: Mapping[str, Any]) -> None:
        if self._writer is None:
            # With the first line: importing it need not delay the first step. Not accelerate's tracker: that one flushes
            # after every step, which costs a small model two milliseconds of it.
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=line["step"])
        for step, numbers in by_step(line):
            for name, number in numbers.items():
                self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def check_trackers(config: Config) -> None:
    """Raises UserError where `logging.wandb = true` lacks its package."""
    if config.logging.wandb and find_spec("wandb") is None:
        raise UserError("logging.wandb = true needs the package wandb: run `pip install -e '.[wandb]'`, or set it to false")


def sign_in(config: Config) -> None:
    """Raises UserError where the config asks for Weights & Biases, and it knows nobody here or cannot be reached."""
    if not config.logging.wandb or os.environ.get("WANDB_MODE", "online") != "online":
        return
    import wandb
    from wandb.errors import Error

    try:
        wandb.setup(settings=wandb.Settings(silent=True))
        known, why = wandb.login(prompt=False), "nobody is logged in; run `wandb login`, set WANDB_API_KEY"
    except Error as error:
        known, why = False, f"{_first_line(error)}; check the key and the network"
    if not known:
        raise UserError(f"logging.wandb = true: Weights & Biases: {why}, or set {OFFLINE}")


class WeightsAndBiases:
    """One run there for one run here, however often it is resumed. What a killed start had logged after its last checkpoint
    appears twice.

    folder: where the library keeps what it sends. about: what makes the run's id: its name, when it first started, and of a
    fork its folder. say: is told the run's address, and once why nothing more is sent. Raises UserError where the service
    does not take the run.
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
                # What a run prints stays here, and so does the source of whoever's folder it was started in.
                settings=wandb.Settings(silent=True, console="off", disable_code=True, disable_git=True),
            )
        except Error as error:
            raise UserError(f"logging.wandb = true: Weights & Biases: {_first_line(error)}; set {OFFLINE}") from None
        # Its own counter of steps only grows; a resumed run may go back.
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
    """The programs that the config asks for, in the main process."""
    processes, layout = context.processes, context.layout
    if not processes.is_main:
        return []
    trackers: list[Tracker] = [TensorBoard(layout.tensorboard)] if config.logging.tensorboard else []
    if config.logging.wandb:
        values = config.model_dump(mode="json", exclude_none=True)
        # A fork has its name and its date from its original.
        about = (config.run.name, progress.started, *((str(layout.root),) if layout.original.exists() else ()))
        trackers.append(WeightsAndBiases(layout.root, about=about, config=values, say=processes.say))
    return trackers


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
