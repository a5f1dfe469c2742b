"""How well an adapter learns, where the truth is known: a pocket model is taught a style that it never saw.

    python scripts/bench/learning.py --out outputs/learning               # every cell, three seeds; goes on where it was
    python scripts/bench/learning.py --out outputs/learning --cells 'sdxl/rank*' --seeds 1

The model trains on 12 icons of the new style (examples/icons/lessons). It is examined on 60 others (examples/icons/exams),
whose subjects it knows from three other styles:

- held-out loss: the plain loss of the 60 true icons over 48 fixed (noise, timestep) draws; the curve has 12 of them;
- forgetting: the same of those subjects in the styles that the model knows (examples/icons/trained), 12 draws;
- distance, in some cells: between the 60 drawn icons (fixed seeds) and the true ones, in pixels and in the VAE's latents.

One factor at a time is changed around the default cell. The cells `peft-lora` and `peft-dora` are a plain diffusers + PEFT
loop over the same model in bf16: the same batches, noise and timesteps, AdamW and clipping. Seconds are of the steps alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from tests.harness import built, take_step  # noqa: E402
from trainer import config as configs  # noqa: E402
from trainer.data import sampler  # noqa: E402
from trainer.encoding import prompt_conditioning  # noqa: E402
from trainer.models.base import SampleRequest  # noqa: E402
from trainer.run import Run  # noqa: E402
from trainer.step import batch_losses  # noqa: E402
from trainer.types import Occurrence  # noqa: E402

ICONS = ROOT / "examples" / "icons"
STYLES = ("noto", "twemoji", "fluent_flat")
STEPS, EVERY = 160, 20
DRAWS, CURVE_DRAWS = 48, 12
EXAM_SEED = 12345  # of the draws that losses are measured on, whatever the run's seed is
DENOISER = {"sdxl": "unet", "flux": "transformer"}
PEFT_TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]


@dataclass(frozen=True)
class Cell:
    """One way of training. changes: config keys, dots as `__`. draws: whether the 60 icons are drawn too."""

    family: str
    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    peft: bool = False
    draws: bool = False

    @property
    def path(self) -> str:
        return f"{self.family}/{self.name}"


def stored(dtype: str, backend: str | None = None) -> dict[str, Any]:
    return {"storage": {"dtype": dtype} | ({"backend": backend} if backend else {})}


FORMATS = {
    "fp32": ("fp32", None), "bf16": ("bf16", None), "fp16": ("fp16", None), "fp8_e5m2": ("fp8_e5m2", None),
    "fp8_e4m3-quanto": ("fp8_e4m3", "quanto"), "int8-quanto": ("int8", "quanto"),
    "int8-bitsandbytes": ("int8", "bitsandbytes"), "int4-quanto": ("int4", "quanto"), "int2-quanto": ("int2", "quanto"),
    "nf4": ("nf4", None), "fp4": ("fp4", None),
}  # fmt: skip
SDXL = (
    Cell("sdxl", "default", draws=True),
    Cell("sdxl", "lora", {"adapter__type": "lora"}, draws=True),
    Cell("sdxl", "rank-4", {"adapter__rank": 4, "adapter__alpha": 4}),
    Cell("sdxl", "rank-64", {"adapter__rank": 64, "adapter__alpha": 64}),
    *(Cell("sdxl", f"stored-{name}", stored(*kind), draws=name == "fp32") for name, kind in FORMATS.items()),
    Cell("sdxl", "float8-products", {"precision__matmul": "fp8"}),
    Cell("sdxl", "adamw8bit", {"optimizer__name": "adamw8bit"}),
    Cell("sdxl", "computed-fp16", {"precision__compute": "fp16"}),
    Cell("sdxl", "min-snr", {"objective__min_snr_gamma": 5.0}),
    Cell("sdxl", "bf16-lora", {"adapter__type": "lora", **stored("bf16")}),
    Cell("sdxl", "peft-lora", {"adapter__type": "lora", **stored("bf16")}, peft=True),
    Cell("sdxl", "peft-dora", stored("bf16"), peft=True),
)
FLUX = (
    Cell("flux", "default", draws=True),
    Cell("flux", "lora", {"adapter__type": "lora"}),
    Cell("flux", "stored-bf16", stored("bf16")),
    Cell("flux", "stored-nf4", stored("nf4")),
)
CELLS = (*SDXL, *FLUX)


def config(cell: Cell, seed: int, out: Path, steps: int) -> configs.Config:
    """The default cell is the demo's: a DoRA of rank 16 on attention and MLP over float8, AdamW, computing in bf16."""
    tree: dict[str, Any] = {
        "run": {"name": "ink", "output_dir": str(out / "run"), "seed": seed, "max_steps": steps},
        "model": {"family": cell.family, "path": str(ROOT / "examples" / f"pocket_{cell.family}")},
        "adapter": {"type": "dora", "rank": 16, "targets": "attention+mlp"},
        "data": {
            "resolution": 64, "batch_size": 12, "caption_dropout": 0.0, "cache_dir": str(out / f"cache-{cell.family}"),
            "sources": [{"path": str(ICONS / "lessons")}, {"path": str(ICONS / "exams")}]
            + [{"path": str(ICONS / "trained" / style)} for style in STYLES],
        },
        "optimizer": {"lr": 2e-3},
        "schedule": {"warmup": 0.05},
        "checkpoint": {"every_steps": 0},
        # What is drawn is drawn here; the request keeps the VAE in memory.
        "validation": {"every_steps": steps, "prompts": ["a red apple"] if cell.draws else []},
        "logging": {"tensorboard": False},
    }  # fmt: skip
    storage = {"dtype": "fp8_e4m3"}
    for key, value in cell.changes.items():
        if key == "storage":
            storage = value
            continue
        table, leaf = key.split("__")
        tree.setdefault(table, {})[leaf] = value
    tree["model"]["components"] = {DENOISER[cell.family]: storage}
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
        return sorted(name for name in self.run.reader.photos if name.startswith(f"{source}/"))

    @torch.no_grad()
    def loss(self, samples: Sequence[str], draws: int) -> float:
        total = 0.0
        for draw in range(draws):
            batch = self.run.reader[tuple(Occurrence(draw, sample, 0) for sample in samples)]
            total += float(losses(self.run, batch, self.predict, self.objective, EXAM_SEED).mean())
        return total / draws

    def held_out(self, draws: int) -> float:
        return self.loss(self.samples(1), draws)

    def forgetting(self) -> float:
        return sum(self.loss(self.samples(source), CURVE_DRAWS) for source in (2, 3, 4)) / 3


