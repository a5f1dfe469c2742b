"""What a run that was stopped leaves beside its checkpoint (export.on_stop): adapter files and a report as of that step."""

from trainer.artifacts.exports import Artifacts
from trainer.base.errors import Interrupted, PeerStopped, is_out_of_memory
from trainer.base.signals import Signals

# Whoever stops a process gives it ten seconds (docker stop) or more; step and checkpoint have taken some. The checkpoint is
# on the disk by then: to be killed meanwhile loses nothing.
SECONDS = 5.0


def leave_in_time(artifacts: Artifacts, signals: Signals) -> None:
    """Write the adapter files and the report after a signal: within SECONDS and until a second signal, else not at all. What
    stands in the way is said: the run ends by its signal. All processes call it, and wait for the one that writes."""
    processes, step = artifacts.context.processes, artifacts.state.progress.step
    signals.promise = f"leaving at once; step {step} is saved"
    earlier, why, files = artifacts.earlier(), None, False
    try:
        with signals.last_work(SECONDS):
            artifacts.leave_files()
            files = True
            artifacts.leave_report()
    except PeerStopped:
        raise
    except Interrupted:
        why = "a second signal, or too little time"
    except (OSError, MemoryError, RuntimeError, ValueError) as error:
        # Of them are UserError and NonFiniteError, what torch says of memory, and what Pillow says of a picture.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        why = f"out of memory: {reason}" if is_out_of_memory(error) else reason
    if why is not None:
        old = f"{', '.join(earlier)} are still those of an earlier step" if earlier else "there are none"
        old = f"no adapter files of this step, {old}"
        left = f"the adapter files are of step {step}, the report is older" if files else old
        remedy = "`python scripts/adapter.py export` makes the files of its checkpoint"
        processes.say(f"{left} ({why}); step {step} is saved, and {remedy}")
    processes.wait()
