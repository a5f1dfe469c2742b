"""How a process ends: its status and last words; at once, with what libraries want done at the end, or as Python does."""

from __future__ import annotations

import errno
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from tests.harness import ROOT
from trainer.base.errors import DataError, Interrupted, NonFiniteError, UserError
from workbench.commands.main import main

END = """
import atexit, sys, threading, time
from workbench.commands.main import leave
class Late:
    def __del__(self): print("taken apart")
late = Late()
atexit.register(print, "at the end")
print("said", end=" ")
"""


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("", "said at the end\n"),
        ("threading.Thread(target=lambda: (time.sleep(0.3), print('written'))).start()",
         "said written\nat the end\ntaken apart\n"),
    ],
)  # fmt: skip
def test_what_is_to_be_done_at_the_end_is_done_and_the_interpreter_is_not_taken_apart(before: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{END}\n{before}\nleave(143)"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (143, said, "")


@pytest.mark.parametrize(
    ("raised", "status", "said", "goes_on"),
    [
        (UserError("no such thing\nnor that"), 2, "error: no such thing\n       nor that", False),
        (NonFiniteError("a loss"), 4, "error: a loss", False),
        (MemoryError(), 5, "error: out of memory", False),
        (DataError("a photo is gone"), 6, "error: a photo is gone", True),
        (OSError(errno.ENOSPC, "No space left"), 6, "error: storage: ", True),
        (Interrupted(signal.SIGTERM), 143, "stopped by SIGTERM", True),
        (KeyboardInterrupt(), 130, "stopped at once", True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
@pytest.mark.parametrize("more", [[], ["--plan"], ["launched"]], ids=lambda more: "".join(more))
def test_what_ends_a_run_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch, capsys, raised: BaseException, status: int, said: str, goes_on: bool, more: list[str]
) -> None:
    """A stop is no error. What may go on is told with its command, unless a launcher has it, or nothing was begun."""
    (tmp_path / "run.toml").write_text(
        tomli_w.dumps(
            {
                "run": {"name": "bear", "output_dir": "out", "max_steps": 4},
                "model": {"family": "sdxl", "path": "model"},
                "data": {"sources": [{"path": "photos"}]},
            }
        )
    )

    def ends(*given: object, **named: object) -> bool:
        raise raised

    for function in ("workbench.commands.launch.train", "workbench.commands.plan_command.preview"):
        monkeypatch.setattr(function, ends)
    monkeypatch.setenv("WORLD_SIZE", "2" if more == ["launched"] else "1")
    given = ["--config", str(tmp_path / "run.toml"), *(option for option in more if option != "launched")]
    assert main(given) == status
    told = capsys.readouterr().err
    assert told.startswith(said)
    again = f"\ngo on: python train.py {shlex.join(given)} --resume_from auto\n"
    assert told.endswith(again) == ("\ngo on: " in told) == (goes_on and not more)
