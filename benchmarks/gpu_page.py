"""Write GPU-DATE.md from GPU-DATE.json, what scripts/gpu_suite.sh measured: every cell, and what was not measured by name.

    python benchmarks/gpu_page.py docs/benchmarks/GPU-2026-11-26.json

It plans the memory of each step at the published sizes (workbench/planning), which needs no card and takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import gpu_report  # noqa: E402
from benchmarks.bench_attention import line as attention_line  # noqa: E402
from benchmarks.bench_step import BATCHES, SIZES, TEXT_TOKENS, Cell, Side, cells, copies  # noqa: E402
from benchmarks.pages import table  # noqa: E402
from scripts.memory_table import Model, plan_of  # noqa: E402
from trainer import kernels  # noqa: E402
from workbench.pages.rendering import environment  # noqa: E402
from workbench.planning.dry_run import without_values  # noqa: E402
from workbench.planning.estimate import Forecaster  # noqa: E402

MISSING = "not measured"
NEAR = 0.10  # of the plan's peak: how far the measured one may be off


@cache
def planned(
    family: str, storage: str, adapter: str, recomputed: bool | str, resident: int | None
) -> dict[tuple[int, int], int]:
    """Bytes of a step of that run, by (pixels, batch), without the VAE that its samples need."""
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_of(Model(family.lower(), storage, adapter.lower(), recomputed, resident), Path(folder))
        with without_values():
            forecaster = Forecaster(plan, kernels.planned("auto"))
            list(forecaster.captions(stay=False)), forecaster.photos(512, 512)
            forecaster.prepare()
            stages = {at: forecaster.step(((at[0], at[0]),), at[1]) for at in product(SIZES, BATCHES)}
    return {at: stage.peak - stage.loaded.get(plan.model.family.vae, 0) for at, stage in stages.items()}


def step_rows(cell: Cell, measured: dict[str, Any]) -> Iterator[list[str]]:
    """The rows of a cell. measured: of its sides, by name."""
    for side in cell.sides:
        row = measured.get(side.name, {})
        if "ms" not in row:
            why = row.get("lacks") or row.get("error", "").partition("\n")[0]
            yield [side.name, f"{MISSING}{': ' if why else ''}{why}", *[""] * 6]
            continue
        ratio = f"{row['ratio']:.3f}" if "ratio" in row else ""
        figures = [side.name, f"{row['ms']:.0f}", ratio]
        figures += [f"{row['launches']:,}", f"{row['host_share']:.0%}"] if "host_share" in row else ["", ""]
        figures.append(f"{row['utilisation']:.0%}" if "utilisation" in row else "")
        yield [*figures, *memory_of(cell, side, row)]


def memory_of(cell: Cell, side: Side, row: dict[str, Any]) -> list[str]:
    """(the peak, the plan's with the measured one's share of it), in GiB."""
    if "peak_bytes" not in row:
        return ["", ""]
    peak = row["peak_bytes"]
    if side.who == "peft":
        return [f"{peak / 2**30:.1f}", ""]
    resident = row.get("resident_blocks")
    recomputed = "selective" if side.selective else cell.recomputed
    told = planned(cell.family, side.storage, side.adapter, recomputed, resident)[cell.pixels, cell.batch]
    off = "" if abs(peak / told - 1) <= NEAR else ", MISSED"
    return [f"{peak / 2**30:.1f}", f"{told / 2**30:.1f} ({peak / told:.2f}{off})"]


TITLES = ["side", "ms", "of the first", "launches", "host", "of the card's rate", "peak GiB", "plan GiB"]


def page(result: dict[str, Any]) -> str:
    """The whole page."""
    there = result.get("steps", {}).get("cells", {})
    steps = [
        {
            "name": cell.name,
            "table": table(TITLES, step_rows(cell, there[cell.name]["sides"])),
            "copies": [
                f"{name}: {copies(row)}" for name, row in there[cell.name]["sides"].items() if row.get("copied_bytes")
            ],
        }
        for cell in cells()
        if cell.name in there
    ]
    figures = [
        [row["layers"], row["figure"], MISSING if row["worst"] is None else f"{row['worst']:.3f}", row["limit"],
         "met" if row["met"] else "MISSED"]
        for row in result["figures"]
    ]  # fmt: skip
    parts = {
        "attention": lambda part: "\n".join(f"- {attention_line(row)}" for row in part["rows"]),
        "float8": lambda part: "\n".join(f"- {line}" for line in gpu_report.float8_lines(part)),
        "deterministic": lambda part: "\n".join(f"- {line}" for line in gpu_report.deterministic_lines(part)),
        "layers": lambda part: _plain(part["rows"], ("family", "storage", "rank"), ("DoRA / LoRA", "PEFT DoRA / DoRA")),
        "kernels": lambda part: _plain(part["rows"], ("operation", "storage", "layer"), ("triton_us", "eager_us")),
        "tests": lambda part: (
            f"{part['tests']} run, {part['failures'] + part['errors']} failed, {part['skipped']} skipped"
            + "".join(f"\n- failed: {name}" for name in part["failed"])
        ),
    }
    told = {name: (words(result[name]) if name in result else MISSING) for name, words in parts.items()}
    template = environment(ROOT / "benchmarks" / "templates").get_template("gpu.md")
    missing = [cell.name for cell in cells() if cell.name not in there]
    return template.render(
        result=result, versions=", ".join(f"{name} {number}" for name, number in result["versions"].items()),
        figures=table(["model", "figure", "measured", "limit", ""], figures), steps=steps, missing=missing,
        text_tokens=TEXT_TOKENS, bus=f"{bus:.1f}" if (bus := result.get("steps", {}).get("bus_gbps")) else "", **told,
    )  # fmt: skip


def _plain(rows: list[dict[str, Any]], names: tuple[str, ...], figures: tuple[str, ...]) -> str:
    """A table of some columns of rows; a figure that a row lacks is left empty."""
    cells = [
        [*(row[name] for name in names), *(f"{row[figure]:.2f}" if figure in row else "" for figure in figures)]
        for row in rows
    ]
    return table([*names, *figures], cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, metavar="GPU-DATE.json")
    asked = parser.parse_args()
    path = asked.json.with_suffix(".md")
    path.write_text(page(json.loads(asked.json.read_text())), encoding="utf-8")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
