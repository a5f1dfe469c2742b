"""How much an adapter learns over each storage format and compute dtype, on tiny models; writes docs/learning.md.

    python scripts/proofs/learning_table.py --jobs 2
    python scripts/proofs/learning_table.py --cells 'flux/dora/int?-*/*'    # some, beside the fp32 base; prints only

An adapter of rank 8 on attention and MLP is trained for 100 steps of two draws at lr 1e-2. There are 24 fixed (noise,
timestep) draws, 12 for each of two photos. The fall is 1 - last / first mean loss over the draws. A fall of 5 % is
promised over the fp32 base. Every other storage format and compute dtype is promised to keep at least 70 % of that
base's fall. int2 and fp4 are measured, not promised.

The storage format is that of the denoiser's Linear layers, and of its convolutions where the format has them. The
text encoders are stored as bf16, the VAE as fp32.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from scripts.proofs.shared import FAMILIES, make_models  # noqa: E402
from scripts.proofs.support_matrix import DISTRIBUTIONS, KINDS, STORAGE, one_thread  # noqa: E402
from tests.harness import DENOISER, PHOTOS, Workbench, built  # noqa: E402
from trainer.types import Occurrence  # noqa: E402

DRAWS = 12  # of each of the two photos
STEPS = 100
LEAST_FALL, LEAST_KEPT = 0.05, 0.7
NOT_PROMISED = ("int2-quanto", "fp4-bitsandbytes")
EXACT = ("fp32-native", "fp32")
# (storage, compute)
WAYS = (EXACT, *(("fp32-native", compute) for compute in ("bf16", "fp16")), *((s, "fp32") for s in STORAGE[1:]))


@dataclass(frozen=True)
class Case:
    """storage: DTYPE-BACKEND of the denoiser."""

    family: str
    kind: str
    storage: str
    compute: str

    @property
    def name(self) -> str:
        return f"{self.family}/{self.kind}/{self.storage}/{self.compute}"

    @property
    def exact(self) -> Case:
        """What it is measured against."""
        return Case(self.family, self.kind, *EXACT)


CASES = tuple(Case(family, kind, *way) for family in FAMILIES for kind in KINDS for way in WAYS)


@dataclass(frozen=True)
class Losses:
    """Mean loss over the fixed draws, before and after training."""

    first: float
    last: float

    @property
    def fall(self) -> float:
        return 1 - self.last / self.first


def measure(case: Case, bench: Workbench) -> Losses:
    """Train one case under `bench.tmp`."""
    photos = bench.tmp / "photos"
    if not photos.exists():
        photos.mkdir()
        for name in ("01.jpg", "01.txt", "03.jpg", "03.txt"):
            (photos / name).write_bytes((PHOTOS / name).read_bytes())
    dtype, _, backend = case.storage.partition("-")
    config = bench.config(
        case.family, run__output_dir=str(bench.tmp / case.name.replace("/", "-")), precision__compute=case.compute,
        model__components={DENOISER[case.family]: {"dtype": dtype, "backend": backend}},
        adapter__type=case.kind, adapter__rank=8, adapter__alpha=8.0, adapter__targets="attention+mlp",
        # The captions are short: T5's 512 tokens would be padding, and most of the time.
        data__text_length=32 if case.family == "flux" else None,
        data__sources=[{"path": str(photos)}], data__caption_dropout=0.0, data__bucket_step=64,
        data__cache_dir=str(bench.tmp / f"cache-{case.family}"), optimizer__lr=1e-2,
    )  # fmt: skip
    with one_thread(), built(config) as run:
        samples = sorted(run.reader.photos)
        draws = [Occurrence(draw, sample, 0) for draw in range(DRAWS) for sample in samples]
        batches = [run.reader[tuple(draws[i : i + 8])] for i in range(0, len(draws), 8)]

        def mean_loss() -> float:
            with torch.no_grad():
                return float(torch.cat([run.step.losses(batch) for batch in batches]).mean())

        first = mean_loss()
        for step in range(STEPS):
            start = 2 * step % len(draws)
            run.step.run(step + 1, [run.reader[tuple(draws[start : start + 2])]], draws[start : start + 2])
        return Losses(first, mean_loss())


def broken_promise(case: Case, losses: Losses, exact: Losses) -> str | None:
    """What the case promised and does not keep."""
    if case == case.exact:
        return f"the loss falls by {losses.fall:.1%}" if not losses.fall >= LEAST_FALL else None
    kept = losses.fall / exact.fall
    broken = case.storage not in NOT_PROMISED and not kept >= LEAST_KEPT
    return f"keeps {kept:.0%} of the fall" if broken else None


def table(measured: dict[Case, Losses]) -> str:
    """Markdown: "fall (share of the fp32 fall)" by format and adapter."""
    columns = [(family, kind) for family in FAMILIES for kind in KINDS]
    lines = ["| stored as | computes | " + " | ".join(" ".join(c) for c in columns) + " |", "|---|---|---|---|---|---|"]
    for storage, compute in WAYS:
        cells = []
        for column in columns:
            case = Case(*column, storage, compute)
            if case not in measured:
                cells.append("")
                continue
            losses, exact = measured[case], measured[case.exact]
            kept = "" if case == case.exact else f" ({losses.fall / exact.fall:.0%})"
            cells.append(f"{losses.fall:.1%}{kept}" + (" **broken**" if broken_promise(case, losses, exact) else ""))
        if any(cells):
            promised = "" if storage not in NOT_PROMISED else ", not promised"
            lines.append(f"| {storage.replace('-', ' ')}{promised} | {compute} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def page(measured: dict[Case, Losses], jobs: int) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in DISTRIBUTIONS)
    said = __doc__.split("\n\n", 2)[2].strip()
    return (
        "# Learning survives the storage\n\n"
        f"Measured on {date.today()} on a CPU with\n{versions}:\n\n"
        f"    python scripts/proofs/learning_table.py --jobs {jobs}\n\n"
        f"{said}\n\nIn the table: the fall, and in brackets its share of the fall over the fp32 base computing in fp32.\n\n"
        + table(measured)
    )


def measure_alone(case: Case, models: Path, work: Path) -> tuple[Losses, float]:
    """In a worker: (losses, seconds). Its own caches."""
    folder = work / str(os.getpid())
    folder.mkdir(exist_ok=True)
    started = time.perf_counter()
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        losses = measure(case, Workbench(models, folder))
    return losses, time.perf_counter() - started


def measure_all(cases: Iterable[Case], models: Path, work: Path, jobs: int) -> dict[Case, Losses]:
    measured = {}
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = {case: pool.submit(measure_alone, case, models, work) for case in cases}
        for case, future in waiting.items():
            losses, seconds = future.result()
            measured[case] = losses
            print(
                f"{case.name:<40} {losses.first:.4f} -> {losses.last:.4f}  falls {losses.fall:.1%}  {seconds:.1f} s",
                flush=True,
            )
    return measured


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", metavar="GLOB", default="*", help="only FAMILY/KIND/STORAGE/COMPUTE that match")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--out", type=Path, help="Markdown file; left out: docs/learning.md, of all cells only")
    asked = parser.parse_args(arguments)
    wanted = [case for case in CASES if fnmatchcase(case.name, asked.cells)]
    if not wanted:
        parser.error(f"--cells {asked.cells!r} matches none of {CASES[0].name}, ...")
    with tempfile.TemporaryDirectory() as temporary:
        models = make_models(Path(temporary))
        cases = dict.fromkeys([*(case.exact for case in wanted), *wanted])
        measured = measure_all(cases, models, Path(temporary), asked.jobs)
    print(f"\n{table(measured)}")
    out = asked.out or (ROOT / "docs" / "learning.md" if asked.cells == "*" else None)
    if out:
        out.write_text(page(measured, asked.jobs), encoding="utf-8")
    broken = {case.name: broken_promise(case, losses, measured[case.exact]) for case, losses in measured.items()}
    for name, promise in broken.items():
        if promise:
            print(f"{name}: {promise}")
    return int(any(broken.values()))


if __name__ == "__main__":
    sys.exit(main())
