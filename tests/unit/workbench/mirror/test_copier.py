"""The copier: the newest first, tried again for as long as it takes, said once a minute, and never in the run's way."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faulty_store import URL, FaultyStore
from tests.unit.workbench.mirror.test_store import saved
from trainer.base import files
from trainer.base.errors import Interrupted, UserError
from trainer.base.run_layout import Layout, folder_name
from trainer.checkpoint import store
from workbench.mirror import copier
from workbench.mirror.copier import Asker, Copier, Troubles, may_pass, reason, run_in_thread

OWNER = {"run": "bear", "id": "5"}
TIMEOUT = 20  # seconds until a test that hangs fails


class EndpointConnectionError(Exception):
    """As botocore's: no OSError."""


class NoCredentialsError(Exception): ...


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch) -> None:
    monkeypatch.setattr(copier, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(copier, "LONGEST_PAUSE", 0.01)
    monkeypatch.setattr(copier, "POLL_SECONDS", 0.005)


class Bench:
    """An output folder and a copier of it."""

    def __init__(self, folder: Path, keep_last: int = 3) -> None:
        self.fs, self.layout, self.said = FaultyStore(), Layout(folder), []
        self.layout.checkpoints.mkdir(parents=True)
        self.layout.metrics.write_bytes(b"{}\n")
        self.copier = Copier(self.fs.mirror(), self.layout, owner=OWNER, keep_last=keep_last, say=self.said.append)

    def save(self, step: int) -> None:
        saved(self.layout.checkpoints, step)
        self.copier.offer(step)

    def until(self, done) -> None:
        limit = time.monotonic() + TIMEOUT
        while not done():
            assert time.monotonic() < limit, "it never came"
            time.sleep(0.002)

    def finish(self, seconds: float = TIMEOUT) -> list[str]:
        return self.copier.finish(seconds, lambda: None)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "out")
    yield made
    made.finish(0)


def manifests(fs: FaultyStore) -> list[int]:
    """The steps in the order in which they became whole."""
    written = [name for what, name in fs.changes() if what == "write" and name.endswith("manifest.json")]
    return [int(name.split("/")[1].removeprefix("step-")) for name in written]


def test_checkpoints_results_and_what_the_end_leaves_are_there(bench: Bench) -> None:
    bench.copier.start(0)
    early = bench.layout.samples_of(0) / "00.png"
    early.parent.mkdir(parents=True)
    early.write_bytes(b"png")
    bench.save(1)
    bench.until(lambda: manifests(bench.fs) == [1])
    writes = [name for what, name in bench.fs.changes() if what == "write"]
    assert writes[0] == "run.json" and writes.index("samples/step-00000000/00.png") < len(writes) - 1
    bench.layout.adapters.mkdir()
    for path in (bench.layout.adapters / "bear.safetensors", bench.layout.report):
        path.write_bytes(b"end")
    (bench.layout.adapters / ".bear.safetensors.1.00.tmp").write_bytes(b"half")
    assert bench.finish() == [] and not bench.said
    assert {name for name in bench.fs.mirror().listing() if "checkpoints" not in name} == {
        "run.json", "samples/step-00000000/00.png", "adapters/bear.safetensors", "report.html"
    }  # fmt: skip
    assert bench.fs.changes().count(("write", "samples/step-00000000/00.png")) == 1


def test_of_several_that_wait_the_newest_is_copied_first_and_what_keep_last_deletes_never(bench: Bench) -> None:
    """While the first is copied, five more come."""
    go_on, begun = threading.Event(), threading.Event()

    def slow(what: str, name: str) -> bool:
        if what == "write" and folder_name(1) in name:
            begun.set()
            go_on.wait(TIMEOUT)
        return False

    bench.fs.fails = slow
    bench.copier.start(0)
    bench.save(1)
    assert begun.wait(TIMEOUT)
    for step in range(2, 7):
        bench.save(step)
    go_on.set()
    assert bench.finish() == []
    assert manifests(bench.fs) == [1, 6, 5, 4] and bench.fs.mirror().steps() == [4, 5, 6]


