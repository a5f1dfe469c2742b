"""Several configs of one command line. The runs are small programs here; their signals and statuses are those of runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness import ROOT
from trainer import config as configs
from trainer.base.errors import UserError
from workbench.commands import arguments, queue

CONFIG = "pocket_sdxl.toml"
# A program in the place of train.py: it ends with the status that its file's name says, or waits for a signal.
PROGRAM = """
import pathlib, signal, sys, time
def stop(signum, frame):
    with open("signals", "a") as file: file.write(f"{signum}\\n")
    if signum != signal.SIGUSR1: sys.exit(128 + signum)
for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1): signal.signal(signum, stop)
status = pathlib.Path(sys.argv[2]).stem
print("arguments", *sys.argv[1:], flush=True)
if status == "wait":
    pathlib.Path("ready").touch()
    for _ in range(6000): time.sleep(0.01)  # and not without end, where nobody stops it
if status == "killed":
    import os
    os.kill(os.getpid(), 9)
sys.exit(int(status))
"""


def queued(*names: str) -> list[queue.Queued]:
    return [queue.Queued(f"{name}.toml", configs.load(CONFIG, [f"run.output_dir=out-{name}"])) for name in names]


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setattr(queue, "PROGRAM", tmp_path / "program.py")
    monkeypatch.chdir(tmp_path)


def test_a_run_that_fails_does_not_stop_the_rest(capfd) -> None:
    runs = queued("0", "2", "killed", "5", "0")
    assert queue.run_queue(runs, ["--verify"]) == 137
    assert [run.status for run in runs] == [0, 2, 137, 5, 0]
    printed = capfd.readouterr().out
    assert printed.count("arguments --config") == 5 and "arguments --config 5.toml --verify" in printed
    assert "queue: 2 of 5 runs ended with status 0\n  0.toml: status 0 after 0" in printed and "out-5" in printed
    assert queue.run_queue(queued("0", "0"), []) == 0


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(("sent", "status"), [([signal.SIGTERM], 143), ([signal.SIGUSR1, signal.SIGINT], 130)])
def test_a_signal_goes_to_the_run_at_hand_and_ends_the_queue(tmp_path: Path, sent: list[int], status: int) -> None:
    """Each reaches it once. The runs behind it are not started, and the table says so."""
    script = (
        "import sys; from pathlib import Path; from workbench.commands import queue\n"
        "from tests.unit.workbench.commands.test_queue import queued\n"
        "queue.PROGRAM = Path('program.py')\n"
        "sys.exit(queue.run_queue(queued('0', 'wait', '0'), []))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    deadline, log = time.monotonic() + 120, tmp_path / "signals"
    while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    for signum in sent:
        process.send_signal(signum)
        while str(int(signum)) not in (log.read_text() if log.exists() else ""):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == status
    assert log.read_text().split() == [str(int(signum)) for signum in sent]
    assert "queue: 1 of 3 runs ended with status 0" in printed and "0.toml: not started" in printed


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_terminals_signal_reaches_a_run_once(tmp_path: Path) -> None:
    """A terminal sends it to all processes of its group, of which the run is none."""
    script = (
        "import os, signal, sys; from pathlib import Path; from workbench.commands import queue\n"
        "from tests.unit.workbench.commands.test_queue import queued\n"
        "queue.PROGRAM = Path('program.py')\n"
        "sys.exit(queue.run_queue(queued('wait'), []))"
    )
    more = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "start_new_session": True}
    process, deadline = subprocess.Popen([sys.executable, "-c", script], **more), time.monotonic() + 120
    while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGUSR1)
    log = tmp_path / "signals"
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(5 * queue.POLL)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(120) == 130 and log.read_text().split() == [str(int(signal.SIGUSR1)), str(int(signal.SIGINT))]


def test_what_cannot_be_a_queue_is_refused_before_a_run_begins(monkeypatch) -> None:
    with pytest.raises(
        UserError, match=r"--config a.toml b.toml: both have run.output_dir = 'outputs/ink'; give each its own"
    ):
        for name in ("a", "b"):
            Path(f"{name}.toml").write_text((ROOT / "configs" / CONFIG).read_text())
        queue.queue_of(["a.toml", "b.toml"], [])
    with pytest.raises(UserError, match="missing.toml: No such file"):
        queue.queue_of([CONFIG, "missing.toml"], [])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="names 2 files, and WORLD_SIZE is 2; start each run by its own command"):
        queue.queue_of([CONFIG, "b.toml"], [])


@pytest.mark.parametrize(
    "given", ["--config a b.toml --verify", "--config a --verify --config=b.toml", "--verify --config a b.toml"]
)
def test_the_files_of_a_command_line_are_taken_out_of_it(given: str) -> None:
    assert arguments.parse(given.split()).config == ["a", "b.toml"]
    assert arguments.without_config(given.split()) == ["--verify"]


def test_a_folder_is_named_by_what_differs() -> None:
    def folder(*overrides: str) -> str:
        return configs.load(CONFIG, ["run.output_dir=auto", *overrides]).run.output_dir

    assert folder() == folder("run.stop_after=3", "logging.wandb=true", "optimizer.lr=2e-3") == "outputs/ink"
    assert folder("optimizer.lr=1e-4", "adapter.rank=4") == "outputs/ink-rank=4-lr=1e-4"
    assert folder("adapter.rank=", "validation.samples=", "data.sources.0.path=a b") == "outputs/ink-rank=-path=a_b-samples="
    long = [folder(f"export.trigger_phrase={'a b ' * 60}{end}") for end in "xy"]
    assert long[0] != long[1] and all(len(Path(name).name) < 140 and " " not in name for name in long)
    assert configs.load(CONFIG, ["run.output_dir=x"]).run.output_dir == "x"
