"""Write docs/benchmarks/craft.md, its plot and its data from what benchmarks/craft.py measured.

    python benchmarks/craft_page.py outputs/craft        # or the file that --together names

Needs `pip install -e .[plots]`. Cells that were not measured are named as such.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import pages  # noqa: E402
from benchmarks.cells import Result, Results  # noqa: E402
from benchmarks.craft import BENCH, CHOICES, DEFAULT, Choice  # noqa: E402

# Of Student's t: what 95 % of the values lie below in size, by the degrees of freedom from 1 on.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
HEADINGS = {
    "optimizer": "Optimizers",
    "rates": "Rates of parts",
    "schedule": "Schedules",
    "objective": "Objectives",
    "adapter": "Averages and adapter options",
}


def pairs(results: Results, choice: Choice) -> list[tuple[Result, Result]]:
    """(the cell, what it is compared with) of every seed that both were trained with."""
    default = {run["seed"]: run for run in results.get(choice.against, [])}
    return [(run, default[run["seed"]]) for run in results.get(choice.path, []) if run["seed"] in default]


def differences(of_pairs: Sequence[tuple[Result, Result]], what: str = "draws") -> list[float]:
    """Of each seed: how much higher the cell's loss is than the default's, as a share of the default's."""

    def loss(run: Result) -> float:
        return mean(run["draws"]) if what == "draws" else run[what]

    return [loss(run) / loss(default) - 1 for run, default in of_pairs]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the mean, by Student's t. Of one value there is none: it may be anything."""
    if len(values) < 2:
        return -math.inf, math.inf
    half = STUDENT[len(values) - 2] * stdev(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


def noise_of_draws(run: Result, default: Result) -> float:
    """The standard error of a seed's difference that is due to the exam's draws: other draws would move it by so much."""
    moved = [one - other for one, other in zip(run["draws"], default["draws"], strict=True)]
    return stdev(moved) / math.sqrt(len(moved)) / mean(default["draws"])


def verdict(values: Sequence[float]) -> str:
    low, high = interval(values)
    if len(values) == 1:
        return "one seed"
    if not any(values):
        return "equal"
    return "lower" if high < 0 else "higher" if low > 0 else "not told apart"


def signed(value: float) -> str:
    return f"{100 * value:+.1f} %"


def ratio(runs: Sequence[Result]) -> float | None:
    """Of a step's time over the default's: the median over the turns."""
    turns = [own / other for run in runs for own, other in run["turns"]]
    return median(turns) if turns else None


def keys(choice: Choice) -> str:
    """The config keys as --set takes them, without what only the size of the model asks for."""
    told = []
    for key, value in choice.changes.items():
        named = value if isinstance(value, dict) else {}
        told += [f"{key}.{leaf} = {json.dumps(its)}" for leaf, its in named.items()] or [
            f"{key} = {json.dumps(value)}" if value != {} else f"no [{key}]"
        ]
    return "; ".join(f"`{each.replace('__', '.')}`" for each in told)


def row(results: Results, choice: Choice) -> list[str]:
    runs, of_pairs = results.get(choice.path, []), pairs(results, choice)
    name = choice.name if choice.against == DEFAULT.path else f"{choice.name}, against {choice.against}"
    if not of_pairs:
        return [name, keys(choice), "not measured", "", "", "", ""]
    values = differences(of_pairs)
    low, high = interval(values)
    band = f" ({signed(low).removesuffix(' %')} to {signed(high).removesuffix(' %')})" if len(values) > 1 else ""
    cost = ratio(runs)
    return [
        name,
        keys(choice),
        signed(mean(values)) + band,
        verdict(values),
        signed(mean(differences(of_pairs, "forgetting"))),
        f"{cost:.2f}" if cost is not None else "not measured",
        f"{runs[0]['state_bytes'] / runs[0]['parameters']:.1f}",
    ]


TITLES = ["choice", "what is set", "held-out loss (95 % band)", "", "loss on known styles", "step", "state, B / parameter"]


def tables(results: Results) -> str:
    parts = []
    for kind, heading in HEADINGS.items():
        rows = [row(results, choice) for choice in CHOICES if choice.kind == kind]
        if rows:
            parts.append(f"## {heading}\n\n{pages.table(TITLES, rows)}\n")
    return "\n".join(parts)


def dots(axes: Any, results: Results) -> None:
    """Every choice's difference: a point for each seed, and the band where there are several."""
    shown = [choice for choice in CHOICES if choice is not DEFAULT and pairs(results, choice)]
    colours = dict(zip(HEADINGS, pages.COLOURS, strict=False))
    for place, choice in enumerate(reversed(shown)):
        values = [100 * value for value in differences(pairs(results, choice))]
        colour = colours[choice.kind]
        if len(values) > 1:
            axes.plot(interval(values), [place, place], color=colour, linewidth=4, alpha=0.4, solid_capstyle="butt")
        axes.plot(values, [place] * len(values), "o", color=colour, markersize=3.5)
    axes.axvline(0, color=pages.COLOURS[-1], linewidth=1.2)
    axes.set_yticks(range(len(shown)), [choice.name for choice in reversed(shown)])
    axes.set_xlim(*reach(results, shown))
    axes.set_xlabel("held-out loss against the default, %  (left is better)")


def reach(results: Results, shown: Sequence[Choice]) -> tuple[float, float]:
    """Percent that hold every seed; a band that is wider, of seeds that disagree, leaves the plot."""
    values = [100 * value for choice in shown for value in differences(pairs(results, choice))]
    room = 0.1 * (max(values) - min(values)) + 2
    return min(values) - room, max(values) + room


def figures(results: Results) -> dict[str, str]:
    """By a choice's name, with _ for -: its difference in words."""
    told = {}
    for choice in CHOICES:
        of_pairs = pairs(results, choice)
        seeds = f"{len(of_pairs)} seed{'s' * (len(of_pairs) > 1)}"
        told[choice.name.replace("-", "_")] = (
            f"{signed(mean(differences(of_pairs)))}, {seeds}" if of_pairs else "not measured"
        )
    return told


def write(results: Results, docs: Path) -> Path:
    """Raises ValueError where results cannot stand in one table."""
    runs = [run for runs in results.values() for run in runs]
    default = results[DEFAULT.path]
    steps = {run["steps"] for run in runs}
    counts = {len(run["draws"]) for run in runs}
    if len(steps) > 1 or len(counts) > 1:
        raise ValueError("results differ in steps or draws: measure them again in a folder of their own")
    folder = docs / "benchmarks" / "craft"
    folder.mkdir(parents=True, exist_ok=True)
    measured = [choice for choice in CHOICES if pairs(results, choice)]
    pages.plot(folder / "choices", lambda axes: dots(axes, results), height=1.2 + 0.24 * len(measured))
    seeds = {choice.name: len(results[choice.path]) for choice in CHOICES if choice.path in results}
    most = max(seeds.values())
    fewer = {count: [name for name, its in seeds.items() if its == count] for count in range(most - 1, 0, -1)}
    but = "; ".join(f"{', '.join(names)} with {count}" for count, names in fewer.items() if names)
    but = f", but {but}: these tell little yet, and the same command measures the rest" if but else ""
    noises = [noise_of_draws(*pair) for choice in measured if choice is not DEFAULT for pair in pairs(results, choice)]
    control = ratio(default)
    taken = sorted({len(run["turns"]) for run in runs if run["turns"]})
    turns = " to ".join(dict.fromkeys([str(taken[0]), str(taken[-1])])) if taken else "no"
    return pages.write(
        "craft",
        results,
        docs,
        steps=steps.pop(),
        draws=counts.pop(),
        seeds=f"Each choice was trained with {most} seeds{but}.",
        exams=60,
        noise=pages.share(median(noises)) if noises else "an unknown share",
        forgotten=f"{mean(run['forgetting'] / run['forgetting_before'] for run in default):.0f}",
        turns=turns,
        control="not measured" if control is None else f"{control:.2f}",
        own=f"{default[0]['state_bytes'] / default[0]['parameters']:.1f}",
        plot=pages.picture("craft/choices", "held-out loss against the default, by choice, with bands"),
        tables=tables(results),
        **figures(results),
    )


if __name__ == "__main__":
    sys.exit(pages.main(__doc__, BENCH, write))
