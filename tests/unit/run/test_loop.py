"""What the loop asks for and does between two steps."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from trainer.base.errors import (
    DataError,
    Interrupted,
    NonFiniteError,
    NotTrained,
    NotWritten,
    OutOfMemory,
    PeerStopped,
    UserError,
)
from trainer.run.loop import BY_SIGNAL, BY_THE_CLOCK, Loop
from trainer.runtime.jobs import ENDINGS


def between_steps(*, is_main: bool = True, pending: Exception | None = None, signalled: bool = False, others=(0, 0, 0, 0)):
    """A loop between two steps whose clock asks for a save; what it asks the others for, what it saves and says. others: what
    another process asks for."""
    asked, saved, said = [], [], []

    def largest(*numbers: int) -> list[int]:
        asked.append(numbers)
        return [max(pair) for pair in zip(numbers, others, strict=True)]

    loop = SimpleNamespace(
        pending=pending, state=SimpleNamespace(progress=SimpleNamespace(step=3)),
        signals=SimpleNamespace(stop=None, save=signalled),
        saves=SimpleNamespace(overdue=True, failed=False, is_saved=False, save=lambda: saved.append(3)),
        context=SimpleNamespace(processes=SimpleNamespace(is_main=is_main, largest=largest, say=said.append)),
    )  # fmt: skip
    return loop, asked, saved, said


@pytest.mark.parametrize("is_main", [True, False])
def test_the_main_process_s_clock_decides_and_all_save(is_main: bool) -> None:
    loop, asked, saved, said = between_steps(is_main=is_main)
    Loop._agree(loop)
    assert asked == [(0, BY_THE_CLOCK if is_main else 0, 0, 0)] and saved == [3] * is_main and not said
    loop, asked, saved, said = between_steps(is_main=is_main, others=(0, BY_THE_CLOCK, 0, 0))
    Loop._agree(loop)
    assert len(asked) == 1 and saved == [3] and not said


@pytest.mark.parametrize("here", [True, False])
def test_a_save_that_a_signal_asks_for_is_said_and_one_by_the_clock_is_not(here: bool) -> None:
    loop, _, saved, said = between_steps(signalled=here, others=(0, 0 if here else BY_SIGNAL, 0, 0))
    Loop._agree(loop)
    assert saved == [3] and said == ["SIGUSR1: step 3 is being saved"] and not loop.signals.save


@pytest.mark.parametrize("error", [DataError("x"), OutOfMemory("x"), NotWritten("x"), UserError("x"), NotTrained("x")])
def test_what_one_process_met_with_is_raised_by_all_after_the_same_step(error: Exception) -> None:
    loop, asked, _, _ = between_steps(pending=error)
    with pytest.raises(type(error)) as here:
        Loop._agree(loop)
    assert here.value is error and asked[0][3] > 0
    loop, _, _, _ = between_steps(others=asked[0])
    with pytest.raises(ENDINGS, match="another process could not go on") as there:
        Loop._agree(loop)
    assert isinstance(error, type(there.value))


def ended(
    error: BaseException | None, step: int = 3, *, replaced: bool = False, saved: Callable[..., None] | None = None
) -> tuple[list[str], BaseException | None]:
    """(what a loop does whose steps end like this, what it raises). replaced: whether a later start goes on without it.
    saved: what a save does."""
    done: list[str] = []

    def steps() -> Iterator[dict]:
        if error is not None:
            raise error
        yield from ()

    def noted(**how: bool) -> None:
        done.append(" ".join(["saved", *(word for word, is_so in how.items() if is_so)]))

    loop = SimpleNamespace(
        state=SimpleNamespace(progress=SimpleNamespace(step=step)), finished=True, signals=SimpleNamespace(), _steps=steps,
        saves=SimpleNamespace(save=saved or noted, close=lambda: done.append("saver closed")),
        measurements=SimpleNamespace(end=lambda error: None, log=SimpleNamespace(close=lambda: done.append("log closed"))),
        data=SimpleNamespace(close=lambda: done.append("data closed")),
        context=SimpleNamespace(processes=SimpleNamespace(replaced=replaced)),
    )  # fmt: skip
    try:
        assert list(Loop.steps(loop)) == []
        return done, None
    except BaseException as raised:  # of the loop, whatever it is
        return done, raised


CLOSED = ["data closed", "saver closed", "log closed"]


@pytest.mark.parametrize(
    ("error", "does"),
    [
        (None, CLOSED), (Interrupted(15), ["saved final", *CLOSED]), (DataError("x"), ["saved final", *CLOSED]),
        (NonFiniteError("x"), ["saved final", *CLOSED]), (NotWritten("x"), ["saved final", *CLOSED]),
        (UserError("x"), ["saved final", *CLOSED]),
        # Nobody waits for a process whose peer is gone; at a second signal nothing is waited for; what nobody foresaw
        # may have come in the middle of a step.
        (PeerStopped("x", 143), ["saved final alone", *CLOSED]), (KeyboardInterrupt(), ["data closed", "log closed"]),
        (AssertionError("x"), CLOSED),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, list) else "",
)  # fmt: skip
def test_the_last_whole_step_is_saved_however_a_run_ends(error: BaseException | None, does: list[str]) -> None:
    done, raised = ended(error)
    assert done == does and type(raised) is type(error)
    if isinstance(error, Interrupted):
        assert "after step 3, which is saved" in str(raised) and "which is saved" not in str(ended(error, step=0)[1])


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OutOfMemory("step 4: out of memory\nlower this"), "stopping: step 4: out of memory"),
        (NonFiniteError("step 4: the loss"), "stopping: step 4: the loss"),
        (KeyError("ours"), f"stopping: KeyError: 'ours' ({__file__}, line "),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_ends_a_run_is_told_before_a_save_that_may_hang_or_fail(error: Exception, line: str, capsys) -> None:
    """Else a full disk was all that was told of a run that ran out of memory."""
    told: list[str] = []

    def failing(**how: bool) -> None:
        told.append(capsys.readouterr().err)
        raise OSError(errno.ENOSPC, "no space")

    done, raised = ended(error, saved=failing)
    assert done == CLOSED and (told or [capsys.readouterr().err])[0].startswith(line)
    assert isinstance(raised, KeyError if isinstance(error, KeyError) else OSError)


def test_a_process_that_a_later_start_does_without_writes_nothing() -> None:
    done, raised = ended(PeerStopped("x", 143), replaced=True)
    assert done == CLOSED and isinstance(raised, PeerStopped)


def test_what_one_process_cannot_read_waits_until_all_know_of_it() -> None:
    """Raised at once it would leave the others in the step's reduction."""

    def updates():
        yield ["occurrences"], ["batch"]
        raise DataError("a photo is gone")

    loop = SimpleNamespace(data=updates(), pending=None)
    assert Loop._read(loop) == (["occurrences"], ["batch"]) and loop.pending is None
    assert Loop._read(loop) == ([], []) and str(loop.pending) == "a photo is gone"
