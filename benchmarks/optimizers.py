"""Which learning rate suits which optimizer, on the pocket SDXL; and the table of docs/optimizers.md.

    python benchmarks/optimizers.py --out outputs/optimizers      # every rate, one seed; goes on where it was
    python benchmarks/optimizers.py --table                       # the table, from the code and what was measured

Each run is the demo's (configs/pocket_sdxl.toml) but for the optimizer, its rate, and its length of 30 steps. Measured is
by how much the held-out loss falls: of 60 true icons of a style that the model never saw, over four (noise, timestep) draws
(benchmarks/lessons.py). Schedule-free AdamW trains at a constant rate, the others along the demo's cosine.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks import pages  # noqa: E402
from trainer.optim import OPTIMIZERS, build_optimizer, state_bytes  # noqa: E402
from trainer.optim.options import library_of  # noqa: E402
from trainer.plan.optimizer_rules import does_not_go_with  # noqa: E402

STEPS, DRAWS = 30, 4
MEASURED = ROOT / "docs" / "benchmarks" / "optimizers-CPU-2026-11-23.json"
# paged_adamw8bit is adamw8bit where nothing is paged. Prodigy finds its rate: what is tried is where its estimate begins.
RATES: dict[str, Sequence[float]] = {
    "adamw": (2e-3, 4e-3, 1e-3),
    "adamw8bit": (2e-3, 1e-3),
    "lion": (1e-3, 3e-4, 1e-4),
    "lion8bit": (1e-3, 3e-4),
    "adafactor": (2e-3, 4e-3, 1e-3),
    "prodigy": (1e-3, 1e-4, 1e-5, 1e-6),
    "schedulefree_adamw": (4e-3, 8e-3, 2e-3),
    "came": (2e-4, 5e-4, 2e-3),
    "muon": (4e-3, 2e-3, 8e-3),
}


def changes(name: str, rate: float) -> dict[str, Any]:
    """The config's keys of one run."""
    keys: dict[str, Any] = {"optimizer__name": name, "optimizer__lr": rate}
    if OPTIMIZERS[name].finds:
        keys |= {"optimizer__lr": 1.0, "optimizer__options": {"d0": rate}}
    if OPTIMIZERS[name].schedules:
        keys["schedule__name"] = "constant"
    return keys


def runs() -> Iterator[tuple[str, float]]:
    """The likely rates of all first."""
    for place in range(max(map(len, RATES.values()))):
        yield from ((name, rates[place]) for name, rates in RATES.items() if place < len(rates))


def measure(out: Path) -> None:
    from benchmarks import cells, lessons
    from tests.harness import built, take_step

    before = out / "before.json"  # an adapter begins as nothing: alike for all
    for name, rate in runs():
        path = out / f"{name}-{rate:g}.json"
        if path.exists():
            continue
        with ExitStack() as stack:
            stack.enter_context(redirect_stdout(io.StringIO()))  # what a run says of itself
            folder = Path(stack.enter_context(TemporaryDirectory()))
            chosen = lessons.config(
                "sdxl", 0, folder / "run", out / "cache", changes=changes(name, rate), steps=STEPS, known=()
            )
            run = stack.enter_context(built(chosen))
            # A run notes a signal and ends at its next step; there is no such loop here.
            for stop in (signal.SIGINT, signal.SIGTERM):
                signal.signal(stop, signal.SIG_DFL)
            examiner = lessons.Examiner(run)
            if not before.exists():
                cells.write_whole(before, examiner.held_out(DRAWS))
            for number, update in zip(range(1, STEPS + 1), lessons.updates(run), strict=False):
                take_step(run, number, update)
            result = {"steps": STEPS, "before": json.loads(before.read_text()), "after": examiner.held_out(DRAWS)}
            cells.write_whole(path, result | {"changes": changes(name, rate), "machine": lessons.machine(run)})
        gc.collect()
        print(f"{name:<20} {rate:<8g} falls by {fall(result):.1%}", flush=True)


def fall(result: dict[str, Any]) -> float:
    return 1 - sum(result["after"]) / sum(result["before"])


def together(out: Path) -> dict[str, dict[str, Any]]:
    """By optimizer, by rate, what was measured."""
    return {
        name: {
            f"{rate:g}": json.loads(path.read_text()) for rate in rates if (path := out / f"{name}-{rate:g}.json").exists()
        }
        for name, rates in RATES.items()
    }


# --- the table --------------------------------------------------------------------------------------------------------


def bytes_of(name: str) -> float:
    """Of state for each trained number: a DoRA of rank 16 on a Linear of 1280 x 1280."""
    a, b, m = (nn.Parameter(torch.zeros(shape)) for shape in ((16, 1280), (1280, 16), (1280,)))
    groups = [
        {"params": part, "lr": 1.0, "weight_decay": 0.0, "magnitudes": magnitudes}
        for part, magnitudes in (([a, b], False), ([m], True))
    ]
    optimizer = build_optimizer(name, groups)
    return state_bytes(name, optimizer) / sum(p.numel() for p in (a, b, m))


def measured() -> dict[str, dict[str, Any]]:
    """By optimizer, by rate, what the repository's measurement found."""
    return json.loads(MEASURED.read_text())


def best_rate(name: str) -> float:
    """That with the largest fall of those tried; where the optimizer finds its rate, the start of its estimate."""
    found = measured()[name]
    return float(max(found, key=lambda rate: fall(found[rate])))


def start(name: str) -> str:
    if OPTIMIZERS[name].paged:
        return f"as `{name.removeprefix('paged_')}`"
    found = sorted(measured()[name].items(), key=lambda item: float(item[0]))
    best = f"{best_rate(name):g}"
    edge = {found[-1][0]: ", the highest tried", found[0][0]: ", the lowest tried"}.get(best, "")
    what = f"1.0, `{OPTIMIZERS[name].finds.start}` {best}" if OPTIMIZERS[name].finds else best
    return f"{what}{edge} ({', '.join(f'{rate}: {fall(result):.1%}' for rate, result in found)})"


def table() -> str:
    start_with = "rate to start with (tried: fall of the held-out loss)"
    titles = ["`optimizer.name`", "library", "state, bytes a trained number", start_with, "does not go with"]
    rows = [
        [f"`{name}`", library_of(name), f"{bytes_of(name):.2f}", start(name), "; ".join(does_not_go_with(name)) or "-"]
        for name in OPTIMIZERS
    ]
    return pages.table(titles, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file for every run; those there are kept")
    parser.add_argument("--together", type=Path, metavar="FILE", help="all results in one JSON file as well")
    parser.add_argument("--table", action="store_true", help="print the table of docs/optimizers.md")
    asked = parser.parse_args()
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        if not asked.table and not asked.together:
            measure(asked.out)
        if asked.together:
            asked.together.write_text(json.dumps(together(asked.out), indent=1) + "\n")
    if asked.table:
        print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
