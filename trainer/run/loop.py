"""The loop over the steps of a run, and the jobs between them. Knows no config and no model family."""

import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from trainer.base.console import cause_first
from trainer.base.errors import DataError, Interrupted, PeerStopped
from trainer.base.memory import peak_bytes, reset_peak
from trainer.base.progress import PACE_UNITS, pace_of
from trainer.base.signals import Signals
from trainer.base.types import Batch, Occurrence
from trainer.data.batches.sampler import MicroBatch
from trainer.engine.assembly import TrainState
from trainer.engine.policies import NonFinite
from trainer.engine.step import Step, StepResult
from trainer.monitoring.course import rates
from trainer.monitoring.measurements import Measurements
from trainer.run.checkpointing import Saves
from trainer.runtime.context import RunContext
from trainer.runtime.jobs import ENDINGS, Fields, Job, Position, run_jobs

# Acknowledgements of a stop, once there is a step to save.
SAVED = "stopping; a checkpoint is written"
AFTER_STEP = "stopping after this step; a checkpoint is written"

# Reasons for a checkpoint between two steps; the higher one wins.
BY_THE_CLOCK, BY_SIGNAL = 1, 2


@dataclass(kw_only=True)
class Loop:
    """Steps until the end, `stop_after`, a signal or an error. All processes run it in parallel. data: each remaining update,
    and this process's batches of it; closed here. last, stop_after: steps, stop_after <= last. measurements: writes the log.
    jobs: run after its line. pending: an error that ends the run once all processes know of it."""

    step: Step
    data: Generator[tuple[Sequence[MicroBatch], list[Batch]]]
    state: TrainState
    last: int
    stop_after: int
    saves: Saves
    jobs: Sequence[Job]
    measurements: Measurements
    non_finite: NonFinite
    context: RunContext
    signals: Signals
    pending: Exception | None = field(default=None, init=False)

    def steps(self) -> Generator[Fields]:
        """Yields each step's line of the log after its jobs. However it ends, also when closed, the last whole step is saved.
        Raises Interrupted, PeerStopped, one of ENDINGS, OSError, KeyboardInterrupt."""
        progress, at_once = self.state.progress, False
        self.signals.promise = SAVED
        try:
            with cause_first():
                yield from self._steps()
            if not self.finished:
                self.context.processes.say(f"stopped after step {progress.step} as asked (run.stop_after), which is saved")
        except GeneratorExit:
            self.saves.save(final=True)
            raise
        except (Interrupted, *ENDINGS) as error:
            # Between two steps, or in a step that changed nothing: the trained state is whole, and saved. All processes get
            # here and leave together: if one ended first, the launcher would stop the one that saves.
            self.measurements.end(error)
            self.saves.save(final=True)
            if isinstance(error, Interrupted):
                states = (f"after step {progress.step}, which is saved",) if progress.step else ()
                raise Interrupted(error.signum, *states) from None
            raise
        except PeerStopped:
            # Maybe within a step, which changes nothing before its last reduction. No other process waits for this one.
            if not self.context.processes.replaced:
                self.saves.save(final=True, alone=True)
            raise
        except KeyboardInterrupt:
            at_once = True
            raise
        finally:
            self.data.close()
            if not at_once:
                self.saves.close()
            self.measurements.log.close()

    @property
    def finished(self) -> bool:
        """Whether the last step is done."""
        return self.state.progress.step >= self.last

    def _steps(self) -> Generator[Fields]:
        processes, progress, at = self.context.processes, self.state.progress, self._position(fresh=False)
        ends: deque[float] = deque(maxlen=PACE_UNITS)  # end times of the last steps
        _, self.pending = run_jobs(self.jobs, at, processes)  # at step 0, or jobs that a stop cut off
        self.pending = self.measurements.begin(at) or self.pending
        while progress.step < self.stop_after:
            began = time.perf_counter()
            update, batches = self._read()
            self._agree()
            occurrences = [occurrence for micro_batch in update for occurrence in micro_batch]
            started = time.perf_counter()
            reset_peak(processes.device)
            self.signals.promise = AFTER_STEP
            try:
                result = self.step.run(progress.step + 1, batches, occurrences)
            finally:
                self.signals.promise = SAVED
            ended = time.perf_counter()
            ends.append(ended)
            self.measurements.log.phase.pace = pace_of(list(ends)) or ended - began
            entry = self._count(result, occurrences, ended - started)
            at = self._position()
            self.pending = run_jobs(self.jobs, at, processes)[1] or self.pending
            if self.pending is None:
                yield entry
        self._agree()

    def _position(self, *, fresh: bool = True) -> Position:
        return Position(self.state.progress.step, self.last, fresh)

    def _read(self) -> tuple[Sequence[MicroBatch], list[Batch]]:
        """The next update; an error becomes pending, until `_agree` tells all processes."""
        try:
            return next(self.data)
        except DataError as error:
            self.pending = error
            return [], []

    def _agree(self) -> None:
        """Act in all processes on signals, due saves and errors of any process, between two steps. Raises Interrupted for a
        signal, OSError for a checkpoint that could not be written, and the pending error."""
        processes, step = self.context.processes, self.state.progress.step
        kind = next((place for place, ending in enumerate(ENDINGS, 1) if isinstance(self.pending, ending)), 0)
        save = BY_SIGNAL if self.signals.save else BY_THE_CLOCK if processes.is_main and self.saves.overdue else 0
        signum, save, failed, kind = processes.largest(self.signals.stop or 0, save, int(self.saves.failed), kind)
        if failed:
            self.saves.answer()
        if kind:
            raise self.pending or ENDINGS[kind - 1]("another process could not go on; its message says why")
        if signum:
            raise Interrupted(signum)
        saved = self.saves.is_saved
        if save:
            self.saves.save()
        if save == BY_SIGNAL:
            self.signals.save = False
            processes.say(f"SIGUSR1: step {step} is {'saved already' if saved else 'being saved'}")

    def _count(self, result: StepResult, occurrences: Sequence[Occurrence], seconds: float) -> Fields:
        """Count a step, and write its line to the log; returns the line."""
        progress = self.state.progress
        if result.refused:
            cause = "" if result.bad_latents else self.measurements.course.blame()
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
            **result.log_fields,
            "seconds": round(seconds, 6),
            "images_per_second": round(len(occurrences) / seconds, 3),
            "time": round(time.time(), 3),
        }
        if self.step.scaler.is_enabled():
            entry["loss_scale"] = result.loss_scale
        if result.refused:
            entry["non_finite"] = result.refused
        peak = peak_bytes(self.context.processes.device)
        if peak is not None:
            entry["peak_bytes"] = peak
        self.pending = self.measurements.step(entry, self._position())
        progress.log = self.measurements.log.digest
        return entry
