"""Write docs/benchmarks/learning.md, its plots and its data from what benchmarks/learning.py measured.

    python benchmarks/learning_page.py outputs/learning        # or the file that --together names

Needs `pip install -e .[plots]`. Cells that were not measured are left out of the tables.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import pages  # noqa: E402
from benchmarks.cells import Results  # noqa: E402
from benchmarks.learning import BENCH, CELLS, FORMATS  # noqa: E402
from benchmarks.pages import COLOURS, band, picture, plot, share, table  # noqa: E402

KEPT = 0.9  # of fp32's fall: what a format has to keep to be recommended
WIDE = ("fp32", "fp16", "bf16")  # formats that quantise nothing
MOST = 0.9  # of the weights: what a format has to quantise for its row to speak of the whole model
EXAMS = 60
PAIRS = (("bf16-lora", "peft-lora"), ("stored-bf16", "peft-dora"))


def check(results: Results) -> None:
    """Raises ValueError for what cannot stand in one table: cells of a family that differ in their steps or their device."""
    for family in dict.fromkeys(path.partition("/")[0] for path in results):
        runs = [run for path, runs in results.items() if path.startswith(f"{family}/") for run in runs]
        for what, values in {
            "steps": {run["steps"] for run in runs},
            "device": {run["machine"]["device"] for run in runs},
        }.items():
            if len(values) > 1:
                told = " and ".join(map(str, sorted(values)))
                raise ValueError(f"results of {family} differ in {what}, {told}: measure them again in a folder of their own")


def falls(runs: Sequence[Mapping[str, Any]], what: str = "held_out") -> list[float]:
    """1 - last / first of every seed."""
    return [1 - run["last"][what] / run["first"][what] for run in runs]


def factors(results: Results, family: str) -> str:
    """Every cell of a family that is no storage format and no other trainer."""
    names = [c.name for c in CELLS if c.family == family and not c.peft]
    if family == "sdxl":  # its storage formats have a table of their own
        names = [name for name in names if not name.startswith("stored-")]
    rows = []
    for name in names:
        runs = results.get(f"{family}/{name}")
        if runs:
            forgotten = [-value for value in falls(runs, "forgetting")]
            rows.append([name, band(falls(runs)), band(forgotten), band([run["seconds"] for run in runs], "{:.0f}".format)])
    return table(["cell", "held-out loss falls by", "loss on known styles rises by", "seconds"], rows)


def kept(results: Results) -> dict[str, float]:
    """Storage format -> share of fp32's fall, of the means over the seeds."""
    if "sdxl/stored-fp32" not in results:
        return {}
    exact = mean(falls(results["sdxl/stored-fp32"]))
    named = {"fp8_e4m3": "sdxl/default"} | {name: f"sdxl/stored-{name}" for name in FORMATS}
    return {name: mean(falls(results[path])) / exact for name, path in named.items() if path in results}


def stored_share(results: Results, name: str) -> float:
    """Of the weights of Linears and convolutions, those that the format quantises. The others stay in 16 bits."""
    return results["sdxl/default" if name == "fp8_e4m3" else f"sdxl/stored-{name}"][0]["quantised"]


def formats(results: Results) -> str:
    rows = []
    for name, value in sorted(kept(results).items(), key=lambda item: -item[1]):
        path = "sdxl/default" if name == "fp8_e4m3" else f"sdxl/stored-{name}"
        quantised = share(stored_share(results, name)) if name not in WIDE else "-"
        rows.append([name, quantised, band(falls(results[path])), share(value), verdict(results, name, value)])
    titles = ["stored as", "of the weights", "held-out loss falls by", "of fp32's fall", f"at least {KEPT:.0%}"]
    return table(titles, rows)


def verdict(results: Results, name: str, value: float) -> str:
    """Whether enough is kept. A format that leaves most weights as they were is tried on the others alone."""
    if value < KEPT:
        return "no"
    return "yes" if name in WIDE or stored_share(results, name) >= MOST else "yes, of the Linears alone"


