"""Every family x adapter x storage format x compute dtype, over tiny models: does it train, resume, sample and export?

    python tests/proofs/support_matrix.py --jobs 2                       # all; writes docs/benchmarks/support_matrix.md
    python tests/proofs/support_matrix.py --cells 'flux/dora/int?-*/*'   # some; prints only

A cell is FAMILY/KIND/STORAGE/COMPUTE, "sdxl/dora/nf4-bitsandbytes/bf16". Denoiser and text encoders are stored in the format
and both are adapted (every Linear and Conv2d that has a gradient path); the VAE is fp32. A cell is "ok" where

- three steps of two micro-batches train, each clips its gradients, every loss is finite, and by the last step every adapter
  tensor (A, B, and DoRA's magnitude) has had a gradient other than zero; in fp16 the loss scaler was at work;
- the run, stopped after step 1 and resumed, ends in the bytes of the uninterrupted one: adapter and optimizer of the
  checkpoint, both adapter files (but for the date of the start), metrics (but for times);
- a sample is an image, and not the one from before training;
- both adapter files hold finite tensors.

"refused" is a UserError before any weight was read. Exit status 1 where a cell failed.
"""

from __future__ import annotations

import argparse
import gc
import io
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from datetime import date
from fnmatch import fnmatchcase
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks import pages  # noqa: E402
from tests.harness import DENOISER, PHOTOS, Workbench, built, metrics_of, train_built  # noqa: E402
from tests.proofs.shared import FAMILIES, make_models  # noqa: E402
from trainer import config as configs  # noqa: E402
from trainer.base.errors import UserError  # noqa: E402
from trainer.base.tensorfile import TensorFile  # noqa: E402
from trainer.quantization import ALL_FORMATS  # noqa: E402
from trainer.runtime import precision  # noqa: E402
from trainer.runtime.precision import COMPUTE_DTYPES  # noqa: E402

KINDS = ("lora", "dora")
TEXT_ENCODERS = ("text_encoder", "text_encoder_2")
STEPS, STOP, ACCUMULATION = 3, 1, 2
CLIP = 1e-3  # far below the gradient's norm
SCALE = 1024.0  # low enough that fp16 gradients of the tiny models rarely overflow
STORAGE = tuple(f"{f.dtype_name}-{f.backend}" for f in ALL_FORMATS)
DISTRIBUTIONS = ("torch", "bitsandbytes", "optimum-quanto", "diffusers", "transformers", "peft")


@dataclass(frozen=True)
class Cell:
    """storage: DTYPE-BACKEND of denoiser and text encoders, or one for each, joined by '+'.

    targets: a preset or patterns on the denoiser's layers.
    """

    family: str
    kind: str
    storage: str
    compute: str
    targets: str | tuple[str, ...] = "all"

    @property
    def name(self) -> str:
        return f"{self.family}/{self.kind}/{self.storage}/{self.compute}"

    def components(self) -> dict[str, str]:
        """Component -> DTYPE-BACKEND, the denoiser first."""
        names, parts = (DENOISER[self.family], *TEXT_ENCODERS), self.storage.split("+")
        return dict(zip(names, parts * len(names) if len(parts) == 1 else parts, strict=False))


@dataclass(frozen=True)
class Result:
    """state: "ok", "refused" or "failed". skipped_updates: by the loss scaler. left_out: layers without a gradient path."""

    cell: Cell
    state: str
    reason: str = ""
    seconds: float = 0.0
    skipped_updates: int = 0
    left_out: tuple[str, ...] = ()
    log: str = ""


class Broken(Exception):
    """A promise of the matrix that a cell does not keep."""


