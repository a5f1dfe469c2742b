"""The tables of docs/memory_tables.md: what the presets need and take on their cards; and what runs need, by family, dtype,
adapter, resolution and batch, and which cards have that.

    python scripts/memory_table.py --processes 2
    python scripts/memory_table.py --presets --processes 2
    python scripts/memory_table.py --readme

It plans every cell at the published sizes, for a GPU, and writes the tables between the markers of docs/memory_tables.md, and
the README's table of cards from that of the presets, which are what `train.py --new` begins with. It reads no weights and
needs no GPU. It takes 15 minutes of one core, which --processes shares out. --presets writes the presets' table and the
README's, in 10 minutes. --readme plans nothing: it writes the README's table from the one that stands in
docs/memory_tables.md.
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
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from workbench.hub import hub
from workbench.planning.describe import band, step_seconds
from workbench.planning.dry_run import without_values
from workbench.planning.estimate import SHARE, STEP, Forecast, Forecaster, forecast
from workbench.planning.remedies import REMEDIES
from workbench.planning.step_time import Range, on_card
from workbench.planning.suggestions import with_keys

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT, README = ROOT / "docs" / "memory_tables.md", ROOT / "README.md"
BEGIN, END = "<!-- scripts/memory_table.py writes from here -->\n", "<!-- to here -->\n"
BEGIN_PRESETS = "<!-- scripts/memory_table.py --presets writes from here -->\n"
PRESETS = tuple(sorted(path.stem for path in (ROOT / "configs").glob("*_*gb.toml")))
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


def photos_in(folder: Path, side: int) -> Path:
    """A folder in it of captioned photos of that size."""
    photos = folder / f"photos-{side}"
    if not photos.exists():
        photos.mkdir(parents=True)
        for number in range(CAPTIONS):
            Image.new("RGB", (side, side)).save(photos / f"{number:02}.png")
            (photos / f"{number:02}.txt").write_text(f"photo {number}")
    return photos


def plan_of(model: Model, folder: Path) -> RunPlan:
    """All other keys have their defaults. folder: for the photos."""
    photos = photos_in(folder, 512)
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
    source = open_source(config, hub)
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


# --- presets ----------------------------------------------------------------------------------------------------------

NAMES = {
    "sdxl": "SDXL", "flux": "Flux", "flux2": "FLUX.2 klein 4B", "flux3": "FLUX.3 klein", "zimage": "Z-Image",
    "bf16": "bf16", "fp8_e4m3": "float8", "nf4": "4-bit",
}  # fmt: skip
# By whose time the ways of a preset are ordered, for a card of so many GiB: of step_time.CARDS those that come nearest. And
# seconds of a bare operator of the host beside it: benchmarks/host_time.py has 1.0 to 1.2 us.
STANDING_FOR = {24: "NVIDIA GeForce RTX 4090", 80: "NVIDIA H100 80GB HBM3"}
ELSE, OPERATOR = "NVIDIA GeForce RTX 3090", 1.1e-6
# The cards whose time is shown, by the GiB of the preset that --new takes there: a 5090 has 32 GB.
SHOWN = {
    8: ("GeForce RTX 4060",), 10: ("GeForce RTX 3080",), 12: ("GeForce RTX 3060", "GeForce RTX 4070"),
    16: ("GeForce RTX 4080",), 24: ("GeForce RTX 3090", "GeForce RTX 4090", "GeForce RTX 5090"), 80: ("H100 80GB HBM3",),
}  # fmt: skip
RECOMPUTED = {
    False: "nothing", 4: "every fourth block", 3: "every third block", 2: "every second block",
    "selective": "all but attention", True: "all",
}  # fmt: skip


@dataclass(frozen=True)
class Way:
    """A way for a preset to make its steps. recomputed: memory.gradient_checkpointing. share: of the card, what the run
    needs. seconds: of a step, from and to, on the card by which ways are ordered. own: whether the preset recomputes so.
    streamed: how many blocks, of how many; "" of none. shown: seconds of a step by card."""

    recomputed: bool | int | str
    graphs: bool
    share: float
    seconds: Range
    own: bool
    streamed: str = ""
    shown: Mapping[str, Range] = field(default_factory=dict)

    def fits(self, card: int) -> bool:
        """With 5 % to spare, of 8 GB 15 %; with graphs at all, as the steps are eager where they find no room."""
        return self.share <= (1 if self.graphs else 0.85 if card == 8 else 0.95)

    def __str__(self) -> str:
        return f"{RECOMPUTED[self.recomputed]}{', graphs' * self.graphs}"


def gib(preset: str) -> int:
    """Of the card that it is for."""
    return int(preset.rpartition("_")[2].removesuffix("gb"))


def step_on(card: str, plan: RunPlan, needs: Forecast, graphs: bool) -> Range:
    """Seconds of a step, from and to. By CUDA graphs no time of the host is in them."""
    machine = on_card(f"NVIDIA {card}", OPERATOR)
    assert machine is not None
    if not graphs:
        return step_seconds(plan, needs, machine)
    step = next(phase for phase in needs.phases if phase.name.startswith(STEP))
    batches = plan.config.step.accumulation
    ends = (
        batches * end.device_seconds(step.cost, 1) + end.device_seconds(step.once, 1) for end in (machine.best, machine.worst)
    )
    return next(ends), next(ends)


def ways(preset: str, folder: Path) -> list[Way]:
    """All ways of a preset, the fastest first by the middle of its band. folder: for the photos."""
    config = configs.load(f"{preset}.toml", [f"data.sources.0.path={str(photos_in(folder, 1024))!r}"])
    source, own = open_source(config, hub), config.memory.gradient_checkpointing
    plan, found = make_plan(resolve(config, source), source, processes=1), []
    for keys in REMEDIES[0].levels(plan):
        needs, (recomputed,) = forecast(with_keys(plan, keys), kernels.planned("auto")), keys.values()
        blocks = needs.streaming and len(needs.streaming.blocks)
        streamed = f"{blocks - needs.streaming.resident} of {blocks}" if blocks and needs.streaming else ""
        for graphs in (True, False)[not needs.graphs :]:
            size = needs.total + graphs * int((1 + SHARE) * needs.graphs)
            time = partial(step_on, plan=plan, needs=needs, graphs=graphs)
            order = STANDING_FOR.get(gib(preset), ELSE).removeprefix("NVIDIA ")
            shown = {card: time(card) for card in SHOWN[gib(preset)]}
            share = size / (gib(preset) * 2**30)
            found.append(Way(recomputed, graphs, share, time(order), recomputed == own, streamed, shown))
    return sorted(found, key=lambda way: sum(way.seconds))


def chosen(preset: str, found: Iterable[Way]) -> tuple[Way, Way | None]:
    """(the fastest that fits its card, what would be next faster; None: nothing)."""
    faster = None
    for way in found:
        if way.fits(gib(preset)):
            return way, faster
        faster = way
    raise ValueError(f"{preset}: nothing fits")


COLUMNS_OF_PRESETS = (
    "preset", "base", "photos in a micro-batch", "recomputed, and whether by graphs", "GiB", "of the card",
    "a step, *estimated*", "next faster, of the card",
)  # fmt: skip


def preset_row(preset: str, folder: Path) -> str:
    """A row of Markdown. Raises ValueError for a preset that chooses another way."""
    way, faster = chosen(preset, ways(preset, folder))
    if not way.own:
        raise ValueError(f"{preset}: its plan allows a faster one: {way}, {way.share:.3f} of the card")
    beyond = f"{faster}: {faster.share:.3f}" if faster else ""
    times = "; ".join(f"{short(card)}: {band(*seconds)}" for card, seconds in way.shown.items())
    needed = f"{way.share * gib(preset):.1f}"
    cells = (f"`{preset}`", *own_cells(preset, way.streamed), str(way), needed, f"{way.share:.3f}", f"*{times}*", beyond)
    return f"| {' | '.join(cells)} |"


def own_cells(preset: str, streamed: str) -> tuple[str, str]:
    """Of its row, what its file says: the base, and photos in a micro-batch. streamed: as in Way."""
    config = configs.load(f"{preset}.toml", [])
    dtype = config.model.components[FAMILIES[config.model.family].denoiser].dtype
    base = f"{NAMES[str(dtype)]}{f', {streamed} blocks streamed' * bool(streamed)}"
    return base, str(config.data.batch_size)


def short(card: str) -> str:
    """RTX 4090, H100."""
    return card.removeprefix("GeForce ").partition(" 80GB")[0]


def preset_table(rows: Iterable[str]) -> Iterator[str]:
    """Lines of Markdown."""
    yield f"| {' | '.join(COLUMNS_OF_PRESETS)} |"
    yield "|---" * len(COLUMNS_OF_PRESETS) + "|"
    yield from rows
    yield ""


def readme_table(document: str) -> Iterator[str]:
    """Lines of Markdown, from the table of presets in docs/memory_tables.md (its whole text is `document`): by model and card
    what `--new` writes there."""
    table = document.partition(BEGIN_PRESETS)[2].partition(END)[0]
    rows = {cells[1].strip("`"): cells for line in table.splitlines() if len(cells := re.split(r"\s*\|\s*", line)) > 3}
    yield "| model | card | base | recomputed | needs | a step, *estimated* |"
    yield "|---|---|---|---|---|---|"
    for family in FAMILIES:
        for card in sorted(SHOWN):
            _, _, base, _, way, size, _, times, *_ = rows[f"{family}_{card}gb"]
            recomputed, times = way.partition(", graphs")[0], times.replace("; ", "<br>")
            yield f"| {NAMES[family]} | {card} GB | {base} | {recomputed} | {size} GiB | {times} |"


def between(text: str, lines: Iterable[str], begin: str = BEGIN) -> str:
    """`text` with `lines` between two markers, the first of which is `begin`."""
    before, _, rest = text.partition(begin)
    return before + begin + "\n" + "\n".join(lines) + "\n" + END + rest.partition(END)[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--readme", action="store_true")
    parser.add_argument("--presets", action="store_true")
    given = parser.parse_args()
    if given.presets:
        with shared_out(given.processes) as (folder, pool):
            photos_in(folder, 1024)
            rows = [*pool.map(partial(preset_row, folder=folder), PRESETS)]
        DOCUMENT.write_text(between(DOCUMENT.read_text(), preset_table(rows), BEGIN_PRESETS))
    elif not given.readme:
        DOCUMENT.write_text(between(DOCUMENT.read_text(), tables(planned(given.processes))))
    README.write_text(between(README.read_text(), (*readme_table(DOCUMENT.read_text()), "")))
    return 0


@contextmanager
def shared_out(processes: int) -> Iterator[tuple[Path, ProcessPoolExecutor]]:
    """(a folder, processes that plan)."""
    with (
        tempfile.TemporaryDirectory(prefix="memory-table-") as folder,
        ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool,
    ):
        yield Path(folder), pool


def planned(processes: int) -> Needed:
    """What every cell needs."""
    with shared_out(processes) as (folder, pool):
        plan_of(MODELS[0], folder)
        return dict(zip(MODELS, pool.map(partial(needed, folder=folder), MODELS), strict=True))


if __name__ == "__main__":
    sys.exit(main())
