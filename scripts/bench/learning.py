"""How well an adapter learns, where the truth is known: a pocket model is taught a style that it never saw.

    python scripts/bench/learning.py --out outputs/learning               # every cell, three seeds; goes on where it was
    python scripts/bench/learning.py --out outputs/learning --cells 'sdxl/rank*' --seeds 1
    python scripts/bench/learning.py --out outputs/learning --jobs 12 --together learning.json    # many cores, or a GPU

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
import gc
import io
import json
import os
import platform
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from datetime import date
from fnmatch import fnmatchcase
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from scripts.bench import plain_peft  # noqa: E402
from scripts.bench.plain_peft import run_losses  # noqa: E402
from scripts.pocket import draw  # noqa: E402
from tests.harness import DENOISER, built, take_step  # noqa: E402
from trainer import config as configs  # noqa: E402
from trainer import kernels  # noqa: E402
from trainer.data import sampler  # noqa: E402
from trainer.encoding import prompt_conditioning  # noqa: E402
from trainer.models.base import SampleRequest  # noqa: E402
from trainer.quantization import FrozenLayer  # noqa: E402
from trainer.run import Run  # noqa: E402
from trainer.types import Occurrence  # noqa: E402

ICONS = ROOT / "examples" / "icons"
TRAINED = ("trained/noto", "trained/twemoji", "trained/fluent_flat")
# The true icons and their captions: a run's mirror images and empty captions would differ from seed to seed.
EXAMINED = {"flip": False, "caption_dropout": 0.0}
EVERY = 20  # steps between two points of a curve
DRAWS, CURVE_DRAWS = 48, 4
EXAM_SEED = 12345  # of the draws that losses are measured on, whatever the run's seed is
LIBRARIES = ("torch", "diffusers", "transformers", "peft", "bitsandbytes", "optimum-quanto")


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
    # From the smallest size that bitsandbytes keeps in 8 bits: most layers of so small a model are below the usual one.
    Cell("sdxl", "adamw8bit", {"optimizer__name": "adamw8bit", "optimizer__min_8bit_size": 256}),
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
CELLS = (*SDXL, *FLUX)


def config(
    cell: Cell, seed: int, out: Path, cache: Path, steps: int | None, known: Sequence[str] = TRAINED
) -> configs.Config:
    """The demo's own config with the exams and known styles beside the lessons, and what the cell changes.

    steps: None for the demo's.
    """
    dtype, _, backend = cell.storage.partition("-")
    path = ROOT / "configs" / f"pocket_{cell.family}.toml"
    tree = tomllib.loads(path.read_text(encoding="utf-8"))
    changes = {
        "run__output_dir": str(out),
        "run__seed": seed,
        "run__max_steps": steps or tree["run"]["max_steps"],
        "model__path": str(ROOT / tree["model"]["path"]),
        f"model__components__{DENOISER[cell.family]}": {"dtype": dtype} | ({"backend": backend} if backend else {}),
        "data__cache_dir": str(cache),
        "data__sources": [
            {"path": str(ICONS / "lessons")},
            *(EXAMINED | {"path": str(ICONS / f)} for f in ("exams", *known)),
        ],
        "checkpoint__every_steps": 0,
        # What is drawn is drawn here; the request keeps the VAE in memory.
        "validation": {"every_steps": 1, "prompts": ["a red apple"] if cell.draws else []},
        "logging__tensorboard": False,
    }
    for key, value in (changes | cell.changes).items():
        *tables, leaf = key.split("__")
        node = tree
        for table in tables:
            node = node.setdefault(table, {})
        node[leaf] = value
    return configs.parse(tree)


class Examiner:
    """The losses that are measured beside a training, of one model and its data."""

    def __init__(self, run: Run, predict: Callable[..., torch.Tensor]) -> None:
        self.run, self.predict = run, predict
        # The plain loss, whatever the run weighs.
        weighted = getattr(run.plan.objective, "min_snr_gamma", None)
        self.objective = replace(run.plan.objective, min_snr_gamma=None) if weighted else run.plan.objective

    def samples(self, source: int) -> list[str]:
        """The photos of a source, by its place in the config."""
        return sorted(name for name in self.run.reader.examples if name.startswith(f"{source}/"))

    @torch.no_grad()
    def loss(self, samples: Sequence[str], draws: int) -> float:
        total = 0.0
        for number in range(draws):
            batch = self.run.reader[tuple(Occurrence(number, sample, 0) for sample in samples)]
            total += float(run_losses(self.run, batch, self.predict, self.objective, EXAM_SEED).mean())
        return total / draws

    def held_out(self, draws: int) -> float:
        return self.loss(self.samples(1), draws)

    def losses(self, draws: int) -> dict[str, float]:
        """held_out: of the exams. forgetting: of the known styles, where the run has them."""
        known = range(2, len(self.run.plan.config.data.sources))
        measured = {"held_out": self.held_out(draws)}
        if known:
            measured["forgetting"] = sum(self.loss(self.samples(source), CURVE_DRAWS) for source in known) / len(known)
        return measured


def updates(run: Run) -> Iterator[list[sampler.MicroBatch]]:
    """Of the lessons alone: what is examined is never trained on."""
    lessons = [example for example in run.plan.examples if example.sample.startswith("0/")]
    data = run.plan.config.data
    return sampler.all_updates(
        lessons, seed=run.plan.config.run.seed, batch_size=data.batch_size, accumulation=1, processes=1, after=0
    )


Results = dict[str, list[dict[str, Any]]]  # FAMILY/NAME -> what each seed measured

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
        steps = run.plan.max_steps
        if cell.peft:
            step, predict = plain_peft.beside(run)
        else:
            step = lambda number, update: take_step(run, number, update)  # noqa: E731
            predict = lambda *inputs: run.family.predict(run.model, *inputs)  # noqa: E731
        for micro_batch in next(updates(run)):  # what is compiled at its first use; the step sets gradients to zero
            run_losses(run, run.reader[micro_batch], predict, run.plan.objective, seed).mean().backward()
        examiner = Examiner(run, predict)
        key = cell, draws, tuple(known)
        if key not in untrained:
            untrained[key] = examiner.losses(draws), distances(run, drawn(run)) if cell.draws else None
        first, before = untrained[key]
        curve, seconds = [(0, 0.0, examiner.held_out(CURVE_DRAWS))], 0.0
        for number, update in zip(range(1, steps + 1), updates(run), strict=False):
            started = now(run)
            step(number, update)
            seconds += now(run) - started
            if number % EVERY == 0 or number == steps:
                curve.append((number, seconds, examiner.held_out(CURVE_DRAWS)))
        last = examiner.losses(draws)
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


def now(run: Run) -> float:
    """Seconds, once the device has done what it was given."""
    if run.processes.device.type == "cuda":
        torch.cuda.synchronize(run.processes.device)
    return time.perf_counter()


def quantised(run: Run) -> float:
    """The share of the denoiser's weights, in Linears and convolutions, that are stored in fewer than 16 bits."""
    layers = [layer for layer in run.model.modules[run.family.denoiser].modules() if isinstance(layer, FrozenLayer)]
    sizes = [(layer.weight_shape.numel(), layer.format.quantised) for layer in layers]
    return sum(size for size, fewer in sizes if fewer) / sum(size for size, _ in sizes)


