"""Measurements between two steps, some of them rare, whose results stand in the step's line of the log."""

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

# The first step after which the change of the weights is measured; then after 32, 64, and so on.
FIRST = 16


@dataclass
class Measurements:
    """Runs the measuring jobs, writes the log, and follows it. All processes call its methods alike.

    The line of step N has the measurements after step N. The first line of a log, or of a start that measures other photos,
    also has those before it, under "at_start". The next start adds measurements that a stop prevented.

    jobs: those with fields. changed: settings of a step's loss that --allow changed here; "" for none.
    """

    jobs: Sequence[Job]
    log: Metrics
    levers: str
    processes: Processes
    changed: str = ""
    at_start: Fields = field(default_factory=dict, init=False)
    course: Course = field(default_factory=Course, init=False)

    def begin(self, at: Position) -> Exception | None:
        """Run the measurements due before the first step of this start. Returns the error that ends the run, or None."""
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
        missing = [
            job for job in self.jobs
            if job not in starts and job.due(at) and self._agreed(last is not None and not last.keys() >= set(job.fields))
        ]  # fmt: skip
        fields, failed = run_jobs(missing, at, self.processes)
        self.log.add(fields)
        if warning := self.course.measured(at.step, fields):
            self.processes.say(warning)
        return failure or failed

    def step(self, entry: Fields, at: Position) -> Exception | None:
        """Measure after a step, and write its line. Returns the error that ends the run, or None."""
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
        """Say that the run has diverged, if it ends by a value that is not finite: such a run prints no final table."""
        if isinstance(error, NonFiniteError) and (alarm := self.course.alarm):
            table = {"Effect": {"columns": ["what", "value"], "rows": [["verdict", "diverged"]]}}
            reason = f"the training has diverged: at step {alarm.step} {alarm.text}"
            self.processes.say(f"warning: {reason}; {self.course.remedy()}")
            self.processes.say(weight_change.render(table, width(sys.stdout)))

    def _agreed(self, answer: bool) -> bool:
        """The main process's answer, in all processes: it alone has the log."""
        return bool(self.processes.largest(int(answer and self.processes.is_main))[0])


def change_due(at: Position) -> bool:
    """Whether the change of the weights is measured here: after 16, 32, 64, ... steps, as it reads every weight."""
    return at.step >= FIRST and at.step & (at.step - 1) == 0


def change_fields(adapter: Adapter, start: Mapping[str, torch.Tensor] | None, phases: Phases) -> Fields:
    """Fields of the log: ||dW|| / ||W|| of the layer that moved most, and of each block's; None for one that is not finite;
    the number of layers with magnitudes whose gradient is lost, if any. start: the weights that the run started from."""
    blocks = weight_change.weight_change(adapter, start, phases)
    changes = {name: block.largest if math.isfinite(block.largest) else None for name, block in blocks.items()}
    most = weight_change.largest([block.largest for block in blocks.values()])
    layers = sum(block.lost_layers for block in blocks.values())
    return {"weight_change": most if math.isfinite(most) else None, BLOCKS: changes} | ({LOST: layers} if layers else {})
