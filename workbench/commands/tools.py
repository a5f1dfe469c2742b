"""Exit statuses and signals of the programs in scripts/, as of train.py (trainer/base/errors.py)."""

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from trainer.base import signals
from trainer.base.console import write
from trainer.base.errors import Interrupted, UserError, ending, error_text
from trainer.runtime.libraries import quiet_libraries
from workbench.commands.environment import show_everything


def missing_part(error: BaseException) -> UserError | None:
    """The message for a deleted folder of workbench/ that is needed; None for any other error."""
    package, _, folder = ((isinstance(error, ModuleNotFoundError) and error.name) or "").partition(".")
    if package != "workbench":
        return None
    return UserError(f"workbench/{folder.partition('.')[0]} is not here, and what was asked for is made of it; get it back")


def run_tool(work: Callable[[], int | None]) -> int:
    """The exit status of `work`, or of its error, which is printed to stderr. Unexpected errors are raised."""
    show_everything()
    quiet_libraries()
    try:
        status = work() or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # of `| head`. The status is the one that a signal would leave.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards the rest of the buffer
        return 141
    except (Exception, KeyboardInterrupt) as error:
        error = missing_part(error) or error
        status, message = ending(error)
        if status == 1 and not isinstance(error, OSError):
            raise
        write(error_text(error, message), sys.stderr, whole=True)
        return status


@contextmanager
def handling(signums: Iterable[int], handler: Callable[[int, object], None]) -> Iterator[None]:
    """A block in which `handler` is called for these signals. A SIGHUP that was ignored stays so (nohup)."""
    ignored = {signals.HANGUP} if signals.HANGUP and signal.getsignal(signals.HANGUP) == signal.SIG_IGN else set()
    handlers = {signum: signal.getsignal(signum) for signum in {*signums} - ignored}
    try:
        for signum in handlers:
            signal.signal(signum, handler)
        yield
    finally:
        for signum, earlier in handlers.items():
            signal.signal(signum, earlier)


def undoing() -> AbstractContextManager[None]:
    """A block that cleans up when it fails: SIGTERM and SIGHUP raise Interrupted where they arrive."""
    signums = {*signals.STOP} - {signal.SIGINT}

    def stop(signum: int, frame: object) -> None:
        for other in signums:  # once: the cleanup must not be interrupted
            signal.signal(other, signal.SIG_IGN)
        raise Interrupted(signum, "before it was done", "nothing is left of it: start again")

    return handling(signums, stop)
