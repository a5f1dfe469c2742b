"""Taking hold of a run's output folder."""

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
def opened(run: Run) -> Iterator[None]:
    """A block with the output folder, held for this run alone: with the resolved config, without what a killed start left.

    After all that can refuse the run: a refused one leaves the output as it was. A checkpoint with other values than this run
    is pinned to (--allow) gives its place to one that pins these, so that the next start needs no --allow.
    """
    config, step, resumed = run.plan.config, run.progress.step, run.resumed
    processes, phases, layout = run.context.processes, run.context.phases, run.context.layout
    processes.wait(obey=True)  # all have read what may get another name now
    if not processes.is_main:
        processes.wait(obey=True)
        yield
        return
    with files.locked(layout.lock):
        _bring(resumed, layout)  # first: by it a start that is killed before its first checkpoint is known as a fork
        if phases.record is not None:
            phases.record.open(layout.phases)
            phases.record.add(_moment(START, step) | {"total": run.plan.length.max_steps})
        files.make_folder(layout.checkpoints, "run.output_dir")
        files.remove_leftovers(layout.leftovers())
        for folder in layout.samples.glob(".step-*.tmp"):
            files.remove_folder(folder)
        named = store.settle(layout.checkpoints)
        files.write_atomic(layout.config, [configs.dumps(config).encode()])
        # In this order no kill in between loses what is resumed or a line of the log: by later checkpoints' names the next
        # start knows of what later steps left.
        own = layout.checkpoints / folder_name(step)
        if resumed is not None and (run.changed or named.get(resumed, resumed).resolve() != own.resolve()):
            store.save(layout.checkpoints, step, run.pieces.pack(), instead=True)
        later = store.steps(layout.checkpoints)[-1:] > [step]
        if later and (aside := start_point.set_aside_results(layout, name=config.run.name, after=step)) is not None:
            processes.say(
                f"warning: samples, adapter files and the log of later steps are set aside in {aside}; "
                "delete it when you do not want them back"
            )
        for moved in store.set_aside(layout.checkpoints, after=step):
            processes.say(f"warning: a later checkpoint is set aside as {moved}; delete it when you need no way back")
        metrics.truncate(layout.metrics, step)
        # Of steps that a killed start made after its last checkpoint, perhaps with other prompts: they are made again.
        for folder in layout.samples.glob("*"):
            own_step = step_of(folder.name)
            if own_step is not None and (own_step > step or step == 0):
                shutil.rmtree(folder)
        processes.wait(obey=True)
        why: dict[str, str] = {}
        try:
            yield
        except BaseException as error:
            why = {"why": cause(error)}
            raise
        finally:
            if phases.record is not None:
                with suppress(OSError):  # what ended the run is told, and not that this could not be written
                    phases.record.add(_moment(STOP, step) | why)


def _bring(checkpoint: Path | None, layout: Layout) -> None:
    """Copy what the run of a checkpoint from elsewhere logged and drew; of a checkpoint that lies alone there is nothing."""
    if checkpoint is None:
        return
    old = Layout(checkpoint.resolve().parent.parent)
    if old.root == layout.root.resolve() or old.checkpoints != checkpoint.resolve().parent:
        return
    log = old.metrics.read_bytes() if old.metrics.exists() else b""
    files.write_atomic(layout.original, [log])
    files.write_atomic(layout.metrics, [log])  # what is of later steps is cut like that of any start
    if old.samples.is_dir() and not layout.samples.exists():
        with files.appearing(layout.samples) as copied:
            shutil.copytree(old.samples, copied, dirs_exist_ok=True)


def _moment(what: str, step: int) -> dict[str, Any]:
    return {"phase": what, "started": round(time.time(), 3), "seconds": 0.0, "done": step, "unit": "step"}
