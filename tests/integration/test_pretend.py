"""What pretend_cases.py tests, in processes of its own.

torch keeps a device that was registered to the end of the process: fork_rng() asks it for a generator then, and a backward
starts a thread for it. The tests that follow are to have torch as a user has it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT

CASES = Path(__file__).with_name("pretend_cases.py")
HALVES = {"slow": "not proof", "proof": "proof"}


@pytest.mark.parametrize("half", [pytest.param(half, marks=getattr(pytest.mark, half)) for half in HALVES])
def test_the_cases_pass_in_a_process_of_their_own(tmp_path: Path, half: str) -> None:
    command = [sys.executable, "-m", "pytest", "-rfEs", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "cases")]
    done = subprocess.run([*command, "-m", HALVES[half], str(CASES)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
