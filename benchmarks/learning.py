"""How well an adapter learns, where the truth is known: a pocket model is taught a style that it never saw.

    python benchmarks/learning.py --out outputs/learning               # every cell, three seeds; goes on where it was
    python benchmarks/learning.py --out outputs/learning --cells 'sdxl/rank*' --seeds 1
    python benchmarks/learning.py --out outputs/learning --jobs 12 --together learning.json    # many cores, or a GPU

The model trains on 12 icons of the new style (examples/icons/lessons). It is examined on 60 others (examples/icons/exams),
whose subjects it knows from three other styles:

- held-out loss: the plain loss of the 60 true icons over 48 fixed (noise, timestep) draws; the curve has 4 of them;
- forgetting: the same of those subjects in the styles that the model knows (examples/icons/trained), 4 draws;
- distance, in some cells: between the 60 drawn icons (fixed seeds) and the true ones, in pixels and in the VAE's latents.

One factor at a time is changed around the default cell. The cells `peft-lora` and `peft-dora` are a plain diffusers + PEFT
loop over the same model in bf16: the same batches, noise and timesteps, AdamW and clipping. Seconds are of the steps alone.
Every draw is made on the CPU, so a GPU sees the same batches, noise and seeds. Cells that run side by side share the machine:
their seconds are longer than those of cells that run alone.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import cells, lessons, plain_peft  # noqa: E402
from benchmarks.lessons import CURVE_DRAWS, TRAINED, Examiner, distances, drawn, machine, now, updates  # noqa: E402
from benchmarks.plain_peft import run_losses  # noqa: E402
from tests.harness import built, take_step  # noqa: E402
from trainer import config as configs  # noqa: E402
from trainer import kernels  # noqa: E402
from trainer.models import FAMILIES  # noqa: E402
from trainer.quantization import FrozenLayer  # noqa: E402
from trainer.run.run import Run  # noqa: E402

EVERY = 20  # steps between two points of a curve
DRAWS = 48  # of the held-out loss


@dataclass(frozen=True, eq=False)
class Cell:
    """One way of training.

    changes: config keys, dots as `__`. storage: DTYPE or DTYPE-BACKEND of the denoiser. draws: whether icons are drawn.
    """

    family: str
    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    storage: str = "fp8_e4m3"
    peft: bool = False
    draws: bool = False

    @property
    def path(self) -> str:
        return f"{self.family}/{self.name}"


LORA = {"adapter__type": "lora"}
FORMATS = (
    "fp32", "fp16", "fp8_e5m2", "fp8_e4m3-quanto", "fp8_e5m2-quanto", "int8-quanto", "int8-bitsandbytes", "int4-quanto",
    "int2-quanto", "nf4", "fp4", "bf16",
)  # fmt: skip
SDXL = (
    Cell("sdxl", "default", draws=True),
    Cell("sdxl", "lora", LORA, draws=True),
    Cell("sdxl", "rank-4", {"adapter__rank": 4}, draws=True),
    Cell("sdxl", "rank-64", {"adapter__rank": 64}),
    Cell("sdxl", "float8-products", {"precision__matmul": "fp8"}),
    Cell("sdxl", "adamw8bit", {"optimizer__name": "adamw8bit"}),
    Cell("sdxl", "computed-fp16", {"precision__compute": "fp16"}),
    Cell("sdxl", "no-min-snr", {"objective": {}}),
    Cell("sdxl", "attention+mlp", {"adapter__targets": "attention+mlp"}),
    # Ours and theirs follow each other, so that a slow hour of the machine meets both: stored-bf16 is our DoRA.
    *(Cell("sdxl", f"stored-{name}", storage=name, draws=name == "fp32") for name in FORMATS),
    Cell("sdxl", "peft-dora", storage="bf16", peft=True),
    Cell("sdxl", "bf16-lora", LORA, storage="bf16"),
    Cell("sdxl", "peft-lora", LORA, storage="bf16", peft=True),
)
FLUX = (
    Cell("flux", "default", draws=True),
    Cell("flux", "lora", LORA),
    Cell("flux", "stored-bf16", storage="bf16"),
    Cell("flux", "stored-nf4", storage="nf4"),
)
FLUX2 = (
    Cell("flux2", "default", draws=True),
    Cell("flux2", "lora", LORA),
    Cell("flux2", "logit-normal", {"objective__timesteps": "logit_normal"}),
)
CELLS = (*SDXL, *FLUX, *FLUX2)


def config(
    cell: Cell, seed: int, out: Path, cache: Path, steps: int | None, known: Sequence[str] = TRAINED
) -> configs.Config:
    """As lessons.config, with what the cell changes."""
    dtype, _, backend = cell.storage.partition("-")
    stored = {"dtype": dtype} | ({"backend": backend} if backend else {})
    changes = {f"model__components__{FAMILIES[cell.family].denoiser}": stored} | cell.changes
    return lessons.config(cell.family, seed, out, cache, changes=changes, steps=steps, known=known, drawn=cell.draws)


def losses(examiner: Examiner, draws: int) -> dict[str, float]:
    """held_out: of the exams. forgetting: of the known styles, where the run has them."""
    measured, forgetting = {"held_out": lessons.mean(examiner.held_out(draws))}, examiner.forgetting()
    return measured if forgetting is None else measured | {"forgetting": forgetting}


# What is measured before a cell's training: an adapter begins as nothing, so it is the same for every seed.
untrained: dict[tuple[Cell, int, tuple[str, ...]], tuple[dict[str, float], dict[str, list[float]] | None]] = {}


def measure(
    cell: Cell, seed: int, cache: Path, steps: int | None = None, draws: int = DRAWS, known: Sequence[str] = TRAINED
) -> dict[str, Any]:
    """Train one cell; returns what was measured.

    cache: of encoded icons and captions. draws: of the held-out loss. known: styles that forgetting is measured on.
    """
    # The pocket's layers are narrower than those that multiply in float8 for speed: here all do.
    narrow = patch.multiple(kernels, FP8_MIN_WEIGHTS=1, FP8_MIN_ROWS=1)
    with TemporaryDirectory() as folder, narrow, built(config(cell, seed, Path(folder) / "run", cache, steps, known)) as run:
        # A run notes a signal and ends at its next step; there is no such loop here.
        for stop in (signal.SIGINT, signal.SIGTERM):
            signal.signal(stop, signal.SIG_DFL)
        steps = run.plan.length.max_steps
        if cell.peft:
            step, predict = plain_peft.beside(run)
        else:
            step = lambda number, update: take_step(run, number, update)  # noqa: E731
            predict = None
        examiner = Examiner(run, predict)
        for micro_batch in next(updates(run)):  # what is compiled at its first use; the step sets gradients to zero
            run_losses(run, run.reader[micro_batch], examiner.predict, run.plan.model.objective, seed).mean().backward()
        key = cell, draws, tuple(known)
        if key not in untrained:
            untrained[key] = losses(examiner, draws), distances(run, drawn(run)) if cell.draws else None
        first, before = untrained[key]
        curve, seconds = [(0, 0.0, lessons.mean(examiner.held_out(CURVE_DRAWS)))], 0.0
        for number, update in zip(range(1, steps + 1), updates(run), strict=False):
            started = now(run)
            step(number, update)
            seconds += now(run) - started
            if number % EVERY == 0 or number == steps:
                curve.append((number, seconds, lessons.mean(examiner.held_out(CURVE_DRAWS))))
        last = losses(examiner, draws)
        result = {
            "cell": cell.path,
            "seed": seed,
            "steps": steps,
            "first": first,
            "last": last,
            "curve": curve,
            "seconds": seconds,
            "quantised": quantised(run),
            "machine": machine(run),
        }
        if before is not None:
            result["drawn"] = {"before": before, "after": distances(run, drawn(run))}
        return result


def quantised(run: Run) -> float:
    """The share of the denoiser's weights, in Linears and convolutions, that are stored in fewer than 16 bits."""
    layers = [layer for layer in run.model.modules[run.family.denoiser].modules() if isinstance(layer, FrozenLayer)]
    sizes = [(layer.weight_shape.numel(), layer.format.quantised) for layer in layers]
    return sum(size for size, fewer in sizes if fewer) / sum(size for size, _ in sizes)


def told(result: cells.Result) -> str:
    fall = 1 - result["last"]["held_out"] / result["first"]["held_out"]
    return f"held-out loss falls by {fall:.1%} in {result['seconds']:.0f} s"


def settings(cell: Cell, asked: argparse.Namespace) -> dict[str, Any]:
    return {"steps": config(cell, 0, asked.out, asked.out, asked.steps).run.max_steps}


BENCH = cells.Bench(
    Path(__file__),
    __doc__,
    CELLS,
    lambda cell, seed, asked: measure(cell, seed, asked.out / f"cache-{cell.family}", asked.steps),
    settings,
    told,
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
