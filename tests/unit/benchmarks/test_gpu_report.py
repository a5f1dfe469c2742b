"""What scripts/gpu_suite.sh gathers, over invented parts: no GPU is needed to see that a miss is called one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import pytest
import torch

from benchmarks import bench_attention, bench_deterministic, bench_step, gpu_page, gpu_report
from tests.harness import ROOT

JUNIT = """<testsuites><testsuite tests="3" failures="{failures}" errors="0" skipped="1" time="2.5">
<testcase classname="tests.a" name="one"/><testcase classname="tests.a" name="two">{inner}</testcase>
<testcase classname="tests.a" name="three"><skipped/></testcase></testsuite></testsuites>"""


@pytest.fixture
def report():
    return gpu_report


FLOAT8 = {
    "rows": [
        {"model": "Flux", "shape": [4608, 3072, 3072], "ratio": 0.7, "pays": True, "gate": True},
        {"model": "Flux", "shape": [512, 3072, 3072], "ratio": 1.1, "pays": False, "gate": True},
        {"model": "SDXL", "shape": [4096, 640, 640], "ratio": 1.3, "pays": False, "gate": False},
    ],
    "errors": {"SDXL layer (1, 2, 3)": "OutOfMemoryError: CUDA out of memory.\nmore"},
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


def steps(float8: float, dora: float) -> dict:
    """As bench_step.py writes it: of Flux at 1024 px, float8 storage at `float8` of bf16, and a DoRA at `dora` of a LoRA."""
    found: dict = {}
    for cell in (cell for cell in bench_step.cells() if cell.family == "Flux" and cell.pixels == 1024 and cell.recomputed):
        if cell.about in ("graphs and PEFT", "float8"):
            sides: dict = {side.name: {"side": asdict(side)} for side in cell.sides}
            for side in cell.sides:
                ms = 500.0 * (dora if side.adapter == "DoRA" else 1) * (float8 if side.storage == "fp8_e4m3" else 1)
                sides[side.name] |= {
                    "ms": ms, "rounds": [ms, ms], "ratio": ms / (500.0 * dora), "peak_bytes": 3 << 30, "utilisation": 0.61,
                    "launches": 12_000, "busy_ms": 0.75 * ms, "host_share": 0.25,
                }  # fmt: skip
            about = {key: value for key, value in asdict(cell).items() if key != "sides"}
            found[cell.name] = {"cell": about, "sides": sides}
    sides[side.name] = {"side": asdict(side), "error": "OutOfMemoryError: CUDA out of memory.\nmore"}
    return {"about": {}, "cells": found}


def run(
    report, tmp_path: Path, monkeypatch, *, failed: bool, ratio: float, status: dict[str, int], storage: float = 1.05
) -> tuple[int, dict]:
    parts, folder = tmp_path / "parts", tmp_path / "out"
    parts.mkdir(), folder.mkdir()
    (parts / "tests.xml").write_text(JUNIT.format(failures=int(failed), inner="<failure/>" if failed else ""))
    rows = [
        {
            "family": "Flux",
            "storage": "bf16",
            "rank": 16,
            "DoRA / LoRA": ratio,
            "extra memory": 0.01,
            "PEFT DoRA / DoRA": 2.0,
        },
        {"family": "Flux", "storage": "bf16", "rank": 16, "DoRA / LoRA": 1.0, "extra memory": 0.0},
        {"family": "Flux", "storage": "bf16", "rank": 64, "DoRA / LoRA": 9.0, "extra memory": 0.0},
    ]
    (parts / "layers.json").write_text(json.dumps({"about": {}, "rows": rows}))
    (parts / "steps.json").write_text(json.dumps(steps(storage, ratio)))
    (parts / "float8.json").write_text(json.dumps(FLOAT8))
    (parts / "deterministic.json").write_text(json.dumps(DETERMINISTIC))
    (parts / "attention.json").write_text(json.dumps(ATTENTION))
    for name, code in status.items():
        (parts / f"{name}.status").write_text(str(code))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a card")
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", str(parts), str(folder)])
    code = report.main()
    (path,) = folder.glob("GPU-*.json")
    return code, json.loads(path.read_text())


DONE = dict.fromkeys(gpu_report.PARTS, 0)


def test_all_met(report, tmp_path, monkeypatch, capsys) -> None:
    code, result = run(report, tmp_path, monkeypatch, failed=False, ratio=1.05, status=DONE)
    assert code == 0
    figures = {row["figure"]: (row["worst"], row["met"]) for row in result["figures"]}
    assert figures == {
        "DoRA / LoRA": (1.05, True), "PEFT DoRA / DoRA": (2.0, True), "extra memory": (0.01, True),
        "graphs or compiled, 1024 px, ms": (525.0, True), "graphs or compiled, 512 px, ms": (None, False),
        "DoRA / LoRA bf16, graphs, 1024 px": (1.05, True), "DoRA / LoRA bf16, eager, 1024 px": (1.05, True),
        "DoRA / LoRA fp8_e4m3, graphs, 1024 px": (1.05, True), "fp8 / bf16, 1024 px": (1.05, True),
    }  # fmt: skip
    shown = capsys.readouterr().out
    assert shown.count("MISSED") == 1
    assert "1.000 of the first, 3.0 GiB, 12,000 launches, host 25%, 61% of the card's bf16 rate" in shown
    assert "Flux: a float8 product pays at 4608x3072x3072 (0.70)\n" in shown
    assert "scaled_matmul_pays is to be changed for 512x3072x3072 (1.10)\nSDXL: a float8 product pays at none" in shown
    assert "LoRA fp8_e4m3, eager: OutOfMemoryError: CUDA out of memory.\n" in shown and "more" not in shown
    assert (
        "Flux  1024 px deterministic 1.250 of ordinary (500.0 / 400.0 ms, attention flash / cudnn); "
        "gradients repeat: yes / no\nSDXL: the worker ended with status -9\n"
        "Flux  24 heads of 128, 4608 x 4608: flash 1.00, efficient 1.75, math 8.00 of auto (torch's own, 3.25 ms); "
        "no cudnn: it is too old\n"
    ) in shown


def test_misses_failures_and_timeouts_are_said(report, tmp_path, monkeypatch, capsys) -> None:
    status = DONE | {"tests": 1, "kernels": 124}
    code, result = run(report, tmp_path, monkeypatch, failed=True, ratio=1.2, status=status, storage=1.09)
    shown = capsys.readouterr().out
    assert code == 1
    assert result["tests"]["failed"] == ["tests.a::two"] and "failed: tests.a::two" in shown
    assert "worst   1.200   at most 1.06   MISSED" in shown
    assert "fp8 / bf16, 1024 px   worst   1.090   at most 1.08   MISSED" in shown
    assert "DoRA / LoRA bf16, graphs, 1024 px worst   1.200   at most 1.1    MISSED" in shown
    assert "kernels: exit status 124 (ran out of time)" in shown


def test_the_page_has_every_cell_or_names_it(report, tmp_path, monkeypatch) -> None:
    """And judges the peak by the plan."""
    _, result = run(report, tmp_path, monkeypatch, failed=False, ratio=1.05, status=DONE)
    plan = {"bf16": 3.2, "fp8_e4m3": 2.0}
    planned = lambda family, storage, *_: {(1024, 1): int(plan[storage] * 2**30)}  # noqa: E731
    monkeypatch.setattr(gpu_page, "planned", planned)
    (path,) = (tmp_path / "out").glob("*.json")
    monkeypatch.setattr(sys, "argv", ["gpu_page.py", str(path)])
    assert gpu_page.main() == 0
    page = path.with_suffix(".md").read_text()
    assert "| DoRA bf16, graphs | 525 | 1.000 | 12,000 | 25% | 61% | 3.0 | 3.2 (0.94) |" in page
    assert "| DoRA fp8_e4m3, eager | 551 | 1.050 | 12,000 | 25% | 61% | 3.0 | 2.0 (1.50, MISSED) |" in page
    assert "| LoRA fp8_e4m3, eager | not measured: OutOfMemoryError: CUDA out of memory. |" in page
    assert "| Flux | graphs or compiled, 512 px, ms | not measured | at most 300 | MISSED |" in page
    for cell in bench_step.cells():
        assert (f"### {cell.name}" if cell.name in result["steps"]["cells"] else f"- {cell.name}") in page
    del result["attention"]
    assert "## Kinds of attention\n\nnot measured\n" in gpu_page.page(result)


def test_the_cells_are_the_whole_and_the_most_important_come_first() -> None:
    cells = bench_step.cells()
    assert len({cell.name for cell in cells}) == len(cells) and all(len(set(c.sides)) == len(c.sides) for c in cells)
    there = {(cell.family, cell.pixels, cell.batch, side) for cell in cells if cell.recomputed for side in cell.sides}
    for family, pixels, batch, adapter in product(("Flux", "SDXL"), (512, 768, 1024), (1, 4), ("LoRA", "DoRA")):
        ours = {bench_step.Side(adapter, way, storage) for way, storage in product(WAYS, ("bf16", "fp8_e4m3"))}
        for side in (*ours, bench_step.Side(adapter, who="peft")):
            assert (family, pixels, batch, side) in there
    assert [(cell.family, cell.pixels, cell.about) for cell in cells[:5]] == [
        ("Flux", 1024, "graphs and PEFT"), ("Flux", 512, "graphs and PEFT"),
        ("Flux", 1024, "selective"), ("Flux", 512, "selective"), ("Flux", 1024, "compiled"),
    ]  # fmt: skip
    attention = {side.attention for cell in cells for side in cell.sides}
    assert attention == {"auto", "flash", "cudnn", "efficient"}
    assert {side.storage for cell in cells for side in cell.sides} == {"bf16", "fp8_e4m3", "int8", "nf4"}


WAYS = ("eager", "graphs", "compiled")


@pytest.mark.slow
def test_what_was_cut_off_goes_on_and_measures_nothing_twice(tmp_path, monkeypatch, capsys) -> None:
    """Each call of `measured` takes 10 s; the third leaves a side out."""
    clock, calls = [0.0], []

    def measured(cell, *_):
        clock[0] += 10
        calls.append(cell.name)
        row = {"error": bench_step.NO_TIME} if len(calls) == 3 else {"ms": 1.0, "rounds": [1.0]}
        return {side.name: {"side": asdict(side)} | row for side in cell.sides}

    path, cells = tmp_path / "steps.json", [cell for cell in bench_step.cells() if cell.name in WANTED]
    monkeypatch.setattr(bench_step, "measured", measured)
    monkeypatch.setattr(bench_step, "tiny", lambda cell: cell)
    monkeypatch.setattr(bench_step, "cells", lambda: cells)
    monkeypatch.setattr(bench_step.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(sys, "argv", ["bench_step.py", "--quick", "--seconds", "25", "--json", str(path)])
    assert bench_step.main() == bench_step.OUT_OF_TIME
    assert calls == WANTED[:3] and "out of time" in capsys.readouterr().out
    assert bench_step.main() == 0
    assert calls == [*WANTED[:3], *WANTED[2:]] and list(json.loads(path.read_text())["cells"]) == WANTED
    assert bench_step.main() == 0 and len(calls) == len(WANTED) + 1
    other = json.loads(path.read_text())
    other["about"]["commit"] = "another"
    path.write_text(json.dumps(other))
    with pytest.raises(SystemExit, match="2"):
        bench_step.main()
    assert "is of commit 'another', not " in capsys.readouterr().err and json.loads(path.read_text()) == other


WANTED = [cell.name for cell in bench_step.cells()[:5]]


# In the place of Python: says what it was asked for, and ends as the test wants it.
PYTHON = """#!/bin/bash
case "$1 $2" in
  "-c import torch"*) echo "a card 2.13" ;;
  "-c "*) exit 1 ;;
  *) echo "$*" >> "$HOME/asked"; for part in $FAILING; do [[ "$*" != *"$part"* ]] || exit 124; done ;;
