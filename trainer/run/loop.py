"""The steps of a run, and what is due between two of them. Knows no config and no model family."""

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

from trainer.base.errors import DataError, Interrupted, OutOfMemory, PeerStopped
from trainer.base.memory import peak_bytes, reset_peak
from trainer.base.progress import PACE_UNITS, pace_of
from trainer.base.signals import Signals
from trainer.base.types import Batch, Occurrence
from trainer.checkpoint.state import Progress
from trainer.data.batches.sampler import MicroBatch
from trainer.engine.policies import NonFinite
from trainer.engine.step import Step, StepResult
from trainer.monitoring.course import rates
from trainer.monitoring.measurements import Measured
from trainer.run.checkpointing import Saves
from trainer.runtime.jobs import ENDINGS, Job, Position, run_jobs
from trainer.runtime.processes import Processes

# What is said of a stop once there is a step to keep.
SAVED = "stopping; a checkpoint is written"
AFTER_STEP = "stopping after this step; a checkpoint is written"

# What asks for a checkpoint between two steps, the stronger last.
BY_THE_CLOCK, BY_SIGNAL = 1, 2


@dataclass(kw_only=True)
class Loop:
    """Steps until the end, `stop_after`, a signal, or what ends a run. All processes go through it side by side.

    updates: the micro-batches of every update still to come. batches: this process's share of each, read; it is closed here.
    last, stop_after: steps; stop_after is at most last. save_every: steps between two checkpoints; 0 is never.
    jobs: what is done after a step's checkpoint. measured: writes the log, before it.
    too_large: what to change where a step runs out of memory.
    pending: what ends the run once all processes know of it. ends: when each of the last steps was done.
    """

    step: Step
    updates: Iterator[Sequence[MicroBatch]]
    batches: Generator[list[Batch]]
    progress: Progress
    last: int
    stop_after: int
    save_every: int
    saves: Saves
    jobs: Sequence[Job]
    measured: Measured
    non_finite: NonFinite
    too_large: str
    processes: Processes
    signals: Signals
    pending: Exception | None = field(default=None, init=False)
    ends: deque[float] = field(default_factory=lambda: deque(maxlen=PACE_UNITS), init=False)

    def run(self) -> bool:
        """Returns whether the last step was reached. However it ends, the last whole step is saved.

        Raises Interrupted, PeerStopped, one of ENDINGS, OSError, KeyboardInterrupt.
        """
        progress, at_once, at = self.progress, False, self._position(fresh=False)
        self.signals.promise = SAVED
        try:
            _, self.pending = run_jobs(self.jobs, at, self.processes)  # of step 0, or what a stop cut off
            self.pending = self.measured.begin(at) or self.pending
            for update in self.updates:
                if progress.step >= self.stop_after:
                    break
                begun = time.perf_counter()
                batches = self._read()
                self._agree()
                occurrences = [occurrence for micro_batch in update for occurrence in micro_batch]
                started = time.perf_counter()
                reset_peak(self.processes.device)
                self.signals.promise = AFTER_STEP
                try:
                    result = self.step.run(progress.step + 1, batches, occurrences)
                except OutOfMemory as error:
                    raise OutOfMemory(f"{error}\n{self.too_large}") from None
                finally:
                    self.signals.promise = SAVED
                ended = time.perf_counter()
                self.ends.append(ended)
                self.measured.log.phase.pace = pace_of(list(self.ends)) or ended - begun
                self._count(result, occurrences, ended - started)
                at = self._position()
                if at.due(self.save_every):
                    self.saves.save()
                if progress.step == self.stop_after:
                    self.saves.save(final=True)
                self.pending = run_jobs(self.jobs, at, self.processes)[1] or self.pending
            self._agree()
            finished = progress.step >= self.last
            if not finished:
                self.processes.say(f"stopped after step {progress.step} as asked (run.stop_after), which is saved")
            return finished
        except (Interrupted, *ENDINGS) as error:
            # Between two steps, or a step that changed nothing: what was trained is whole, and kept. All processes are here,
            # and leave together: whoever ended first would have the launcher stop the one that saves.
            self.measured.end(error)
            self.saves.save(final=True)
            if isinstance(error, Interrupted):
                where = (f"after step {progress.step}, which is saved",) if progress.step else ()
                raise Interrupted(error.signum, *where) from None
            raise
        except PeerStopped:
            # In the middle of a step, perhaps: it changes nothing before its last reduction. Nobody waits for this process.
            self.saves.save(final=True, alone=True)
            raise
        except KeyboardInterrupt:
            at_once = True
            raise
        finally:
            self.batches.close()
            if not at_once:
                self.saves.close()
            self.measured.log.close()

    def _position(self, *, fresh: bool = True) -> Position:
        return Position(self.progress.step, self.last, fresh)

    def _read(self) -> list[Batch]:
        """The next update's micro-batches of this process; an error waits until `_agree` tells all processes of it."""
        try:
            return next(self.batches)
        except DataError as error:
            self.pending = error
            return []

    def _agree(self) -> None:
        """Do between two steps what any process was asked to do or met with, in all of them at the same step.

        Raises Interrupted for a signal, OSError for a checkpoint that could not be written, what is pending. Only what was
        agreed counts: a signal that comes in the meantime is told to the others before the next step.
        """
        kind = next((place for place, ending in enumerate(ENDINGS, 1) if isinstance(self.pending, ending)), 0)
        save = BY_SIGNAL if self.signals.save else BY_THE_CLOCK if self.processes.is_main and self.saves.overdue else 0
        signum, save, failed, kind = self.processes.largest(self.signals.stop or 0, save, int(self.saves.failed), kind)
        if failed:
            self.saves.answer()
        if kind:
            raise self.pending or ENDINGS[kind - 1]("another process could not go on; its message says why")
        if signum:
            raise Interrupted(signum)
        saved = self.saves.done
        if save:
            self.saves.save()
        if save == BY_SIGNAL:
            self.signals.save = False
            self.processes.say(f"SIGUSR1: step {self.progress.step} is {'saved already' if saved else 'being saved'}")

    def _count(self, result: StepResult, occurrences: Sequence[Occurrence], seconds: float) -> None:
        """Note that a step was made, and its line in the log."""
        progress = self.progress
        if result.refused:
            cause = "" if result.bad_latents else self.measured.course.blame()
            self.non_finite.update(f"step {progress.step + 1}: {result.refused}; the adapter is unchanged", cause=cause)
        progress.step += 1
        progress.images += len(occurrences)
        entry = {
            "step": progress.step,
            "epoch": occurrences[0].epoch + 1,
            "loss": result.loss,
            **rates(result.lr),
            "grad_norm": result.grad_norm,
            "images": progress.images,
            "skipped": not result.updated,
            **result.told,
            "seconds": round(seconds, 6),
            "images_per_second": round(len(occurrences) / seconds, 3),
            "time": round(time.time(), 3),
        }
        if self.step.scaler.is_enabled():
            entry["loss_scale"] = result.loss_scale
        if result.refused:
            entry["non_finite"] = result.refused
        peak = peak_bytes(self.processes.device)
        if peak is not None:
            entry["peak_bytes"] = peak
        self.pending = self.measured.step(entry, self._position())