@dataclass
class Seen:
    """What a run showed while it ran. gradients: sum over the steps of |gradient| of each adapter tensor."""

    gradients: dict[str, float] = field(default_factory=dict)
    clipped_norms: list[float] = field(default_factory=list)
    stored: dict[str, set[tuple[str, torch.dtype]]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def all_cells() -> list[Cell]:
    return [
        Cell(family, kind, storage, compute)
        for family in FAMILIES
        for kind in KINDS
        for storage in STORAGE
        for compute in COMPUTE_DTYPES
    ]


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes on one thread: tiny models gain nothing from more, and lose much where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run_cell(cell: Cell, bench: Workbench, *, resumed: bool = True) -> Result:
    """Run one cell under `bench.tmp`. What it leaves there is the cache of latents, which the next cells share.

    resumed: also show that stopped and resumed equals uninterrupted, which takes as long again.
    """
    started, log = time.perf_counter(), io.StringIO()
    folder = bench.tmp / "cell"
    shutil.rmtree(folder, ignore_errors=True)
    skipped, left_out = 0, ()
    # As cli/main.py does; a run collects by itself, and need not look through what was there before.
    gc.disable()
    gc.freeze()
    try:
        soon = patch.object(precision, "GROWTH_INTERVAL", 2)  # so that the scale moves within three steps
        with one_thread(), redirect_stdout(log), redirect_stderr(log), soon:
            skipped, left_out = exercise(cell, bench, folder, resumed=resumed)
        state, reason = "ok", ""
    except UserError as error:
        state, reason = "failed" if folder.exists() else "refused", str(error)
    except Exception as error:  # whatever it is, it is the cell's result
        state, reason = "failed", str(error) if isinstance(error, Broken) else f"{type(error).__name__}: {error}"
        traceback.print_exc(file=log)
    finally:
        gc.unfreeze()
        gc.enable()
        shutil.rmtree(folder, ignore_errors=True)
    return Result(cell, state, reason, time.perf_counter() - started, skipped, left_out, log.getvalue())


def exercise(cell: Cell, bench: Workbench, folder: Path, *, resumed: bool) -> tuple[int, tuple[str, ...]]:
    """(updates that the loss scaler skipped, layers left out). Raises Broken for the first promise that is not kept."""
    whole, parts = folder / "whole", folder / "parts"
    seen = train(config_of(cell, bench, whole, samples=True))
    check_training(cell, seen, metrics_of(whole))
    check_samples(whole)
    check_adapter_files(cell, whole)
    if resumed:
        train(config_of(cell, bench, parts, stop_after=STOP))
        if (parts / "adapters").exists():
            raise Broken("a stopped run wrote adapter files")
        train(config_of(cell, bench, parts), resume_from="latest")
        check_resumed(whole, parts)
    return sum(entry.get("skipped", False) for entry in metrics_of(whole)), seen.left_out


def config_of(
    cell: Cell, bench: Workbench, out: Path, *, samples: bool = False, stop_after: int | None = None
) -> configs.Config:
    stored = {}
    for component, storage in cell.components().items():
        dtype, _, backend = storage.partition("-")
        stored[component] = {"dtype": dtype, "backend": backend, "compute": cell.compute}
    return bench.config(
        cell.family, run__output_dir=str(out), run__max_steps=STEPS, run__stop_after=stop_after,
        model__components=stored | {"vae": {"dtype": "fp32"}},
        precision__compute=cell.compute, **({"precision__loss_scale": SCALE} if cell.compute == "fp16" else {}),
        adapter__type=cell.kind, adapter__targets=cell.targets,
        adapter__rules=[{"component": name, "match": "*"} for name in TEXT_ENCODERS],
        # Twice the five photos: no update of the first epoch lacks a micro-batch.
        data__sources=[{"path": str(PHOTOS), "repeats": 2}], data__batch_size=1,
        data__text_length=32 if cell.family == "flux" else None, data__cache_dir=str(bench.tmp / f"cache-{cell.family}"),
        step__accumulation=ACCUMULATION, step__max_grad_norm=CLIP, optimizer__lr=1e-2,
        checkpoint__every_steps=0, validation__every_steps=STEPS if samples else 0,
        validation__prompts=["a photo of sks plush bear"] if samples else [], validation__steps=2,
    )  # fmt: skip


def train(config: configs.Config, resume_from: str | None = None) -> Seen:
    """A run to its end or to `run.stop_after`, watched."""
    with built(config, resume_from) as run:
        seen = Seen(left_out=tuple(run.plan.skipped))
        for name, layer in run.adapter.layers.items():
            base = layer.get_base_layer()
            stored = f"{base.format.dtype_name}-{base.format.backend}"
            seen.stored.setdefault(name.partition(".")[0], set()).add((stored, base.compute_dtype))
        parameters, update = run.adapter.named_parameters(), run.step.run

        def watched(*arguments: Any) -> Any:
            result = update(*arguments)
            if result.updated:
                for name, parameter in parameters.items():
                    seen.gradients[name] = seen.gradients.get(name, 0.0) + float(parameter.grad.abs().sum())
                grads = [parameter.grad for parameter in parameters.values()]
                seen.clipped_norms.append(float(torch.nn.utils.get_total_norm(grads)))
            return result

        run.step.run = watched
        train_built(run)
    return seen


# ------------------------------------------------------------------------------------------------------- promises


def require(kept: bool, otherwise: str) -> None:
    if not kept:
        raise Broken(otherwise)


def check_training(cell: Cell, seen: Seen, entries: Sequence[dict[str, Any]]) -> None:
    for component, storage in cell.components().items():
        require(
            (storage, COMPUTE_DTYPES[cell.compute]) in seen.stored.get(component, ()),
            f"no adapted layer of {component} is stored {storage} and computes {cell.compute}",
        )
    require([entry["step"] for entry in entries] == list(range(1, STEPS + 1)), "metrics.jsonl lacks a step")
    require(entries[-1]["images"] == STEPS * ACCUMULATION, f"trained on {entries[-1]['images']} images")
    require(all(math.isfinite(entry["loss"]) for entry in entries), "a loss is not finite")
    taken = [entry for entry in entries if not entry.get("skipped")]
    require(bool(taken), "the loss scaler skipped every update")
    require(all(entry["grad_norm"] > CLIP for entry in taken), "clipping did not bite")
    require(
        all(math.isclose(norm, CLIP, rel_tol=1e-3) for norm in seen.clipped_norms),
        f"gradients clipped at {CLIP} have norms {seen.clipped_norms}",
    )
    dead = [name for name, total in seen.gradients.items() if not total > 0 or not math.isfinite(total)]
    require(not dead, f"{len(dead)} of {len(seen.gradients)} adapter tensors have no finite gradient: {dead[:1]}")
    kinds = {name.rpartition(".lora_")[2] for name in seen.gradients}
    wanted = {"A.weight", "B.weight"} | ({"magnitude_vector"} if cell.kind == "dora" else set())
    require(kinds == wanted, f"the adapter has {kinds}")
    scales = [entry.get("loss_scale") for entry in entries]
    if cell.compute == "fp16":
        require(None not in scales and min(scales) > 1 and len(set(scales)) > 1, f"the loss scale did nothing: {scales}")
    else:
        require(scales == [None] * len(scales), f"{cell.compute} has a loss scale: {scales}")


def check_samples(out: Path) -> None:
    from PIL import Image

    images = []
    for step in (0, STEPS):
        (path,) = (out / "samples" / f"step-{step:08d}").glob("*.png")
        with Image.open(path) as image:
            images.append(image.convert("RGB").tobytes())
        # NaN becomes black.
        require(len(set(images[-1])) > 16, f"the sample of step {step} has {len(set(images[-1]))} levels")
    require(images[0] != images[1], "training did not change the sample")


def check_adapter_files(cell: Cell, out: Path) -> None:
    for name in ("bear.safetensors", "bear_comfyui.safetensors"):
        tensors = TensorFile(out / "adapters" / name).read_all()
        bad = [key for key, tensor in tensors.items() if not torch.isfinite(tensor).all()]
        require(not bad, f"{name}: {bad[:1]} is not finite")
        ups = [key for key in tensors if ".lora_B." in key or ".lora_up." in key]
        idle = [key for key in ups if not tensors[key].any()]
        require(bool(ups) and not idle, f"{name}: {len(idle)} of {len(ups)} B are zero")
        magnitudes = sum("magnitude_vector" in key or key.endswith(".dora_scale") for key in tensors)
        expected = len(ups) if cell.kind == "dora" else 0
        require(magnitudes == expected, f"{name} has {magnitudes} magnitudes for {len(ups)} layers")


def check_resumed(whole: Path, parts: Path) -> None:
    require(metrics_of(whole) == metrics_of(parts), "resumed: metrics.jsonl differs")
    last = Path("checkpoints") / f"step-{STEPS:08d}"
    for file in (last / "adapter.safetensors", last / "optimizer.safetensors"):
        require((whole / file).read_bytes() == (parts / file).read_bytes(), f"resumed: {file.name} differs")
    for name in ("bear.safetensors", "bear_comfyui.safetensors"):
        # Of one day: the date is all they hold of the clock.
        ours, theirs = ((out / "adapters" / name).read_bytes() for out in (whole, parts))
        require(ours == theirs, f"resumed: adapters/{name} differs")


# ---------------------------------------------------------------------------------------------------------- report


def table(results: Iterable[Result]) -> str:
    """Markdown: a table for each family, then the reasons of what did not work."""
    results = list(results)
    reasons: dict[str, int] = {}
    by_cell = {result.cell: result for result in results}
    lines = []
    for family in FAMILIES:
        columns = [(kind, compute) for kind in KINDS for compute in COMPUTE_DTYPES]
        rows = []
        for storage in STORAGE:
            row = [by_cell.get(Cell(family, kind, storage, compute)) for kind, compute in columns]
            if any(row):
                rows.append([storage.replace("-", " "), *(_mark(result, reasons) for result in row)])
        lines += [f"## {family}", "", pages.table(["stored as", *map(" ".join, columns)], rows), ""]
        left_out = sorted({name for r in results if r.cell.family == family for name in r.left_out})
        if left_out:
            blocks = [f"{block}.* ({len(list(names))})" for block, names in groupby(left_out, _block)]
            lines += [f"Not adapted, as they have no gradient path: {', '.join(blocks)}.", ""]
    for reason, number in reasons.items():
        lines.append(f"{number}. {' '.join(reason.split())}")
    return "\n".join(lines).rstrip() + "\n"


def _mark(result: Result | None, reasons: dict[str, int]) -> str:
    if result is None:
        return ""
    if result.state == "ok":
        return "ok" + (f", {result.skipped_updates} skipped" if result.skipped_updates else "")
    number = reasons.setdefault(result.reason, len(reasons) + 1)
    return f"{result.state.upper() if result.state == 'failed' else result.state} [{number}]"


def _block(layer: str) -> str:
    """Up to the first index: text_encoder.encoder.layers.2"""
    parts = layer.split(".")
    return ".".join(parts[: next((i + 1 for i, part in enumerate(parts) if part.isdigit()), len(parts))])


def summary(results: Sequence[Result], seconds: float) -> str:
    counts = {state: sum(r.state == state for r in results) for state in ("ok", "refused", "failed")}
    counted = ", ".join(f"{count} {state}" for state, count in counts.items())
    each = sum(r.seconds for r in results) / len(results)
    return f"{len(results)} cells: {counted}; {seconds:.0f} s, {each:.1f} s a cell"


def page(results: Sequence[Result], seconds: float, jobs: int) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in DISTRIBUTIONS)
    said = __doc__.split("\n\n", 2)[2]
    return (
        "# Support matrix\n\n"
        "After this page you know which storage format, compute dtype and adapter go together in each family.\n\n"
        f"Measured on {date.today()} on a CPU with\n{versions}:\n\n"
        f"    python tests/proofs/support_matrix.py --jobs {jobs}\n\n"
        f"{summary(results, seconds)}.\n\n{said.strip()}\n\n"
        '"n skipped": updates that the loss scaler skipped. bitsandbytes, int4 and int2 store no convolutions: those are '
        "kept in bf16.\n\n" + table(results)
    )


