"""Signs of life: given by whoever works, cheap, gone at the end, and never what ends a run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from trainer.base import progress
from trainer.base.errors import Interrupted
from trainer.base.progress import EVERY_SECONDS, QUIET_SECONDS, Alive, Phases, Sign, last_sign


class Clock:
    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


def old(path: Path) -> None:
    os.utime(path, (1.0, 1.0))


def test_a_sign_is_given_now_and_then_and_gone_at_the_end(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "out" / "alive.json"
    with Alive(path) as alive:
        alive.sign("hashing")
        assert not path.parent.exists(), "a run that is refused leaves nothing"
        path.parent.mkdir()
        alive.sign("hashing")
        here = {"host": os.uname().nodename, "pid": os.getpid()}
        assert json.loads(path.read_text()) == {"doing": "hashing", "silence": 5} | here
        old(path)
        clock.now += EVERY_SECONDS / 2
        alive.sign("encoding")
        assert path.stat().st_mtime == 1.0, "soon after the last one"
        clock.now += EVERY_SECONDS / 2
        inode = path.stat().st_ino
        alive.sign("hashing")
        assert path.stat().st_mtime > 1.0 and path.stat().st_ino == inode, "nothing else to say: nothing is written"
        clock.now += 700
        alive.sign("training")
        assert (sign := last_sign(path)) and (sign.silence, sign.doing) == (700, "training")
        clock.now += EVERY_SECONDS
        path.unlink()  # another start, refused, had it for a moment
        alive.sign("training")
        assert path.exists()
    assert not any(path.parent.iterdir())


def test_one_that_gave_none_deletes_none(tmp_path: Path) -> None:
    (tmp_path / "alive.json").write_text("{}")
    with Alive(tmp_path / "alive.json"):
        pass
    assert (tmp_path / "alive.json").exists()


def test_a_full_disk_has_room_for_a_time(tmp_path: Path, clock: Clock, monkeypatch) -> None:

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "alive.json"
    with Alive(path) as alive:
        alive.sign("hashing")
        monkeypatch.setattr(progress, "write_atomic", refuse)
        for doing in ("encoding", "training", "drawing"):
            clock.now += EVERY_SECONDS
            old(path)
            alive.sign(doing)
            assert path.stat().st_mtime > 1.0
        path.unlink()
        clock.now += EVERY_SECONDS
        alive.sign("training")  # a failing one ends nothing


@pytest.mark.parametrize(
    ("silence", "seconds", "over"),
    [(0, QUIET_SECONDS - 1, False), (0, QUIET_SECONDS, True), (1000, 3999, False), (1000, 4000, True)],
)
def test_a_run_is_silent_for_ten_minutes_or_four_times_its_longest_silence(
    silence: float, seconds: float, over: bool
) -> None:
    assert (1e9 + seconds >= Sign(1e9, silence, "").over) is over


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"doing": "x", "silence": "long"}'])
def test_what_cannot_be_read_is_no_sign(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "alive.json").write_text(text)
    assert last_sign(tmp_path / "alive.json") is None


def test_every_piece_of_work_is_a_sign_and_waiting_is_none() -> None:
    given: list[str] = []
    phases = Phases(sign=given.append)
    with phases("downloading", 9, "B") as phase:
        phase.advance(3)
        phase.advance(0)  # whoever downloads may hang
        phase.check()
        phases.sign()
        with phases("saving step 1", unit="B", obey=False) as inner:
            inner.advance(1)
            inner.advance(0)
    phases.check()
    assert given == ["downloading"] * 4 + ["saving step 1"] * 2 + [""]


def test_a_stop_is_heard_whether_or_not_the_work_gets_on() -> None:
    def stop() -> None:
        raise Interrupted(15)

    for count in (0, 1):
        phases = Phases()
        with pytest.raises(Interrupted), phases("downloading", 9, "B") as phase:
            phases._check = stop
            phase.advance(count)
