"""What everybody in a run needs to speak, to wait and to write."""

from dataclasses import dataclass

from trainer.base.progress import Phases
from trainer.base.run_layout import Layout
from trainer.runtime.processes import Processes


@dataclass(frozen=True)
class RunContext:
    """What everybody needs to speak, wait and write. processes: this process among its equals. phases: announces long
    pieces of work. layout: where the run's files lie."""

    processes: Processes
    phases: Phases
    layout: Layout
