"""How well averages of other lengths are made of those that a run sets aside: the table of docs/ema.md. Reads no run.

python benchmarks/ema_errors.py                              # 20 files in 1,000 updates
python benchmarks/ema_errors.py --files 10 --updates 500 --lengths 0.15 0.2
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import pages  # noqa: E402
from trainer.ema import LENGTHS  # noqa: E402
from trainer.ema.power import Profile, fit  # noqa: E402

SHOWN = (0.05, 0.1, 0.07, 0.15, 0.2, 0.25, 0.03, 0.02)


def table(files: int, updates: int, lengths: Sequence[float]) -> str:
    """A row for each length. The files are at equal distances, the last one at the end."""
    stored = [Profile(length, updates * n // files) for n in range(1, files + 1) for length in LENGTHS]
    found = {length: fit(stored, Profile(length, updates)) for length in lengths}
    rows = [[f"{length:.2f}", f"{100 * its.error:.2f} %", f"{100 * its.reach:.2f} %"] for length, its in found.items()]
    return pages.table(["length", "error of the profile", "bound"], rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--lengths", type=float, nargs="+", default=SHOWN)
    chosen = parser.parse_args(arguments)
    print(table(chosen.files, chosen.updates, chosen.lengths))


if __name__ == "__main__":
    main()
