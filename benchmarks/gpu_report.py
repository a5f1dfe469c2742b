"""Gathers what scripts/gpu_suite.sh measured into GPU-DATE.json and prints its short table.

python benchmarks/gpu_report.py PARTS FOLDER     # PARTS: its gpu-parts: tests.xml, NAME.json and NAME.status
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import bench_attention
from benchmarks.bench_step import side_line

# (figure, of which rows, which statistic, limit, whether the figure may be at most or must be at least that)
LIMITS = (
    ("DoRA / LoRA", "Flux", max, 1.06, "at most"),
    ("DoRA / LoRA", "SDXL", max, 1.15, "at most"),
    ("PEFT DoRA / DoRA", "Flux", min, 1.8, "at least"),
    ("PEFT DoRA / DoRA", "SDXL", min, 1.8, "at least"),
    ("extra memory", "Flux", max, 0.02, "at most"),
    ("extra memory, no bias", "SDXL", max, 0.02, "at most"),
)
PARTS = ("steps", "tests", "attention", "kernels", "layers", "shared", "float8", "deterministic")
# Of a step with the denoiser stored as fp8_e4m3 and multiplied in bf16, over one stored as bf16; by the image's pixels.
STORAGE_LIMITS = {1024: 1.08, 512: 1.15}
# Milliseconds of a DoRA's step over Flux in bf16, every block recomputed, by graphs or compiled; by the image's pixels.
FLUX_LIMITS = {1024: 800, 512: 300}
FAST = ("DoRA bf16, graphs", "DoRA bf16, compiled")
ADAPTER_LIMIT = 1.10  # of a DoRA's step over a LoRA's


def tests(path: Path) -> dict[str, Any]:
    """Counts of the junit file, and the names of what failed."""
    suite = ElementTree.parse(path).getroot().find("testsuite")
    assert suite is not None
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite
        if case.find("failure") is not None or case.find("error") is not None
    ]
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    return counts | {"seconds": float(suite.get("time", 0)), "failed": failed}


def judged(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every figure that has a limit, its worst value over the rank-16 rows, and whether that meets it."""
    table = []
    for name, family, worst, limit, sense in LIMITS:
        values = [row[name] for row in layers if row["family"] == family and row["rank"] == 16 and name in row]
        if values:
            value = worst(values)
            met = value <= limit if sense == "at most" else value >= limit
            table.append({"figure": name, "layers": family, "worst": value, "limit": f"{sense} {limit}", "met": met})
    return table


def judged_steps(cells: dict[str, Any]) -> list[dict[str, Any]]:
    """The same of whole steps: their time, float8 storage's cost, and DoRA's over LoRA's. A step that failed, or found no
    time, has not met its limit."""
    table = []

    def judge(figure: str, model: str, value: float | None, limit: float) -> None:
        met = value is not None and value <= limit
        table.append({"figure": figure, "layers": model, "worst": value, "limit": f"at most {limit}", "met": met})

    for pixels, limit in FLUX_LIMITS.items():
        sides = [
            sides for cell, sides in every(cells) if usual(cell) and (cell["family"], cell["pixels"]) == ("Flux", pixels)
        ]
        found = [s[name]["ms"] for s in sides for name in FAST if "ms" in s.get(name, {})]
        judge(f"graphs or compiled, {pixels} px, ms", "Flux", min(found, default=None), limit)
    for cell, sides in every(cells):
        where = f"{cell['pixels']} px" + (f", batch {cell['batch']}" if cell["batch"] > 1 else "")
        for name, row in sides.items():
            lora = sides.get(name.replace("DoRA", "LoRA"), {})
            if row["side"]["adapter"] == "DoRA" and row["side"]["who"] == "ours" and "ms" in row and "ms" in lora:
                ratio = median(a / b for a, b in zip(row["rounds"], lora["rounds"], strict=True))
                judge(f"{name.replace('DoRA', 'DoRA / LoRA')}, {where}", cell["family"], ratio, ADAPTER_LIMIT)
        if usual(cell) and cell["about"] == "float8" and cell["pixels"] in STORAGE_LIMITS:
            ratio = sides["DoRA fp8_e4m3, eager"].get("ratio")
            judge(f"fp8 / bf16, {cell['pixels']} px", cell["family"], ratio, STORAGE_LIMITS[cell["pixels"]])
    return table


