"""The surroundings of a run's parts."""

from dataclasses import dataclass

from trainer.base.progress import Phases
from trainer.base.run_layout import Layout
from trainer.runtime.processes import Processes


@dataclass(frozen=True)
class RunContext:
    """What everybody in a run needs to speak, wait and write. phases: announces long pieces of work."""

    processes: Processes
    phases: Phases
    layout: Layout
