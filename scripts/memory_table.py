"""The tables of docs/memory.md: what runs need, by family, dtype, adapter, resolution and batch, and which cards have that.

    python scripts/memory_table.py --processes 2
    python scripts/memory_table.py --readme

It plans every cell at the published sizes, for a GPU, and writes the tables between the two markers of docs/memory.md, and
the README's small table from them. It reads no weights and needs no GPU. It takes 15 minutes of one core, which --processes
shares out. --readme plans nothing: it writes the README's table from the tables that stand in docs/memory.md.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
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
from trainer.models import FAMILIES
from trainer.plan.run_plan import RunPlan, make_plan, open_source, resolve
from workbench.planning.dry_run import without_values
from workbench.planning.estimate import Forecast, Forecaster

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT, README = ROOT / "docs" / "memory.md", ROOT / "README.md"
BEGIN, END = "<!-- scripts/memory_table.py writes from here -->\n", "<!-- to here -->\n"
CARDS = (8, 12, 16, 24, 48, 80)  # GiB
DTYPES = ("bf16", "fp8_e4m3", "nf4")
ADAPTERS = ("lora", "dora")
RESOLUTIONS = (512, 768, 1024)
BATCHES = (1, 4)
CAPTIONS = 20  # enough that text encoders get eight at once


@dataclass(frozen=True)
class Model:
    """What is built once. recomputed: whether all blocks are, or none. resident: how many of them stay on the card while the
    others are streamed; None: nothing is streamed."""

    family: str
    dtype: str
    adapter: str
    recomputed: bool
    resident: int | None = None


# (batch, whether all blocks are recomputed or none, how many of them stay on the card or None where nothing is streamed)
COLUMNS = (*itertools.product(BATCHES, (True, False), (None,)), (1, True, 0))
WAYS = tuple(dict.fromkeys(column[1:] for column in COLUMNS))
MODELS = tuple(Model(*of, *way) for *of, way in itertools.product(FAMILIES, DTYPES, ADAPTERS, WAYS))
Needed = Mapping[Model, Mapping[tuple[int, int], int]]  # bytes, by (resolution, batch)


def plan_of(model: Model, folder: Path) -> RunPlan:
    """All other keys have their defaults. folder: for the photos."""
    photos = folder / "photos"
    if not photos.exists():
        photos.mkdir(parents=True)
        for number in range(CAPTIONS):
            Image.new("RGB", (512, 512)).save(photos / f"{number:02}.png")
            (photos / f"{number:02}.txt").write_text(f"photo {number}")
    family = FAMILIES[model.family]
    streaming = {} if model.resident is None else {"offload": "blocks", "resident_blocks": model.resident}
    tree = {
        "run": {"name": "table", "output_dir": str(folder / "out"), "max_steps": 1},
        "model": {
            "family": model.family,
            "path": next(iter(family.files.hub_ids)),
            "components": {family.denoiser: {"dtype": model.dtype}},
        },
        "adapter": {"type": model.adapter},
        "data": {"resolution": 512, "sources": [{"path": str(photos)}]},
        "memory": {"gradient_checkpointing": model.recomputed} | streaming,
        "validation": {"prompts": ["a photo"]},
    }
    config = configs.parse(tree)
    source = open_source(config)
    return make_plan(resolve(config, source), source, processes=1)


def needed(model: Model, folder: Path, sides: tuple[int, ...] = RESOLUTIONS) -> dict[tuple[int, int], int]:
    """Bytes that runs with this model need, each with samples of its own resolution."""
    counts = [count for count, *way in COLUMNS if way == [model.recomputed, model.resident]]
    cells = tuple(itertools.product(sides, counts))
    plan = plan_of(model, folder)
    (request,) = plan.data.requests
    with without_values():
        forecaster = Forecaster(plan, kernels.planned("auto"))
        captions = tuple(forecaster.captions(stay=False))
        photos = {side: forecaster.photos(side, side) for side, _ in cells}
        forecaster.prepare()
        samples = {side: forecaster.sample(replace(request, width=side, height=side)) for side, _ in cells}
        steps = {(side, count): forecaster.step(((side, side),), count) for side, count in cells}
    return {
        (side, count): Forecast((*captions, photos[side], step, samples[side]), 0, 0).total
        for (side, count), step in steps.items()
    }


def tables(found: Needed) -> Iterator[str]:
    """Lines of Markdown."""
    heads = [
        f"batch {count}, {'all' if recomputed else 'nothing'} recomputed{', all streamed' * (resident == 0)}"
        for count, recomputed, resident in COLUMNS
    ]
    for family in FAMILIES:
        yield f"**{family}**\n"
        yield f"| dtype | adapter | resolution | {' | '.join(heads)} |"
        yield "|---" * (3 + len(heads)) + "|"
        for dtype, adapter, side in itertools.product(DTYPES, ADAPTERS, RESOLUTIONS):
            yield row(found, family, dtype, adapter, side)
        yield ""


def row(found: Needed, family: str, dtype: str, adapter: str, side: int) -> str:
    sizes = [found[Model(family, dtype, adapter, *way)][side, count] for count, *way in COLUMNS]
    return f"| {dtype} | {adapter} | {side} | {' | '.join(map(cell, sizes))} |"


def cell(size: int) -> str:
    """What is needed in GiB, and the smallest card that has it."""
    card = next((f"{card} GB" for card in CARDS if size <= card * 2**30), "none")
    return f"{size / 2**30:.1f}: {card}"


NAMES = {"sdxl": "SDXL", "flux": "Flux", "flux2": "FLUX.2 klein 4B", "bf16": "bf16", "fp8_e4m3": "float8", "nf4": "4-bit"}


def readme_table(document: str) -> Iterator[str]:
    """Lines of Markdown: what of docs/memory.md's tables (its whole text is `document`) each card has memory for.

    A DoRA at batch 1. The largest photos come first, then the finest dtype of the base, then a step that recomputes nothing.
    """
    kinds = [(family, streamed) for family in FAMILIES for streamed in (False, True)]
    yield f"| card | {' | '.join(NAMES[family] + ', streamed' * streamed for family, streamed in kinds)} |"
    yield "|---" * (1 + len(kinds)) + "|"
    for card in CARDS:
        yield f"| {card} GB | {' | '.join(best(document, family, card, streamed) for family, streamed in kinds)} |"


def best(document: str, family: str, card: int, streamed: bool) -> str:
    """A cell of the README's table. card: GiB. streamed: every block, and all are recomputed."""
    table = document.partition(f"**{family}**\n")[2].partition("\n**")[0]
    rows = {tuple(cells[:3]): cells[3:] for line in table.splitlines() if len(cells := re.split(r"\s*\|\s*", line)[1:-1]) > 3}
    columns = [(1, True, 0)] if streamed else [(1, False, None), (1, True, None)]
    for side, dtype, column in itertools.product(reversed(RESOLUTIONS), DTYPES, columns):
        size, _, least = rows[dtype, "dora", str(side)][COLUMNS.index(column)].partition(": ")
        if least != "none" and int(least.removesuffix(" GB")) <= card:
            recomputed = column[1] and not streamed
            return f"{side} px, {NAMES[dtype]} base{', recomputed' * recomputed}: {size} GiB"
    return "nothing fits"


def between(text: str, lines: Iterable[str]) -> str:
    """`text` with `lines` between its two markers."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + rest.partition(END)[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--readme", action="store_true")
    chosen = parser.parse_args()
    if not chosen.readme:
        DOCUMENT.write_text(between(DOCUMENT.read_text(), tables(planned(chosen.processes))))
    README.write_text(between(README.read_text(), (*readme_table(DOCUMENT.read_text()), "")))
    return 0


def planned(processes: int) -> Needed:
    """What every cell needs."""
    with (
        tempfile.TemporaryDirectory(prefix="memory-table-") as folder,
        ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool,
    ):
        plan_of(MODELS[0], Path(folder))
        return dict(zip(MODELS, pool.map(partial(needed, folder=Path(folder)), MODELS), strict=True))


if __name__ == "__main__":
    sys.exit(main())
