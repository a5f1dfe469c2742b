"""Shared by the tests: tiny checkpoints, made once a session, and configs over them."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from scripts import make_model
from tests import tools
from tests.harness import ROOT, Workbench
from tests.proofs.forks import Server
from tests.proofs.shared import STARTED
from trainer.base import console, signals
from trainer.plan import fixed_draws

# Two runs that are compared byte by byte started at the same time.
os.environ.setdefault("SOURCE_DATE_EPOCH", "1735689600")

UNDER_NOHUP = "TESTS_UNDER_NOHUP"  # for the workers of pytest-xdist
QUICK = "not slow and not proof and not gpu"  # as pyproject.toml has it
LEFT_OUT = pytest.StashKey[Counter[str]]()
HANGS = 900  # seconds after which a test is ended: ten times what the longest takes

# A machine that is busy with something else is no fault of a test.
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")


def pytest_configure() -> None:
    """Fails at once where torch was loaded before tests/__init__.py was: workers with a pool of threads each wait for each
    other, and bytes are compared between different counts.

    Under nohup the suite outlives its terminal, and yet what a test starts heeds SIGHUP: a handler is not inherited, as a
    signal that is ignored would be.
    """
    assert torch.get_num_threads() == 1, "torch was loaded before tests/__init__.py; start with OMP_NUM_THREADS=1"
    if signals.HANGUP and (signal.getsignal(signals.HANGUP) == signal.SIG_IGN or UNDER_NOHUP in os.environ):
        os.environ[UNDER_NOHUP] = "1"
        signal.signal(signals.HANGUP, lambda signum, frame: None)


def pytest_itemcollected(item: pytest.Item) -> None:
    """A case that is marked as its whole test is: the other cases are so marked too, and were meant to be quick.

    What hangs is ended with the stacks of its threads (pytest-timeout), so that it has a name; a proof may take hours.
    """
    marks = [mark.name for mark in item.iter_markers() if mark.name in ("slow", "proof", "gpu")]
    assert len(marks) == len({*marks}), f"{item.nodeid}: the mark of the test is the mark of a case, too; leave out one"
    if not {"proof", "gpu"} & {*marks}:
        item.add_marker(pytest.mark.timeout(HANGS))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The quick suite runs the tests of a tool where it, or what it imports, changed (tests/tools.py)."""
    whole = [Path(argument).resolve() for argument in config.args] == [ROOT / "tests"]
    if whole and config.option.markexpr == QUICK:
        config.stash[LEFT_OUT] = tools.leave_out(config, items)


def pytest_report_collectionfinish(config: pytest.Config) -> str:
    """What was left out, by tool."""
    counts = config.stash.get(LEFT_OUT, Counter())
    named = ", ".join(f"{tool} {count}" for tool, count in sorted(counts.items()))
    return f"tests of tools that nothing changed for are left out (--all runs them): {named}" if counts else ""


@pytest.fixture(scope="session", autouse=True)
def libraries_are_no_garbage() -> Iterator[None]:
    """A run collects garbage when it lets an encoder go; looking through the libraries' objects would be half its time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def a_checkpoint_is_asked_of_nobody() -> None:
    """As the command line does first of all. A test that calls it leaves the signal as it was, then, the first one too."""
    signals.hold_save()


@pytest.fixture(scope="session", autouse=True)
def a_line_is_as_long_as_what_it_says() -> None:
    """Where a long line is broken depends on how long the paths of a test are. tests/integration/test_terminal.py has the
    real width, of processes of their own."""
    console.WIDTH = 1_000_000


@pytest.fixture(autouse=True)
def a_test_leaves_the_signals_as_they_were() -> Iterator[None]:
    """Else a later one ends the worker without a word: so a server whose client goes away, where SIGPIPE has its default."""
    # SIGUSR1 is not among them: the command line ignores it from its start on (signals.hold_save).
    names = ("SIGHUP", "SIGINT", "SIGPIPE", "SIGTERM")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]  # Windows has fewer
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before, "this test, or what it calls, changed signal handlers"


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A process that has imported the libraries, for runs that are forks of it (integration/test_processes.py)."""
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "SOURCE_DATE_EPOCH": STARTED, "CUDA_VISIBLE_DEVICES": ""}
    with Server(ROOT, ["tests.integration.test_processes", "trainer.adapters.dora"], environment) as server:
        yield server


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """A folder with sdxl/ and flux/ (diffusers layout), sdxl.safetensors and flux.safetensors (single files)."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("sdxl", "flux"):
        for layout, name in (("diffusers", family), ("single_file", f"{family}-one.safetensors")):
            wanted = ["--size", "tiny", "--family", family, "--layout", layout]
            assert make_model.main([*wanted, str(folder / name)]) == 0
    return folder


@pytest.fixture
def few_draws(monkeypatch) -> None:
    """Of the held-out loss, which would be nine tenths of a tiny run in this process."""
    monkeypatch.setattr(fixed_draws, "FEWEST", 4)


@pytest.fixture
def bench(models: Path, tmp_path: Path) -> Workbench:
    return Workbench(models, tmp_path)
