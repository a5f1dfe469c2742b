"""Jobs: the work of a run between two steps besides training, when each is due, and how one ends the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainer.base.errors import DataError, Interrupted, NonFiniteError, NotWritten, OutOfMemory, UserError, is_out_of_memory
from trainer.base.memory import give_back
from trainer.runtime.processes import Processes

Fields = dict[str, Any]  # of a step's line of the log

# The table of endings: errors that may stop one process between two steps. `guarded` converts a job's errors to them; the
# other processes learn its place, from 1, and raise the same; all save the last whole step.
ENDINGS = (DataError, OutOfMemory, NotWritten, UserError, NonFiniteError)


class Every(NamedTuple):
    """A period in steps, counted from the step `zero`; 0 is never. Nothing is due before the step `first`."""

    every: int
    zero: int = 0
    first: int = 1

    def steps(self, last: int) -> range:
        """The due steps, up to `last`."""
        first = max(1, self.first)
        return range(first + (self.zero - first) % self.every, last + 1, self.every) if self.every else range(0)


@dataclass(frozen=True)
class Position:
    """A moment between two steps. step: the number of steps so far. last: of the whole run. fresh: whether this start made
    the step; else an earlier one may have run the jobs due there."""

    step: int
    last: int
    fresh: bool = True

    @property
    def at_end(self) -> bool:
        """Whether this is after the last step."""
        return self.step == self.last

    def due(self, every: int | Every, *, ends: bool = False) -> bool:
        """Whether a job is due. every: a period in steps, or an Every. ends: also before the first step and after all."""
        every = Every(every) if isinstance(every, int) else every
        if ends and self.step in (0, self.last):
            return every.every > 0
        return self.step in every.steps(self.step)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One activity of a run.

    name: completes "out of memory while ...": "samples were drawn". due: the same in all processes.
    run: does the work; returns fields for the step's line of the log, or None. remedy: what to change if memory runs out.
    shared: whether every process takes part, and none waits. Otherwise the main process runs it, and the others wait.
    fields: names of its fields. A job with fields runs before the step's line is written, others after its checkpoint.
    mark: identifies the data that it measures, and stands in the line; None if that data cannot change.
    at_once: it coordinates the processes itself, so its errors are no ending to agree on. Every process runs it.
    """

    name: str
    due: Callable[[Position], bool]
    run: Callable[[Position], Fields | None]
    remedy: str
    shared: bool = False
    fields: Sequence[str] = ()
    mark: str | None = None
    at_once: bool = False


def guarded(job: Job, at: Position) -> tuple[Fields, Exception | None]:
    """Run a job. Returns (its fields, one of ENDINGS or None), not raised, as all processes stop together. A stop interrupts
    the job, and is obeyed between two steps; the next start runs the job again."""
    try:
        return job.run(at) or {}, None
    except Interrupted:
        return {}, None
    except ENDINGS as error:
        return {}, error
    except OSError as error:
        return {}, NotWritten(error)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # Only its text is kept: the exception holds on to tensors.
        failure = OutOfMemory(f"step {at.step}: out of memory while {job.name}\n{error}\n{job.remedy}")
    give_back()
    return {}, failure


def run_jobs(jobs: Iterable[Job], at: Position, processes: Processes) -> tuple[Fields, Exception | None]:
    """Run the due jobs in order. Returns (all their fields, the error that ends the run, or None). All processes call it
    alike. After a failure the main process skips its own jobs, but not those that all processes share."""
    fields: Fields = {}
    failure = None
    for job in (job for job in jobs if job.due(at)):
        if job.at_once:
            job.run(at)
            continue
        if job.shared or (processes.is_main and failure is None):
            values, error = guarded(job, at)
            fields, failure = fields | values, failure or error
        if not job.shared:
            processes.wait()
    return fields, failure
