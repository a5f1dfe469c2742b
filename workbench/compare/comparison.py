"""Trains the runs of a comparison one after the other, and writes the page that judges them in pairs.

A run's folder is named by the digest of everything that decides its bytes: a finished run is not repeated, a stopped one
resumes, and one whose photos, model, config or program changed is trained anew in a folder beside it.
"""

import csv
import gc
import hashlib
import io
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import combinations
from pathlib import Path
from typing import Any

from trainer import __version__
from trainer import config as configs
from trainer.artifacts.ports import Ports
from trainer.base.console import LIVE, printable, write
from trainer.base.digests import FileDigests
from trainer.base.errors import Interrupted, NonFiniteError, UserError
from trainer.base.files import json_bytes, make_folder, write_atomic
from trainer.base.memory import give_back
from trainer.base.progress import Phases
from trainer.base.run_layout import Layout
from trainer.config import Config
from trainer.data import identity
from trainer.plan.run_plan import RunPlan, fetched
from trainer.resume import pins
from trainer.resume.initial_adapter import open_start
from trainer.run.session import Session
from workbench.adapter_files.start import read_start
from workbench.compare.page import RunFiles, compare, group_runs, not_judged, pairs_of, read_run, record, without_samples
from workbench.compare.paired import before_the_runs
from workbench.compare.variations import Variation, Variations
from workbench.hub import hub
from workbench.sources import LAYOUTS

# Keys that do not change a run's bytes: places, reports and files that are kept. run.name is the folder's.
NO_OTHER_RUN = (
    "run.name", "run.output_dir", "run.lost_after", "model.cache_dir", "data.cache", "data.cache_dir", "data.cache_limit",
    "data.num_workers", "logging.*", "export.*", "checkpoint.*",
)  # fmt: skip
PAGE, COLUMNS = "comparison.html", "first second seed step held_out_loss difference mean low high seconds peak_bytes"


def read(run: Variation) -> RunFiles:
    """Read a run's files."""
    return replace(read_run(run.folder.name, Layout(run.folder)), variant=run.variant)


def result(run: Variation) -> str:
    """A run's result: "finished", "not finite", or "" if it has to be trained."""
    if not run.folder.exists():
        return ""
    state = read(run).state(time.time())
    return "finished" if state.kind == "finished" else "not finite" if not state.finite else ""