def test_a_network_that_fails_delays_and_is_said_once(bench: Bench) -> None:
    """Every other call fails, half of a file having come: in the end all is whole there, and the run heard of it twice."""
    count = [0]

    def every_other(what: str, name: str) -> bool:
        count[0] += 1
        return count[0] < 60 and what == "write" and count[0] % 2 == 0

    bench.fs.fails = every_other
    bench.copier.troubles.clock = lambda: 0.0
    bench.copier.start(0)
    for step in (1, 2, 3):
        bench.save(step)
    assert bench.finish() == [] and bench.fs.mirror().steps() == [1, 2, 3]
    warnings = [line for line in bench.said if line.startswith("warning: ")]
    assert warnings and len(bench.said) <= 2 * len(warnings)
    assert (
        f"checkpoint.mirror = '{URL}' fails ([Errno {errno.ECONNRESET}] the connection was cut); it is tried" in warnings[0]
    )
    assert bench.said[-1].endswith("answers again")


def test_a_checkpoint_that_is_pruned_while_it_is_copied_is_no_trouble(bench: Bench) -> None:
    def prune(what: str, name: str) -> bool:
        if what == "write" and name.endswith(f"{folder_name(1)}/adapter.safetensors"):
            saved(bench.layout.checkpoints, 2)
            store.prune(bench.layout.checkpoints, 1)
            bench.copier.offer(2)
        return False

    bench.fs.fails = prune
    bench.copier.start(0)
    bench.save(1)
    assert bench.finish() == [] and not bench.said
    assert {name.split("/")[1] for name in bench.fs.mirror().listing("checkpoints")} == {folder_name(2)}


def test_an_end_without_a_network_names_what_is_missing_and_leaves(bench: Bench) -> None:
    bench.copier.start(0)
    bench.save(1)
    bench.until(lambda: manifests(bench.fs) == [1])
    bench.fs.fails = lambda what, name: True
    bench.save(2)
    bench.layout.report.write_bytes(b"end")
    assert bench.finish(0.05) == [folder_name(2), "report.html"]
    bench.until(lambda: not [thread for thread in threading.enumerate() if thread.name == "mirror"])
    asked = len(bench.fs.asked)
    bench.fs.fails = lambda what, name: False
    time.sleep(0.05)
    assert len(bench.fs.asked) == asked, "it goes on after the end"


def test_the_end_does_not_sleep_through_a_long_pause(bench: Bench, monkeypatch) -> None:
    monkeypatch.setattr(copier, "LONGEST_PAUSE", 1e9)
    bench.copier.troubles._pause = 1e6
    bench.fs.fails = lambda what, name: True
    bench.copier.start(0)
    bench.save(1)
    bench.until(lambda: bench.said)
    bench.fs.fails = lambda what, name: False
    assert bench.finish() == [] and bench.fs.mirror().steps() == [1]


def test_a_stop_leaves_the_wait_at_once(bench: Bench) -> None:
    bench.fs.fails = lambda what, name: True
    bench.copier.start(0)
    bench.save(1)

    def stop() -> None:
        raise Interrupted(15)

    with pytest.raises(Interrupted):
        bench.copier.finish(1e9, stop)
    assert bench.copier.missing() == [folder_name(1)]


def test_a_start_offers_its_own_checkpoint_and_sends_no_result_twice(tmp_path: Path) -> None:
    first = Bench(tmp_path / "out")
    sample = first.layout.samples_of(0) / "00.png"
    sample.parent.mkdir(parents=True)
    sample.write_bytes(b"png")
    saved(first.layout.checkpoints, 2)
    first.copier.start(2)
    assert first.finish() == [] and first.fs.mirror().steps() == [2]
    first.fs.mirror().put(saved(tmp_path / "later", 3), 3, b"")
    first.fs.asked.clear()
    again = Copier(first.fs.mirror(), first.layout, owner=OWNER, keep_last=3, say=first.said.append)
    again.start(2)
    assert again.finish(TIMEOUT, lambda: None) == []
    assert [name for what, name in first.fs.changes() if what == "write"] == ["run.json"]
    assert first.fs.mirror().steps() == [2] and f"superseded-{folder_name(3)}" in first.said[0]


