"""How a run can fail, as far as the exit status tells. Imports next to nothing, so that the command line starts at once."""

from __future__ import annotations

import signal


class UserError(ValueError):
    """Something the user can mend. The message names the offending value and the remedy. Exit status 2."""


class NonFiniteError(RuntimeError):
    """A latent, loss or gradient is NaN or infinite, and the policy is to stop or its limit is reached. Exit status 4."""


class OutOfMemory(RuntimeError):
    """A step did not fit; the message says what was computed and what would lower it. Exit status 5."""


class DataError(RuntimeError):
    """Data that was checked when the run started cannot be read any more, or what reads it died. Exit status 6."""


class Interrupted(Exception):
    """SIGTERM or SIGINT arrived; `signum` says which, `where` what of the run is kept. Exit status 128 + signum."""

    def __init__(self, signum: int, where: str = "before a step was made") -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} {where}; go on with --resume_from auto")
        self.signum = signum
