"""Opening a run's output folder."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainer import config as configs
from trainer.base import files
from trainer.base.errors import cause
from trainer.base.progress import START, STOP
from trainer.base.run_layout import Layout, folder_name, step_of
from trainer.checkpoint import store
from trainer.monitoring import metrics
from trainer.resume import start_point
from trainer.run.run import Run


@contextmanager
def open_output(run: Run) -> Iterator[None]:
    """A block with the output folder locked for this run, with the resolved config and without leftovers of a killed start.
    Call it after all checks: a refused run must leave the output unchanged. If --allow changed pinned values, the checkpoint
    is replaced by one with the new values, so that the next start needs no --allow."""
    config, step, resumed = run.plan.config, run.progress.step, run.resumed
    processes, phases, layout = run.context.processes, run.context.phases, run.context.layout
    processes.wait(obey=True)  # all have read the files that may be renamed now
    if not processes.is_main:
        processes.wait(obey=True)
        yield
        return
    with files.locked(layout.lock):
        _copy_forked(resumed, layout)  # first, so that a start killed before its first checkpoint is known as a fork
        if phases.record is not None:
            phases.record.open(layout.phases)
            phases.record.add(_entry(START, step) | {"total": run.plan.length.max_steps})
        files.make_folder(layout.checkpoints, "run.output_dir")
        files.remove_leftovers(layout.leftovers())
        for folder in layout.samples.glob(".step-*.tmp"):
            files.remove_folder(folder)
        renamed = store.settle(layout.checkpoints)
        files.write_atomic(layout.config, [configs.dumps(config).encode()])
        # In this order no kill in between loses the resumed checkpoint or a line of the log: the names of later checkpoints
        # tell the next start that there are results of later steps.
        current = layout.checkpoints / folder_name(step)
        if resumed is not None and (run.changed or renamed.get(resumed, resumed).resolve() != current.resolve()):
            store.save(layout.checkpoints, step, run.pieces.pack(), instead=True)
        later = store.steps(layout.checkpoints)[-1:] > [step]
        if later and (aside := start_point.set_aside_results(layout, name=config.run.name, after=step)) is not None:
            processes.say(
                f"warning: samples, adapter files and the log of later steps are set aside in {aside}; "
                "delete it when you do not want them back"
            )
        for checkpoint in store.set_aside(layout.checkpoints, after=step):
            processes.say(f"warning: a later checkpoint is set aside as {checkpoint}; delete it when you need no way back")
        metrics.truncate(layout.metrics, step)
        # Samples that a killed start drew after its last checkpoint, perhaps with other prompts: they are drawn again.
        for folder in layout.samples.glob("*"):
            sample_step = step_of(folder.name)
            if sample_step is not None and (sample_step > step or step == 0):
                shutil.rmtree(folder)
        processes.wait(obey=True)
        ending: dict[str, str] = {}
        try:
            yield
        except BaseException as error:
            ending = {"why": cause(error)}
            raise
        finally:
            if phases.record is not None:
                with suppress(OSError):  # the error that ended the run is reported, not this one
                    phases.record.add(_entry(STOP, step) | ending)


def _copy_forked(checkpoint: Path | None, layout: Layout) -> None:
    """Copy log and samples of the run that a checkpoint from elsewhere belongs to, if it lies in a run's folder."""
    if checkpoint is None:
        return
    old = Layout(checkpoint.resolve().parent.parent)
    if old.root == layout.root.resolve() or old.checkpoints != checkpoint.resolve().parent:
        return
    log = old.metrics.read_bytes() if old.metrics.exists() else b""
    files.write_atomic(layout.original, [log])
    files.write_atomic(layout.metrics, [log])  # lines of later steps are cut as at any start
    if old.samples.is_dir() and not layout.samples.exists():
        with files.appearing(layout.samples) as target:
            shutil.copytree(old.samples, target, dirs_exist_ok=True)


def _entry(phase: str, step: int) -> dict[str, Any]:
    return {"phase": phase, "started": round(time.time(), 3), "seconds": 0.0, "done": step, "unit": "step"}
