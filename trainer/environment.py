"""Whether this Python can run the program at all. The only file that may be imported where nothing is installed."""

import importlib.util
import sys
from pathlib import Path

OLDEST = (3, 11)
# Those that nothing works without. Others are asked for where they are needed.
NEEDED = ("torch", "diffusers", "transformers", "safetensors", "pydantic")
ROOT = Path(__file__).resolve().parent.parent


def check(arguments):
    """End with status 2 and how to start the program, where this Python is too old or lacks a library."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    version = ".".join(map(str, sys.version_info[:2]))
    if sys.version_info >= OLDEST and not missing:
        return
    lacks = "has no {}".format(", ".join(missing)) if missing else "is older than {}.{}".format(*OLDEST)
    lines = [f"this Python ({sys.executable}, version {version}) {lacks}"]
    python = ROOT / ".venv" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    command = "{} {}".format(python, " ".join(arguments))
    if python.exists():
        lines.append(f"start it with the project's own: {command}")
    else:
        lines.append("make the project's own first: bash {}".format(ROOT / "scripts" / "setup.sh"))
        lines.append(f"then: {command}")
    sys.exit(_told(lines))


def _told(lines):
    sys.stderr.write("error: {}\n".format("\n       ".join(lines)))
    return 2
