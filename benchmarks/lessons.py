"""The lessons and exams of the pocket models: what benchmarks/learning.py and benchmarks/craft.py train and measure.

A pocket model trains on 12 icons of a style that it never saw (examples/icons/lessons). It is examined on 60 others
(examples/icons/exams), whose subjects it knows from three other styles (examples/icons/trained). Every draw of an exam is
fixed, whatever the run's seed is, and made on the CPU.
"""

from __future__ import annotations

import io
import platform
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.plain_peft import run_losses  # noqa: E402
from examples.pocket import draw  # noqa: E402
from trainer import config as configs  # noqa: E402
from trainer.base.types import Occurrence  # noqa: E402
from trainer.data.batches import sampler  # noqa: E402
from trainer.engine.encoding import prompt_conditioning  # noqa: E402
from trainer.models.base import SampleRequest  # noqa: E402
from trainer.plan.requirements import family_options  # noqa: E402
from trainer.plan.run_plan import find_objective  # noqa: E402
from trainer.run.run import Run  # noqa: E402

ICONS = ROOT / "examples" / "icons"
TRAINED = ("trained/noto", "trained/twemoji", "trained/fluent_flat")
# The true icons and their captions: a run's mirror images and empty captions would differ from seed to seed.
EXAMINED = {"flip": False, "caption_dropout": 0.0}
EXAM_SEED = 12345  # of the draws that losses are measured on, whatever the run's seed is
CURVE_DRAWS = 4  # of a point of a curve, and of the loss on known styles
LIBRARIES = ("torch", "diffusers", "transformers", "peft", "bitsandbytes", "optimum-quanto")


def config(
    family: str,
    seed: int,
    out: Path,
    cache: Path,
    *,
    changes: Mapping[str, Any],
    steps: int | None = None,
    known: Sequence[str] = TRAINED,
    drawn: bool = False,
) -> configs.Config:
    """The demo's own config, in bf16, with the exams and known styles beside the lessons, and what is changed.

    changes: config keys, dots as `__`. steps: None for the demo's. drawn: whether the exams will be drawn.
    """
    path = ROOT / "configs" / f"pocket_{family}.toml"
    tree = tomllib.loads(path.read_text(encoding="utf-8"))
    own = {
        "run__output_dir": str(out),
        "run__seed": seed,
        "run__max_steps": steps or tree["run"]["max_steps"],
        "precision__compute": "bf16",  # as on a card; the demo's fp32 is for CPUs without such instructions
        "model__path": str(ROOT / tree["model"]["path"]),
        "data__cache_dir": str(cache),
        "data__sources": [
            {"path": str(ICONS / "lessons")},
            *(EXAMINED | {"path": str(ICONS / f)} for f in ("exams", *known)),
        ],
        "checkpoint__every_steps": 0,
        # What is drawn is drawn here; the request keeps the VAE in memory.
        "validation": {"every_steps": 1, "prompts": ["a red apple"] if drawn else []},
        "logging__tensorboard": False,
    }
    for key, value in (own | dict(changes)).items():
        *tables, leaf = key.split("__")
        node = tree
        for table in tables:
            node = node.setdefault(table, {})
        node[leaf] = value
    return configs.parse(tree)


class Examiner:
    """The losses that are measured beside a training, of one model and its data."""

    def __init__(self, run: Run, predict: Callable[..., torch.Tensor] | None = None) -> None:
        """predict: None for the run's own."""
        self.run = run
        self.predict = predict or (lambda *inputs: run.family.images.predict(run.model, *inputs))
        self.used = list(run.state.weights_for_use().values())[-1]  # the average, where there is one
        # The plain loss at the demo's times, whatever the run weighs and draws.
        demo = configs.load(f"pocket_{run.family.name}.toml", [])
        self.objective = find_objective(run.plan.model.source, family_options(demo, run.family)).plain()

    def samples(self, source: int) -> list[str]:
        """The photos of a source, by its place in the config."""
        return sorted(name for name in self.run.reader.examples if name.startswith(f"{source}/"))

    @torch.no_grad()
    def losses(self, samples: Sequence[str], draws: int) -> list[float]:
        """Of each draw, the mean over the samples, with the weights that are used: an average where the run keeps one."""
        losses = []
        with self.used():
            for number in range(draws):
                batch = self.run.reader[tuple(Occurrence(number, sample, 0) for sample in samples)]
                losses.append(float(run_losses(self.run, batch, self.predict, self.objective, EXAM_SEED).mean()))
        return losses

    def held_out(self, draws: int) -> list[float]:
        """Of the true icons in the new style."""
        return self.losses(self.samples(1), draws)

    def forgetting(self) -> float | None:
        """Of the known styles, where the run has them."""
        known = range(2, len(self.run.plan.config.data.sources))
        means = [mean(self.losses(self.samples(source), CURVE_DRAWS)) for source in known]
        return mean(means) if means else None


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def updates(run: Run) -> Iterator[list[sampler.MicroBatch]]:
    """Of the lessons alone: what is examined is never trained on."""
    lessons = [example for example in run.plan.data.examples if example.sample.startswith("0/")]
    data = run.plan.config.data
    return sampler.all_updates(lessons, seed=run.plan.config.run.seed, batch_size=data.batch_size, group=1, after=0)


def now(run: Run) -> float:
    """Seconds, once the device has done what it was given."""
    if run.context.processes.device.type == "cuda":
        torch.cuda.synchronize(run.context.processes.device)
    return time.perf_counter()


def machine(run: Run) -> dict[str, Any]:
    device, installed = run.context.processes.device, {each.name: each.version for each in distributions()}
    return {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {platform.machine()}",
        "threads": torch.get_num_threads(),
        "versions": {name: installed[name] for name in LIBRARIES if name in installed},
    }


def exams(run: Run) -> list[Any]:
    return sorted((photo for photo in run.plan.data.photos if photo.sample.startswith("1/")), key=lambda photo: photo.sample)


def drawn(run: Run) -> list[Any]:
    """The 60 exams as PIL images, each from a seed of its own."""
    pictures = []
    shown = configs.load(f"pocket_{run.plan.config.model.family}.toml", []).validation
    for number, photo in enumerate(exams(run)):
        request = SampleRequest(photo.caption, "", 64, 64, number, shown.steps, shown.samples[0].guidance)
        told = [prompt_conditioning(run.components, run.reader, text) for text in (request.prompt, request.negative)]
        with torch.no_grad():
            pictures.append(run.family.images.draw(run.model, request, *told))
    return pictures


def distances(run: Run, pictures: Sequence[Any]) -> dict[str, list[float]]:
    """Of every picture to its truth and to another exam's: mean pixel difference, and distance in the VAE's latents."""
    from PIL import Image

    made = torch.stack([draw.pixels(picture) for picture in pictures])
    truth = torch.stack([draw.pixels(Image.open(io.BytesIO(photo.image.read()))) for photo in exams(run)])
    others = truth.roll(1, 0)

    def encode(values: torch.Tensor) -> torch.Tensor:
        return run.family.images.encode(run.model, values)

    return {
        "pixels": draw.distances(made, truth).tolist(),
        "pixels_other": draw.distances(made, others).tolist(),
        "features": draw.feature_distances(made, truth, encode).tolist(),
        "features_other": draw.feature_distances(made, others, encode).tolist(),
    }
