"""What is measured between two steps, now and then, and stands in the step's line of the log."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from trainer.adapters import Adapter
from trainer.base.console import width
from trainer.base.errors import NonFiniteError
from trainer.base.progress import Phases
from trainer.monitoring import weight_change
from trainer.monitoring.course import BLOCKS, CHANGED, LOST, Course
from trainer.monitoring.metrics import Metrics, is_line, mark_of, read_lines
from trainer.runtime.jobs import Fields, Job, Position, run_jobs
from trainer.runtime.processes import Processes

# The first step after which the change of the weights is measured; then at twice as many, and so on.
FIRST = 16


@dataclass
class Measurements:
    """Writes the log, and follows it. All processes call it alike.

    The line of step N has what holds after step N. The first line of a log, or of a start that measures on other photos, has
    what held before it, too, under "at_start". What a stop keeps from a line, the next start adds.

    jobs: those that give fields. changed: what --allow changed here of what the loss of a step measures; "" where nothing.
    """

    jobs: Sequence[Job]
    log: Metrics
    levers: str
    processes: Processes
    changed: str = ""
    at_start: Fields = field(default_factory=dict, init=False)
    course: Course = field(default_factory=Course, init=False)

    def begin(self, at: Position) -> Exception | None:
        """Measure what is due before the first step of this start; returns what ends the run."""
        rows = list(filter(is_line, read_lines(self.log.path)))
        self.course, before = Course(rows, self.levers), mark_of(rows)
        last = rows[-1] if rows and rows[-1]["step"] == at.step else None
        first = replace(at, step=0)
        starts = [job for job in self.jobs if job.due(first) and self._agreed(last is None or job.mark != before)]
        if before and any(job.mark != before for job in starts):
            self.processes.say(
                "warning: other photos, captions or draws are measured than before, or at another size or guidance: "
                "the held-out loss begins a new curve here"
            )
        if self.changed and not at.at_end:
            self.processes.say(f"from step {at.step + 1} on the loss measures something else: its level begins anew there")
        self.at_start, failure = run_jobs(starts, first, self.processes)
        lacking = [
            job for job in self.jobs
            if job not in starts and job.due(at) and self._agreed(last is not None and not last.keys() >= set(job.fields))
        ]  # fmt: skip
        fields, failed = run_jobs(lacking, at, self.processes)
        self.log.add(fields)
        if warning := self.course.measured(at.step, fields):
            self.processes.say(warning)
        return failure or failed

    def step(self, entry: Fields, at: Position) -> Exception | None:
        """Write the line of the step that was made. Returns what ends the run."""
        fields, failure = run_jobs(self.jobs, at, self.processes)
        if self.at_start:
            fields["at_start"], self.at_start = self.at_start, {}
        if self.changed:
            fields[CHANGED], self.changed = self.changed, ""
        self.log.log(entry | fields)
        if warning := self.course.add(entry | fields):
            self.processes.say(warning)
        return failure

    def end(self, error: Exception) -> None:
        """A run that a value ends which is not finite has no last table: that it has diverged is said here."""
        if isinstance(error, NonFiniteError) and (alarm := self.course.alarm):
            table = {"Effect": {"columns": ["what", "value"], "rows": [["verdict", "diverged"]]}}
            reason = f"the training has diverged: at step {alarm.step} {alarm.what}"
            self.processes.say(f"warning: {reason}; {self.course.remedy()}")
            self.processes.say(weight_change.render(table, width(sys.stdout)))

    def _agreed(self, here: bool) -> bool:
        """As the main process finds, which writes the log."""
        return bool(self.processes.largest(int(here and self.processes.is_main))[0])


def change_due(at: Position) -> bool:
    """Whether the change of the weights is measured here: after 16, 32, 64, ... steps, as every weight is read."""
    return at.step >= FIRST and at.step & (at.step - 1) == 0


def change_fields(adapter: Adapter, start: Mapping[str, torch.Tensor] | None, phases: Phases) -> Fields:
    """Fields of the log: ||dW|| / ||W|| of the layer that moved most, and of each block's; None where one is not finite; and
    how many layers have magnitudes whose gradient is lost, where any have. start: the weights that the run started from."""
    blocks = weight_change.weight_change(adapter, start, phases)
    moved = {name: block.largest if math.isfinite(block.largest) else None for name, block in blocks.items()}
    most = weight_change.largest([block.largest for block in blocks.values()])
    lost = sum(block.lost for block in blocks.values())
    return {"weight_change": most if math.isfinite(most) else None, BLOCKS: moved} | ({LOST: lost} if lost else {})