def machine(run: Run) -> dict[str, Any]:
    device, installed = run.processes.device, {each.name: each.version for each in distributions()}
    return {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {platform.machine()}",
        "threads": torch.get_num_threads(),
        "versions": {name: installed[name] for name in LIBRARIES if name in installed},
    }


def drawn(run: Run) -> list[Any]:
    """The 60 exams as PIL images, each from a seed of its own."""
    pictures = []
    shown = configs.load(f"pocket_{run.plan.config.model.family}.toml", []).validation
    for number, photo in enumerate(exams(run)):
        request = SampleRequest(photo.caption, "", 64, 64, number, shown.steps, shown.samples[0].guidance)
        told = [prompt_conditioning(run.components, run.reader, text) for text in (request.prompt, request.negative)]
        with torch.no_grad():
            pictures.append(run.family.sample(run.model, request, *told))
    return pictures


def exams(run: Run) -> list[Any]:
    return sorted((photo for photo in run.plan.photos if photo.sample.startswith("1/")), key=lambda photo: photo.sample)


def distances(run: Run, pictures: Sequence[Any]) -> dict[str, list[float]]:
    """Of every picture to its truth and to another exam's: mean pixel difference, and distance in the VAE's latents."""
    from PIL import Image

    made = torch.stack([draw.pixels(picture) for picture in pictures])
    truth = torch.stack([draw.pixels(Image.open(io.BytesIO(photo.image.read()))) for photo in exams(run)])
    others = truth.roll(1, 0)

    def encode(values: torch.Tensor) -> torch.Tensor:
        return run.family.encode_images(run.model, values)

    return {
        "pixels": draw.distances(made, truth).tolist(),
        "pixels_other": draw.distances(made, others).tolist(),
        "features": draw.feature_distances(made, truth, encode).tolist(),
        "features_other": draw.feature_distances(made, others, encode).tolist(),
    }


