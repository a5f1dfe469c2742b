"""How often a page of --compare, and a verdict, are wrong: what their intervals promise, counted.

    python benchmarks/coverage.py pages             # simulated comparisons: false alarms and detections
    python benchmarks/coverage.py random            # the pocket SDXL with adapters of random numbers, and with idle ones
    python benchmarks/coverage.py demos             # its demo, which does learn

All by the program's own functions: `report/paired.py`, `monitoring/diagnosis.py`, `engine/held_out_loss.py`.
"""

from __future__ import annotations

import argparse
import math
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks import lessons  # noqa: E402
from tests.harness import built  # noqa: E402
from trainer.adapters.change import change  # noqa: E402
from trainer.config import Config  # noqa: E402
from trainer.engine.held_out_loss import HeldOutLoss  # noqa: E402
from trainer.monitoring.metrics import is_line, read_lines  # noqa: E402
from trainer.run.run import Run  # noqa: E402
from workbench.compare.paired import Pair, corrected, detectable  # noqa: E402
from workbench.pages.diagnosis import Verdict, judge  # noqa: E402

PAGES, SEEDS, VARIANTS = 4000, (2, 3, 5, 10), (2, 3, 5, 10)
HELD_OUT = 4  # photos of the pocket's 12
LARGE, IDLE = (
    0.05,
    0.005,
)  # ||dW|| / ||W|| of random adapters: large enough to be seen, and as small as in a run that does nothing
LOOKS = 8  # measurements of an idle run, beside that of its start

# What a run has of its own beside what its seed does: mean 0 and standard deviation 1, for the variants by turns. Those that
# are skewed are so to opposite sides, as the difference of two alike would not be. A tenth of the runs end in another basin.
OWN: dict[str, Callable[[random.Random, int], float]] = {
    "normal": lambda draw, variant: draw.gauss(0, 1),
    "skewed": lambda draw, variant: (draw.expovariate(1) - 1) * (-1) ** variant,
    "two basins": lambda draw, variant: ((draw.random() < 0.1) - 0.1) / 0.3,
}


def page(draw: random.Random, kind: str, seeds: int, variants: int, shift: float) -> list[Pair]:
    """A page of so many variants, of which the last is better by `shift` standard deviations of a difference."""
    shared = [draw.gauss(0, 5) for _ in range(seeds)]
    losses = []
    for variant in range(variants):
        better = shift * math.sqrt(2) * (variant == variants - 1)
        losses.append({seed: [(1, 50 + shared[seed] + OWN[kind](draw, variant) - better)] for seed in range(seeds)})
    names = [chr(ord("a") + variant) for variant in range(variants)]
    pairs = [
        Pair.of(names[one], names[other], losses[one], losses[other])
        for one in range(variants) for other in range(one + 1, variants)
    ]  # fmt: skip
    return corrected([pair for pair in pairs if pair])


def pages(count: int) -> Iterator[str]:
    """Rows: on how many pages of equal settings any two are told apart; where one variant differs by what one pair in five
    misses, on how many it is told apart from the first, and on how many others are, or with the wrong sign."""
    yield "| differences | seeds | variants | false alarms | one differs by | it is seen | others are, or the sign is wrong |"
    yield "|---|---|---|---|---|---|---|"
    for kind in OWN:
        for seeds in SEEDS:
            for variants in VARIANTS:
                draw, shift = random.Random(f"{kind} {seeds} {variants}"), detectable(seeds, math.comb(variants, 2))
                alarms = sum(any(pair.told_apart for pair in page(draw, kind, seeds, variants, 0.0)) for _ in range(count))
                seen = wrong = 0
                last = chr(ord("a") + variants - 1)
                for _ in range(count):
                    found = page(draw, kind, seeds, variants, shift)
                    told = [pair for pair in found if pair.told_apart]
                    seen += any(pair.second == last and pair.first == "a" for pair in told)
                    wrong += any(pair.second != last or pair.last.mean < 0 for pair in told)
                shares = f"{shift:.1f} | {seen / count:.0%} | {wrong / count:.1%}"
                yield f"| {kind} | {seeds} | {variants} | {alarms / count:.1%} | {shares} |"