def test_a_place_that_another_start_has_claimed_is_left_to_it(bench: Bench) -> None:
    """The run goes on and ends without a mirror; it is said once."""
    bench.copier.start(0)
    bench.save(1)
    bench.until(lambda: manifests(bench.fs) == [1])
    other = bench.fs.mirror()
    other.claim(OWNER | {"start": "another"})
    before = bench.fs.mirror().listing()
    bench.save(2)
    bench.until(lambda: bench.said)
    bench.save(3)
    bench.layout.report.write_bytes(b"end")
    assert bench.finish(1e9) == [] and bench.fs.mirror().listing() == before
    (said,) = bench.said
    assert said.startswith(f"warning: checkpoint.mirror = '{URL}' is claimed by another run now, or by another start of this")
    other.hold()


def test_going_back_is_noted_until_the_mirror_has_obeyed(bench: Bench) -> None:
    """Through starts that do not reach it, the earliest step counts."""
    later = bench.layout.root.parent / "later"
    for step in (2, 3, 5):
        bench.fs.mirror().put(saved(later, step), step, b"")

    def start(step: int) -> Copier:
        made = Copier(bench.fs.mirror(), bench.layout, owner=OWNER, steps=[2, 3, 5], keep_last=3, say=bench.said.append)
        made.start(step)
        return made

    bench.fs.fails = lambda what, name: what == "copy"
    for step, noted in ((3, 3), (4, 3), (2, 2)):
        start(step).finish(0.0, lambda: None)
        assert files.read_json(bench.layout.mirror) == {"id": "5", "back_to": noted}
    bench.fs.fails = lambda what, name: False
    last = start(4)
    bench.until(lambda: files.read_json(bench.layout.mirror) == {"id": "5"})
    assert bench.fs.mirror().steps() == [2] and last.finish(TIMEOUT, lambda: None) == []
    start(5).finish(TIMEOUT, lambda: None)
    assert files.read_json(bench.layout.mirror) == {"id": "5"}, "nobody went back"


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (TimeoutError(), True), (ConnectionResetError(), True), (OSError(errno.EBUSY, "503"), True), (OSError("odd"), True),
        (EndpointConnectionError(), True), (PermissionError("403"), False), (FileNotFoundError("no such bucket"), False),
        (NoCredentialsError(), False), (OSError(errno.EINVAL, "400"), False), (NotImplementedError(), False),
        (ValueError("bucket name"), False),
    ],
)  # fmt: skip
def test_what_may_pass_and_what_will_last(error: Exception, passes: bool) -> None:
    assert may_pass(error) == passes


def test_a_trouble_is_said_once_a_minute_with_growing_pauses(monkeypatch) -> None:
    monkeypatch.setattr(copier, "FIRST_PAUSE", 1.0)
    monkeypatch.setattr(copier, "LONGEST_PAUSE", 60.0)
    now, said = [0.0], []
    troubles = Troubles(URL, said.append, lambda: now[0])
    pauses = []
    while now[0] < 600:
        pauses.append(troubles.pause_after(OSError("down"), "step 1 is copied then"))
        now[0] += pauses[-1]
    assert pauses[:8] == [1, 2, 4, 8, 16, 32, 60, 60] and 9 <= len(said) <= 11
    troubles.end()
    troubles.end()
    assert said[-1] == f"checkpoint.mirror = '{URL}' answers again" and troubles.pause_after(OSError("down"), "") == 1.0
    assert said[-1].startswith("warning: "), "a new trouble is said at once"


