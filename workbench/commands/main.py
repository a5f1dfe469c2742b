"""The command line: arguments in, exit status out. 0 done; 2 user error; 4 non-finite values; 5 out of memory; 6 storage;
143 / 130 / 129 after SIGTERM / SIGINT / SIGHUP."""

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
from trainer.base.errors import Interrupted, PeerStopped, ending, told
from trainer.runtime.libraries import quiet_libraries
from workbench.commands.arguments import again, parse, without_config
from workbench.commands.tools import missing_part, undoing


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line asks; returns the exit status. arguments: None takes those of this process."""
    options = parse(arguments)
    planned = options.new is not None or options.plan or options.plan_memory is not None
    # Where a launcher started several processes, only the user knows how.
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    given = sys.argv[1:] if arguments is None else arguments
    next_one = partial(again, given)
    signals.hold_save()
    quiet_libraries()
    # Importing the libraries makes millions of objects and no garbage; collecting meanwhile takes a sixth of the time to
    # the first step. run.train turns it on again.
    gc.disable()
    try:
        overrides = [item for group in options.overrides for item in group]
        if len(options.config or ()) > 1:
            return run_several(options.config, overrides, given, "" if planned else next_one())
        from workbench.commands.launch import asked, compare_runs, launched, next_command, size_of, train

        # Looking through the libraries' objects would be most of a collection, and of a plan a tenth.
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
        loaded, resume_from, allowed = launched(options, overrides)
        LIVE.json = loaded.logging.json
        next_one = partial(next_command, options, loaded, given)
        if planned:
            from workbench.commands.plan_command import preview

            preview(loaded, memory, launch=asked(resume_from, allowed, verify=options.verify))
        elif not train(loaded, resume_from=resume_from, allowed=allowed, verify=options.verify) and alone:
            write(f"go on: {next_one()}", whole=True)
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, Interrupted) and options.fork_from is not None and alone:
            error = Interrupted(error.signum, error.where, "this command goes on")
        error = missing_part(error) or error
        status, message = ending(error)
        if status == 1 and not isinstance(error, PeerStopped):
            if LIVE.json:  # its traceback goes to stderr
                write(f"error: {type(error).__name__}: {error}")
            raise
        goes_on = alone and not planned and (status == 6 or status > 128)
        write(told(error, message) + (f"\ngo on: {next_one()}" if goes_on else ""), sys.stderr, whole=True)
        if not (alone or planned or options.compare):
            from trainer.runtime.processes import excuse

            excuse(error, status)
        return status
    finally:
        gc.enable()
        LIVE.json = False
    return 0


def run_several(files: list[str], overrides: list[str], arguments: list[str], goes_on: str) -> int:
    """The status of a queue of runs, which this process only waits for. goes_on: the command that goes on with it, or ""."""
    from workbench.commands.queue import queue_of, run_queue

    status = run_queue(queue_of(files, overrides), without_config(arguments))
    if goes_on and (status == 6 or status > 128):
        write(f"go on: {goes_on}", sys.stderr, whole=True)
    return status


def write_first(photos: str, *, model: str | None, memory: int | None, overrides: list[str]) -> None:
    """Write a first config into the present folder; show what it trains on, its plan, and how to start it."""
    from trainer import config
    from trainer.base.errors import UserError
    from trainer.base.files import make_folder
    from workbench.commands.check_data import data_page, report_data
    from workbench.commands.new_config import trigger_line, write_first_config
    from workbench.commands.plan_command import preview, write_head

    begun = told = False

    def show(loaded: config.Config, otherwise: str | None) -> bool:
        nonlocal begun, told
        page = data_page(loaded)
        for folder in reversed((page.parent, *page.parent.parents)):  # undone from the innermost
            if not folder.exists():
                undo.callback(_remove_if_empty, folder)
        make_folder(page.parent, "run.output_dir")
        if not told and not page.exists():
            undo.callback(page.unlink, missing_ok=True)
        if not begun:
            write_head(loaded, memory)
            write(trigger_line(loaded))
        begun = True
        try:
            if not told:
                report_data(loaded, strict=False)
            told = True
        except UserError as error:  # its photos were read already: what is missing is of the model, perhaps not here yet
            write(f"warning: no data report: {error}", sys.stderr)
        return preview(loaded, memory, head=False, data=not told, otherwise=otherwise)

    with ExitStack() as undo:
        path = write_first_config(photos, model=model, memory=memory, overrides=overrides, folder=Path(), show=show)
        undo.pop_all()
    write(f"config: {path}\nstart: python train.py --config {path} --resume_from auto", whole=True)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def leave(status: int) -> NoReturn:
    """End this process, for which there is nothing left to do; what libraries want done at the end is done. The
    interpreter's own way out takes millions of objects apart first: seconds that a machine about to be taken away may not
    have. It is taken only where threads, child processes or a process group must still be ended."""
    # What was not loaded has left nothing; to load it only to ask would be a tenth of the time that --help takes.
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
    except (OSError, ValueError):  # nobody reads it any more: the interpreter knows how that ends
        sys.exit(status)
    os._exit(status)
