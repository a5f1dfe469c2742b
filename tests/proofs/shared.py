"""What proofs and measurements share: the files of another commit, tiny models of every family."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PHOTOS = ROOT / "examples" / "bear_plushie"
FAMILIES = ("sdxl", "flux")
# SOURCE_DATE_EPOCH: two runs that are compared byte by byte started at the same time.
STARTED = "1735689600"


@contextmanager
def worktree(commit: str, folder: Path) -> Iterator[Path]:
    """`commit` checked out in `folder`, and gone from the repository's list again at the end.

    Exits with a message where the commit is not there.
    """
    git = ["git", "-C", str(ROOT), "worktree"]
    made = subprocess.run([*git, "add", "--detach", str(folder), commit], capture_output=True, text=True)
    if made.returncode:
        sys.exit(f"commit {commit}: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def make_models(folder: Path, families: Iterable[str] = FAMILIES) -> Path:
    """A tiny checkpoint of each family under `folder`, as folders of that name."""
    for family in families:
        command = [sys.executable, "scripts/make_model.py", "--size", "tiny", "--family", family]
        subprocess.run([*command, "--layout", "diffusers", str(folder / family)], cwd=ROOT, check=True)
    return folder
