"""What a run that was stopped leaves beside its checkpoint (export.on_stop): adapter files and a report as of that step.

The checkpoint is on the disk by then. So whoever does not wait for this work, and kills the process, loses nothing.
"""

from trainer.artifacts import Artifacts
from trainer.errors import Interrupted, NonFiniteError
from trainer.signals import Signals

# Of the time that whoever stops a process gives it: ten seconds (docker stop) or more, of which the step under way and the
# checkpoint have taken some.
SECONDS = 5.0


def leave_in_time(artifacts: Artifacts, signals: Signals) -> None:
    """After a signal: within SECONDS and until a second signal, else not at all. Raises none of what may stand in the way.

    All processes call it; those that have nothing to write wait for the one that has.
    """
    processes, step = artifacts.components.processes, artifacts.progress.step
    signals.promise = f"leaving at once; step {step} is saved"
    why = None
    try:
        with signals.last_work(SECONDS):
            artifacts.leave()
    except Interrupted:
        why = "a second signal, or too little time"
    except (OSError, NonFiniteError) as error:
        why = str(error)
    if why is not None:
        processes.say(
            f"no adapter files or no report as of this step ({why}); step {step} is saved, and "
            "`python scripts/adapter.py export` makes the files of its checkpoint"
        )
    processes.wait()
