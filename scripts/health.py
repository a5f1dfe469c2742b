"""Say whether a run hangs: exit status 0 where it is busy, has ended or has not begun, 1 where it hangs.

    python scripts/health.py outputs/bear    # one run
    python scripts/health.py                 # the newest run below /outputs, as in the image

A run renews OUTPUT/alive.json while it gets on. It hangs where it did not for ten minutes, or four times its longest silence.
A sign from before this machine or container started is of a run that went with the last one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402

from trainer.base.console import printable  # noqa: E402
from trainer.base.progress import Sign, last_sign  # noqa: E402
from trainer.base.run_layout import Layout, holds_run  # noqa: E402

OUTPUTS = Path("/outputs")  # of the image (its volumes)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "output", nargs="?", type=Path, metavar="OUTPUT", help=f"a run's folder; else the newest in {OUTPUTS}"
    )
    chosen = parser.parse_args(arguments)
    roots = [chosen.output] if chosen.output else runs(OUTPUTS)
    found = [(sign, root) for root in roots if (sign := last_sign(Layout(root).alive)) and sign.time >= started()]
    if not found:
        print(f"healthy: no run is at work in {printable(chosen.output or OUTPUTS)}")
        return 0
    sign, root = max(found, key=lambda each: each[0].time)
    status, said = judged(sign, printable(root), time.time())
    print(said)
    return status


def judged(sign: Sign, name: str, now: float) -> tuple[int, str]:
    """(exit status, a sentence) of the run `name`."""
    from trainer.base.progress import duration

    doing = f" ({sign.doing})" if sign.doing else ""
    silence = duration(max(0.0, now - sign.time))
    if now >= sign.over:
        way = "start it again with --resume_from auto"
        return 1, f"hung: {name} has given no sign of life for {silence}{doing}, or was killed; {way}"
    return 0, f"healthy: {name} gave a sign of life {silence} ago{doing}"


def runs(folder: Path) -> Iterator[Path]:
    """The folders of runs at work, at most three deep; those inside a run are not looked through."""
    for root, folders, names in os.walk(folder):
        at_work, deep = Layout(Path(root)).alive.name in names, len(Path(root).relative_to(folder).parts)
        if at_work:
            yield Path(root)
        if at_work or holds_run({*folders, *names}) or deep == 3:
            folders.clear()


def started() -> float:
    """Unix time at which the first process of this machine or container began."""
    try:
        return psutil.Process(1).create_time()
    except psutil.Error:  # Windows has none of that number
        return psutil.boot_time()


if __name__ == "__main__":
    sys.exit(main())
