"""What a stop leaves: whatever stands in the way of its files, the run ends by its signal, and says what is there."""

from __future__ import annotations

import errno
import signal
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.artifacts.exports import leave_in_time
from trainer.base.errors import Interrupted, NonFiniteError, PeerStopped, UserError


def leaves(files: BaseException | None = None, report: BaseException | None = None) -> tuple[list[str], str]:
    """(what is said and done, what a second signal is promised)."""
    told: list[str] = []

    def work(name: str, error: BaseException | None) -> None:
        if error is not None:
            raise error
        told.append(name)

    artifacts: Any = SimpleNamespace(
        context=SimpleNamespace(processes=SimpleNamespace(say=told.append, wait=lambda: told.append("waited"))),
        state=SimpleNamespace(progress=SimpleNamespace(step=7)), existing_names=lambda: ["bear.safetensors"],
        leave_files=lambda: work("files", files), leave_report=lambda: work("report", report),
    )  # fmt: skip
    signals: Any = SimpleNamespace(promise="", last_work=lambda seconds: nullcontext())
    leave_in_time(artifacts, signals)
    return told, signals.promise


def test_files_and_report_are_left_and_then_waited_for() -> None:
    assert leaves() == (["files", "report", "waited"], "leaving at once; step 7 is saved")


IN_THE_WAY = [
    (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
    (MemoryError(), "MemoryError"),
    (NonFiniteError("the adapter's B is not finite\nmore"), "the adapter's B is not finite"),
    (UserError("no such thing"), "no such thing"),
    (ValueError("what Pillow says"), "what Pillow says"),
    (Interrupted(signal.SIGTERM), "a second signal, or too little time"),
]


@pytest.mark.parametrize(("error", "why"), IN_THE_WAY, ids=[type(error).__name__ for error, _ in IN_THE_WAY])
def test_whatever_is_in_the_way_is_said_and_ends_nothing(error: Exception, why: str) -> None:
    """With what is there now: of this step, or of an earlier one."""
    (said, waited), _ = leaves(files=error)
    assert waited == "waited" and said.startswith(
        "no adapter files of this step, bear.safetensors are still those of an earlier step ("
    )
    assert why in said and "; step 7 is saved, and `python scripts/adapter.py export` makes the files" in said
    (files, said, waited), _ = leaves(report=error)
    assert (files, waited) == ("files", "waited")
    assert said.startswith("the adapter files are of step 7, the report is older (") and why in said


def test_the_end_of_another_process_ends_this_one() -> None:
    with pytest.raises(PeerStopped):
        leaves(files=PeerStopped("gone", 143))
