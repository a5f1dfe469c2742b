"""The quick suite leaves out a tool's tests where neither it nor what it imports changed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import tools
from tests.harness import ROOT


def test_what_a_tool_imports_is_found_down_to_the_base() -> None:
    audit = tools.closure(ROOT / "workbench" / "audit")
    assert {"workbench/audit/page.py", "trainer/run/session.py", "trainer/engine/step.py", "trainer/base/errors.py"} <= audit
    assert not any(file.startswith(("workbench/replay", "workbench/importing")) for file in audit)
    assert "workbench/compare/page.py" in tools.closure(ROOT / "workbench" / "watch")


def item(path: str, *marks: pytest.Mark) -> Any:
    return SimpleNamespace(path=ROOT / path, get_closest_marker=lambda name: next(iter(marks), None))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"workbench/replay/exact.py"}, "replay whole step"), ({"trainer/engine/step.py"}, "replay whole audit step"),
        ({"docs/replay.md"}, "step"), ({"tests/harness.py"}, "replay whole audit step"), (None, "replay whole audit step"),
        ({"tests/unit/workbench/audit/test_page.py"}, "audit step"),
    ],
)  # fmt: skip
def test_tests_of_a_tool_are_run_where_it_or_what_it_imports_changed(monkeypatch, files: set[str] | None, left: str) -> None:
    named = {
        "replay": item("tests/unit/workbench/replay/test_exact.py"),
        "whole": item("tests/integration/test_replay.py", pytest.mark.tool("replay").mark),
        "audit": item("tests/unit/workbench/audit/test_page.py"), "step": item("tests/unit/engine/test_step.py"),
    }  # fmt: skip
    monkeypatch.setattr(tools, "changed", lambda: files)
    items, out = list(named.values()), list[Any]()
    config: Any = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: out.extend(items)))
    counts = tools.leave_out(config, items)
    assert [name for name, each in named.items() if each in items] == left.split()
    assert len(out) == sum(counts.values()) == len(named) - len(left.split())


def test_every_tool_is_a_folder_and_every_mark_names_one() -> None:
    assert all((ROOT / "workbench" / tool / "__init__.py").is_file() for tool in tools.TOOLS)
    for path in Path(ROOT / "tests" / "integration").glob("test_*.py"):
        for name in tools.re.findall(r'mark\.tool\("(\w+)"\)', path.read_text(encoding="utf-8")):
            assert name in tools.TOOLS, path
