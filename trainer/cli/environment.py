"""Whether this Python can run the program, and how its threads wait.

The only file that may be imported where nothing is installed.
"""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

OLDEST = (3, 11)
# Those that nothing works without. Others are asked for where they are needed.
NEEDED = ("torch", "diffusers", "transformers", "safetensors", "pydantic")
ROOT = Path(__file__).resolve().parents[2]
# Some 10 microseconds (libgomp takes 100,000 turns for a millisecond): enough for the next loop of the same step to begin.
SPINS = "1000"


def prepare(arguments):
    """Call `wait_briefly`, then `check`. Every program calls it before it imports a library."""
    wait_briefly()
    check(arguments)


def wait_briefly():
    """Have OpenMP's threads give their core away soon while they wait, unless the user chose how they wait.

    By default they first spin for 3 ms, on cores that the thread they wait for may need: beside four loops a step took
    60 times as long (benchmarks/busy.py). GNU's OpenMP, which PyTorch has, reads this once, when it is loaded.
    """
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        os.environ["GOMP_SPINCOUNT"] = SPINS


def check(arguments):
    """End with status 2 and how to start the program, where this Python is too old or lacks a library."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    version = ".".join(map(str, sys.version_info[:2]))
    if sys.version_info >= OLDEST and not missing:
        return
    lacks = "has no {}".format(", ".join(missing)) if missing else "is older than {}.{}".format(*OLDEST)
    lines = [f"this Python ({sys.executable}, version {version}) {lacks}"]
    python = ROOT / ".venv" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    command = _command([str(python), *arguments])
    if python.exists():
        lines.append(f"start it with the project's own: {command}")
    else:
        lines.append(f"make the project's own first: {_command(['bash', str(ROOT / 'scripts' / 'setup.sh')])}")
        lines.append(f"then: {command}")
    sys.exit(_told(lines))


def torch_said():
    """Lines: which PyTorch is installed, for what, and where there is a card that it cannot use the remedy."""
    import torch

    built = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"ROCm {torch.version.hip}"
        if torch.version.hip
        else "the CPU"
    )
    if torch.cuda.is_available():
        return [f"PyTorch {torch.__version__}, built for {built}; runs use {torch.cuda.get_device_name(0)}"]
    lines = [f"PyTorch {torch.__version__}, built for {built}; runs use the CPU"]
    if card := _nvidia_card():
        remedy = (
            f"it may need a newer driver for CUDA {torch.version.cuda}; update the driver"
            if torch.version.cuda
            else "it was built without CUDA; install PyTorch's CUDA build into .venv, with the command that pytorch.org names"
        )
        lines.append(f"warning: this machine has {card}, which it cannot use: {remedy}")
    return lines


def _nvidia_card():
    """Its name, as the driver's own tool tells it; "" where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    asked = subprocess.run([tool, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False)
    return (asked.stdout.splitlines() or [""])[0].strip() if asked.returncode == 0 else ""


def _command(words):
    """As it can be copied, also where a word has spaces."""
    return subprocess.list2cmdline(words) if sys.platform == "win32" else shlex.join(words)


def _told(lines):
    sys.stderr.write("error: {}\n".format("\n       ".join(lines)))
    return 2


if __name__ == "__main__":
    print("\n".join(torch_said()))
