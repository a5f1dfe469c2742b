"""A whole training step on a CPU: our DoRA over our LoRA, and each over a plain diffusers + PEFT loop. Ratios, in one run.

    OMP_NUM_THREADS=1 python benchmarks/paired_steps.py                   # tiny and pocket, about 6 minutes
    OMP_NUM_THREADS=1 python benchmarks/paired_steps.py --cells 'tiny-*' --json FILE
    OMP_NUM_THREADS=1 python benchmarks/paired_steps.py --sides ema       # our DoRA with [ema], and without
    OMP_NUM_THREADS=1 python benchmarks/paired_steps.py --sides compiled  # step.compile = "blocks" beside both
    OMP_NUM_THREADS=1 python benchmarks/paired_steps.py --sides offload --cells short-flux-bf16   # every block streamed
    OMP_NUM_THREADS=1 python benchmarks/paired_steps.py --sides plan      # ours, and what a plan says that they take

The models take turns, a step each, over the same batches: forward, backward, clipping, AdamW. A figure is the median over the
rounds of the ratio within a round, with the quartiles, so a slow spell of the machine meets both sides. Seconds are the
processor's, not the clock's: another program does not count. "plain" is
benchmarks/plain_peft.py: fp32 adapters over a bf16 base under autocast, or over an fp32 base without; ours has the same
adapter over a base of the same dtype. The tiny SDXL shows what the steps of a program cost beside its products; the pocket
models are those of examples/, with the demo's config.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks import plain_peft  # noqa: E402
from scripts import make_model  # noqa: E402
from tests.harness import DENOISER, built, take_step  # noqa: E402
from tests.proofs.shared import PHOTOS, make_models  # noqa: E402
from trainer import config as configs  # noqa: E402
from trainer import kernels  # noqa: E402
from trainer.data.batches import sampler  # noqa: E402
from trainer.plan.run_plan import make_plan, open_source, resolve  # noqa: E402
from trainer.runtime.precision import COMPUTE_DTYPES  # noqa: E402
from workbench.planning.describe import band, step_seconds  # noqa: E402
from workbench.planning.estimate import forecast  # noqa: E402
from workbench.planning.step_time import Probe, on_cpu  # noqa: E402


@dataclass(frozen=True)
class Cell:
    """size: tiny or pocket, or short: of full width, with six blocks. dtype: of the base, and what is computed in."""

    size: str
    family: str
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.size}-{self.family}-{self.dtype}"


CELLS = (
    Cell("tiny", "sdxl", "fp32"),
    Cell("tiny", "sdxl", "bf16"),
    Cell("tiny", "flux", "bf16"),
    Cell("pocket", "sdxl", "bf16"),
    Cell("pocket", "flux", "bf16"),
)
SHORT = Cell("short", "flux", "bf16")  # asked for by name: gigabytes
Tables = dict[str, dict[str, Any]]
DORA: Tables = {"adapter": {"type": "dora"}}
LORA: Tables = {"adapter": {"type": "lora"}}
RECOMPUTED: Tables = {"memory": {"gradient_checkpointing": True}}
OFFLOAD: Tables = {"memory": {"gradient_checkpointing": True, "offload": "blocks"}}
COMPILED: Tables = {"step": {"compile": "blocks"}}
# By the name of a comparison: its sides, each with what its config has of its own and whether it is the plain loop; and the
# ratios of two sides each.
SIDES: dict[str, tuple[dict[str, tuple[Tables, bool]], tuple[tuple[str, str], ...]]] = {
    "peft": (
        {"ours DoRA": (DORA, False), "ours LoRA": (LORA, False), "plain DoRA": (DORA, True), "plain LoRA": (LORA, True)},
        (("ours DoRA", "ours LoRA"), ("ours DoRA", "plain DoRA"), ("ours LoRA", "plain LoRA")),
    ),
    # The second "without" says how far two equal sides are apart.
    "ema": (
        {"without": (DORA, False), "ema": (DORA | {"ema": {"kind": "constant"}}, False), "without again": (DORA, False)},
        (("ema", "without"), ("without again", "without")),
    ),
    "compiled": (
        {
            "compiled DoRA": (DORA | COMPILED, False),
            "compiled LoRA": (LORA | COMPILED, False),
            "ours DoRA": (DORA, False),
            "ours LoRA": (LORA, False),
            "plain DoRA": (DORA, True),
            "plain LoRA": (LORA, True),
        },
        (
            ("compiled DoRA", "compiled LoRA"),
            ("compiled DoRA", "ours DoRA"),
            ("compiled LoRA", "ours LoRA"),
            ("compiled DoRA", "plain DoRA"),
            ("compiled LoRA", "plain LoRA"),
        ),
    ),
    # Memory is copied to memory: both sides lie in it.
    "offload": (
        {
            "resident": (DORA | RECOMPUTED, False),
            "streamed": (DORA | OFFLOAD, False),
            "resident again": (DORA | RECOMPUTED, False),
        },
        (("streamed", "resident"), ("resident again", "resident")),
    ),
    "plan": ({"ours DoRA": (DORA, False), "ours LoRA": (LORA, False)}, ()),
}


def deeper(variant: str, short: Callable[[str], Any] = make_model.short_configs) -> dict[str, dict[str, Any]]:
    """The short configs, with six blocks of the denoiser: a step copies eight times."""
    configs = short(variant)
    configs["transformer"] |= {"num_layers": 3, "num_single_layers": 3}
    return configs


def config(cell: Cell, own: Tables, folder: Path, models: Path) -> configs.Config:
    """As the demo has it; of a tiny model over the project's own photos. own: what it has besides, by table."""
    tree = tomllib.loads((ROOT / "configs" / f"pocket_{cell.family}.toml").read_text(encoding="utf-8"))
    tree["run"] |= {"output_dir": str(folder / "run"), "max_steps": 10_000}
    tree["model"] |= {"path": str(ROOT / tree["model"]["path"]), "components": {DENOISER[cell.family]: {"dtype": cell.dtype}}}
    tree["data"] |= {"cache_dir": str(folder.parent / f"cache-{cell.name}")}
    if cell.size != "pocket":
        tree["model"]["path"] = str(models / (cell.family if cell.size == "tiny" else "short"))
        size, count = (64, 2) if cell.size == "tiny" else (256, 1)
        tree["data"] |= {"resolution": size, "batch_size": count, "sources": [{"path": str(PHOTOS)}]}
        tree["adapter"]["targets"] = "attention+mlp"
    else:
        for source in tree["data"]["sources"]:
            source["path"] = str(ROOT / source["path"])
    for table, keys in own.items():
        tree[table] = tree.get(table, {}) | keys
    tree["precision"] = {"compute": cell.dtype}
    tree["validation"] = {"every_steps": 0}
    tree["checkpoint"] = {"every_steps": 0}
    tree["logging"] = {"tensorboard": False}
    return configs.parse(tree)


