"""The held-out loss of the runs of a comparison beside that of their mean at several ranks: the pictures of docs/average.md.

    python train.py --compare compare_dora_lora.toml
    python benchmarks/averages.py outputs/dora-lora [--ranks 4 8 16 32 80]

Prints a row for each variant: the loss without an adapter, that of each seed, and of their mean at each rank, with what
the rank loses of the mean's change of the weights. Writes docs/pictures/average-light.png and -dark.png, and the numbers into
docs/benchmarks/. Needs `pip install -e .[plots]`.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import pages  # noqa: E402
from trainer import config as configs  # noqa: E402
from trainer.base.progress import Phases  # noqa: E402
from trainer.base.run_layout import Layout  # noqa: E402
from workbench.adapter_files.opening import models_at, open_adapter  # noqa: E402
from workbench.adapters.average import Averaged, average  # noqa: E402
from workbench.adapters.base_weights import BaseWeights  # noqa: E402
from workbench.adapters.measured import HeldOutLosses, plan_losses  # noqa: E402

RANKS = (4, 8, 16, 32, 80)


def measured(folders: Sequence[Path], ranks: Sequence[int], phases: Phases) -> dict[str, Any]:
    """The losses of a variant's runs, of its model alone and of the runs' mean. lost: by a rank, as a share of the change."""
    config = configs.load(str(Layout(folders[0]).config), [])
    models = models_at(config.model.path)
    opened = [open_adapter(Layout(folder).adapters / f"{folder.name}.safetensors", models) for folder in folders]
    adapters = [Averaged(each.path, each.model, each.portable, 1 / len(opened)) for each in opened]
    losses = HeldOutLosses(*plan_losses(config, adapters, max(ranks), phases), adapters, phases)
    found = {
        "without": losses.of(None)["held_out_loss"],
        "seeds": [losses.of(each.portable)["held_out_loss"] for each in adapters],
        "means": [],
    }
    with TemporaryDirectory() as folder:
        for rank in ranks:
            out = Path(folder) / f"{rank}.safetensors"
            made = average(adapters, out, rank, weight=BaseWeights(models[0].source).weight, phases=phases)
            loss = losses.of(made.portable)["held_out_loss"]
            found["means"].append({"rank": rank, "loss": loss, "lost": made.loss.share})
    return found


def table(results: Mapping[str, Any]) -> str:
    """A row for each variant."""
    ranks = [each["rank"] for each in next(iter(results.values()))["means"]]
    rows = []
    for name, found in results.items():
        seeds = f"{mean(found['seeds']):.4f} ({min(found['seeds']):.4f} to {max(found['seeds']):.4f})"
        means = [f"{each['loss']:.4f} ({each['lost']:.1%} lost)".replace("%", " %") for each in found["means"]]
        rows.append([name, f"{found['without']:.4f}", seeds, *means])
    return pages.table(["runs", "no adapter", "the seeds", *(f"mean, rank {rank}" for rank in ranks)], rows)


def draw(axes: Any, results: Mapping[str, Any]) -> None:
    """Of each variant the seeds as points, at the left, the best of them as a line, and the mean over its rank."""
    for colour, (name, found) in zip(pages.COLOURS, results.items(), strict=False):
        ranks, losses = zip(*((each["rank"], each["loss"]) for each in found["means"]), strict=True)
        beside = min(ranks) / 2
        axes.plot([beside] * len(found["seeds"]), found["seeds"], "x", color=colour, label=f"{name}: each seed")
        axes.axhline(min(found["seeds"]), color=colour, linestyle=":", linewidth=1.2, label=f"{name}: best seed")
        axes.plot(ranks, losses, "o-", color=colour, label=f"{name}: mean of {len(found['seeds'])} seeds")
        axes.set_xscale("log", base=2)
        axes.set_xticks([beside, *ranks], ["each", *map(str, ranks)])
    axes.minorticks_off()
    axes.set_xlabel("each seed, and the rank of their mean")
    axes.set_ylabel("held-out loss")
    axes.legend(ncols=len(results), loc="upper right")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the output_dir of a comparison whose runs are finished")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, metavar="R")
    chosen = parser.parse_args(arguments)
    runs: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(chosen.folder.glob("*-*-*/config.toml")):
        runs[path.parent.name.rsplit("-", 2)[0]].append(path.parent)
    phases, docs, day = Phases(show=True), ROOT / "docs", date.today().isoformat()
    results = {name: measured(folders, chosen.ranks, phases) for name, folders in runs.items()}
    print(table(results))
    pages.plot(docs / "pictures" / "average", lambda axes: draw(axes, results))
    machine = {"device": f"CPU, {platform.machine()}", "threads": torch.get_num_threads(), "torch": torch.__version__}
    kept = docs / "benchmarks" / f"averages-CPU-{day}.json"
    kept.write_text(json.dumps({"machine": machine, "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
