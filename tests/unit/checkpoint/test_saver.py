"""The saver: the same bytes beside the training as in its way, one save at a time, no failure lost."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from trainer import optim
from trainer.checkpoint import state, store
from trainer.checkpoint.saver import Saver

TIMEOUT = 20  # seconds until a test that hangs fails


class Piece:
    def __init__(self, **values) -> None:
        self.values = values

    def state_dict(self):
        return self.values

    def load_state_dict(self, values) -> None: ...


class Training:
    """A small adapter that trains: parameters in one flat tensor, AdamW, a step counter."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.parameters = {"a": nn.Parameter(torch.randn(300)), "b": nn.Parameter(torch.randn(4, 5))}
        group = {"params": list(self.parameters.values()), "lr": 1e-2, "weight_decay": 0.1, "magnitudes": False}
        self.optimizer = optim.build_optimizer("adamw", [group])
        self.progress = state.Progress(step=0, images=0, non_finite=0, total_steps=9, started="2025-01-01T00:00:00+00:00")

    def step(self) -> None:
        self.progress.step += 1
        for number, parameter in enumerate(self.parameters.values()):
            parameter.grad.fill_(self.progress.step + number)
        self.optimizer.step()

    def pack(self):
        pieces = {name: Piece(value=name) for name in state.PIECES}
        adapter = Piece(**{name: parameter.detach() for name, parameter in self.parameters.items()})
        optimizer = optim.OptimizerState(self.optimizer, "adamw")
        return state.pack(pieces | {"adapter": adapter, "optimizer": optimizer, "progress": self.progress})


def contents(step: int) -> dict[str, list[bytes]]:
    return {"state.json": [b"{}", b" " * step]}


def held(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture
def slow_disk(monkeypatch):
    """No sync ends before the event is set."""
    mended, real = threading.Event(), os.fsync

    def fsync(descriptor: int) -> None:
        assert mended.wait(TIMEOUT), "nobody mended the disk"
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    yield mended
    mended.set()


def broken(step: int):
    def pieces():
        raise OSError(errno.ENOSPC, f"no space for step {step}")
        yield b""

    return {"state.json": pieces()}


def test_in_the_background_the_bytes_are_the_same(tmp_path) -> None:
    for background in (False, True):
        training, saver = Training(), Saver(tmp_path / str(background), keep_last=2, background=background)
        for step in (1, 2, 3):
            training.step()
            saver.save(step, training.pack())
            training.step()  # while it is written
        assert saver.join() is None
    one, other = held(tmp_path / "False"), held(tmp_path / "True")
    assert one == other and {name.partition("/")[0] for name in one} == {"step-00000002", "step-00000003"}


def test_a_snapshot_does_not_train_on() -> None:
    training = Training()
    training.step()
    contents = training.pack()
    before = {name: b"".join(map(bytes, pieces)) for name, pieces in contents.items()}
    training.step()
    after = {name: b"".join(map(bytes, pieces)) for name, pieces in training.pack().items()}
    assert {name: b"".join(map(bytes, pieces)) for name, pieces in contents.items()} == before
    assert {name for name in after if after[name] != before[name]} == {
        "adapter.safetensors", "optimizer.safetensors", "state.json"
    }, "the step changed nothing that could be lost"  # fmt: skip


def test_a_slow_disk_does_not_hold_up_the_training(tmp_path, slow_disk) -> None:
    saver = Saver(tmp_path, keep_last=1, background=True)
    saver.save(1, contents(1))
    assert store.steps(tmp_path) == [] and not saver.failed
    slow_disk.set()
    assert saver.join() is None
    assert store.steps(tmp_path) == [1]


def test_one_save_at_a_time(tmp_path, slow_disk) -> None:
    """The second waits for the first; both are there in the end, in order."""
    order = []
    saver = Saver(tmp_path, keep_last=5, background=True, before=lambda: order.append(store.steps(tmp_path)))
    saver.save(1, contents(1))
    training = threading.Thread(target=lambda: (saver.save(2, contents(2)), order.append("training goes on")))
    training.start()
    training.join(0.3)
    assert training.is_alive() and order == [[]], "the second save did not wait"
    slow_disk.set()
    training.join(TIMEOUT)
    assert saver.join() is None
    assert [entry for entry in order if entry != "training goes on"] == [[], [1]] and store.steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("another", [True, False])
def test_a_failure_surfaces_once_and_holds_up_no_later_save(tmp_path, background: bool, another: bool) -> None:
    saver = Saver(tmp_path, keep_last=1, background=background)
    saver.save(1, broken(1))
    deadline = time.monotonic() + TIMEOUT
    while not saver.failed:
        assert time.monotonic() < deadline, "the failure is not to be seen"
        time.sleep(0.01)
    assert saver.step == -1, "what failed does not count as saved"
    if another:
        saver.save(2, contents(2))
    failure = saver.join()
    assert isinstance(failure, OSError) and "no space for step 1" in str(failure)
    assert not saver.failed and saver.join() is None
    assert store.steps(tmp_path) == ([2] if another else []) and saver.step == (2 if another else -1)
    assert [path.name for path in tmp_path.iterdir()] == [store.folder_name(2)] * another


def test_of_several_failures_the_first_is_told(tmp_path) -> None:
    saver = Saver(tmp_path, keep_last=1, background=True)
    for step in (1, 2):
        saver.save(step, broken(step))
    assert "no space for step 1" in str(saver.join()) and saver.join() is None


def test_whatever_fails_surfaces(tmp_path) -> None:
    """Not storage alone: a bug in the thread must not pass for a saved checkpoint."""

    def before() -> None:
        raise MemoryError("before")

    saver = Saver(tmp_path, keep_last=1, background=True, before=before)
    saver.save(1, contents(1))
    failure = saver.join()
    assert isinstance(failure, MemoryError) and str(failure) == "before"