def every(cells: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(what its sides have in common, the sides) of each cell."""
    return [(each["cell"], each["sides"]) for each in cells.values()]


def usual(cell: dict[str, Any]) -> bool:
    """Whether it has one photo, and every block recomputed."""
    return cell["batch"] == 1 and cell["recomputed"]


def step_lines(cells: dict[str, Any]) -> list[str]:
    """Each side of each cell, in words."""
    lines = []
    for name, each in cells.items():
        for side, row in each["sides"].items():
            said = row.get("lacks") or row.get("error", "").partition("\n")[0]
            lines.append(f"{name}: " + (side_line(side, row) if "ms" in row else f"{side}: {said}"))
    return lines


def float8_lines(result: dict[str, Any]) -> list[str]:
    """Which layers a float8 product pays for."""
    lines = []
    for model in dict.fromkeys(row["model"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["model"] == model]

        def shapes(chosen: list[dict[str, Any]]) -> str:
            return ", ".join(f"{'x'.join(map(str, row['shape']))} ({row['ratio']:.2f})" for row in chosen) or "none"

        lines.append(f"{model}: a float8 product pays at {shapes([row for row in rows if row['pays']])}")
        wrong = [row for row in rows if row["pays"] != row["gate"]]
        if wrong:
            lines.append(f"  kernels.scaled_matmul_pays is to be changed for {shapes(wrong)}")
    return lines + [f"{what}: {error.splitlines()[0]}" for what, error in result["errors"].items()]


def deterministic_lines(result: dict[str, Any]) -> list[str]:
    """What run.deterministic costs, with the attention it takes; whether gradients repeat with it, and without."""
    lines = []
    for row in result["rows"]:
        ms, same = row["ms"], row["same gradients"]
        attention = {way: name.removesuffix("_ATTENTION").lower() for way, name in row["attention"].items()}
        lines.append(
            f"{row['model']:<5} {row['pixels']:>4} px deterministic {row['ratio']:.3f} of ordinary "
            f"({ms['deterministic']:.1f} / {ms['ordinary']:.1f} ms, attention {attention['deterministic']} / "
            f"{attention['ordinary']}); gradients repeat: {'yes' if same['deterministic'] else 'NO'} / "
            f"{'yes' if same['ordinary'] else 'no'}"
        )
    return lines + [f"{what}: {error.splitlines()[0]}" for what, error in result["errors"].items()]


def main() -> int:
    parts, folder = Path(sys.argv[1]), Path(sys.argv[2])
    begun = [name for name in PARTS if (parts / f"{name}.status").exists()]
    status = {name: int((parts / f"{name}.status").read_text()) for name in begun}
    now = datetime.now(UTC)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    import torch

    result: dict[str, Any] = {
        "date": now.isoformat(timespec="seconds"), "commit": commit or "unknown", "device": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("torch", "triton", "peft", "diffusers")},
        "exit status of each part": status, "command": "bash scripts/gpu_suite.sh",
    }  # fmt: skip
    if (parts / "tests.xml").exists():
        result["tests"] = tests(parts / "tests.xml")
    for name in PARTS:
        if (parts / f"{name}.json").exists():
            result[name] = json.loads((parts / f"{name}.json").read_text())
    result["figures"] = judged(result["layers"]["rows"]) if "layers" in result else []
    result["figures"] += judged_steps(result["steps"]["cells"]) if "steps" in result else []
    path = folder / f"GPU-{now:%Y-%m-%d}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")

    print(f"== {result['device']}, torch {result['versions']['torch']}, triton {result['versions']['triton']}")
    if "tests" in result:
        t = result["tests"]
        print(f"tests: {t['tests']} run, {t['failures'] + t['errors']} failed, {t['skipped']} skipped, {t['seconds']:.0f} s")
        for name in t["failed"][:20]:
            print(f"  failed: {name}")
    for row in result["figures"]:
        met = "met" if row["met"] else "MISSED"
        worst = "none" if row["worst"] is None else f"{row['worst']:.3f}"
        print(f"{row['layers']:<5} {row['figure']:<21} worst {worst:>7}   {row['limit']:<14} {met}")
    if "steps" in result:
        print("\n".join(step_lines(result["steps"]["cells"])))
    if "float8" in result:
        print("\n".join(float8_lines(result["float8"])))
    if "deterministic" in result:
        print("\n".join(deterministic_lines(result["deterministic"])))
    if "attention" in result:
        print("\n".join(map(bench_attention.line, result["attention"]["rows"])))
    for name, code in status.items():
        if code:
            print(f"{name}: exit status {code}" + (" (ran out of time)" if code == 124 else ""))
    if len(begun) < len(PARTS):
        print(f"not begun: {', '.join(name for name in PARTS if name not in begun)}")
    print(path)
    return int(any(status.values()) or len(begun) < len(PARTS))


if __name__ == "__main__":
    sys.exit(main())
