"""The command line. Exit status: 0 done; 2 user error; 4 non-finite values; 5 out of memory; 6 storage; 143 / 130 / 129 after
SIGTERM / SIGINT / SIGHUP."""

import atexit
import gc
import os
import sys
import threading
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from trainer.base import signals
from trainer.base.console import LIVE, write
from trainer.base.errors import Interrupted, PeerStopped, ending, error_text
from trainer.runtime.libraries import quiet_libraries
from workbench.commands.arguments import parse, resume_command, without_config
from workbench.commands.tools import missing_part, undoing


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status. arguments: None: this process's."""
    options = parse(arguments)
    planned = options.new is not None or options.plan or options.plan_memory is not None
    # The command that resumes a run of several processes is unknown: a launcher started them.
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    arguments = sys.argv[1:] if arguments is None else arguments
    resume = partial(resume_command, arguments)
    signals.hold_save()
    quiet_libraries()
    # Importing the libraries makes millions of objects and no garbage; collecting meanwhile takes a sixth of the time to
    # the first step. run.train turns it on again.
    gc.disable()
    try:
        overrides = [item for group in options.overrides for item in group]
        if len(options.config or ()) > 1:
            return run_several(options.config, overrides, arguments, "" if planned else resume())
        from workbench.commands.launch import compare_runs, load_run, make_launch, next_command, size_of, train

        # Traversing the libraries' objects would be most of a collection, and a tenth of a plan.
        if not gc.get_freeze_count():
            gc.freeze()
        memory = None if options.plan_memory is None else size_of(options.plan_memory)
        if options.new is not None:
            with undoing():
                write_first(options.new, model=options.model, memory=memory, overrides=overrides)
            return 0
        if options.compare is not None:
            compare_runs(options.compare, only_plan=options.plan)
            return 0
        loaded, resume_from, allowed = load_run(options, overrides)
        LIVE.json = loaded.logging.json
        resume = partial(next_command, options, loaded, arguments)
        if planned:
            from workbench.commands.plan_command import preview

            preview(loaded, memory, launch=make_launch(resume_from, allowed, verify=options.verify))
        elif not train(loaded, resume_from=resume_from, allowed=allowed, verify=options.verify) and alone:
            write(f"go on: {resume()}", whole=True)
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, Interrupted) and options.fork_from is not None and alone:
            error = Interrupted(error.signum, error.state, "this command goes on")
        error = missing_part(error) or error
        status, message = ending(error)
        if status == 1 and not isinstance(error, PeerStopped):
            if LIVE.json:  # its traceback goes to stderr
                write(f"error: {type(error).__name__}: {error}")
            raise
        resumable = alone and not planned and (status == 6 or status > 128)
        write(error_text(error, message) + (f"\ngo on: {resume()}" if resumable else ""), sys.stderr, whole=True)
        if not (alone or planned or options.compare):
            from trainer.runtime.processes import excuse

            excuse(error, status)
        return status
    finally:
        gc.enable()
        LIVE.json = False
    return 0


def run_several(files: list[str], overrides: list[str], arguments: list[str], resume: str) -> int:
    """Run a queue, for which this process only waits; returns its status. resume: the command that resumes it, or ""."""
    from workbench.commands.queue import queue_of, run_queue

    status = run_queue(queue_of(files, overrides), without_config(arguments))
    if resume and (status == 6 or status > 128):
        write(f"go on: {resume}", sys.stderr, whole=True)
    return status


def write_first(photos: str, *, model: str | None, memory: int | None, overrides: list[str]) -> None:
    """Write a first config into the current folder; print its data, its plan, and the command that starts it."""
    from trainer import config
    from trainer.base.errors import UserError
    from trainer.base.files import make_folder
    from workbench.commands.check_data import data_page, report_data
    from workbench.commands.new_config import trigger_line, write_first_config
    from workbench.commands.plan_command import preview, write_head

    has_head = has_report = False

    def show(loaded: config.Config, otherwise: str | None) -> bool:
        nonlocal has_head, has_report
        page = data_page(loaded)
        for folder in reversed((page.parent, *page.parent.parents)):  # undone from the innermost
            if not folder.exists():
                undo.callback(_remove_if_empty, folder)
        make_folder(page.parent, "run.output_dir")
        if not has_report and not page.exists():
            undo.callback(page.unlink, missing_ok=True)
        if not has_head:
            write_head(loaded, memory)
            write(trigger_line(loaded))
        has_head = True
        try:
            if not has_report:
                report_data(loaded, strict=False)
            has_report = True
        except UserError as error:  # the photos were readable: files of the model are missing, perhaps not here yet
            write(f"warning: no data report: {error}", sys.stderr)
        return preview(loaded, memory, head=False, data=not has_report, otherwise=otherwise)

    with ExitStack() as undo:
        path = write_first_config(photos, model=model, memory=memory, overrides=overrides, folder=Path(), show=show)
        undo.pop_all()
    write(f"config: {path}\nstart: python train.py --config {path} --resume_from auto", whole=True)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def leave(status: int) -> NoReturn:
    """Exit after the libraries' atexit functions, without the interpreter's own shutdown, which frees millions of objects:
    seconds that a machine about to be taken away may not have. Threads, child processes or a process group that must still
    be ended get the ordinary exit."""
    # Modules that were not loaded have nothing to end; importing them to ask would be a tenth of the time that --help takes.
    torch, multiprocessing = sys.modules.get("torch"), sys.modules.get("multiprocessing")
    grouped = torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
    if grouped:
        from trainer.runtime.heartbeat import WATCHING

        # A group that lost a process cannot be ended in an orderly way.
        grouped = WATCHING not in {thread.name for thread in threading.enumerate()}
    threads = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    if grouped or threads or (multiprocessing is not None and multiprocessing.active_children()):
        sys.exit(status)
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # a closed pipe: the interpreter handles it
        sys.exit(status)
    os._exit(status)
