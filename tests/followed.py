"""A true command line whose phases are followed from outside: when each begins and ends, and when a signal is obeyed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness import ROOT
from tests.timing import queued

# Python imports it before anything else. The program is as it is; each phase says when it begins and ends. One may be made
# slow, so that a signal meets it in its middle.
SPY = """
import os, sys, time
sys.path.insert(0, {root!r})
from trainer.phases import Phase
begin, check, close = Phase.__init__, Phase.check, Phase.close
def begins(self, name, *more, **settings):
    begin(self, name, *more, **settings)
    os.write(2, f"<{{name}}>\\n".encode())
def checks(self):
    if {slow!r} and self.name.startswith({slow!r}):
        time.sleep(0.1)
    check(self)
def closes(self):
    close(self)
    os.write(2, f"</{{self.name}}>\\n".encode())
Phase.__init__, Phase.check, Phase.close = begins, checks, closes
"""


@dataclass
class Followed:
    """A run and what it said on stderr: (monotonic time, line)."""

    process: subprocess.Popen
    said: list[tuple[float, str]] = field(default_factory=list)

    def when(self, start: str, *, timeout: float) -> float:
        """The time of the first line that begins so; waits for it."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            ended = self.has_ended()
            for at, line in list(self.said):
                if line.startswith(start):
                    return at
            assert not ended, f"the run ended with {self.process.wait()} without {start!r}:\n{self.text}"
            time.sleep(0.005)
        raise AssertionError(f"no {start!r} within {timeout} s:\n{self.text}")

    def has_ended(self) -> bool:
        """It can still be asked then what it waited for a core."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.said)


@dataclass(frozen=True)
class Obeyed:
    """Seconds from the signal: to its acknowledgement, to the end of what is seen to its end (a step and its checkpoint, else
    0), from there to the end of the process. Those in which the process waited for a core are not counted."""

    acknowledged: float
    seen_to_its_end: float
    left: float
    status: int
    text: str


def follow(folder: Path, *arguments: str, slow: str = "") -> Followed:
    """`python train.py ARGUMENTS`, followed. slow: the phase whose every check is to take a tenth of a second."""
    spy = folder / "spy"
    spy.mkdir(exist_ok=True)
    (spy / "sitecustomize.py").write_text(SPY.format(root=str(ROOT), slow=slow))
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(spy)},
    )  # fmt: skip
    followed = Followed(process)

    def read() -> None:
        for line in process.stderr:
            followed.said.append((time.monotonic(), line.decode().rstrip("\n")))

    threading.Thread(target=read, daemon=True).start()
    return followed


def stop_in(run: Followed, begins: str, signum: int, *, delay: float, saved: bool = False, timeout: float) -> Obeyed:
    """Send the signal `delay` seconds after the line that begins so ("<loading unet").

    saved: a step under way ends and is saved first.
    """
    try:
        run.when(begins, timeout=timeout)
        time.sleep(delay)
        sent, waited = time.monotonic(), queued(pid := run.process.pid)
        run.process.send_signal(signum)
        acknowledged = run.when(f"{signal.Signals(signum).name}: stopping", timeout=10) - sent - (queued(pid) - waited)
        while not run.has_ended():
            assert time.monotonic() - sent < timeout, f"the run goes on:\n{run.text}"
            time.sleep(0.005)
        ended = time.monotonic() - (queued(pid) - waited)
        wait_for = run.when("</saving", timeout=1) - sent if saved else 0.0
    finally:
        run.process.kill()
        status = run.process.wait()
    return Obeyed(acknowledged, wait_for, ended - sent - wait_for, status, run.text)
