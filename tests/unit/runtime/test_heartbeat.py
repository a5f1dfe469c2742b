"""Signs of life: a process that gives none is lost, named, and takes the others with it, whatever holds them up."""

from __future__ import annotations

import os
import socket
import threading
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from trainer.base.errors import PeerStopped
from trainer.runtime import heartbeat
from trainer.runtime.heartbeat import Heartbeat

LIMIT = 60.0
HERE = f"(host {socket.gethostname()}, pid {os.getpid()})"


class Broken(Exception):
    pass


class Group:
    """Processes that give signs of life and look for those of the others when they are told to: no clock is read."""

    def __init__(self, count: int, lost_after: float = LIMIT) -> None:
        self.store, self.pause = HashStore(), min(heartbeat.MOST_SECONDS, lost_after / 20)
        self.ended: list[str] = []
        self.members = [
            Heartbeat(self.store, rank=rank, count=count, lost_after=lost_after, broken=Broken, end=self.ended.append)
            for rank in range(count)
        ]
        self.signs = 0

    def go_on(self, seconds: float, *, alive: set[int]) -> float:
        """Until all of the living take another for lost, or for so long; returns the seconds."""
        gone = 0.0
        while gone < seconds and not all(self.members[rank]._loss.is_set() for rank in alive):
            gone += self.pause
            self.signs += 1
            for rank in alive:
                self.members[rank].exchange(self.signs)
            for rank in alive:
                self.members[rank].look(self.pause)
        return gone

    def said(self, rank: int) -> str:
        with pytest.raises(PeerStopped) as lost:
            self.members[rank].answer()
        assert lost.value.status == 143
        return str(lost.value)


@pytest.mark.parametrize("lost_after", [5.0, 60.0, 1000.0])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_silent_process_is_lost_in_time_for_the_others_to_end_and_is_named(lost: int, lost_after: float) -> None:
    group = Group(3, lost_after)
    group.go_on(100 * lost_after, alive={0, 1, 2})
    alive = {0, 1, 2} - {lost}
    for rank in alive:
        group.members[rank].answer()  # nothing
    gone = group.go_on(lost_after, alive=alive)
    # Time is left to act on it; and a thread that was held up for most of it was not taken for dead.
    assert 0.7 * lost_after <= gone <= lost_after - 2 * group.pause
    for rank in alive:
        group.go_on(2 * group.pause, alive=alive)
        main = ", the main one," if lost == 0 else ""
        said = group.said(rank)
        assert said.startswith(f"process {lost} {HERE}{main} has given no sign of life for {lost_after:g} s (run.lost_after)")


def test_a_process_that_never_gave_a_sign_is_lost_too() -> None:
    group = Group(2)
    assert group.go_on(LIMIT, alive={0}) < LIMIT
    assert group.said(0).startswith("process 1 has given no sign of life for 60 s (run.lost_after); ")


def test_the_others_are_asked_for_soon_again_until_all_are_known() -> None:
    """One that is lost right at the start is named with its host and number only if a sign of it was taken before."""
    group, pauses = Group(2), []

    def wait(seconds: float) -> bool:
        pauses.append(seconds)
        if len(pauses) == 3:
            group.members[0].exchange(1)
        return len(pauses) == 5

    group.members[1]._over = SimpleNamespace(wait=wait)
    group.members[1]._exchange()
    assert pauses == [0, group.pause / 10, group.pause / 10, group.pause, group.pause]


def test_one_that_has_ended_is_not_missed() -> None:
    group = Group(2)
    group.go_on(10, alive={0, 1})
    group.members[1].exchange(heartbeat.OVER)
    group.go_on(100 * LIMIT, alive={0})
    group.members[0].answer()


def test_who_was_stopped_itself_takes_no_other_for_lost() -> None:
    """A debugger, or a machine that is moved: an hour passes between two looks, and the other's sign is to come yet."""
    group = Group(2)
    group.go_on(10, alive={0, 1})
    group.members[0].look(group.pause)
    group.go_on(10, alive={0, 1})
    group.members[0].answer()


def test_one_that_was_stopped_for_so_long_that_the_others_began_anew_ends_before_it_gives_a_sign() -> None:
    group = Group(2)
    group.go_on(10, alive={0, 1})
    assert not group.ended
    group.store.set(heartbeat.REPLACED, "")
    group.members[1].exchange(99)
    assert len(group.ended) == 1 and "a later start goes on without it" in group.ended[0]


def test_one_that_was_away_for_long_knows_that_it_may_have_been_missed(monkeypatch) -> None:
    """From the first moment on, and also once it gives signs again."""
    monkeypatch.setattr(heartbeat, "time", clock := Patient())
    one = Group(2).members[1]
    for _ in range(3):
        clock.seconds += LIMIT / 2
        assert not one.missed
        one.exchange(1)
    clock.seconds += 0.8 * LIMIT
    assert one.missed
    one.exchange(2)
    one.exchange(3)
    assert one.missed


