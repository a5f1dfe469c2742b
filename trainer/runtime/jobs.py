"""What a run does between two steps beside training: jobs, when each is due, and how one ends the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainer.base.errors import DataError, Interrupted, NonFiniteError, NotWritten, OutOfMemory, UserError, is_out_of_memory
from trainer.base.memory import give_back
from trainer.runtime.processes import Processes

Fields = dict[str, Any]  # of a step's line of the log

# The table of endings: what may stop one process between two steps. `guarded` makes one of whatever a job meets with; the
# other processes hear of it by its place, from 1, and raise the same; all save the last whole step.
ENDINGS = (DataError, OutOfMemory, NotWritten, UserError, NonFiniteError)


class Every(NamedTuple):
    """How often something is due: every so many steps, 0 is never, counted from the step `zero`; not before `first`."""

    every: int
    zero: int = 0
    first: int = 1

    def steps(self, last: int) -> range:
        """The steps at which it is due, up to `last`."""
        first = max(1, self.first)
        return range(first + (self.zero - first) % self.every, last + 1, self.every) if self.every else range(0)


@dataclass(frozen=True)
class Position:
    """A moment between two steps. step: made so far, 0 before the first. last: of the whole run. fresh: whether this start
    made the step; else an earlier one may have done what is due there."""

    step: int
    last: int
    fresh: bool = True

    @property
    def at_end(self) -> bool:
        """Whether the last step is made."""
        return self.step == self.last

    def due(self, every: int | Every, *, ends: bool = False) -> bool:
        """Whether something is due here. every: so many steps, or an Every; 0 is never. ends: before the first step and after
        the last one, too."""
        every = Every(every) if isinstance(every, int) else every
        if ends and self.step in (0, self.last):
            return every.every > 0
        return self.step in every.steps(self.step)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One activity of a run.

    name: what is done, as it follows "out of memory while": "samples were drawn". due: alike in all processes.
    run: does it; returns fields for the step's line of the log, or None. remedy: what to change where memory runs out.
    shared: whether every process takes part, and none waits. Otherwise the main process does it, and the others wait for it.
    fields: names of what it gives. Such a job runs before the step's line is written, the others after its checkpoint.
    mark: identifies the data that it measures, and stands in the line; None where that data cannot change.
    at_once: it sees to the other processes itself, so what it raises is no ending to be agreed on. Every process runs it.
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
    """Run a job: (its fields, one of ENDINGS that ends the run). The ending is not raised: all processes stop together. A
    stop cuts the job off, and is obeyed between two steps; the next start makes what is missing."""
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
        # Only its text is kept: the exception holds on to what was computed.
        failure = OutOfMemory(f"step {at.step}: out of memory while {job.name}\n{error}\n{job.remedy}")
    give_back()
    return {}, failure


def run_jobs(jobs: Iterable[Job], at: Position, processes: Processes) -> tuple[Fields, Exception | None]:
    """Run those that are due, in their order: (the fields of all, what ends the run). All processes call it alike. After a
    failure of the main process its own jobs are left out; those that all processes share are not."""
    fields: Fields = {}
    failure = None
    for job in (job for job in jobs if job.due(at)):
        if job.at_once:
            job.run(at)
            continue
        if job.shared or (processes.is_main and failure is None):
            values, failed = guarded(job, at)
            fields, failure = fields | values, failure or failed
        if not job.shared:
            processes.wait()
    return fields, failure