def rows_of(measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A log of these measurements, the first that of the start."""
    first, *later = map(dict, measured)
    rows = [{"step": step, "images": step, "lr": 1e-3, "loss": 1.0, "grad_norm": 1.0} for step in range(1, len(later) + 1)]
    for row, fields in zip(rows, later, strict=True):
        row.update(fields)
    rows[0]["at_start"] = first
    return rows


def judged(measured: Sequence[Mapping[str, Any]]) -> Verdict:
    return judge(rows_of(measured), {"block": LARGE})


def random_adapters(count: int) -> Iterator[str]:
    """Rows: what `count` adapters of random numbers are called, and as many idle runs. An idle run is measured at its start
    and with LOOKS adapters, drawn of the small ones."""
    with TemporaryDirectory() as folder, built(_config(Path(folder))) as run:
        held_out = HeldOutLoss.of(run.plan, run.components, run.reader, run.state.evaluating)
        start, generator = held_out.measure(), torch.Generator().manual_seed(0)
        large, small = ([_measured(run, held_out, size, generator) for _ in range(count)] for size in (LARGE, IDLE))
    called = Counter(judged([start, each]).kind for each in large)
    draw = random.Random(0)
    idle = [judged([start, *draw.sample(small, LOOKS)]) for _ in range(count)]
    yield "| | runs | called |"
    yield "|---|---|---|"
    yield f"| random, {LARGE:.0%} of W, {HELD_OUT} photos | {count} | {_counted(called)} |"
    yield f"| idle, {IDLE:.1%} of W, {LOOKS} measurements | {count} | {_counted(Counter(each.kind for each in idle))} |"
    take = sum(each.kind == "worse" and each.step is not None for each in idle)
    yield f"| idle, 'worse' with a step to take | {count} | {take / count:.1%} |"


def _config(out: Path) -> Config:
    changes = {
        "data__held_out": HELD_OUT, "validation__loss_every_steps": 1, "adapter__type": "lora", "precision__compute": "fp32",
        "data__sources": [{"path": str(lessons.ICONS / "lessons")}],
    }  # fmt: skip
    return lessons.config("sdxl", 0, out / "run", out / "cache", changes=changes)


def _measured(run: Run, held_out: HeldOutLoss, size: float, generator: torch.Generator) -> Mapping[str, Any]:
    """The held-out loss with an adapter of random numbers, each layer's update `size` of its weight."""
    for parameter in run.adapter.named_parameters().values():
        parameter.data.normal_(generator=generator)
    run.adapter.mark_stale()
    for name, layer in run.adapter.layers.items():
        there = change(layer)
        run.adapter.named_parameters()[f"{name}.lora_B.weight"].data.mul_(size * there.size / there.moved)
    run.adapter.mark_stale()
    return held_out.measure()


def demos(seeds: int) -> Iterator[str]:
    """Rows: what the pocket SDXL's demo is called with each seed, where HELD_OUT of its icons are held out."""
    called = Counter()
    with TemporaryDirectory() as folder:
        for seed in range(seeds):
            given = [
                f"run.seed={seed}", f"run.output_dir={folder}/{seed}", f"data.cache_dir={folder}/cache",
                f"data.held_out={HELD_OUT}", "validation.loss_every_steps=30", "validation.every_steps=0",
                "checkpoint.every_steps=0", "logging.tensorboard=false",
            ]  # fmt: skip
            command = [sys.executable, "train.py", "--config", "pocket_sdxl.toml", "--set", *given]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
            rows = [row for row in read_lines(Path(folder, str(seed), "metrics.jsonl")) if is_line(row)]
            verdict = judge(rows, {"block": LARGE})
            assert verdict.sentence.partition(",")[0] in " ".join(done.stdout.split()), verdict.sentence
            called[verdict.kind] += 1
            print(f"seed {seed}: {verdict.sentence}", file=sys.stderr, flush=True)
    yield f"| the demo, {HELD_OUT} of 12 held out | {seeds} | {_counted(called)} |"


def _counted(called: Counter[str]) -> str:
    return ", ".join(f"{kind} {count / called.total():.1%}" for kind, count in called.most_common())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pages", "random", "demos"))
    parser.add_argument("--count", type=int, help="pages of each row (4,000), random adapters (200) or seeds (20)")
    chosen = parser.parse_args()
    rows, usual = {"pages": (pages, PAGES), "random": (random_adapters, 200), "demos": (demos, 20)}[chosen.what]
    for line in rows(chosen.count or usual):
        print(line, flush=True)


if __name__ == "__main__":
    main()
