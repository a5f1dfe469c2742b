"""The policy for values that are not finite: stop the run, or skip the update."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trainer.base.errors import NonFiniteError
from trainer.checkpoint.state import Progress


@dataclass(frozen=True)
class NonFinite:
    """step.non_finite and step.max_skipped. progress: counts skipped updates. say: prints a line of the run."""

    policy: Literal["stop", "skip"]
    max_skipped: int
    progress: Progress
    say: Callable[[str], None]

    def entry(self, name: str) -> None:
        """Handle a non-finite encoded photo or caption: raises NonFiniteError, or warns that its updates are skipped."""
        if self.policy == "stop":
            raise NonFiniteError(
                f"{name} are not finite; do one of these:\n"
                "- look at the file\n"
                "- look at the encoder's compute dtype\n"
                "- leave out every update it is in: step.non_finite = 'skip'"
            )
        self.say(
            f"warning: {name} are not finite; look at the file and at the encoder's compute dtype; every update it is in "
            "will be skipped"
        )

    def update(self, problem: str, *, cause: str = "") -> None:
        """Handle a refused update: raises NonFiniteError, or counts it as skipped. cause: the likely one, in words."""
        skipped, refusal = self.progress.non_finite, ""
        if self.policy == "stop":
            refusal = (
                "look at these samples and at the compute dtypes; with step.non_finite = 'skip' and --resume_from auto the "
                "run goes on without such updates"
            )
        elif skipped >= self.max_skipped:
            refusal = f"{skipped} updates were skipped before it, and step.max_skipped = {self.max_skipped} allows no more"
        if refusal:
            raise NonFiniteError("\n".join(filter(None, (problem, cause, refusal))))
        self.say(f"warning: {problem}; the update is skipped ({skipped + 1} of at most {self.max_skipped})")
        self.progress.non_finite += 1
