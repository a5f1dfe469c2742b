"""The tests of tools that the quick suite runs. A tool's tests run when the tool, or a file that it imports, changed.

A tool is a folder of workbench/ that may be deleted. Its tests are those of its folder in unit/workbench/, and the files of
integration/ with the mark `tool("NAME")`. What changed is what differs from the commit TESTS_SINCE (left out: the one before
the last), and what git does not know yet. `--all`, a named file and any other -m run them all.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.harness import ROOT

TOOLS = ("adapters", "audit", "compare", "drawing", "importing", "mirror", "replay", "watch")
# What every test depends on.
SHARED = ("tests/[a-z_]*.py", "pyproject.toml", "constraints.txt", "scripts/make_model.py")
IMPORT = re.compile(r"^\s*from ((?:trainer|workbench)[\w.]*) import ([\w, ]+)|^\s*import ((?:trainer|workbench)[\w.]*)", re.M)


def files_of(module: str, name: str = "") -> list[Path]:
    """The files that an import of a module, or of a name from it, runs first: below the root, those that are there."""
    stem = ROOT.joinpath(*module.split("."))
    candidates = [stem.with_suffix(".py"), stem / "__init__.py", stem / f"{name}.py", stem / name / "__init__.py"]
    return [path for path in candidates if path.is_file()]


def closure(folder: Path) -> set[str]:
    """The files of a folder, and all that they import of trainer/ and workbench/, as paths below the root."""
    left, seen = list(folder.rglob("*.py")), set[Path]()
    while left:
        path = left.pop()
        if path not in seen:
            seen.add(path)
            for module, names, plain in IMPORT.findall(path.read_text(encoding="utf-8")):
                for name in (names or "").split(",") or [""]:
                    left += files_of(module or plain, name.strip().partition(" ")[0])
    return {path.relative_to(ROOT).as_posix() for path in seen}


def changed() -> set[str] | None:
    """The files that differ from TESTS_SINCE; None where git does not say."""
    since = os.environ.get("TESTS_SINCE", "HEAD~1")
    said = [
        subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
        for words in (("diff", "--name-only", since), ("ls-files", "-o", "--exclude-standard"))
    ]
    return None if any(each.returncode for each in said) else {line for each in said for line in each.stdout.splitlines()}


def tool_of(path: Path, mark: pytest.Mark | None) -> str:
    """The tool of a test's file; "" where it is of none."""
    parts = path.relative_to(ROOT).parts
    if parts[:3] == ("tests", "unit", "workbench") and parts[3] in TOOLS:
        return parts[3]
    return mark.args[0] if mark is not None else ""


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> Counter[str]:
    """Take the tests of tools without a change out of `items`; returns how many of each."""
    files = changed()
    if files is None or any(Path(file).match(pattern) for file in files for pattern in SHARED):
        return Counter()
    needed = {tool: bool(files & closure(ROOT / "workbench" / tool)) for tool in TOOLS}
    kept, out = [], []
    for item in items:
        tool = tool_of(item.path, item.get_closest_marker("tool"))
        test = item.path.relative_to(ROOT).as_posix()
        (kept if not tool or needed[tool] or test in files else out).append((item, tool))
    items[:] = [item for item, _ in kept]
    config.hook.pytest_deselected(items=[item for item, _ in out])
    return Counter(tool for _, tool in out)
