"""The programs in scripts/ end as train.py does."""

from __future__ import annotations

import errno
import os
import signal
import sys
from types import ModuleType

import pytest

from scripts import adapter, data, inspect_checkpoint, make_model, sample
from trainer.base.errors import Interrupted, NonFiniteError, UserError
from workbench.commands import tools

PROGRAMS = [
    (adapter, "merge", ["merge", "model", "a.safetensors", "out"]),
    (data, "cache", ["cache", "--folder", "cache"]),
    (inspect_checkpoint, "inspect", ["folder"]),
    (make_model, "make", ["out", "--size", "tiny", "--family", "sdxl", "--layout", "diffusers"]),
    (sample, "sample", ["model", "--prompt", "a bear"]),
]


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "stopped at once\n"),
        (UserError("no such thing\nnor that"), 2, "error: no such thing\n       nor that\n"),
        (NonFiniteError("a weight"), 4, "error: a weight\n"),
        (OSError(errno.ENOENT, "No such file"), 1, "error: [Errno 2] No such file\n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
@pytest.mark.parametrize(("program", "work", "given"), PROGRAMS, ids=[program.__name__ for program, *_ in PROGRAMS])
def test_a_program_ends_with_its_status_and_without_a_traceback(
    monkeypatch, capsys, program: ModuleType, work: str, given: list[str], raised: BaseException, status: int, said: str
) -> None:
    def ends(*given: object, **named: object) -> None:
        raise raised

    monkeypatch.setattr(program, work, ends)
    monkeypatch.setattr(sys, "argv", ["program", *given])
    assert program.main() == status
    assert capsys.readouterr().err == said


def test_what_nobody_foresaw_is_raised(monkeypatch) -> None:
    def ends(chosen: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(sample, "sample", ends)
    with pytest.raises(ZeroDivisionError):
        sample.main(["model", "--prompt", "a bear"])


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_sigterm_undoes_the_work_whoever_ignored_it_and_is_put_back(before: signal.Handlers) -> None:
    """A parent's handlers are inherited; a SIGHUP that it ignored stays so (nohup)."""
    handlers = {signal.SIGTERM: before, signal.SIGHUP: signal.SIG_IGN}
    earlier = {each: signal.signal(each, handler) for each, handler in handlers.items()}
    try:
        with pytest.raises(Interrupted), tools.undoing():
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
        assert {each: signal.getsignal(each) for each in handlers} == handlers
    finally:
        for each, handler in earlier.items():
            signal.signal(each, handler)