def losses(run: Run, batch: Any, predict: Callable[..., torch.Tensor], objective: Any, seed: int) -> torch.Tensor:
    """fp32 [B]."""
    return batch_losses(
        batch,
        objective=objective,
        predict=predict,
        encode=lambda texts: run.family.encode_prompts(run.model, texts),
        image_tokens=run.family.image_tokens,
        seed=seed,
        device=run.processes.device,
    )


def updates(run: Run) -> Iterator[list[sampler.MicroBatch]]:
    """Of the lessons alone: what is examined is never trained on."""
    lessons = [(photo, bucket) for photo, bucket in run.plan.photos if photo.sample.startswith("0/")]
    data = run.plan.config.data
    return sampler.all_updates(
        lessons, seed=run.plan.config.run.seed, batch_size=data.batch_size, accumulation=1, processes=1, after=0
    )


def measure(cell: Cell, seed: int, out: Path, steps: int) -> dict[str, Any]:
    """Train one cell; returns what was measured."""
    with built(config(cell, seed, out, steps)) as run:
        if cell.peft:
            step, predict = peft_step(run, cell)
        else:
            step = lambda number, update: take_step(run, number, update)  # noqa: E731
            predict = lambda *inputs: run.family.predict(run.model, *inputs)  # noqa: E731
        examiner = Examiner(run, predict)
        first = {"held_out": examiner.held_out(DRAWS), "forgetting": examiner.forgetting()}
        before = drawn(run) if cell.draws else None
        curve, seconds = [(0, 0.0, examiner.held_out(CURVE_DRAWS))], 0.0
        for number, update in zip(range(1, steps + 1), updates(run), strict=False):
            started = time.perf_counter()
            step(number, update)
            seconds += time.perf_counter() - started
            if number % EVERY == 0:
                curve.append((number, seconds, examiner.held_out(CURVE_DRAWS)))
        last = {"held_out": examiner.held_out(DRAWS), "forgetting": examiner.forgetting()}
        result = {"cell": cell.path, "seed": seed, "first": first, "last": last, "curve": curve, "seconds": seconds}
        if before is not None:
            result["drawn"] = {"before": distances(run, before), "after": distances(run, drawn(run))}
        return result