def compare_all(variations: Variations, train: Callable[[Config], bool], *, only_plan: bool = False) -> None:
    """Train the missing runs of a comparison, and write its page; or print the command of each run. train: trains or resumes
    a run. Raises whatever `train` raises, and UserError, before a weight is read, for runs that cannot be compared."""
    LIVE.json = variations.runs[0].config.logging.json
    if (count := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise UserError(
            f"--compare trains one run after the other in one process, and WORLD_SIZE is {count}; start --compare alone, or "
            "each run by its own command, which --compare FILE --plan prints"
        )
    runs = planned(variations)
    if only_plan:
        for run in runs:
            # A command that trains the run alone, on any machine.
            command = ["python", "train.py", "--config", variations.base, "--set", *run.overrides, "--resume_from", "auto"]
            line = shlex.join(map(printable, command))
            write(f"# {run.variant}, seed {run.seed}: {result(run) or 'to be trained'}\n{line}", whole=True)
        return
    make_folder(Path(variations.output_dir), "output_dir")
    write_page(variations, runs)
    write(_power(variations))
    if lack := without_samples([configs.flatten(configs.tree(run.config)) for run in runs]):
        write(lack)
    for number, run in enumerate(runs, 1):
        name = f"run {number} of {len(runs)}: {run.variant}, seed {run.seed}"
        if state := result(run):
            write(f"{name}: {state} already ({run.folder})")
            continue
        write(f"{name}: {run.folder}", whole=True)
        try:
            train(run.config)
        except NonFiniteError as error:
            write(f"{name}: ended: {error}")  # a result of this variant
        except Interrupted as error:
            raise Interrupted(error.signum, f"{error.state} ({name})", "the same command goes on") from None
        finally:
            gc.collect()
            give_back()
        write_page(variations, runs)
    page, groups = write_page(variations, runs), group_runs(list(map(read, runs)))
    pairs, reasons = pairs_of(groups), not_judged(groups)
    for pair in pairs:
        write(f"{pair.sentence()}\n  {pair.errors()}", whole=True)
    nothing = "nothing can be compared: no two variants have a held-out loss of two common seeds"
    for sentence in reasons or ([] if pairs else [nothing]):
        write(sentence)
    write(f"comparison: {page}")


def write_page(variations: Variations, runs: Sequence[Variation]) -> Path:
    """Write the page of the runs so far, and its data as JSON and CSV beside it; returns its path."""
    page = Path(variations.output_dir) / PAGE
    files = list({run.folder: read(run) for run in runs if run.folder.exists()}.values())
    data = record(files, pairs_of(group_runs(files)))
    write_atomic(page.with_suffix(".json"), [json_bytes(data)])
    write_atomic(page.with_suffix(".csv"), [_csv(data).encode()])
    write_atomic(page, [compare(files, {}, power=_power(variations)).encode()])
    return page


def _power(variations: Variations) -> str:
    lengths = {run.variant: (run.config.run.max_steps, run.config.run.epochs) for run in variations.runs}
    # Variants of different lengths are judged at their ends, too.
    pairs = sum(1 + (one != other) for one, other in combinations(lengths.values(), 2))
    return before_the_runs(len({run.seed for run in variations.runs}), pairs, variations.deviation)


def _csv(data: dict[str, Any]) -> str:
    """The CSV: a line for each measurement of a run, and for each seed of a pair at each step."""
    lines = csv.DictWriter(text := io.StringIO(), COLUMNS.split())
    lines.writeheader()
    for run in data["runs"]:
        row = {"first": run["variant"], **{key: run[key] for key in ("seed", "seconds", "peak_bytes")}}
        lines.writerows(row | {"step": step, "held_out_loss": loss} for step, loss in run["held_out_loss"])
    for pair in data["pairs"]:
        for at in pair["by_step"]:
            low, high = at["interval"]
            row = {"first": pair["first"], "second": pair["second"], "step": at["step"], "mean": at["mean"]}
            seeds = zip(at["seeds"], at["differences"], strict=True)
            lines.writerows(row | {"low": low, "high": high, "seed": seed, "difference": d} for seed, d in seeds)
    return text.getvalue()


def planned(variations: Variations) -> list[Variation]:
    """The runs in their folders, checked as far as possible without weights. Photos are read once. Raises UserError."""
    root = Path(variations.output_dir)
    if root.exists() and not root.is_dir():
        raise UserError(f"output_dir = {variations.output_dir!r} is a file; give a folder")
    phases, runs, first = Phases(show=True), [], None
    cache = Layout(root).cache  # shared by the runs
    digests = FileDigests(cache / "digests.json" if cache.is_dir() else None, phases)
    for variation in variations.runs:
        try:
            session = Session.open(variation.config, only="measure", ports=Ports(hub=hub, layouts=LAYOUTS))
            plan = session.plan(phases=phases, scanned=first.data.scanned if first else None)
            if session.source.repository is not None:
                plan = replace(plan, model=fetched(plan.model, session.processes, phases))
        except UserError as error:
            raise UserError(f"variant {variation.variant!r}: {error}") from error
        first = first or plan
        runs.append(_in_folder(variations, variation, mark(plan, digests)))
    return runs


def mark(plan: RunPlan, digests: FileDigests) -> str:
    """The digest of all that decides a run's bytes: config without NO_OTHER_RUN and places, photos, model, versions."""
    flat = configs.flatten(configs.tree(plan.config))
    settings = {k: v for k, v in flat.items() if not any(fnmatchcase(k, p) for p in (*NO_OTHER_RUN, *pins.PLACES))}
    parts = {
        "config": settings,
        "photos": [identity.parts(plan.data.examples), identity.parts(plan.data.held_out)],
        "model": plan.model.source.contents([component.name for component in plan.model.family.components], digests.of),
        "start": open_start(plan.config.adapter.init_from, lambda: read_start(plan)).sha256,
        "versions": {"trainer": __version__, **pins.versions(plan.config.optimizer.name)},
    }
    return hashlib.sha256(json_bytes(parts)).hexdigest()[:12]


def _in_folder(variations: Variations, run: Variation, digest: str) -> Variation:
    """A run with its folder, named by its digest, even if another variant's name is in the folder's name."""
    root = Path(variations.output_dir)
    existing = sorted(path for path in root.glob(f"*-{digest}") if path.is_dir())
    folder = existing[0] if existing else root / f"{run.variant}-{run.seed}-{digest}"
    names = {"run.name": folder.name, "run.output_dir": str(folder)}
    if (mirror := run.config.checkpoint.mirror) is not None:
        names["checkpoint.mirror"] = f"{mirror}/{folder.name}"
    if run.config.data.cache_dir is None and run.config.data.cache == "disk":
        names["data.cache_dir"] = str(Layout(root).cache)  # encoded once for all runs
    overrides = (*run.overrides, *(f"{key}={configs.literal(value)}" for key, value in names.items()))
    return replace(run, overrides=overrides, config=configs.load(variations.base, list(overrides)))
