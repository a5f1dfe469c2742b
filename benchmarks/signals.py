"""A signal in each long phase of full-size SDXL: seconds to its acknowledgement, and to the end of the process.

    python benchmarks/signals.py [--model FOLDER] [--json FILE]

The run is a true command line that stores float8, trains a DoRA and draws. It is started once for each phase, gets SIGTERM,
SIGINT or SIGHUP in the middle of it and goes on from there at the next start. Without --model the model is made: 7 GB. A
signal is to be acknowledged within 0.5 s; the process ends within 2 s, counted from the end of a step or a checkpoint under
way. Seconds in which the process was ready and got no core are not counted.

Exit status 1 where one comes late, a status is wrong, a half-written file is left or a step is lost. Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.harness import PHOTOS, Workbench  # noqa: E402
from trainer.base import signals  # noqa: E402

ACKNOWLEDGED, LEFT = 0.5, 2.0  # seconds
PATIENCE = 600.0  # seconds for a phase to begin, and for a process to end

# In the order in which a run meets them: what an earlier start did is cached, drawn or saved. Seconds into the phase.
PHASES = {
    "hashing model": 0.05, "encoding photos": 1.0, "encoding captions": 1.0, "loading unet": 1.0,
    "hashing the frozen weights": 1.0, "reading converted weights": 0.5, "injecting the adapter": 0.5,
    "norms of the adapted layers": 0.5, "drawing samples": 1.0, "step 1": 2.0, "saving step 2": 0.05,
    "exporting": 0.5, "measuring the adapter": 0.5, "writing the report": 0.0,
}  # fmt: skip

# Python imports it before anything else. The program is as it is; each phase says when it begins and ends.
SPY = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from trainer.base.progress import Phase
begin, close = Phase.__init__, Phase.close
def begins(self, phases, name, *more, **settings):
    begin(self, phases, name, *more, **settings)
    os.write(2, f"<{{name}}>\\n".encode())
def closes(self):
    close(self)
    os.write(2, f"</{{self.name}}>\\n".encode())
Phase.__init__, Phase.close = begins, closes
"""


def queued(task: int) -> float:
    """Seconds in which a process has waited for a core so far; 0 where no system tells it."""
    told = Path(f"/proc/{task}/schedstat")
    return int(told.read_text().split()[1]) * 1e-9 if told.exists() else 0.0


@dataclass
class Followed:
    """A run and what it said on stderr: (monotonic time, line)."""

    process: subprocess.Popen
    said: list[tuple[float, str]] = field(default_factory=list)

    def when(self, start: str, *, timeout: float = PATIENCE) -> float:
        """The time of the first line that begins so; waits for it. Exits with a message where it does not come."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            ended = self.has_ended()
            for at, line in list(self.said):
                if line.startswith(start):
                    return at
            if ended:
                sys.exit(f"the run ended with {self.process.wait()} without {start!r}:\n{self.text}")
            time.sleep(0.005)
        sys.exit(f"no {start!r} within {timeout} s:\n{self.text}")

    def has_ended(self) -> bool:
        """It can still be asked then what it waited for a core."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.said)


@dataclass(frozen=True)
class Obeyed:
    """Seconds from the signal: to its acknowledgement, to the end of what is seen to its end (a step and its checkpoint, else
    0), from there to the end of the process."""

    acknowledged: float
    seen_to_its_end: float
    left: float
    status: int


def follow(folder: Path, *arguments: str) -> Followed:
    """`python train.py ARGUMENTS`, followed."""
    spy = folder / "spy"
    spy.mkdir(exist_ok=True)
    (spy / "sitecustomize.py").write_text(SPY)
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(spy)},
    )  # fmt: skip
    followed, errors = Followed(process), process.stderr
    assert errors is not None

    def read() -> None:
        for line in errors:
            followed.said.append((time.monotonic(), line.decode().rstrip("\n")))

    threading.Thread(target=read, daemon=True).start()
    return followed


