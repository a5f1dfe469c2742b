"""The objects for printing, waiting and writing that a run hands to its parts."""

from dataclasses import dataclass

from trainer.base.progress import Phases
from trainer.base.run_layout import Layout
from trainer.runtime.processes import Processes


@dataclass(frozen=True)
class RunContext:
    """Shared by all parts of a run. processes: this process and its peers. phases: announces long pieces of work. layout: the
    paths of the run's files."""

    processes: Processes
    phases: Phases
    layout: Layout
