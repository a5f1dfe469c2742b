"""What scripts/gpu_suite.sh gathers, over invented parts: no GPU is needed to see that a miss is called one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import bench_attention, bench_deterministic, gpu_report
from tests.harness import ROOT

JUNIT = """<testsuites><testsuite tests="3" failures="{failures}" errors="0" skipped="1" time="2.5">
<testcase classname="tests.a" name="one"/><testcase classname="tests.a" name="two">{inner}</testcase>
<testcase classname="tests.a" name="three"><skipped/></testcase></testsuite></testsuites>"""


@pytest.fixture
def report():
    return gpu_report


STEPS = {
    "about": {},
    "layers": [
        {"model": "Flux", "shape": [4608, 3072, 3072], "ratio": 0.7, "pays": True, "gate": True},
        {"model": "Flux", "shape": [512, 3072, 3072], "ratio": 1.1, "pays": False, "gate": True},
        {"model": "SDXL", "shape": [4096, 640, 640], "ratio": 1.3, "pays": False, "gate": False},
    ],
    "errors": {"Flux nf4": "OutOfMemoryError: CUDA out of memory.\nmore"},
}


DETERMINISTIC = {
    "rows": [
        {
            "model": "Flux", "pixels": 1024, "ratio": 1.25, "ratios": [1.2, 1.25, 1.3],
            "ms": {"ordinary": 400.0, "deterministic": 500.0},
            "attention": {"ordinary": "CUDNN_ATTENTION", "deterministic": "FLASH_ATTENTION"},
            "same gradients": {"ordinary": False, "deterministic": True},
        },
    ],
    "errors": {"SDXL": "the worker ended with status -9"},
}  # fmt: skip


ATTENTION = {
    "about": {},
    "rows": [
        {
            "model": "Flux", "heads": 24, "queries": 4608, "keys": 4608, "size": 128, "auto": "torch's own", "note": "",
            "ms": 3.25, "of auto": {"flash": 1.0, "efficient": 1.75, "math": 8.0}, "lacks": {"cudnn": "it is too old"},
        },
    ],
}  # fmt: skip


def steps(ratio: float) -> list[dict]:
    """Rows of bench_step.py: float8 storage at `ratio` of bf16 at 1024 px, and at 1.14 at 512 px."""
    common = {"model": "Flux", "ms": 400.0, "rounds": 7, "resident_bytes": 0, "peak_bytes": 3 << 30}
    return [
        common | {"pixels": 1024, "storage": "bf16", "ratio": 1.0, "utilisation": 0.61},
        common | {"pixels": 1024, "storage": "fp8_e4m3", "ratio": ratio},
        common | {"pixels": 1024, "storage": "fp8_e4m3 + fp8 matmul", "ratio": 0.8},
        common | {"pixels": 512, "storage": "fp8_e4m3", "ratio": 1.14, "peak_bytes": None},
        common | {"pixels": 512, "storage": "nf4", "ratio": 9.0},
    ]


def run(
    report, tmp_path: Path, monkeypatch, *, failed: bool, ratio: float, status: dict[str, int], storage: float = 1.05
) -> tuple[int, dict]:
    parts, folder = tmp_path / "parts", tmp_path / "out"
    parts.mkdir(), folder.mkdir()
    (parts / "tests.xml").write_text(JUNIT.format(failures=int(failed), inner="<failure/>" if failed else ""))
    rows = [
        {"family": "Flux", "rank": 16, "DoRA / LoRA": ratio, "extra memory": 0.01, "PEFT DoRA / DoRA": 2.0},
        {"family": "Flux", "rank": 16, "DoRA / LoRA": 1.0, "extra memory": 0.0},
        {"family": "Flux", "rank": 64, "DoRA / LoRA": 9.0, "extra memory": 0.0},
    ]
    (parts / "layers.json").write_text(json.dumps({"about": {}, "rows": rows}))
    (parts / "steps.json").write_text(json.dumps(STEPS | {"steps": steps(storage)}))
    (parts / "deterministic.json").write_text(json.dumps(DETERMINISTIC))
    (parts / "attention.json").write_text(json.dumps(ATTENTION))
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
        status={"tests": 0, "kernels": 0, "layers": 0, "shared": 0, "steps": 0, "deterministic": 0, "attention": 0},
    )
    assert code == 0
    assert {(row["figure"], row["worst"], row["met"]) for row in result["figures"]} == {
        ("DoRA / LoRA", 1.05, True), ("PEFT DoRA / DoRA", 2.0, True), ("extra memory", 0.01, True),
        ("fp8 / bf16, 1024 px", 1.05, True), ("fp8 / bf16, 512 px", 1.14, True),
    }  # fmt: skip
    shown = capsys.readouterr().out
    assert "MISSED" not in shown
    assert "1.000 of bf16   3.0 GiB 61% of the card's bf16 rate" in shown
    assert "Flux: a float8 product pays at 4608x3072x3072 (0.70)\n" in shown
    assert "scaled_matmul_pays is to be changed for 512x3072x3072 (1.10)\nSDXL: a float8 product pays at none" in shown
    assert "Flux nf4: OutOfMemoryError: CUDA out of memory.\n" in shown and "more" not in shown
    assert (
        "Flux  1024 px deterministic 1.250 of ordinary (500.0 / 400.0 ms, attention flash / cudnn); "
        "gradients repeat: yes / no\nSDXL: the worker ended with status -9\n"
        "Flux  24 heads of 128, 4608 x 4608: flash 1.00, efficient 1.75, math 8.00 of auto (torch's own, 3.25 ms); "
        "no cudnn: it is too old\n"
    ) in shown


def test_misses_failures_and_timeouts_are_said(report, tmp_path, monkeypatch, capsys) -> None:
    code, result = run(
        report,
        tmp_path,
        monkeypatch,
        failed=True,
        ratio=1.2,
        status={"tests": 1, "kernels": 124, "layers": 0, "shared": 0, "steps": 0, "deterministic": 0, "attention": 0},
        storage=1.09,
    )
    shown = capsys.readouterr().out
    assert code == 1
    assert result["tests"]["failed"] == ["tests.a::two"] and "failed: tests.a::two" in shown
    assert "worst   1.200   at most 1.06   MISSED" in shown
    assert "fp8 / bf16, 1024 px   worst   1.090   at most 1.08   MISSED" in shown
    assert "fp8 / bf16, 512 px    worst   1.140   at most 1.15   met" in shown
    assert "kernels: exit status 124 (ran out of time)" in shown


@pytest.mark.slow
def test_the_bench_of_a_step_runs_on_tiny_models(report, tmp_path: Path) -> None:
    """Its rows are what the report reads; float8 products are among them."""
    path = tmp_path / "steps.json"
    command = [sys.executable, "benchmarks/bench_step.py", "--quick", "--device", "cpu", "--storage", "bf16,fp8_e4m3"]
    subprocess.run([*command, "--rounds", "1", "--json", str(path)], cwd=ROOT, check=True, timeout=300)
    result = json.loads(path.read_text())
    assert not result["errors"] and {row["model"] for row in result["layers"]} == {"Flux", "SDXL"}
    storages = ["bf16", "fp8_e4m3", "fp8_e4m3 + fp8 matmul", "fp8_e4m3 LoRA"]
    assert [row["storage"] for row in result["steps"]] == 4 * storages
    assert len(report.step_lines(result)) >= 12 + 2


def test_the_bench_of_attention_runs_on_tiny_shapes(tmp_path: Path, monkeypatch, capsys) -> None:
    """A kind is timed where it passes its trial, and named with the reason where not."""
    path = tmp_path / "attention.json"
    given = ["bench_attention.py", "--kinds", "--quick", "--rounds", "2", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", given)
    assert bench_attention.main() == 0
    rows = json.loads(path.read_text())["rows"]
    assert {row["model"] for row in rows} == set(bench_attention.SHAPES) == set(bench_attention.QUICK)
    shown = capsys.readouterr().out
    for row in rows:
        assert row["of auto"].keys() == {"flash", "math"} and row["lacks"].keys() == {"cudnn", "efficient"}
        assert bench_attention.line(row) in shown
    if not torch.cuda.is_available():
        monkeypatch.setattr(sys, "argv", given[:2])
        assert bench_attention.main() == 2 and "no CUDA device is visible; try --quick" in capsys.readouterr().err


@pytest.mark.proof
def test_the_bench_of_determinism_runs_on_tiny_models(report, tmp_path: Path) -> None:
    path = tmp_path / "deterministic.json"
    command = [sys.executable, "benchmarks/bench_deterministic.py", "--quick", "--rounds", "1", "--json", str(path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    result = json.loads(path.read_text())
    assert not result["errors"] and len(report.deterministic_lines(result)) == 4
    for row in result["rows"]:
        assert len(row["ratios"]) == 1 and row["same gradients"] == {"ordinary": True, "deterministic": True}


# In the place of the work of bench_deterministic.py: a worker that cannot build any model.
FAILING = """
import json, sys
for asked in sys.stdin:
    what = json.loads(asked)[0]
    print(json.dumps({"value": {}} if what == "start" else {"error": "KeyError: 'fp9'"}), flush=True)
"""


def test_the_bench_of_determinism_says_what_fails(tmp_path: Path, monkeypatch, capsys) -> None:
    """An error in a worker ends its model, not the script."""
    path, script = tmp_path / "deterministic.json", tmp_path / "worker.py"
    script.write_text(FAILING)
    monkeypatch.setattr(bench_deterministic, "__file__", str(script))
    monkeypatch.setattr(sys, "argv", ["bench_deterministic.py", "--quick", "--json", str(path)])
    assert bench_deterministic.main() == 1
    assert "error: SDXL: deterministic: KeyError: 'fp9'" in capsys.readouterr().out
    assert json.loads(path.read_text())["errors"].keys() == {"Flux", "SDXL"}