def test_where_the_store_does_not_answer_it_is_the_main_process_that_is_lost() -> None:
    """All are silent then. The last look before it may have seen the main one's sign, and not those of others."""
    group = Group(4)
    group.go_on(10, alive={0, 1, 2, 3})
    one = group.members[3]
    one._previous_beats[0] = None
    while not one._loss.is_set():
        one.look(group.pause)
    assert group.said(3).startswith(f"process 0 {HERE}, the main one, has given no sign")


@pytest.mark.parametrize(("missed", "named"), [(0, "process 0"), (LIMIT / 2, "process 2")])
def test_a_store_that_is_gone_is_the_main_process_or_the_one_for_whose_sake_it_ended(missed: float, named: str) -> None:
    group = Group(3)
    group.go_on(10, alive={0, 1, 2})
    group.go_on(missed, alive={0, 1})
    group.members[1]._store_gone = True
    group.members[1].look(group.pause)
    assert group.said(1).startswith(f"{named} {HERE}")


def test_a_main_process_that_has_ended_takes_its_store_along() -> None:
    group = Group(2)
    group.go_on(10, alive={0, 1})
    group.members[0].exchange(heartbeat.OVER)
    group.members[1].exchange(99)
    group.members[1].look(group.pause)
    group.members[1]._store_gone = True
    group.members[1].look(group.pause)
    group.members[1].answer()


class Stopped:
    """A store that does not answer any more once it is told so."""

    def __init__(self) -> None:
        self.store, self.stopped = HashStore(), threading.Event()

    def set(self, key: str, value: str) -> None:
        if self.stopped.is_set():
            threading.Event().wait()
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        return self.store.get(key)

    def check(self, keys: list[str]) -> bool:
        return self.store.check(keys)


class Patient:
    """A lock that is waited for until a save is over, whatever limit is set, and a clock whose sleep is so, too. It goes by
    the limits."""

    def __init__(self) -> None:
        self.saved, self.seconds = threading.Event(), 0.0

    def acquire(self, timeout: float) -> bool:
        self.seconds += timeout
        return self.saved.wait()

    def sleep(self, seconds: float) -> None:
        self.acquire(seconds)

    def monotonic(self) -> float:
        return self.seconds


@pytest.mark.parametrize("hears", [True, False])
def test_a_main_thread_that_does_not_hear_of_it_is_ended_and_a_save_is_waited_for(hears: bool, monkeypatch) -> None:
    """The threads themselves, over a store that stops: in a reduction of NCCL no exception reaches the main thread. That one
    may be in the middle of a checkpoint."""
    ended, order, over = [], [], threading.Event()

    def end(message: str) -> None:
        order.append("ended")
        ended.append(message)
        over.set()

    store = Stopped()
    with Heartbeat(store, rank=1, count=2, lost_after=0.5, broken=Broken, end=end) as watched:
        watched.undisturbed = patient = Patient()
        monkeypatch.setattr(heartbeat, "time", patient)
        store.stopped.set()
        assert watched._loss.wait(60)
        if hears:
            with pytest.raises(PeerStopped, match="process 0"):
                watched.answer()
        order.append("saved")
        patient.saved.set()
    assert over.wait(60)
    assert order == ["saved", "ended"] and ended[0].startswith("process 0")


@pytest.mark.parametrize("lost_after", [5.0, 60.0, 1000.0])
@pytest.mark.parametrize("hears", [True, False])
@pytest.mark.parametrize("gone", [True, False])
def test_the_end_comes_within_the_time_that_is_given_whatever_the_main_thread_does(
    gone: bool, hears: bool, lost_after: float, monkeypatch
) -> None:
    """Counted from the last sign of the lost process, in seconds that are waited for and not in those of a clock."""
    group = Group(2, lost_after)
    one, limits = group.members[1], Patient()
    limits.saved.set()
    group.go_on(10 * group.pause, alive={0, 1})
    if gone:
        one._store_gone = True
        one.look(group.pause)
        waited = group.pause
    else:
        waited = group.go_on(lost_after, alive={1})

    def wait(seconds: float) -> bool:
        limits.seconds += 0 if hears else seconds
        return hears

    one._reaction, one.undisturbed = SimpleNamespace(wait=wait), limits
    monkeypatch.setattr(heartbeat, "time", limits)
    one._watch()
    assert len(group.ended) == 1 and lost_after / 2 < waited + limits.seconds <= lost_after
    assert gone or limits.seconds >= lost_after / 5 - group.pause / 2, "some time is left to end in order"


def test_an_orderly_end_leaves_no_thread() -> None:
    before = threading.active_count()
    with Heartbeat(HashStore(), rank=0, count=2, lost_after=60, broken=Broken, end=pytest.fail):
        assert threading.active_count() == before + 2
    assert threading.active_count() == before
