"""Watch runs in a browser: the page of each, and a comparison of several.

    python scripts/watch.py outputs/bear                    # one run
    python scripts/watch.py outputs/bear outputs/bear-dora  # two, and their comparison
    python scripts/watch.py outputs                         # all runs in this folder, also those that start later

Prints the address, on this machine alone. Over SSH: `ssh -L 8642:127.0.0.1:8642 MACHINE`, then the same address.
Only reads. Ctrl-C ends it; exit status 2 for a mistake in the arguments.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from workbench.commands import environment  # noqa: E402

if __name__ == "__main__":
    environment.prepare(sys.argv)

from workbench.commands.tools import run_tool  # noqa: E402

PORT = 8642


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="OUTPUT_DIR", help="a run's folder, or a folder of such folders"
    )
    parser.add_argument("--port", type=int, default=PORT, help=f"of this machine's loopback; 0 takes a free one ({PORT})")
    chosen = parser.parse_args(arguments)
    return run_tool(lambda: watch(chosen))


def watch(chosen: argparse.Namespace) -> None:
    """Until Ctrl+C, which is the way to end it."""
    try:
        from workbench.watch.server import serve

        serve(chosen.folders, chosen.port)
    except KeyboardInterrupt:
        print()


if __name__ == "__main__":
    sys.exit(main())