def drawn(results: Results) -> str:
    rows = []
    for path, runs in results.items():
        if "drawn" not in runs[0]:
            continue
        for space, name in (("pixels", "pixels"), ("features", "latents")):
            before = [mean(run["drawn"]["before"][space]) for run in runs]
            after = [mean(run["drawn"]["after"][space]) for run in runs]
            rows.append([
                path, name, band(before, "{:.3f}".format), band(after, "{:.3f}".format),
                band([nearer(run, space) for run in runs], "{:.0f}".format),
                band([own(run, space) for run in runs], "{:.0f}".format),
            ])  # fmt: skip
    titles = [
        "cell",
        "in",
        "distance before",
        "after",
        f"nearer than before, of {EXAMS}",
        f"nearer to its own truth, of {EXAMS}",
    ]
    return table(titles, rows)


def nearer(run: Mapping[str, Any], space: str) -> int:
    """How many icons are nearer to their truth than before the training."""
    return sum(a < b for a, b in zip(run["drawn"]["after"][space], run["drawn"]["before"][space], strict=True))


def own(run: Mapping[str, Any], space: str) -> int:
    """How many icons, after the training, are nearer to their own truth than to another subject's."""
    after = run["drawn"]["after"]
    return sum(a < b for a, b in zip(after[space], after[f"{space}_other"], strict=True))


def seconds_to(curve: Sequence[Sequence[float]], loss: float) -> float | None:
    """When a curve of (step, seconds, loss) first reaches `loss`, on straight lines between its points."""
    for (_, t0, l0), (_, t1, l1) in zip(curve, curve[1:], strict=False):
        if l1 <= loss:
            return t0 + (t1 - t0) * (l0 - loss) / (l0 - l1) if l0 > loss else t0
    return None


def peft(results: Results) -> str:
    """Ours beside the plain loop: at the same step, and when each reaches the plain loop's last loss."""
    rows = []
    for ours, theirs in PAIRS:
        if f"sdxl/{ours}" not in results or f"sdxl/{theirs}" not in results:
            continue
        seeds = {run["seed"]: run for run in results[f"sdxl/{theirs}"]}
        pairs = [(run, seeds[run["seed"]]) for run in results[f"sdxl/{ours}"] if run["seed"] in seeds]
        ratios = []
        for one, other in pairs:
            # 5 % above the last loss: a curve that ends a hair above it would otherwise never reach it.
            goal = other["curve"][-1][2] * 1.05
            first, second = seconds_to(one["curve"], goal), seconds_to(other["curve"], goal)
            if first is not None and second:
                ratios.append(first / second)
        rows.append([
            theirs.removeprefix("peft-").replace("lora", "LoRA").replace("dora", "DoRA"),
            band(falls([one for one, _ in pairs])), band(falls([other for _, other in pairs])),
            band(ratios, "{:.2f}".format) if len(ratios) == len(pairs) else "not reached",
        ])  # fmt: skip
    titles = ["adapter", "ours: held-out loss falls by", "diffusers + PEFT", "time to their last loss + 5 %, ours / theirs"]
    return table(titles, rows)


def times(results: Results) -> str:
    """FLUX.2's default distribution of times beside the other: when each reaches the worse one's mean last loss."""
    named = {"uniform": "flux2/default", "logit-normal, shifted by the resolution": "flux2/logit-normal"}
    if not set(named.values()) <= results.keys():
        return ""
    goal = max(mean(run["curve"][-1][2] for run in results[path]) for path in named.values())
    rows = []
    for name, path in named.items():
        by_step = [[(step, step, loss) for step, _, loss in run["curve"]] for run in results[path]]
        reached = [seconds_to(curve, goal) for curve in by_step]
        steps = [step for step in reached if step is not None]
        late = f" ({len(steps)} of {len(reached)} seeds)" if len(steps) < len(reached) else ""
        rows.append([name, band(falls(results[path])), (band(steps, "{:.0f}".format) if steps else "never") + late])
    return table(["times", "held-out loss falls by", f"steps to a held-out loss of {goal:.3f}"], rows)


# --- plots ------------------------------------------------------------------------------------------------------------


