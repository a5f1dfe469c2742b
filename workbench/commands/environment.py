"""Checks this Python, and sets how OpenMP's threads wait. Needs the standard library alone: programs import it first."""

import importlib.util
import io
import os
import shlex
import shutil
import sys
import time
from pathlib import Path

OLDEST = (3, 11)
# Libraries that every program needs. Others are checked where they are used.
NEEDED = ("torch", "diffusers", "transformers", "safetensors", "pydantic")
ROOT = Path(__file__).resolve().parents[2]
# GOMP_SPINCOUNT: how often a waiting thread looks for work before it yields its core; 100,000 times take a millisecond.
ALONE, BESIDE_OTHERS = "10000", "0"
LOAD = "/proc/loadavg"  # Linux' number of runnable programs


def prepare(arguments):
    """Call `show_everything`, `choose_waiting`, then `check`. Every program calls it before it imports a library."""
    show_everything()
    choose_waiting()
    check(arguments)


def show_everything():
    """Print escapes for characters that a terminal or log cannot encode, and for undecodable bytes of file names."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and (stream.errors == "strict" or stream.encoding.lower() != "utf-8"):
            stream.reconfigure(errors="backslashreplace")


def choose_waiting():
    """Set how long OpenMP's threads spin before they yield their core, unless the user did. Needed before PyTorch is loaded.

    The default is 3 ms, on cores that the thread they wait for may need: beside four endless loops no step ended within 100
    s (benchmarks/busy.py). On a free machine, yielding at once makes a step longer by a third.
    """
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        os.environ["GOMP_SPINCOUNT"] = BESIDE_OTHERS if _others_run() else ALONE


def _others_run():
    """Whether others use a quarter of the whole machine's cores, three times in a row. False if the system does not say."""
    try:
        for _ in range(3):
            with open(LOAD) as file:
                others = int(file.read().split()[3].split("/")[0]) - 1  # this program is one
            if others < max(1, os.cpu_count() / 4):
                return False
            time.sleep(0.001)
    except OSError:
        return False
    return True


def check(arguments):
    """Exit with status 2 and the right command if this Python is too old or lacks a library."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    version = ".".join(map(str, sys.version_info[:2]))
    if sys.version_info >= OLDEST and not missing:
        return
    problem = "has no {}".format(", ".join(missing)) if missing else "is older than {}.{}".format(*OLDEST)
    lines = [f"this Python ({sys.executable}, version {version}) {problem}"]
    python = ROOT / ".venv" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    command = _command([str(python), *arguments])
    if python.exists():
        lines.append(f"start it with the project's own: {command}")
    else:
        lines.append(f"make the project's own first: {_command(['bash', str(ROOT / 'scripts' / 'setup.sh')])}")
        lines.append(f"then: {command}")
    sys.stderr.write("error: {}\n".format("\n       ".join(lines)))
    sys.exit(2)


def torch_report():
    """Lines about the installed PyTorch: its build, its device, and the remedy if it cannot use the machine's card."""
    import torch

    remedy = "it was built without CUDA; install PyTorch's CUDA build into .venv, with the command that pytorch.org names"
    platform = f"ROCm {torch.version.hip}" if torch.version.hip else "the CPU"
    if torch.version.cuda:
        platform = f"CUDA {torch.version.cuda}"
        remedy = f"it may need a newer driver for {platform}; update the driver"
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "the CPU"
    lines = [f"PyTorch {torch.__version__}, built for {platform}; runs use {device}"]
    if not torch.cuda.is_available() and (card := _nvidia_card()):
        lines.append(f"warning: this machine has {card}, which it cannot use: {remedy}")
    return lines


def _nvidia_card():
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    import subprocess  # here: it would be a tenth of the time that --help takes

    query = subprocess.run([tool, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False)
    return (query.stdout.splitlines() or [""])[0].strip() if query.returncode == 0 else ""


def _command(words):
    if sys.platform != "win32":
        return shlex.join(words)
    from subprocess import list2cmdline

    return list2cmdline(words)


if __name__ == "__main__":
    print("\n".join(torch_report()))
