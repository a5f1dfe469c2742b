"""The command line: arguments in, exit status out.

0 done; 2 user error; 4 non-finite values; 5 out of memory; 6 storage; 143 / 130 / 129 after SIGTERM / SIGINT / SIGHUP.
"""

import atexit
import gc
import multiprocessing
import os
import sys
import threading
from pathlib import Path
from typing import NoReturn

from trainer import signals
from trainer.arguments import parse
from trainer.errors import PeerStopped, ending
from trainer.terminal import write


def main(arguments: list[str] | None = None) -> int:
    chosen = parse(arguments)
    signals.hold_save()
    quiet_libraries()
    # Importing the libraries makes millions of objects and no garbage; collecting meanwhile takes a sixth of the time to
    # the first step. run.train turns it on again.
    gc.disable()
    try:
        from trainer import allowance, config
        from trainer.run import preview, train

        # Looking through the libraries' objects would be most of a collection, and of a plan a tenth.
        if not gc.get_freeze_count():
            gc.freeze()
        memory = None if chosen.plan_memory is None else size_of(chosen.plan_memory)
        if chosen.new is not None:
            begin(chosen.new, model=chosen.model, memory=memory)
            return 0
        loaded = config.load(chosen.config, [item for group in chosen.overrides for item in group])
        resume_from = chosen.resume_from and config.expand_home(chosen.resume_from, "--resume_from")
        allowed = allowance.parse(chosen.allow, resume_from)
        if chosen.plan or chosen.plan_memory is not None:
            preview(loaded, memory)
        else:
            train(loaded, resume_from=resume_from, allowed=allowed)
    except (Exception, KeyboardInterrupt) as error:
        status, said = ending(error)
        if status == 1 and not isinstance(error, PeerStopped):
            raise
        lines = said.splitlines() or [""]
        write("\n".join([f"error: {lines[0]}", *(f"       {line}" for line in lines[1:])]), sys.stderr)
        return status
    finally:
        gc.enable()
    return 0


def begin(photos: str, *, model: str | None, memory: int | None) -> None:
    """Write a first config into the present folder; show what it trains on, its plan, and how to start it."""
    from trainer import config
    from trainer.data_check import report_data
    from trainer.errors import UserError
    from trainer.first_config import write_first_config
    from trainer.run import preview

    path = write_first_config(photos, model=model, memory=memory, folder=Path())
    loaded = config.load(str(path), [])
    try:
        report_data(loaded)
    except UserError as error:  # its photos were read already: what is missing is of the model, perhaps not downloaded yet
        write(f"warning: no data report: {error}", sys.stderr)
    preview(loaded, memory)
    write(f"config: {path}\nstart: python train.py --config {path} --resume_from auto")


def size_of(text: str) -> int:
    """Of --plan_memory, in bytes. Raises UserError."""
    from trainer.errors import UserError
    from trainer.files import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise UserError(f"--plan_memory {text!r}: {error}") from error


def leave(status: int) -> NoReturn:
    """End this process, for which there is nothing left to do; what libraries want done at the end is done.

    The interpreter's own way out first takes millions of objects apart, which takes seconds: too long after a signal, when a
    machine is about to be taken away. We use it only where threads, child
    processes or a process group must still be ended.
    """
    torch = sys.modules.get("torch")
    grouped = torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
    threads = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    if grouped or threads or multiprocessing.active_children():
        sys.exit(status)
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # nobody reads it any more: the interpreter knows how that ends
        sys.exit(status)
    os._exit(status)


def quiet_libraries() -> None:
    """Libraries' notices about what they could also do are not the user's business; errors still show."""
    import logging
    import warnings

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step.*")
