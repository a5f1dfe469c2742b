"""Waiting for one another through a store: without a time-out, heedful of signals and of one that failed or is gone."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from trainer.base.errors import Interrupted, PeerStopped, UserError
from trainer.base.progress import Alive
from trainer.base.signals import Signals
from trainer.runtime import heartbeat, processes
from trainer.runtime.processes import Processes

LOST_AFTER = 600.0


@pytest.fixture
def pair(monkeypatch) -> list[tuple[Processes, Signals]]:
    """Two processes' views, over a store of this process; each is run in a thread."""
    store = HashStore()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(processes, "_end", lambda message: None)  # a lost process would end this one
    views = []
    for rank in (0, 1):
        views.append((Processes(torch.device("cpu"), rank, 2, store, lost_after=LOST_AFTER), Signals()))
    return views


def side_by_side(pair, *works: Callable[[Processes, Signals], object]) -> list[object]:
    """What each of the works gives or raises."""

    def run(view: Processes, signals: Signals, work) -> object:
        try:
            with view.attending(signals):
                return work(view, signals)
        except (Interrupted, PeerStopped, UserError) as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(run, *member, work) for member, work in zip(pair, works, strict=True)]
        return [job.result(timeout=30) for job in jobs]


def test_a_quiet_process_says_warnings_alone(capsys) -> None:
    for quiet in (False, True):
        view = Processes(torch.device("cpu"), lost_after=LOST_AFTER, quiet=quiet)
        view.say("cache: 12 latents")
        view.say("warning: the cache is open to others")
    told = "warning: the cache is open to others\n"
    assert capsys.readouterr().out == f"cache: 12 latents\n{told}{told}"


def test_the_main_process_goes_first_however_long_it_takes(pair) -> None:
    order = []

    def work(view: Processes, signals: Signals) -> None:
        with view.main_first():
            if view.is_main:
                time.sleep(0.5)
            order.append(view.rank)
        view.wait()

    assert side_by_side(pair, work, work) == [None, None]
    assert order == [0, 1]


def test_all_leave_together_and_the_main_process_last(pair) -> None:
    """However long it takes: the others hear of what goes wrong until then."""
    left: list[int] = []

    def main(view: Processes, signals: Signals) -> None:
        time.sleep(0.5)
        left.append(-1)
        view.leave_together()
        left.append(0)

    def other(view: Processes, signals: Signals) -> None:
        tell = view._publish

        def slowly(key: str, value: object) -> None:
            if key == "left/1":
                time.sleep(0.5)
                left.append(1)
            tell(key, value)

        view._publish = slowly
        view.leave_together()

    assert side_by_side(pair, main, other) == [None, None]
    assert left == [-1, 1, 0]


def test_who_waits_to_leave_hears_that_the_main_process_failed(pair) -> None:
    def fails(view: Processes, signals: Signals) -> None:
        raise UserError("a full disk")

    _, second = side_by_side(pair, fails, lambda view, signals: view.leave_together())
    assert isinstance(second, PeerStopped) and second.status == 2


def test_an_error_of_the_main_process_alone_ends_the_other_with_its_status(pair) -> None:
    def main(view: Processes, signals: Signals) -> None:
        with view.main_first():
            raise UserError("a photo changed")

    def other(view: Processes, signals: Signals) -> None:
        with view.main_first():
            pytest.fail("went on")

    first, second = side_by_side(pair, main, other)
    assert isinstance(first, UserError)
    assert isinstance(second, PeerStopped) and second.status == 2 and "process 0" in str(second)


def test_a_signal_to_the_one_that_waits_is_heard_by_the_one_that_works(pair) -> None:
    def main(view: Processes, signals: Signals) -> None:
        with view.main_first():
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                view.check()
                time.sleep(0.01)

    def other(view: Processes, signals: Signals) -> None:
        signals.stop = 15
        view.wait()  # as in the loop, where both have to save before they stop

    first, second = side_by_side(pair, main, other)
    assert isinstance(first, Interrupted) and first.signum == 15
    assert isinstance(second, PeerStopped) and second.status == 143


def test_who_waits_is_alive_as_long_as_another_one_gets_on(pair, tmp_path, monkeypatch) -> None:
    """The threads that watch the others give signs while a main thread hangs: these count for nothing here."""
    (main_view, signals), (other, others_signals) = pair
    signs: list[str] = []
    alive = Alive(tmp_path / "alive.json")
    alive.sign = signs.append
    monkeypatch.setattr(heartbeat.Heartbeat, "__enter__", lambda self: self)
    monkeypatch.setattr(heartbeat.Heartbeat, "__exit__", lambda *_: None)

    def exchange(works: int) -> None:
        for _ in range(works):
            other.sign("encoding photos")
        other._heartbeat.exchange(len(signs) + works)
        main_view._heartbeat.exchange(1)

    with main_view.attending(signals, alive), other.attending(others_signals):
        rounds = iter((0, 0, 2, 0, 0, 1, 0))

        def check() -> None:
            if (works := next(rounds, None)) is None:
                main_view._store.set("there", "")
            else:
                exchange(works)

        main_view._await(["there"], check)
        assert signs == ["waiting for another process"] * 2
        main_view.sign("loading")
        assert signs[2:] == ["loading"]