def stop_in(run: Followed, begins: str, signum: int, *, delay: float, saved: bool) -> Obeyed:
    """Send the signal `delay` seconds after the line that begins so ("<loading unet"). saved: a step under way ends and is
    saved first."""
    try:
        run.when(begins)
        time.sleep(delay)
        sent, waited = time.monotonic(), queued(pid := run.process.pid)
        run.process.send_signal(signum)
        acknowledged = run.when(f"{signal.Signals(signum).name}: stopping") - sent - (queued(pid) - waited)
        while not run.has_ended():
            if time.monotonic() - sent > PATIENCE:
                sys.exit(f"the run goes on:\n{run.text}")
            time.sleep(0.005)
        ended = time.monotonic() - (queued(pid) - waited)
        wait_for = run.when("</saving", timeout=1) - sent if saved else 0.0
    finally:
        run.process.kill()
        status = run.process.wait()
    return Obeyed(acknowledged, wait_for, ended - sent - wait_for, status)


def measure(folder: Path, model: Path) -> tuple[dict[str, Obeyed], list[str]]:
    """(what became of the signal in each phase, what is wrong)."""
    bench, photos = Workbench(folder, folder), folder / "photos"
    photos.mkdir()
    for name in ("00.jpg", "00.txt"):
        shutil.copyfile(PHOTOS / name, photos / name)
    # In fp32, which every CPU computes: without AVX512 torch takes seconds for one convolution in bf16.
    tree = bench.tree(
        run__max_steps=2, run__device="cpu", model__path=str(model), model__components={"unet": {"dtype": "fp8_e4m3"}},
        precision__compute="fp32", adapter__type="dora", adapter__rank=16, adapter__targets="attention+mlp",
        data__resolution=256, data__batch_size=1, data__sources=[{"path": str(photos)}],
        data__cache_dir=str(folder / "cache"), model__cache_dir=str(folder / "converted"),
        memory__gradient_checkpointing=True, validation__every_steps=2, export__on_stop=False,
        validation__samples=[{"prompt": "a bear", "width": 256, "height": 256, "steps": 2}],
    )  # fmt: skip
    arguments = ["--config", str(bench.write(tree)), "--resume_from", "auto"]
    table: dict[str, Obeyed] = {}
    wrong: list[str] = []
    for index, (phase, delay) in enumerate(PHASES.items()):
        signum = signals.STOP[index % len(signals.STOP)]
        begins = "</drawing samples" if phase == "step 1" else f"<{phase}"
        run = follow(folder, *arguments)
        obeyed = stop_in(run, begins, signum, delay=delay, saved=phase in ("step 1", "saving step 2"))
        table[phase] = obeyed
        print(
            f"{phase:30} acknowledged {obeyed.acknowledged:.2f} s, seen to its end {obeyed.seen_to_its_end:.2f} s, "
            f"then {obeyed.left:.2f} s to the exit ({obeyed.status})",
            flush=True,
        )
        if obeyed.acknowledged > ACKNOWLEDGED or obeyed.left > LEFT:
            wrong.append(f"{phase}: late")
        if obeyed.status != 128 + signum or "Traceback" in run.text:
            wrong.append(f"{phase}: status {obeyed.status}\n{run.text}")
        if list((folder / "out").rglob("*.tmp")):
            wrong.append(f"{phase}: a half-written file is left")
    last = follow(folder, *arguments)
    status = last.process.wait(timeout=PATIENCE)
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    if status or [json.loads(line)["step"] for line in lines] != [1, 2]:
        wrong.append(f"the last start ends with {status} and {len(lines)} steps:\n{last.text}")
    return table, wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a full-size SDXL in diffusers' layout")
    parser.add_argument("--json", type=Path, metavar="FILE")
    chosen = parser.parse_args(arguments)
    for signum in signals.STOP:
        if signal.getsignal(signum) is signal.SIG_IGN:  # under nohup, and then the runs that are started ignore it, too
            signal.signal(signum, signal.SIG_DFL)
    with tempfile.TemporaryDirectory(prefix="bench-signals-") as temporary:
        folder, model = Path(temporary), chosen.model
        if model is None:
            model = folder / "sdxl"
            command = [sys.executable, "scripts/make_model.py", "--size", "full", "--family", "sdxl"]
            subprocess.run([*command, "--layout", "diffusers", str(model)], cwd=ROOT, check=True)
        table, wrong = measure(folder, model)
    if chosen.json:
        chosen.json.write_text(json.dumps({phase: asdict(obeyed) for phase, obeyed in table.items()}, indent=1) + "\n")
    print("\n".join(wrong) or "all in time")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
