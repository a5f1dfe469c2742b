"""How a run can fail, as far as the exit status tells. Free of imports, so that the command line starts at once."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user can mend. The message names the offending value and the remedy. Exit status 2."""


class NonFiniteError(RuntimeError):
    """A latent, loss or gradient is NaN or infinite, and the policy is to stop or its limit is reached. Exit status 4."""


class OutOfMemory(RuntimeError):
    """A step did not fit; the message says what was computed and what would lower it. Exit status 5."""


class Interrupted(Exception):
    """SIGTERM or SIGINT arrived; `signum` says which. Exit status 128 + signum."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by signal {signum}")
        self.signum = signum