def test_no_key_is_told(monkeypatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "open/sesame+1")
    error = OSError("GET https://me:hush@host/x?sig=abc with open/sesame+1 failed")
    assert reason(error) == "GET https://***@host/x?*** with *** failed"
    for url in (
        "simplecache::ftp://me:hush@host/x",
        "s3://K:hu/sh@host/x",
        "s3://K:hu@sh@host/x",
        "zip://a::s3://K:hu sh@host/x",
    ):
        masked = reason(OSError(f"GET {url} failed"))
        assert "hu" not in masked and masked.endswith("://***@host/x failed"), url
    assert reason(NoCredentialsError("Unable to locate\ncredentials")) == "NoCredentialsError: Unable to locate credentials"


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True), (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (OSError(errno.EIO, "An error occurred (QuotaExceeded) when calling the PutObject operation: None"), True),
        (OSError(errno.EIO, "An error occurred (XMinioStorageFull) when calling the PutObject operation: ..."), True),
        (OSError(errno.EIO, "An error occurred (SlowDown): Quota exceeded for requests per minute"), False),
        (OSError(errno.EMSGSIZE, "too large"), False), (TimeoutError(), False),
    ],
)  # fmt: skip
def test_a_full_place_is_named_with_what_helps_and_tried_again(error: Exception, full: bool) -> None:
    """It may have room a while later, so the run goes on to try."""
    said: list[str] = []
    Troubles(URL, said.append, lambda: 0.0).pause_after(error, "step-00000001 is copied then")
    assert ("; make room there, or give checkpoint.mirror another place); it is tried again: " in said[0]) == full
    assert may_pass(error) or not full


def test_a_start_waits_for_a_network_and_not_for_keys() -> None:
    said, tries = [], []

    def work(error: Exception, times: int) -> str:
        tries.append(error)
        if len(tries) <= times:
            raise error
        return "it"

    ask = Asker(URL, 1e9, said.append, lambda: None)
    assert ask(lambda: work(EndpointConnectionError("down"), 3), "asking") == "it" and len(tries) == 4
    assert [line.split(" ")[0] for line in said] == ["warning:", "checkpoint.mirror"]
    for error, remedy in (
        (PermissionError("Access Denied"), "Access Denied\ngive keys that may list, read, write and delete there"),
        (FileNotFoundError("no such bucket"), "no such bucket\nmake the bucket or folder, or mend the URL"),
    ):
        tries.clear()
        with pytest.raises(UserError, match=remedy) as caught:
            ask(lambda error=error: work(error, 9), "asking")
        assert len(tries) == 1 and str(caught.value).startswith(f"checkpoint.mirror = '{URL}' cannot be used (asking): ")
    tries.clear()
    with pytest.raises(UserError, match="start again when it answers, or wait longer with checkpoint.mirror_wait"):
        Asker(URL, 0.0, said.append, lambda: None)(lambda: work(TimeoutError("slow"), 9), "asking")
    with pytest.raises(OSError, match="No space"):
        ask(lambda: work(OSError(errno.ENOSPC, "No space left on device"), 99), "fetching")


def test_a_server_that_is_silent_is_not_waited_for_longer(monkeypatch) -> None:
    """It accepts, and never answers; while something comes, it is waited for."""
    monkeypatch.setattr(copier, "SHORTEST_SILENCE", 0.05)
    hangs, come = threading.Event(), iter(range(20))
    with pytest.raises(UserError, match=r"\(asking\): .*no answer for 0\.1 s\nstart again when it answers, or wait longer"):
        Asker(URL, 0.0, lambda line: None, lambda: None)(lambda: hangs.wait(TIMEOUT), "asking")
    ask = Asker(URL, 0.05, lambda line: None, lambda: None)
    seen: list[int] = []

    def came() -> int:
        seen.append(next(come, 20))
        if len(seen) > 40:
            hangs.set()
        return seen[-1]

    with pytest.raises(UserError, match="no answer for 0"):
        ask(lambda: hangs.wait(TIMEOUT), "fetching", came)
    assert seen[-1] == 20, "as long as more came than ever"
    hangs.set()


def test_a_signal_is_heard_while_a_call_hangs() -> None:
    hangs = threading.Event()

    def check() -> None:
        raise Interrupted(15)

    with pytest.raises(Interrupted):
        run_in_thread(lambda: hangs.wait(TIMEOUT), check)
    hangs.set()
