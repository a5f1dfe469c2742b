"""When a job is due, what becomes of what it meets with, and which process does it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
from trainer.runtime.jobs import ENDINGS, Job, Position, guarded, run_jobs


@given(st.integers(0, 7), st.integers(1, 30))
def test_what_is_due_every_so_many_steps(every: int, last: int) -> None:
    """By counting: one every so many steps, none before the first; with `ends` also at the first moment and the last."""
    due = [step for step in range(last + 1) if Position(step, last).due(every)]
    assert due == ([] if every == 0 else list(range(every, last + 1, every)))
    both = [step for step in range(last + 1) if Position(step, last).due(every, ends=True)]
    assert both == ([] if every == 0 else sorted({0, *due, last}))


def job(run, **more: Any) -> Job:
    return Job(name="notes were written", due=lambda at: at.due(1), run=run, remedy="write none", **more)


def raising(error: BaseException):
    def run(at: Position) -> None:
        raise error

    return run


@pytest.mark.parametrize("kind", [*ENDINGS, NotTrained])
def test_an_ending_is_handed_on_as_it_is(kind: type[Exception]) -> None:
    error = kind("x")
    assert guarded(job(raising(error)), Position(3, 9)) == ({}, error)


def test_what_a_job_meets_with_becomes_an_ending() -> None:
    at, full = Position(3, 9), OSError(28, "full")
    _, failure = guarded(job(raising(full)), at)
    assert isinstance(failure, NotWritten) and failure.reason is full
    for error in (torch.OutOfMemoryError("too much"), MemoryError("too much")):
        _, failure = guarded(job(raising(error)), at)
        assert isinstance(failure, OutOfMemory) and failure.__traceback__ is None
        assert str(failure) == "step 3: out of memory while notes were written\ntoo much\nwrite none"
    assert guarded(job(raising(Interrupted(15))), at) == ({}, None), "obeyed between two steps"
    assert guarded(job(lambda at: {"notes": at.step}), at) == ({"notes": 3}, None)
    assert guarded(job(lambda at: None), at) == ({}, None)


@pytest.mark.parametrize("error", [PeerStopped("x", 1), RuntimeError("shapes"), KeyError(), KeyboardInterrupt()])
def test_what_nobody_foresaw_is_raised(error: BaseException) -> None:
    with pytest.raises(type(error)):
        guarded(job(raising(error)), Position(3, 9))


@pytest.mark.parametrize("is_main", [True, False])
def test_the_main_process_works_and_the_others_wait_but_for_what_all_share(is_main: bool) -> None:
    """After a failure the main process's other jobs are left out; it waits as often as the others, who know of none."""
    done: list[str] = []
    processes: Any = SimpleNamespace(is_main=is_main, wait=lambda: done.append("wait"))
    first, second = DataError("first"), UserError("second")

    def failing(at: Position) -> None:
        done.append("failing")
        raise first

    def failing_too(at: Position) -> None:
        done.append("shared")
        raise second

    jobs = [
        job(lambda at: done.append("own") or {"own": 1}),
        job(failing),
        job(lambda at: done.append("left out")),
        job(failing_too, shared=True),
        job(lambda at: done.append("shared again") or {"shared": 2}, shared=True),
        Job(name="never", due=lambda at: False, run=lambda at: done.append("never"), remedy=""),
    ]
    fields, failure = run_jobs(jobs, Position(3, 9), processes)
    own = ["own", "wait", "failing", "wait", "wait"] if is_main else ["wait"] * 3
    assert done == [*own, "shared", "shared again"]
    assert fields == ({"own": 1} if is_main else {}) | {"shared": 2} and failure is (first if is_main else second)


@pytest.mark.parametrize("is_main", [True, False])
def test_a_job_that_sees_to_the_others_runs_in_all_after_a_failure_too_and_raises_at_once(is_main: bool) -> None:
    """A checkpoint that is not worth keeping is refused in all processes at the same place."""
    done: list[str] = []
    processes: Any = SimpleNamespace(is_main=is_main, wait=lambda: done.append("wait"))
    jobs = [job(raising(DataError("x")), shared=True), job(lambda at: done.append("saved"), at_once=True)]
    assert run_jobs(jobs, Position(3, 9), processes)[1] is not None and done == ["saved"]
    with pytest.raises(OSError, match="full"):
        run_jobs([job(raising(OSError(28, "full")), at_once=True)], Position(3, 9), processes)


def test_each_ending_has_its_own_exit_or_that_of_its_reason() -> None:
    assert {kind: kind.status for kind in ENDINGS if kind is not NotWritten} == {
        DataError: 6, OutOfMemory: 5, UserError: 2, NonFiniteError: 4,
    }  # fmt: skip
