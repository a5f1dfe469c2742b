"""What scripts/gpu_suite.sh gathers, over invented parts: no GPU is needed to see that a miss is called one."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
JUNIT = """<testsuites><testsuite tests="3" failures="{failures}" errors="0" skipped="1" time="2.5">
<testcase classname="tests.a" name="one"/><testcase classname="tests.a" name="two">{inner}</testcase>
<testcase classname="tests.a" name="three"><skipped/></testcase></testsuite></testsuites>"""


@pytest.fixture
def report():
    spec = importlib.util.spec_from_file_location("gpu_report", ROOT / "scripts" / "gpu_report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(report, tmp_path: Path, monkeypatch, *, failed: bool, ratio: float, status: dict[str, int]) -> tuple[int, dict]:
    parts, folder = tmp_path / "parts", tmp_path / "out"
    parts.mkdir(), folder.mkdir()
    (parts / "tests.xml").write_text(JUNIT.format(failures=int(failed), inner="<failure/>" if failed else ""))
    rows = [
        {"family": "Flux", "rank": 16, "DoRA / LoRA": ratio, "extra memory": 0.01, "PEFT DoRA / DoRA": 2.0},
        {"family": "Flux", "rank": 16, "DoRA / LoRA": 1.0, "extra memory": 0.0},
        {"family": "Flux", "rank": 64, "DoRA / LoRA": 9.0, "extra memory": 0.0},
    ]
    (parts / "layers.json").write_text(json.dumps({"about": {}, "rows": rows}))
    for name, code in status.items():
        (parts / f"{name}.status").write_text(str(code))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a card")
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", str(parts), str(folder)])
    code = report.main()
    (path,) = folder.glob("GPU-*.json")
    return code, json.loads(path.read_text())


def test_all_met(report, tmp_path, monkeypatch, capsys) -> None:
    code, result = run(
        report,
        tmp_path,
        monkeypatch,
        failed=False,
        ratio=1.05,
        status={"tests": 0, "kernels": 0, "layers": 0, "shared": 0},
    )
    assert code == 0
    assert {(row["figure"], row["worst"], row["met"]) for row in result["figures"]} == {
        ("DoRA / LoRA", 1.05, True), ("PEFT DoRA / DoRA", 2.0, True), ("extra memory", 0.01, True),
    }  # fmt: skip
    assert "MISSED" not in capsys.readouterr().out


def test_misses_failures_and_timeouts_are_said(report, tmp_path, monkeypatch, capsys) -> None:
    code, result = run(
        report,
        tmp_path,
        monkeypatch,
        failed=True,
        ratio=1.2,
        status={"tests": 1, "kernels": 124, "layers": 0, "shared": 0},
    )
    shown = capsys.readouterr().out
    assert code == 1
    assert result["tests"]["failed"] == ["tests.a::two"] and "failed: tests.a::two" in shown
    assert "worst   1.200   at most 1.06   MISSED" in shown
    assert "kernels: exit status 124 (ran out of time)" in shown
