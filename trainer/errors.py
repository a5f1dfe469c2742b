"""How a run can fail, as far as the exit status tells. Imports next to nothing, so that the command line starts at once."""

from __future__ import annotations

import errno
import signal

STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG}
NO_ACCESS = (PermissionError, NotADirectoryError, FileExistsError, IsADirectoryError)


class UserError(ValueError):
    """Something the user can mend. The message names the offending value and the remedy. Exit status 2."""


class NonFiniteError(RuntimeError):
    """A latent, loss or gradient is NaN or infinite, and the policy is to stop or its limit is reached. Exit status 4."""


class OutOfMemory(RuntimeError):
    """A step did not fit; the message says what was computed and what would lower it. Exit status 5."""


class DataError(RuntimeError):
    """Data that was checked when the run started cannot be read any more, or what reads it died. Exit status 6."""


class Interrupted(Exception):
    """SIGTERM, SIGINT or SIGHUP arrived; `signum` says which, `where` what of the run is kept. Exit status 128 + signum."""

    def __init__(self, signum: int, where: str = "before a step of this start was made") -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} {where}; go on with --resume_from auto")
        self.signum = signum


class PeerStopped(RuntimeError):
    """Another process of the run has ended or is gone, so this one ends too: with the same exit status, `status`."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def exit_status(error: BaseException) -> int:
    """What the process ends with; 1 for what nobody foresaw."""
    if isinstance(error, PeerStopped):
        return error.status
    if isinstance(error, Interrupted):
        return 128 + error.signum
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    for kinds, status in (
        ((UserError, *NO_ACCESS), 2), (NonFiniteError, 4), ((OutOfMemory, MemoryError), 5), (DataError, 6)
    ):  # fmt: skip
        if isinstance(error, kinds):
            return status
    if isinstance(error, OSError):
        return 6 if error.errno in STORAGE_ERRORS else 1
    if isinstance(error, RuntimeError):
        from trainer.memory import is_out_of_memory

        # A worker's death is told by a signal, in the middle of whatever was done.
        return 6 if str(error).startswith("DataLoader worker") else 5 if is_out_of_memory(error) else 1
    return 1