def test_a_lost_process_ends_the_wait_for_it_and_the_work_beside_it(pair, monkeypatch) -> None:
    """Found by signs of life, which test_heartbeat.py has."""
    (main_view, signals), (_, _) = pair
    with main_view.attending(signals):
        main_view._heartbeat.look(2 * LOST_AFTER)  # without a sign
        for work in (main_view.wait, main_view.check):
            with pytest.raises(PeerStopped, match="process 1 has given no sign of life") as gone:
                work()
            assert gone.value.status == 143


@pytest.mark.parametrize("told", [True, False])
def test_a_connection_that_breaks_in_a_reduction_is_another_process_that_ended(pair, monkeypatch, told) -> None:
    def broken(*_, **more) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:6054.")

    def out_of_memory(*_, **more) -> None:
        raise RuntimeError("CUDA error: out of memory")

    (_, view), signals = (view for view, _ in pair), Signals()
    with view.attending(signals):
        view.check()  # it has just listened
        if told:
            pair[0][0]._publish("failed", {"rank": 0, "status": 5})
        for reduction in (lambda: view.sum(torch.zeros(1)), lambda: view.largest(1)):
            monkeypatch.setattr(torch.distributed, "all_reduce", broken)
            with pytest.raises(PeerStopped, match="process 0 could not" if told else "another process is gone") as ended:
                reduction()
            assert ended.value.status == (5 if told else 1)
            monkeypatch.setattr(torch.distributed, "all_reduce", out_of_memory)
            with pytest.raises(RuntimeError, match="out of memory"):
                reduction()


def test_whatever_is_done_in_common_comes_after_lending(pair, monkeypatch) -> None:
    """As long as others want something, each time."""
    done: list[str] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **more: done.append("reduced") or LateWork())
    monkeypatch.setattr(torch.distributed, "new_group", lambda **more: None)

    def work(view: Processes, signals: Signals) -> None:
        wants = iter([True, True, False, True, False, False, True, False])
        view.lend_with(lambda: next(wants) and not done.append("lent"))
        for common in (view.wait, lambda: view.largest(1), lambda: view.sum(torch.zeros(1), torch.zeros(1)), view.settle):
            common()
            done.append("met")
        view.lend_with(None)
        view.settle()

    def other(view: Processes, signals: Signals) -> None:
        view.wait()  # for both to lend
        view.wait()

    assert side_by_side(pair, work, other) == [None, None]
    assert done == ["lent", "lent", "met", "lent", "reduced", "met", "reduced", "reduced", "met", "lent", "met"]


def test_who_is_first_to_lend_hears_of_one_that_failed(pair, monkeypatch) -> None:
    """And does not wait in torch for a process that will not come."""
    monkeypatch.setattr(torch.distributed, "new_group", lambda **more: pytest.fail("not all are there"))

    def first(view: Processes, signals: Signals) -> None:
        view.lend_with(lambda: False)

    def fails(view: Processes, signals: Signals) -> None:
        raise UserError("a file is damaged")

    heard, _ = side_by_side(pair, first, fails)
    assert isinstance(heard, PeerStopped) and heard.status == 2


class LateWork:
    """A reduction that is done just after the wait for it is over. failed: with what."""

    def __init__(self, failed: str = "") -> None:
        self.failed, self.done = failed, False

    def wait(self, timeout: object = None) -> None:
        if not self.done:
            self.done = True
            raise RuntimeError("Operation timed out!")
        if self.failed:
            raise RuntimeError(self.failed)

    def is_completed(self) -> bool:
        return self.done


def test_a_reduction_that_is_done_just_after_the_wait_is_done(pair, monkeypatch) -> None:
    (_, view), signals = (view for view, _ in pair), Signals()
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **more: LateWork())
    with view.attending(signals):
        view.sum(torch.zeros(1))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **more: LateWork("Connection closed by peer"))
    with view.attending(signals), pytest.raises(PeerStopped, match="Connection closed by peer"):
        view.sum(torch.zeros(1))


def test_one_that_the_launcher_has_replaced_knows(pair, monkeypatch) -> None:
    """So the loop saves nothing for it. Without a launcher nobody starts again over the same store."""
    view = pair[0][0]
    assert not view.replaced
    view._store.set(heartbeat.REPLACED, "")
    assert view.replaced and pair[1][0].replaced
    monkeypatch.setattr(view, "_launched", False)
    assert not view.replaced


def test_a_launcher_that_does_not_answer_may_have_replaced_this_one(pair, monkeypatch) -> None:
    def gone(keys: list[str]) -> bool:
        raise torch.distributed.DistNetworkError("Connection reset by peer")

    view = pair[0][0]
    monkeypatch.setattr(view, "_store", SimpleNamespace(check=gone))
    assert view.replaced


