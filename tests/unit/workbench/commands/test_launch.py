"""What a command line asks of runs: several of them say each thing once."""

from __future__ import annotations

from workbench.commands.launch import differences


class Given:
    """A summary that is its plan."""

    def described(self, plan: str) -> str:
        """The plan."""
        return plan


def test_of_a_further_run_what_differs_is_said_below_its_heads() -> None:
    first = "run a\nparts\n  unet bf16\n  vae fp32\nadapter lora\n  all layers: rank 4\noptimizer lr 1"
    several: list[str] = []
    assert differences(Given(), several, first) == first
    other = first.replace("run a", "run b").replace("unet bf16", "unet int8").replace("rank 4", "rank 8\n  skipped: 2 layers")
    wanted = (
        "run b\nparts\n  unet int8\nadapter lora\n  all layers: rank 8\n  skipped: 2 layers\n  all else as in the plan above"
    )
    for _ in range(2):  # as it is not as the first, however often it was said
        assert differences(Given(), several, other) == wanted
    assert differences(Given(), several, first.replace("run a", "run c")) == "run c\n  all else as in the plan above"
