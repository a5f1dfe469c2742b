"""Gathers what scripts/gpu_suite.sh measured into GPU-DATE.json and prints its short table.

python benchmarks/gpu_report.py PARTS FOLDER     PARTS: tests.xml, kernels.json, layers.json, shared.json, steps.json,
deterministic.json, attention.json and their NAME.status
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import bench_attention

# (figure, of which rows, which statistic, limit, whether the figure may be at most or must be at least that)
LIMITS = (
    ("DoRA / LoRA", "Flux", max, 1.06, "at most"),
    ("DoRA / LoRA", "SDXL", max, 1.15, "at most"),
    ("PEFT DoRA / DoRA", "Flux", min, 1.8, "at least"),
    ("PEFT DoRA / DoRA", "SDXL", min, 1.8, "at least"),
    ("extra memory", "Flux", max, 0.02, "at most"),
    ("extra memory, no bias", "SDXL", max, 0.02, "at most"),
)
PARTS = ("tests", "kernels", "layers", "shared", "steps", "deterministic", "attention")
# Of a step with the denoiser stored as fp8_e4m3 and multiplied in bf16, over one stored as bf16; by the image's pixels.
STORAGE_LIMITS = {1024: 1.08, 512: 1.15}


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


def judged_steps(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same of float8 storage's cost, and of DoRA's over LoRA's, in a whole step."""
    ratios = {(row["model"], row["pixels"]): row.get("ratio") for row in steps if row["storage"] == "fp8_e4m3"}
    table = []
    for model in dict.fromkeys(row["model"] for row in steps):
        for pixels, limit in STORAGE_LIMITS.items():
            ratio = ratios.get((model, pixels))
            table.append(
                {
                    "figure": f"fp8 / bf16, {pixels} px",
                    "layers": model,
                    "worst": ratio,
                    "limit": f"at most {limit}",
                    # A step that failed or found no time has not met it.
                    "met": ratio is not None and ratio <= limit,
                }
            )
    times = {(row["model"], row["pixels"], row["storage"]): row["ms"] for row in steps}
    limits = {layers: limit for name, layers, _, limit, _ in LIMITS if name == "DoRA / LoRA"}
    for (model, pixels, storage), ms in times.items():
        if storage == "fp8_e4m3" and (model, pixels, "fp8_e4m3 LoRA") in times:
            ratio, limit = ms / times[model, pixels, "fp8_e4m3 LoRA"], limits[model]
            figure = f"DoRA / LoRA, {pixels} px"
            table.append(
                {"figure": figure, "layers": model, "worst": ratio, "limit": f"at most {limit}", "met": ratio <= limit}
            )
    return table


def step_lines(result: dict[str, Any]) -> list[str]:
    """Time, memory and utilisation of every storage; then which layers a float8 product pays for."""
    lines = []
    for row in result["steps"]:
        cells = [f"{row['model']:<5}", f"{row['pixels']:>4} px", f"{row['storage']:<22}", f"{row['ms']:8.1f} ms"]
        cells.append(f"{row['ratio']:.3f} of bf16" if "ratio" in row else "")
        cells.append(f"{row['peak_bytes'] / 2**30:5.1f} GiB" if row.get("peak_bytes") else "")
        cells.append(f"{row['utilisation']:.0%} of the card's bf16 rate" if "utilisation" in row else "")
        lines.append(" ".join(cell for cell in cells if cell))
    for model in dict.fromkeys(row["model"] for row in result["layers"]):
        rows = [row for row in result["layers"] if row["model"] == model]

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
    status = {name: int((parts / f"{name}.status").read_text()) for name in PARTS}
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
    for name in PARTS[1:]:
        if (parts / f"{name}.json").exists():
            result[name] = json.loads((parts / f"{name}.json").read_text())
    result["figures"] = judged(result["layers"]["rows"]) if "layers" in result else []
    result["figures"] += judged_steps(result["steps"]["steps"]) if "steps" in result else []
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
        print("\n".join(step_lines(result["steps"])))
    if "deterministic" in result:
        print("\n".join(deterministic_lines(result["deterministic"])))
    if "attention" in result:
        print("\n".join(map(bench_attention.line, result["attention"]["rows"])))
    for name, code in status.items():
        if code:
            print(f"{name}: exit status {code}" + (" (ran out of time)" if code == 124 else ""))
    print(path)
    return int(any(status.values()))


if __name__ == "__main__":
    sys.exit(main())
