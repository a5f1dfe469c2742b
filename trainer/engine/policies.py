"""What a run does about a value that is not finite."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trainer.base.errors import NonFiniteError
from trainer.checkpoint.state import Progress


@dataclass(frozen=True)
class NonFinite:
    """step.non_finite and step.max_skipped. progress: counts the updates that were skipped. say: prints a line of the run."""

    policy: Literal["stop", "skip"]
    max_skipped: int
    progress: Progress
    say: Callable[[str], None]

    def entry(self, what: str) -> None:
        """An encoded photo or caption is not finite. Raises NonFiniteError, or says that updates with it are skipped."""
        if self.policy == "stop":
            raise NonFiniteError(
                f"{what} are not finite; do one of these:\n"
                "- look at the file\n"
                "- look at the encoder's compute dtype\n"
                "- leave out every update it is in: step.non_finite = 'skip'"
            )
        self.say(
            f"warning: {what} are not finite; look at the file and at the encoder's compute dtype; every update it is in "
            "will be skipped"
        )

    def update(self, what: str, *, cause: str = "") -> None:
        """An update was refused. Raises NonFiniteError, or counts it as skipped. cause: a likely one, for people."""
        done, refusal = self.progress.non_finite, ""
        if self.policy == "stop":
            refusal = (
                "look at these samples and at the compute dtypes; with step.non_finite = 'skip' and --resume_from auto the "
                "run goes on without such updates"
            )
        elif done >= self.max_skipped:
            refusal = f"{done} updates were skipped before it, and step.max_skipped = {self.max_skipped} allows no more"
        if refusal:
            raise NonFiniteError("\n".join(filter(None, (what, cause, refusal))))
        self.say(f"warning: {what}; the update is skipped ({done + 1} of at most {self.max_skipped})")
        self.progress.non_finite += 1
