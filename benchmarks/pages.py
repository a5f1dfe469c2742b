"""Pages that are written from what benchmarks/cells.py measured: tables, plots, words, and templates/ for the rest."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.cells import Bench, Results
from workbench.pages.rendering import environment

ROOT = Path(__file__).resolve().parents[1]
LIGHT = {"face": "#ffffff", "ink": "#1f2328", "grid": "#d8dee4"}
DARK = {"face": "#0d1117", "ink": "#e6edf3", "grid": "#30363d"}
COLOURS = ("#3b82f6", "#f97316", "#10b981", "#a855f7", "#ef4444", "#64748b")


def share(value: float) -> str:
    return f"{100 * value:.1f} %"


def band(values: Sequence[float], text: Callable[[float], str] = share) -> str:
    """The mean, and in brackets the smallest and the largest."""
    if len(values) == 1:
        return text(values[0])
    return f"{text(mean(values))} ({text(min(values)).removesuffix(' %')} to {text(max(values)).removesuffix(' %')})"


def table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown."""
    head, *lines = (f"| {' | '.join(map(str, line))} |" for line in (titles, *rows))
    return "\n".join([head, "|" + "---|" * len(titles), *lines])


def keep(name: str, results: Results, docs: Path) -> str:
    """Write the results beside the pages. Returns the file's name."""
    machines = _machines(results)
    kind = "CPU" if all(machine["device"].startswith("CPU") for machine in machines) else "GPU"
    file = f"{name}-{kind}-{max(machine['date'] for machine in machines)}.json"
    (docs / "benchmarks" / file).write_text(json.dumps(results, separators=(",", ":")) + "\n")
    return file


def write(name: str, results: Results, docs: Path, **values: Any) -> Path:
    """Write docs/benchmarks/NAME.md from its template, and the results beside it."""
    values |= {"measured_on": measured_on(results), "data": keep(name, results, docs)}
    page = docs / "benchmarks" / f"{name}.md"
    page.write_text(environment(ROOT / "benchmarks" / "templates").get_template(page.name).render(values), encoding="utf-8")
    return page


def main(about: str, bench: Bench, write: Callable[[Results, Path], Path], arguments: Sequence[str] | None = None) -> int:
    """The command line of a page. write: (results, the folder of the pages); raises ValueError for results that cannot stand
    in one table."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help=f"the --out of benchmarks/{bench.script.name}, or its --together")
    asked = parser.parse_args(arguments)
    results = json.loads(asked.folder.read_text()) if asked.folder.is_file() else bench.read(asked.folder)
    try:
        print(write(results, ROOT / "docs"))
    except ValueError as error:
        parser.error(str(error))
    return 0


def measured_on(results: Results) -> str:
    """When, on what, with which versions: "on ... on ..., with ..."."""
    machines = _machines(results)
    days = sorted({machine["date"] for machine in machines})
    devices = list(dict.fromkeys(f"{m['device']}, {m['threads']} threads" for m in machines))
    versions = dict.fromkeys(f"{name} {number}" for m in machines for name, number in m["versions"].items())
    return f"on {' and '.join(days)} on {'; '.join(devices)}, with {', '.join(versions)}"


def _machines(results: Results) -> list[dict[str, Any]]:
    return [run["machine"] for runs in results.values() for run in runs]


def plot(path: Path, draw: Callable[[Any], object], height: float = 3.8) -> None:
    """draw(axes) twice: PATH-light.png and PATH-dark.png. height: inches, of 7.2 in width."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for name, theme in (("light", LIGHT), ("dark", DARK)):
        colours = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), theme["ink"])
        colours |= dict.fromkeys(("figure.facecolor", "axes.facecolor", "legend.facecolor"), theme["face"])
        colours |= {"axes.edgecolor": theme["grid"], "grid.color": theme["grid"], "legend.edgecolor": theme["grid"]}
        with pyplot.rc_context(colours | {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
            figure, axes = pyplot.subplots(figsize=(7.2, height), layout="constrained")
            axes.grid(True, linewidth=0.6)
            axes.set_axisbelow(True)
            draw(axes)
            figure.savefig(path.with_name(f"{path.name}-{name}.png"), dpi=110)
            pyplot.close(figure)


def picture(name: str, words: str) -> str:
    """name: as of `plot`, from the page's folder."""
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{name}-dark.png">'
        f'<img src="{name}-light.png" alt="{words}" width="720"></picture>\n'
    )
