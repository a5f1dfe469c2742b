"""What is measured between two steps, now and then, and stands in the step's line of the log."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from trainer import outcome
from trainer.adapters import Adapter
from trainer.errors import Interrupted
from trainer.metrics import Metrics
from trainer.phases import Phases
from trainer.processes import Processes

Fields = dict[str, Any]

# The first step after which the change of the weights is measured; then at twice as many, and so on.
FIRST = 16


class Measure(Protocol):
    """names: the fields that it gives. measure: (fields, what ends the run); no fields where a stop cut it off."""

    @property
    def names(self) -> Sequence[str]: ...
    def due(self, step: int) -> bool: ...
    def measure(self) -> tuple[Fields, Exception | None]: ...


@dataclass
class Measured:
    """All processes call it alike. The line of step N has what holds after step N; that of step 1 has what held before it,
    too, under "at_start". A stop is obeyed in the middle. Then the line is written without, and the next start, which stands
    at that step, adds what it lacks."""

    measures: Sequence[Measure]
    processes: Processes
    at_start: Fields = field(default_factory=dict, init=False)

    def __call__(self, step: int, *, again: Metrics | None = None) -> tuple[Fields, Exception | None]:
        """(what the line of `step` says beside the step itself, what ends the run), after that step.

        again: the log of earlier starts, before the first step of this one.
        """
        fields: Fields = {"at_start": self.at_start} if step == 1 and self.at_start else {}
        failure = None
        for measure in self.measures:
            if measure.due(step) and not (again and step and not self._lacks(again, step, measure.names)):
                found, failed = measure.measure()
                fields, failure = fields | found, failure or failed
        if again and step == 0:
            self.at_start = fields
        elif again:
            again.add(step, fields)
        return fields, failure

    def _lacks(self, log: Metrics, step: int, names: Sequence[str]) -> bool:
        return bool(self.processes.largest(int(log.lacks(step, *names)))[0])


@dataclass(frozen=True)
class WeightChange:
    """How far the block that moved most is from where it was: ||dW|| / ||W||, or the drift of its magnitudes. Rarely: every
    weight is read. By the main process; the others go on."""

    adapter: Adapter
    evaluating: Callable[[], AbstractContextManager[None]]
    processes: Processes
    phases: Phases
    names: Sequence[str] = ("weight_change",)

    def due(self, step: int) -> bool:
        """16, 32, 64, ..."""
        return step >= FIRST and step & (step - 1) == 0

    def measure(self) -> tuple[Fields, Exception | None]:
        if not self.processes.is_main:
            return {}, None
        try:
            with self.evaluating():
                blocks = outcome.weight_change(self.adapter, self.phases)
        except Interrupted:
            return {}, None
        largest = outcome.largest([block.worst for block in blocks.values()])
        return {"weight_change": largest if math.isfinite(largest) else None}, None
