"""The tables of docs/memory.md: what runs need, by family, dtype, adapter, resolution and batch, and which cards have that.

    python scripts/memory_table.py --processes 2

It plans every cell at the published sizes, for a GPU, and writes the tables between the two markers of docs/memory.md. It
reads no weights and needs no GPU. It takes 15 minutes of one core, which --processes shares out.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from PIL import Image

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the published configs come with the program
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trainer import config as configs
from trainer import kernels
from trainer.forecast import Forecast, Forecaster
from trainer.models import FAMILIES
from trainer.plan import Plan, make_plan, open_source, resolve
from trainer.rehearsal import without_values

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "memory.md"
BEGIN, END = "<!-- scripts/memory_table.py writes from here -->\n", "<!-- to here -->\n"
CARDS = (8, 12, 16, 24, 48, 80)  # GiB
DTYPES = ("bf16", "fp8_e4m3", "nf4")
ADAPTERS = ("lora", "dora")
RESOLUTIONS = (512, 768, 1024)
BATCHES = (1, 4)
CAPTIONS = 20  # enough that text encoders get eight at once
CELLS = tuple(itertools.product(RESOLUTIONS, BATCHES))


@dataclass(frozen=True)
class Model:
    """What is built once. recomputed: whether all blocks are, or none."""

    family: str
    dtype: str
    adapter: str
    recomputed: bool


MODELS = tuple(Model(*of) for of in itertools.product(FAMILIES, DTYPES, ADAPTERS, (True, False)))
Needed = Mapping[Model, Mapping[tuple[int, int], int]]  # bytes, by (resolution, batch)


def plan_of(model: Model, folder: Path) -> Plan:
    """All other keys have their defaults. folder: for the photos."""
    photos = folder / "photos"
    if not photos.exists():
        photos.mkdir(parents=True)
        for number in range(CAPTIONS):
            Image.new("RGB", (512, 512)).save(photos / f"{number:02}.png")
            (photos / f"{number:02}.txt").write_text(f"photo {number}")
    family = FAMILIES[model.family]
    tree = {
        "run": {"name": "table", "output_dir": str(folder / "out"), "max_steps": 1},
        "model": {
            "family": model.family,
            "path": next(iter(family.hub_ids)),
            "components": {family.denoiser: {"dtype": model.dtype}},
        },
        "adapter": {"type": model.adapter},
        "data": {"resolution": 512, "sources": [{"path": str(photos)}]},
        "memory": {"gradient_checkpointing": model.recomputed},
        "validation": {"prompts": ["a photo"]},
    }
    config = configs.parse(tree)
    source = open_source(config)
    return make_plan(resolve(config, source), source, processes=1)


def needed(model: Model, folder: Path, cells: tuple[tuple[int, int], ...] = CELLS) -> dict[tuple[int, int], int]:
    """Bytes that runs with this model need, each with samples of its own resolution."""
    plan = plan_of(model, folder)
    (request,) = plan.requests
    with without_values():
        forecaster = Forecaster(plan, kernels.planned("auto"))
        captions = tuple(forecaster.captions(stay=False))
        photos = {side: forecaster.photos(side, side) for side, _ in cells}
        forecaster.prepare()
        samples = {side: forecaster.sample(replace(request, width=side, height=side)) for side, _ in cells}
        steps = {(side, count): forecaster.step(side, side, count) for side, count in cells}
    return {
        (side, count): Forecast((*captions, photos[side], step, samples[side]), 0, 0).total
        for (side, count), step in steps.items()
    }


COLUMNS = tuple(itertools.product(BATCHES, (True, False)))  # (batch, recomputed)


def tables(found: Needed) -> Iterator[str]:
    """Lines of Markdown."""
    heads = [f"batch {count}, {'all' if recomputed else 'nothing'} recomputed" for count, recomputed in COLUMNS]
    for family in FAMILIES:
        yield f"**{family}**\n"
        yield f"| dtype | adapter | resolution | {' | '.join(heads)} |"
        yield "|---" * (3 + len(heads)) + "|"
        for dtype, adapter, side in itertools.product(DTYPES, ADAPTERS, RESOLUTIONS):
            yield row(found, family, dtype, adapter, side)
        yield ""


def row(found: Needed, family: str, dtype: str, adapter: str, side: int) -> str:
    sizes = [found[Model(family, dtype, adapter, recomputed)][side, count] for count, recomputed in COLUMNS]
    return f"| {dtype} | {adapter} | {side} | {' | '.join(map(cell, sizes))} |"


def cell(size: int) -> str:
    """What is needed in GiB, and the smallest card that has it."""
    card = next((f"{card} GB" for card in CARDS if size <= card * 2**30), "none")
    return f"{size / 2**30:.1f}: {card}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1)
    chosen = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="memory-table-") as folder,
        ProcessPoolExecutor(chosen.processes, mp_context=get_context("spawn")) as pool,
    ):
        plan_of(MODELS[0], Path(folder))
        found = dict(zip(MODELS, pool.map(partial(needed, folder=Path(folder)), MODELS), strict=True))
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(before + BEGIN + "\n" + "\n".join(tables(found)) + "\n" + END + after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
