"""How a process ends: at once, with what libraries want done at the end, and in the ordinary way where others are seen to."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness import ROOT

END = """
import atexit, sys, threading, time
from trainer.cli.main import leave
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
