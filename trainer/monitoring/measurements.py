"""What is measured between two steps, now and then, and stands in the step's line of the log."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from trainer.adapters import Adapter
from trainer.base.console import width
from trainer.base.errors import TOO_LARGE, Interrupted, NonFiniteError, OutOfMemory
from trainer.base.memory import is_out_of_memory
from trainer.base.progress import Phases
from trainer.monitoring import weight_change
from trainer.monitoring.course import BLOCKS, Course
from trainer.monitoring.diagnosis import is_line, largest, mark_of
from trainer.monitoring.metrics import Metrics, read_lines
from trainer.runtime.processes import Processes

Fields = dict[str, Any]

# The first step after which the change of the weights is measured; then at twice as many, and so on.
FIRST = 16


class Measure(Protocol):
    """names: the fields that it gives. mark: tells on what it measures, and stands in the field PHOTOS; None: on what never
    changes. measure: (fields, what ends the run); no fields where a stop cut it off."""

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def mark(self) -> str | None: ...
    def due(self, step: int) -> bool: ...
    def measure(self) -> tuple[Fields, Exception | None]: ...


@dataclass
class Measured:
    """Writes the log, and follows it. All processes call it alike.

    The line of step N has what holds after step N. The first line of a log has what held before it, too, under "at_start"; so
    has the first one of a start that measures on other photos. A stop is obeyed in the middle. Then the line is written
    without, and the next start, which stands at that step, adds what it lacks.
    """

    measures: Sequence[Measure]
    log: Metrics
    levers: str
    processes: Processes
    at_start: Fields = field(default_factory=dict, init=False)
    course: Course = field(default_factory=Course, init=False)

    def begin(self, step: int) -> Exception | None:
        """Before the first step of this start, at `step`. Returns what ends the run."""
        rows = list(filter(is_line, read_lines(self.log.path)))
        self.course, before = Course(rows, self.levers), mark_of(rows)
        last = rows[-1] if rows and rows[-1]["step"] == step else None
        starts = [m for m in self.measures if m.due(0) and self._agreed(last is None or m.mark != before)]
        if before and any(m.mark != before for m in starts):
            self.processes.say(
                "warning: other photos, captions or draws are measured than before: the held-out loss begins a new curve here"
            )
        self.at_start, failure = self._measure(starts)
        lacking = [
            m for m in self.measures
            if m not in starts and m.due(step) and self._agreed(last is not None and not last.keys() >= set(m.names))
        ]  # fmt: skip
        fields, failed = self._measure(lacking)
        self.log.add(fields)
        if warning := self.course.measured(step, fields):
            self.processes.say(f"warning: {warning}")
        return failure or failed

    def step(self, entry: Fields) -> Exception | None:
        """Write the line of a step. Returns what ends the run."""
        fields, failure = self._measure([m for m in self.measures if m.due(entry["step"])])
        if self.at_start:
            fields["at_start"], self.at_start = self.at_start, {}
        self.log.log(entry | fields)
        if warning := self.course.add(entry | fields):
            self.processes.say(f"warning: {warning}")
        return failure

    def end(self, error: Exception) -> None:
        """A run that a value ends which is not finite has no last table: that it has diverged is said here."""
        if isinstance(error, NonFiniteError) and self.course.diverged is not None:
            table = {"Effect": {"columns": ["what", "value"], "rows": [["verdict", "diverged"]]}}
            said = f"the training has diverged: at step {self.course.diverged} {self.course.what}"
            self.processes.say(f"warning: {said}; {self.course.remedy()}")
            self.processes.say(weight_change.render(table, width(sys.stdout)))

    def _measure(self, measures: Sequence[Measure]) -> tuple[Fields, Exception | None]:
        fields, failure = {}, None
        for measure in measures:
            found, failed = measure.measure()
            fields, failure = fields | found, failure or failed
        return fields, failure

    def _agreed(self, here: bool) -> bool:
        """As the main process finds, which writes the log."""
        return bool(self.processes.largest(int(here and self.processes.is_main))[0])


@dataclass(frozen=True)
class WeightChange:
    """How far the layer that moved most is from where it was: ||dW|| / ||W||. Rarely: every weight is read. By the main
    process; the others go on.

    start: as of weight_change.weight_change.
    """

    adapter: Adapter
    start: Mapping[str, torch.Tensor] | None
    evaluating: Callable[[], AbstractContextManager[None]]
    processes: Processes
    phases: Phases
    names: Sequence[str] = ("weight_change",)
    mark: None = None

    def due(self, step: int) -> bool:
        """16, 32, 64, ..."""
        return step >= FIRST and step & (step - 1) == 0

    def measure(self) -> tuple[Fields, Exception | None]:
        if not self.processes.is_main:
            return {}, None
        try:
            with self.evaluating():
                blocks = weight_change.weight_change(self.adapter, self.start, self.phases)
        except Interrupted:
            return {}, None
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return {}, OutOfMemory(f"out of memory while the change of the weights was measured\n{error}\n{TOO_LARGE}")
        moved = {name: block.largest if math.isfinite(block.largest) else None for name, block in blocks.items()}
        most = largest([block.largest for block in blocks.values()])
        return {"weight_change": most if math.isfinite(most) else None, BLOCKS: moved}, None


def due(every: int, step: int) -> bool:
    """every: a number of steps; 0 is never."""
    return every > 0 and step > 0 and step % every == 0