def peft_step(run: Run, cell: Cell) -> tuple[Callable[[int, Any], None], Callable[..., torch.Tensor]]:
    """(a step, predict) of a plain diffusers + PEFT loop over the same data."""
    from diffusers import UNet2DConditionModel
    from diffusers.training_utils import cast_training_params
    from peft import LoraConfig

    chosen = run.plan.config
    torch.manual_seed(chosen.run.seed)
    unet = UNet2DConditionModel.from_pretrained(chosen.model.path, subfolder="unet", torch_dtype=torch.bfloat16)
    unet.requires_grad_(False)
    rank = chosen.adapter.rank
    unet.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=PEFT_TARGETS, use_dora=chosen.adapter.type == "dora"))
    cast_training_params(unet, dtype=torch.float32)
    parameters = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=chosen.optimizer.lr, weight_decay=chosen.optimizer.weight_decay)
    model = replace(run.model, modules=run.model.modules | {"unet": unet})
    warmup = int(chosen.schedule.warmup * chosen.run.max_steps)

    def predict(*inputs: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return run.family.predict(model, *inputs)

    def step(number: int, update: list[sampler.MicroBatch]) -> None:
        for group in optimizer.param_groups:
            group["lr"] = chosen.optimizer.lr * min(1.0, (number - 1) / max(1, warmup))
        for micro_batch in update:
            losses(run, run.reader[micro_batch], predict, run.plan.objective, chosen.run.seed).mean().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, predict


def drawn(run: Run) -> list[Any]:
    """The 60 exams as PIL images, each from a seed of its own."""
    pictures = []
    for number, photo in enumerate(exams(run)):
        request = SampleRequest(photo.caption, "", 64, 64, number, 20, 4.0)
        told = [prompt_conditioning(run.components, run.reader, text) for text in (request.prompt, request.negative)]
        with torch.no_grad():
            pictures.append(run.family.sample(run.model, request, *told))
    return pictures


def exams(run: Run) -> list[Any]:
    return sorted((p for p, _ in run.plan.photos if p.sample.startswith("1/")), key=lambda photo: photo.sample)


def distances(run: Run, pictures: Sequence[Any]) -> dict[str, list[float]]:
    """Of every picture to its truth and to the next exam's: mean pixel difference, and distance in the VAE's latents."""
    from PIL import Image

    made = torch.stack([pixels(picture) for picture in pictures])
    truth = torch.stack([pixels(Image.open(photo.path)) for photo in exams(run)])
    with torch.no_grad():
        features = [run.family.encode_images(run.model, values) for values in (made, truth)]
    others = truth.roll(1, 0), features[1].roll(1, 0)
    return {
        "pixels": (made - truth).abs().mean((1, 2, 3)).div(2).tolist(),
        "pixels_other": (made - others[0]).abs().mean((1, 2, 3)).div(2).tolist(),
        "features": (features[0] - features[1]).square().mean((1, 2, 3)).sqrt().tolist(),
        "features_other": (features[0] - others[1]).square().mean((1, 2, 3)).sqrt().tolist(),
    }


def pixels(picture: Any) -> torch.Tensor:
    """fp32 [3, H, W] in [-1, 1]."""
    rgb = picture.convert("RGB")
    values = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8).float() / 127.5 - 1
    return values.view(rgb.height, rgb.width, 3).permute(2, 0, 1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a JSON file for every cell and seed; those there are kept")
    parser.add_argument("--cells", metavar="GLOB", default="*", help="only FAMILY/NAME that match")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    asked = parser.parse_args(arguments)
    wanted = [cell for cell in CELLS if fnmatchcase(cell.path, asked.cells)]
    if not wanted:
        parser.error(f"--cells {asked.cells!r} matches none of {', '.join(cell.path for cell in CELLS)}")
    asked.out.mkdir(parents=True, exist_ok=True)
    for seed in range(asked.seeds):
        for cell in wanted:
            path = asked.out / f"{cell.path.replace('/', '-')}-{seed}.json"
            if path.exists():
                continue
            result = measure(cell, seed, asked.out, asked.steps)
            gc.collect()
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(result, indent=1) + "\n")
            temporary.rename(path)
            fall = 1 - result["last"]["held_out"] / result["first"]["held_out"]
            print(f"{cell.path:<28} seed {seed}: held-out loss falls by {fall:.1%} in {result['seconds']:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
