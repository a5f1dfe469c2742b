"""How the programs in scripts/ end: with the statuses and the words of train.py (trainer/base/errors.py)."""

import os
import sys
from collections.abc import Callable

from trainer.base.console import write
from trainer.base.errors import ending, told
from trainer.runtime.libraries import quiet_libraries
from workbench.commands.environment import show_everything


def run_tool(work: Callable[[], int | None]) -> int:
    """The exit status of `work`, or of what ended it, which is told on stderr. Raises what nobody foresaw."""
    show_everything()
    quiet_libraries()
    try:
        status = work() or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # of `| head`. The status is the one that a signal would leave.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in the buffer goes there
        return 141
    except (Exception, KeyboardInterrupt) as error:
        status, said = ending(error)
        if status == 1 and not isinstance(error, OSError):
            raise
        write(told(error, said), sys.stderr, whole=True)
        return status