# ------------------------------------------------------------------------------------------------------- processes


def run_alone(cell: Cell, models: Path, work: Path) -> Result:
    """In a worker, with caches of its own."""
    folder = work / str(os.getpid())
    folder.mkdir(exist_ok=True)
    result = run_cell(cell, Workbench(models, folder))
    gc.collect()
    return result


def run_all(cells: Sequence[Cell], models: Path, work: Path, jobs: int) -> Iterator[Result]:
    if jobs == 1:
        yield from (run_alone(cell, models, work) for cell in cells)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(run_alone, cells, [models] * len(cells), [work] * len(cells))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", metavar="GLOB", default="*", help="only cells whose name matches")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--out", type=Path, help="Markdown file; left out: the page in docs/benchmarks, of all cells only")
    asked = parser.parse_args(arguments)
    cells = [cell for cell in all_cells() if fnmatchcase(cell.name, asked.cells)]
    if not cells:
        parser.error(f"--cells {asked.cells!r} matches none of {all_cells()[0].name}, ...")
    started, results = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        models = make_models(work)
        for result in run_all(cells, models, work, asked.jobs):
            results.append(result)
            print(f"{result.cell.name:<44} {result.state:<8} {result.seconds:5.1f} s  {result.reason}", flush=True)
            if result.state == "failed":
                print(result.log, file=sys.stderr, flush=True)
    seconds = time.perf_counter() - started
    print(f"\n{table(results)}\n{summary(results, seconds)}")
    out = asked.out or (ROOT / "docs" / "benchmarks" / "support_matrix.md" if asked.cells == "*" else None)
    if out:
        out.write_text(page(results, seconds, asked.jobs), encoding="utf-8")
    return int(any(result.state == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
