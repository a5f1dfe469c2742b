"""When the current state is saved as a checkpoint, and what follows if that fails."""

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from trainer.base.errors import NonFiniteError
from trainer.checkpoint.saver import Saver
from trainer.checkpoint.state import Pieces, Progress
from trainer.runtime.context import RunContext
from trainer.runtime.jobs import Every, Job, Position


@dataclass(kw_only=True)
class Saves:
    """Hands the run's state to the saver. All processes call it at the same step; the main one writes. is_finite: whether the
    state may be saved; lr: optimizer.lr, for the message if not. every_minutes: for `overdue`; 0: never. clock: seconds."""

    pieces: Pieces
    saver: Saver
    progress: Progress
    is_finite: Callable[[], bool]
    lr: float
    on_failure: Literal["stop", "continue"]
    context: RunContext
    every_minutes: float = 0.0
    clock: Callable[[], float] = time.monotonic
    _last: float = field(init=False)

    def __post_init__(self) -> None:
        self._last = self.clock()

    @property
    def overdue(self) -> bool:
        """Whether the current step must be saved by this process's clock."""
        return 0 < 60 * self.every_minutes <= self.clock() - self._last and not self.is_saved

    @property
    def is_saved(self) -> bool:
        """Whether the current step is saved or being saved."""
        return self.saver.step == self.progress.step

    @property
    def failed(self) -> bool:
        """Whether a save has failed and `answer` has not handled it yet."""
        return self.saver.failed

    def save(self, *, final: bool = False, alone: bool = False) -> None:
        """Hand the current state to the saver, unless it has it. final: wait until it is on disk. alone: do not wait for
        other processes. Raises NonFiniteError, in all processes, if the state is not finite."""
        step, saver = self.progress.step, self.saver
        self._last = self.clock()
        if step > saver.step and not self.is_finite():
            raise NonFiniteError(
                f"step {step}: the adapter or the optimizer's state is not finite after the update; it is not saved, and the "
                f"checkpoints before it stand\nstart a new run with a lower optimizer.lr than {self.lr:g}"
            )
        if self.context.processes.is_main:
            # obey=False: no signal interrupts a save.
            with self.context.phases(f"saving step {step}", unit="B", obey=False) as phase:
                if final and (failure := saver.join(phase.advance)) is not None:
                    self.context.processes.say(f"warning: an earlier checkpoint could not be written ({failure})")
                if step > saver.step:
                    saver.save(step, self.pieces.pack(), phase.advance)
                if final:
                    failure = saver.join(phase.advance)
                    self._answer(failure, goes_on=saver.step >= step)
        if (final or not saver.background) and not alone:
            self.context.processes.wait()

    def job(self, every: Every, stop_after: int) -> Job:
        """The job of saving at `every`, and after the last step of this start; that save is waited for."""

        def save(at: Position) -> None:
            if at.due(every):
                self.save()
            if at.step == stop_after:
                self.save(final=True)

        def due(at: Position) -> bool:
            return at.fresh and (at.due(every) or at.step == stop_after)

        return Job(name="a checkpoint was written", due=due, run=save, remedy="", at_once=True)

    def answer(self) -> None:
        """Handle a save that failed in any process: raises OSError, or warns and lets the training go on."""
        failure = self.saver.join()
        if not self.context.processes.is_main:
            failure = OSError(errno.EIO, "the main process could not write a checkpoint")
        self._answer(failure, goes_on=self.on_failure == "continue")

    def _answer(self, failure: Exception | None, *, goes_on: bool) -> None:
        """Raises the failure, unless it is an OSError and the run `goes_on`."""
        if failure is not None and not (goes_on and isinstance(failure, OSError)):
            raise failure
        if failure is not None:
            problem = f"a checkpoint could not be written, or older ones not deleted ({failure})"
            self.context.processes.say(f"warning: {problem}; training goes on")

    def close(self) -> None:
        """Wait for the last save at the end of the run, whatever ended it."""
        if (failure := self.saver.join()) is not None:
            self.context.processes.say(f"warning: a checkpoint could not be written: {failure}")