def test_one_that_was_away_for_long_may_have_been_replaced_over_another_store(pair) -> None:
    (view, signals), _ = pair
    with view.attending(signals):
        assert not view.replaced
        view._heartbeat._last_sign -= LOST_AFTER
        assert view.replaced


def test_texts_of_any_length_come_in_the_order_of_the_ranks(pair, monkeypatch) -> None:
    monkeypatch.setattr(processes, "TEXT", 3)
    texts = ["", '\u00e4"\\n' * 5]
    works = [lambda view, signals, text=text: [view.exchange(text), view.exchange(text[:2])] for text in texts]
    assert side_by_side(pair, *works) == [[texts, ["", texts[1][:2]]]] * 2


def test_tables_are_sent_where_they_differ_alone(pair, monkeypatch) -> None:
    sent: list[int] = []
    exchange = Processes.exchange
    monkeypatch.setattr(Processes, "exchange", lambda view, text: sent.append(len(text)) or exchange(view, text))
    tables = [
        {"seed": "7", "only here": "1"} | {str(n): "" for n in range(99)},
        {"seed": "8"} | {str(n): "" for n in range(99)},
    ]
    same = [lambda view, signals: view.differences(tables[0])] * 2
    assert side_by_side(pair, *same) == [{}, {}] and sent == [64, 64]
    unlike = [lambda view, signals, table=table: view.differences(table) for table in tables]
    assert side_by_side(pair, *unlike) == [{"only here": ["1", None], "seed": ["7", "8"]}] * 2


def test_who_compares_hears_of_one_that_refuses_for_a_reason_of_its_own(pair) -> None:
    def fails(view: Processes, signals: Signals) -> None:
        raise UserError("a file is missing")

    heard, _ = side_by_side(pair, lambda view, signals: view.differences({}), fails)
    assert isinstance(heard, PeerStopped) and heard.status == 2


def test_where_all_have_come_nobody_is_stopped_by_what_one_did_since(pair) -> None:
    """All of them know what it knew, so each can say it itself."""
    view, signals = pair[1]
    others = {"1/0": "true", "1/1": "true", "failed": '{"rank": 0, "status": 2}'}

    def failed() -> None:
        for key, value in others.items():
            view._store.set(key, value)
        view._last_poll = 0.0
        view._listen()

    view._await(["1/0", "1/1"], failed)
    with pytest.raises(PeerStopped):
        view._await(["2/0", "2/1"], failed)


@pytest.mark.parametrize("launched", [False, True])
def test_without_a_launcher_the_main_process_stays_until_the_others_have_heard(pair, monkeypatch, launched: bool) -> None:
    """It has the store: without it they would only know that it is gone."""
    ended: list[int] = []

    def fails(view: Processes, signals: Signals) -> None:
        raise UserError("a full disk")

    def busy(view: Processes, signals: Signals) -> None:
        time.sleep(0.5)
        ended.append(view.rank)
        view.wait()

    for view, _ in pair:
        monkeypatch.setattr(view, "_launched", launched)
    part = Processes._announce_end
    monkeypatch.setattr(
        Processes, "_announce_end", lambda view, error: part(view, error) or (view.is_main and ended.append(0))
    )
    first, second = side_by_side(pair, fails, busy)
    assert isinstance(first, UserError) and isinstance(second, PeerStopped) and second.status == 2
    assert ended == ([0, 1] if launched else [1, 0])


def test_an_error_is_not_replaced_by_that_of_a_store_that_is_gone(pair) -> None:
    def gone(key: str, value: str) -> None:
        raise torch.distributed.DistNetworkError("Connection reset by peer")

    view, signals = pair[1]
    with pytest.raises(UserError, match="a photo changed"), view.attending(signals):
        view._store = SimpleNamespace(set=gone)
        raise UserError("a photo changed")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"WORLD_SIZE": "two"}, "^WORLD_SIZE: 'two' should be a number from 1 to"),
        ({"WORLD_SIZE": "0"}, "^WORLD_SIZE: '0' should be"),
        ({"RANK": "first"}, "^RANK: 'first' should be a number from 0 to"),
        ({"LOCAL_RANK": "-1"}, "^LOCAL_RANK: '-1' should be"),
        ({"MASTER_PORT": "none"}, "^MASTER_PORT: 'none' should be"),
        ({"MASTER_PORT": ""}, "MASTER_PORT: .*; set them right for each process"),
        ({}, "EADDRINUSE.*; beside another run on this machine MASTER_PORT has to be another one$"),
    ],
)
def test_an_environment_that_names_no_start_is_refused(monkeypatch, wrong: dict[str, str], said: str) -> None:
    """Before anything waits for the others."""
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        asked = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in (asked | wrong).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=said):
            processes.start(torch.device("cpu"), lost_after=LOST_AFTER)