esac
"""


def test_the_suite_goes_on_where_it_stopped(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    script, stand_in = tmp_path / "scripts" / "gpu_suite.sh", tmp_path / "python"
    script.write_text((ROOT / "scripts" / "gpu_suite.sh").read_text())
    stand_in.write_text(PYTHON)
    stand_in.chmod(0o755)

    def asked(failing: str = "") -> list[str]:
        """The parts that were run, but for the report, which is the last."""
        environment = os.environ | {"PYTHON": str(stand_in), "HOME": str(tmp_path), "FAILING": failing}
        done = subprocess.run(["bash", str(script), "out"], env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and "== steps" in done.stdout, done.stderr
        *parts, report = (tmp_path / "asked").read_text().splitlines()
        (tmp_path / "asked").unlink()
        assert report == "benchmarks/gpu_report.py out/gpu-parts out"
        return [re.search(r"gpu-parts/(\w+)", part)[1] for part in parts]  # type: ignore[index]

    assert asked("steps.json layers.json") == list(gpu_report.PARTS)
    assert asked("layers.json") == ["steps", "layers"] and asked() == ["layers"] and asked() == []
    limits = [int(limit) for limit in re.findall(r"^part \w+ (\d+) ", script.read_text(), re.M)]
    assert len(limits) == len(gpu_report.PARTS) and sum(limits) <= 585
    (tmp_path / "out" / "gpu-parts" / "about").write_text("another card 2.13, commit unknown\n")
    environment = os.environ | {"PYTHON": str(stand_in), "HOME": str(tmp_path)}
    refused = subprocess.run(["bash", str(script), "out"], env=environment, capture_output=True, text=True)
    assert refused.returncode == 2 and "has what was measured with another card" in refused.stderr


def test_the_card_is_busy_where_any_kernel_runs() -> None:
    assert bench_step.busy([(5, 9), (0, 4), (3, 6), (20, 21), (7, 8)]) == 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("only", "sides"), [("Flux 1024 px, batch 1: graphs and PEFT", 6), ("SDXL 1024 px, batch 4: the rest", 10)]
)
def test_a_cell_runs_on_tiny_models(tmp_path: Path, monkeypatch, only: str, sides: int) -> None:
    """All sides over one base in memory; compiled ones apart, which take minutes."""
    path = tmp_path / "steps.json"
    cells = [replace(c, sides=tuple(s for s in c.sides if s.way != "compiled")) for c in bench_step.cells() if c.name == only]
    monkeypatch.setattr(bench_step, "cells", lambda: cells)
    monkeypatch.setattr(sys, "argv", ["bench_step.py", "--quick", "--json", str(path)])
    bases: list = []
    plain = bench_step.plain_step

    def noted(source, bench, **given):
        bases.append({name: tensor.data_ptr() for name, tensor in bench.base.items()})
        return plain(source, bench, **given)

    monkeypatch.setattr(bench_step, "plain_step", noted)
    assert bench_step.main() == 0
    (cell,) = json.loads(path.read_text())["cells"].values()
    assert len(cell["sides"]) == sides and all(len(row["rounds"]) == 2 for row in cell["sides"].values())
    assert {(row["attention"], row["attention_taken"]) for row in cell["sides"].values()} == {("torch's own", "flash")}
    one, other = bases
    assert one == other


@pytest.mark.slow
def test_the_bench_of_float8_products_runs_on_tiny_layers(report, tmp_path: Path) -> None:
    path = tmp_path / "float8.json"
    subprocess.run(
        [sys.executable, "benchmarks/bench_float8.py", "--quick", "--json", str(path)], cwd=ROOT, check=True, timeout=300
    )
    result = json.loads(path.read_text())
    assert not result["errors"] and [row["model"] for row in result["rows"]] == ["Flux", "SDXL"]
    assert len(report.float8_lines(result)) >= 2


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