def timed(cell: Cell, compared: str, rounds: int, warm_up: int, models: Path, folder: Path) -> dict[str, list[float]]:
    """Seconds of each side's steps, round by round. compared: of SIDES."""
    sides = SIDES[compared][0]
    with ExitStack() as stack:
        steps: dict[str, Callable[[int], None]] = {}
        for side, (own, plain) in sides.items():
            where = folder / f"{cell.name}-{side.replace(' ', '-')}"
            with redirect_stdout(io.StringIO()):  # what a run says of itself
                run = stack.enter_context(built(config(cell, own, where, models)))
            step = plain_peft.beside(run, cell.dtype)[0] if plain else lambda n, update, run=run: take_step(run, n, update)
            data = run.plan.config.data
            updates = sampler.all_updates(run.plan.data.examples, seed=0, batch_size=data.batch_size, group=1, after=0)
            steps[side] = lambda n, step=step, updates=updates: step(n, next(updates))
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(warm_up + rounds):
            if number == warm_up:
                gc.collect()
                gc.freeze()  # four models and their libraries: to look through them would be in some steps and not in others
            for side, take in steps.items():
                started = time.process_time()
                take(number + 1)
                if number >= warm_up:
                    seconds[side].append(time.process_time() - started)
    return seconds


def foretold(cell: Cell, own: Tables, probe: dict[str, Any], folder: Path, models: Path) -> tuple[float, float]:
    """Seconds of a step, the least and the most, as a plan on a CPU has them. probe: of that CPU, as `probed` gives it."""
    given = config(cell, own, folder / "plan", models)
    source = open_source(given)
    plan = make_plan(resolve(given, source), source, processes=1)
    found = forecast(plan, kernels.choose("auto", torch.device("cpu")), base=lambda: 1)
    products = {COMPUTE_DTYPES[name].itemsize: rate for name, rate in probe["products"].items()}
    return step_seconds(plan, found, on_cpu(Probe(**probe | {"products": products})))


def probed(cell: Cell) -> dict[str, Any]:
    """What a plan probes of this CPU, with the products by the names of dtypes."""
    found = Probe.of(COMPUTE_DTYPES[cell.dtype])
    products = {name: found.products[COMPUTE_DTYPES[name].itemsize] for name in {cell.dtype, "fp32"}}
    return {"products": products, "memory": found.memory, "operator": found.operator}


def ratios(seconds: dict[str, list[float]], pairs: tuple[tuple[str, str], ...]) -> dict[str, list[float]]:
    """By "one / other": the quartiles of a round's ratio."""
    return {
        f"{one} / {other}": statistics.quantiles((a / b for a, b in zip(seconds[one], seconds[other], strict=True)), n=4)
        for one, other in pairs
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="*", help="of " + ", ".join(cell.name for cell in CELLS))
    parser.add_argument("--sides", choices=SIDES, default="peft", help="what is compared")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--warm_up", type=int, default=4)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    cells = [cell for cell in CELLS if fnmatchcase(cell.name, asked.cells)] or [SHORT] * (asked.cells == SHORT.name)
    if not cells:
        parser.error(f"--cells {asked.cells!r} names none of {', '.join(cell.name for cell in CELLS)}")
    result: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        models = make_models(Path(folder) / "models") if any(cell.size == "tiny" for cell in cells) else Path(folder)
        if SHORT in cells:
            with patch.object(make_model, "short_configs", deeper):
                make_model.make("short", SHORT.family, "diffusers", models / "short", 0, "epsilon", None, False)
        for cell in cells:
            seconds = timed(cell, asked.sides, asked.rounds, asked.warm_up, models, Path(folder))
            found = ratios(seconds, SIDES[asked.sides][1])
            result.append({"cell": cell.name, "seconds": seconds, "ratios": found})
            if asked.sides == "plan":
                result[-1]["probe"] = probe = probed(cell)
                for side, (own, _) in SIDES["plan"][0].items():
                    told = band(*foretold(cell, own, probe, Path(folder), models))
                    print(f"{cell.name}, {side}: {told} foretold")
            medians = ", ".join(f"{side} {1000 * statistics.median(values):.0f} ms" for side, values in seconds.items())
            print(f"{cell.name}: {medians}")
            for name, (low, median, high) in found.items():
                print(f"    {name}: {median:.3f} ({low:.3f} to {high:.3f})", flush=True)
            if asked.json:
                asked.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