def curves(axes, results: Results, names: Mapping[str, str], place: int, label: str) -> None:
    """Held-out loss over steps (place 0) or seconds (1): the mean of the seeds, and a band from the least to the most."""
    for colour, (path, name) in zip(COLOURS, names.items(), strict=False):
        runs = results.get(path)
        if not runs:
            continue
        columns = list(zip(*(run["curve"] for run in runs), strict=True))
        xs = [mean(point[place] for point in column) for column in columns]
        ys = [[point[2] for point in column] for column in columns]
        axes.plot(xs, [mean(y) for y in ys], color=colour, label=name, linestyle="--" if "PEFT" in name else "-")
        axes.fill_between(xs, [min(y) for y in ys], [max(y) for y in ys], color=colour, alpha=0.2, linewidth=0)
    axes.set_xlabel(label)
    axes.set_ylabel("held-out loss")
    axes.legend()


def bars(axes, values: Mapping[str, float]) -> None:
    ordered = sorted(values.items(), key=lambda item: item[1])
    axes.barh([name for name, _ in ordered], [100 * value for _, value in ordered], color=COLOURS[0], height=0.65)
    axes.axvline(100 * KEPT, color=COLOURS[1], linewidth=1.5)
    axes.set_xlabel("share of fp32's fall of the held-out loss, %")


def plots(results: Results, folder: Path) -> list[str]:
    """Returns the names of what could be drawn."""
    folder.mkdir(parents=True, exist_ok=True)
    trainers = {
        "sdxl/bf16-lora": "LoRA", "sdxl/peft-lora": "LoRA, diffusers + PEFT",
        "sdxl/stored-bf16": "DoRA", "sdxl/peft-dora": "DoRA, diffusers + PEFT",
    }  # fmt: skip
    made = []
    if trainers.keys() <= results.keys():
        plot(folder / "steps", lambda axes: curves(axes, results, trainers, 0, "steps"))
        plot(folder / "seconds", lambda axes: curves(axes, results, trainers, 1, "seconds of training"))
        made += ["steps", "seconds"]
    if "sdxl/stored-fp32" in results:
        plot(folder / "formats", lambda axes: bars(axes, kept(results)))
        made.append("formats")
    ranks = {
        "sdxl/rank-4": "DoRA, rank 4",
        "sdxl/default": "DoRA, rank 16",
        "sdxl/rank-64": "DoRA, rank 64",
        "sdxl/lora": "LoRA, rank 16",
    }
    if ranks.keys() <= results.keys():
        plot(folder / "ranks", lambda axes: curves(axes, results, ranks, 0, "steps"))
        made.append("ranks")
    return made


def advice(values: Mapping[str, float]) -> str:
    poor = sorted(name for name, value in values.items() if value < KEPT)
    if not poor:
        return "Every format keeps that."
    return f"We advise against {', '.join(f'`{name}`' for name in poor)} where learning matters more than memory."


def write(results: Results, docs: Path) -> Path:
    """Raises ValueError where results cannot stand in one table."""
    check(results)
    runs = [run for runs in results.values() for run in runs]
    steps = sorted({run["steps"] for run in runs})
    made = plots(results, docs / "benchmarks" / "learning")
    most = max(map(len, results.values()))
    but = "".join(f", but {path} with {len(runs)}" for path, runs in results.items() if len(runs) < most)
    return pages.write(
        "learning",
        results,
        docs,
        steps=" or ".join(map(str, steps)),
        seeds=f"Each cell was trained with {most} seeds{but}.",
        exams=EXAMS,
        factors_sdxl=factors(results, "sdxl"),
        factors_flux=factors(results, "flux"),
        factors_flux2=factors(results, "flux2"),
        times=times(results),
        nf4=f" nf4 stores {share(nf4[0]['quantised'])} of the weights." if (nf4 := results.get("flux/stored-nf4")) else "",
        ranks=picture("learning/ranks", "held-out loss over steps, by rank") if "ranks" in made else "",
        kept_share=f"{KEPT:.0%}",
        advice=advice(kept(results)),
        formats=formats(results),
        formats_plot=picture("learning/formats", "share of fp32's fall, by storage format") if "formats" in made else "",
        peft=peft(results),
        trainers_plot="\n".join(
            picture(f"learning/{n}", f"held-out loss over {n}, by trainer") for n in ("steps", "seconds") if n in made
        ),
        drawn=drawn(results),
    )


if __name__ == "__main__":
    sys.exit(pages.main(__doc__, BENCH, write))