def result_file(out: Path, path: str, seed: int) -> Path:
    return out / f"{path.replace('/', '-')}-{seed}.json"


def read(out: Path) -> Results:
    """What was measured so far."""
    results: Results = {}
    for cell in CELLS:
        files = sorted(out.glob(f"{cell.path.replace('/', '-')}-[0-9]*.json"))
        if files:
            results[cell.path] = [json.loads(file.read_text()) for file in files]
    return results


def write_whole(path: Path, value: Any) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    temporary.rename(path)


def one_after_the_other(cells: Sequence[Cell], asked: argparse.Namespace) -> None:
    for seed in range(asked.seeds):
        for cell in cells:
            path = result_file(asked.out, cell.path, seed)
            if path.exists():
                continue
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # what a run says of itself
                result = measure(cell, seed, asked.out / f"cache-{cell.family}", asked.steps)
            gc.collect()
            result["machine"]["cells at a time"] = asked.beside or 1
            write_whole(path, result)
            fall = 1 - result["last"]["held_out"] / result["first"]["held_out"]
            print(f"{cell.path:<28} seed {seed}: held-out loss falls by {fall:.1%} in {result['seconds']:.0f} s", flush=True)
            if asked.together:
                write_whole(asked.together, read(asked.out))


def side_by_side(cells: Sequence[Cell], asked: argparse.Namespace) -> list[str]:
    """Each cell, with all its seeds, in a process of its own. Returns those that failed; the others go on."""
    command = [sys.executable, str(Path(__file__).resolve()), "--out", str(asked.out), "--seeds", str(asked.seeds)]
    command += ["--beside", str(asked.jobs)] + (["--steps", str(asked.steps)] if asked.steps else [])
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // asked.jobs))}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the cells, below
    waiting, running, failed, there = list(cells), {}, [], None
    try:
        while waiting or running:
            while waiting and len(running) < asked.jobs:
                cell = waiting.pop(0)
                running[cell.path] = subprocess.Popen([*command, "--cells", cell.path], env=environment)
            time.sleep(0.2)
            for path in [path for path, process in running.items() if process.poll() is not None]:
                if running.pop(path).returncode:
                    failed.append(path)
            # A run may be cut off at any time: what it measured so far is together already.
            if asked.together and there != (there := sorted(asked.out.glob("*.json"))):
                write_whole(asked.together, read(asked.out))
    finally:
        for process in running.values():
            process.kill()  # while it builds a run it would only note a signal; results are written whole
        for process in running.values():
            process.wait()
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a JSON file for every cell and seed; those there are kept")
    parser.add_argument("--cells", metavar="GLOB[,GLOB]", default="*", help="only FAMILY/NAME that match one of them")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="in place of the demo's")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="cells at a time, each in a process of its own")
    parser.add_argument(
        "--together", type=Path, metavar="FILE", help="all results in one JSON file as well; those that it holds are kept"
    )
    parser.add_argument("--beside", type=int, help=argparse.SUPPRESS)  # the --jobs of which this process is one
    asked = parser.parse_args(arguments)
    wanted = [cell for cell in CELLS if any(fnmatchcase(cell.path, glob) for glob in asked.cells.split(","))]
    if not wanted:
        parser.error(f"--cells {asked.cells!r} matches none of {', '.join(cell.path for cell in CELLS)}")
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.together and asked.together.exists():
        for path, runs in json.loads(asked.together.read_text()).items():
            for run in runs:
                write_whole(result_file(asked.out, path, run["seed"]), run)
    missing = []
    for cell in wanted:
        steps = config(cell, 0, asked.out, asked.out, asked.steps).run.max_steps
        files = [result_file(asked.out, cell.path, seed) for seed in range(asked.seeds)]
        for file in (file for file in files if file.exists()):
            if (there := json.loads(file.read_text())["steps"]) != steps:
                parser.error(f"{file} is of {there} steps, not of {steps}: choose another --out, or delete it")
        if not all(file.exists() for file in files):
            missing.append(cell)
    failed = []
    if asked.jobs > 1:
        failed = side_by_side(missing, asked)
    else:
        one_after_the_other(missing, asked)
    if asked.together:
        write_whole(asked.together, read(asked.out))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
