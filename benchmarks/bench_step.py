"""Whole training steps of the full-size models on a card: eager, as CUDA graphs, compiled, and those of diffusers + PEFT.

    python benchmarks/bench_step.py [--seconds 300] [--only 'Flux 1024*'] [--json FILE]
    python benchmarks/bench_step.py --quick     # tiny models, on a CPU: it runs, its figures mean nothing

A step: forward and backward of a rank-16 adapter on attention and MLP, clipping, AdamW; bf16 compute, random weights, the
published sizes, built as a run builds them, without files. A cell is one family, size and batch; its sides take turns, a step
each, over one base in memory. Cells are measured in the order of `cells`, the most important first, and each is written to
--json as it is done; run again with that file, it goes on with the next. A side that fails is named with its error.

Of each side: milliseconds of every round; kernels and copies of one step, and how long the card was busy with them, by
torch's profiler; what a run of it alone would hold at most; and its share of what this card multiplies in one large bf16
product (FLOPs of the base alone, forward, recomputed, and of the inputs' gradients, counted on tensors without values). Of
one whose blocks are streamed also: the bytes that it copies from the host, how long they take, beside the rate of one large
copy of pinned memory, and in what share of that time the card computes too.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._C._autograd import DeviceType  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from benchmarks.bench_dora import graph_ms  # noqa: E402
from benchmarks.random_models import Bench, allocated, batch_of, plain_step, sources, synchronize  # noqa: E402
from trainer.base.errors import UserError  # noqa: E402
from trainer.base.types import each_tensor  # noqa: E402
from trainer.engine.graphs import WARM_UP, CudaGraphs  # noqa: E402
from trainer.kernels import scratch  # noqa: E402
from trainer.models.base import Model  # noqa: E402
from trainer.models.building import build  # noqa: E402
from trainer.models.loading import ModelSource  # noqa: E402
from trainer.runtime.attention import choose, head_sizes  # noqa: E402
from trainer.runtime.compilation import Compiler  # noqa: E402
from trainer.runtime.precision import prepare_device  # noqa: E402

FAMILIES = ("Flux", "SDXL")
TEXT_TOKENS = {"Flux": 512, "SDXL": 77}
ADAPTERS, WAYS = ("DoRA", "LoRA"), ("graphs", "eager", "compiled")
SIZES, BATCHES, STORAGES = (1024, 512, 768), (1, 4), ("bf16", "fp8_e4m3")
KINDS = ("auto", "flash", "cudnn", "efficient")
STREAMED = (25, 50, 90, 100)  # percent of the blocks
ROUNDS = {"Flux": 3, "SDXL": 5}
NO_TIME = "no time was left"
OUT_OF_TIME = 124  # the exit status, as timeout(1) has it


@dataclass(frozen=True)
class Side:
    """One that takes turns. way: of WAYS. who: "ours" or "peft". attention, matmul: as step and precision have them.
    streamed: percent of the blocks; the others stay on the card. selective: blocks are recomputed but for attention."""

    adapter: str
    way: str = "eager"
    storage: str = "bf16"
    who: str = "ours"
    attention: str = "auto"
    matmul: str = "compute"
    streamed: int = 0
    selective: bool = False

    @property
    def name(self) -> str:
        if self.who == "peft":
            return f"PEFT's {self.adapter}"
        more = [f"{self.attention} attention"] * (self.attention != "auto") + ["fp8 matmul"] * (self.matmul == "fp8")
        more += [f"{self.streamed} % streamed"] * (self.streamed > 0) + ["selective"] * self.selective
        return ", ".join([f"{self.adapter} {self.storage}", self.way, *more])


@dataclass(frozen=True)
class Cell:
    """What its sides have in common. about: what they differ in. A ratio is to the first side."""

    family: str
    pixels: int
    about: str
    sides: tuple[Side, ...]
    batch: int = 1
    recomputed: bool = True

    @property
    def name(self) -> str:
        how = "" if self.recomputed else ", nothing recomputed"
        return f"{self.family} {self.pixels} px, batch {self.batch}{how}: {self.about}"


def cells() -> list[Cell]:
    """All of them, the most important first: those up to the attention kinds take some eight minutes, by an estimate."""
    graphs = tuple(Side(adapter, way) for adapter in ADAPTERS for way in ("graphs", "eager"))
    beside_peft = (*graphs, *(Side(adapter, who="peft") for adapter in ADAPTERS))
    selective = (Side("DoRA", "graphs"), *(Side(adapter, "graphs", selective=True) for adapter in ADAPTERS))
    in_float8 = (Side("DoRA"), *(replace(side, storage="fp8_e4m3") for side in graphs))
    products = Side("DoRA", "graphs", "fp8_e4m3", matmul="fp8")
    streamed = tuple(Side("DoRA", storage="fp8_e4m3", streamed=share) for share in (0, *STREAMED))
    compiled = (Side("DoRA"), Side("DoRA", "compiled"))
    kinds = tuple(Side("DoRA", "graphs", attention=kind) for kind in KINDS)
    first = [
        *(Cell("Flux", pixels, "graphs and PEFT", beside_peft) for pixels in (1024, 512)),
        *(Cell("Flux", pixels, "selective", selective) for pixels in (1024, 512)),
        *(Cell("Flux", pixels, "compiled", (*compiled, Side("DoRA", "compiled", selective=True))) for pixels in (1024, 512)),
        Cell("Flux", 1024, "attention", kinds),
        *(Cell("Flux", pixels, "float8", (*in_float8[:3], products, *in_float8[3:])) for pixels in (1024, 512)),
        # Each alone: what one keeps for its backward pass leaves no room for another.
        *(
            Cell("Flux", pixels, way, (Side("DoRA", way),), recomputed=False)
            for pixels, way in product((1024, 512), ("graphs", "eager"))
        ),
        Cell("SDXL", 1024, "graphs and PEFT", beside_peft),
        Cell("SDXL", 1024, "compiled", compiled),
        *(Cell("Flux", pixels, "streamed", streamed) for pixels in (1024, 512)),
        Cell("SDXL", 1024, "selective", selective),
        Cell("SDXL", 1024, "float8", in_float8),
        Cell("SDXL", 1024, "streamed", streamed),
        Cell("SDXL", 1024, "attention", kinds),
    ]
    return [*first, *_left(first)]


def _left(first: list[Cell]) -> Iterator[Cell]:
    """What `first` leaves of each size and batch with each storage, adapter and way, and PEFT; and other storages."""
    for family, count, pixels in product(FAMILIES, BATCHES, SIZES):
        there = {
            side for cell in first for side in cell.sides
            if (cell.family, cell.batch, cell.pixels, cell.recomputed) == (family, count, pixels, True)
        }  # fmt: skip
        wanted = [Side(adapter, way, storage) for way, storage, adapter in product(WAYS, STORAGES, ADAPTERS)]
        wanted += [Side(adapter, who="peft") for adapter in ADAPTERS]
        left = [side for side in wanted if side not in there and side != Side("DoRA")]
        yield Cell(family, pixels, "the rest", (Side("DoRA"), *left), count)
        if count == 1 and pixels != 768:
            others = (
                Side("DoRA", storage="int8"),
                Side("DoRA", storage="nf4"),
                Side("DoRA", storage="fp8_e4m3", matmul="fp8"),
            )
            yield Cell(family, pixels, "other storages", (Side("DoRA"), *others))


class Again:
    """Stands for a recorder of CUDA graphs where there is no CUDA: what is replayed is run again."""

    def __init__(self, count: int) -> None:
        self.count, self.made = count, False

    def warm(self, region: Callable[[], Tensor]) -> Tensor:
        return region()

    def record(self, region: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        losses, made = torch.zeros(self.count), None if self.made else region()
        if made is None:
            return lambda: losses.copy_(region()), losses
        self.made = True  # what follows from the parameters comes first
        return region, made


# --- measuring --------------------------------------------------------------------------------------------------------


class Prepared:
    """A side that is ready to take its turns. row: what was measured of it."""

    def __init__(self, cell: Cell, side: Side, source: ModelSource, bases: dict[str, Any], device: torch.device) -> None:
        """bases: the frozen tensors of each storage, which the sides share; its own is put there."""
        self.side, self.device, self.times = side, device, []
        text_tokens = TEXT_TOKENS[cell.family] if device.type == "cuda" else 8
        self.batch = batch_of(source, cell.pixels, text_tokens, cell.batch)
        began, before = time.perf_counter(), allocated(device)
        known = side.storage in bases
        given: dict[str, Any] = {
            "dora": side.adapter == "DoRA",
            "recomputed": "selective" if side.selective else cell.recomputed,
            "base": bases.get(side.storage),
        }
        if side.way == "compiled":
            folder = Path(tempfile.gettempdir()) / "bench_step_compiled"  # stays: the next run of this finds it
            given["compiler"] = Compiler(folder, side.attention, lambda line: None)
        if side.way == "graphs":
            given["recorder"] = lambda: CudaGraphs(device) if device.type == "cuda" else Again(cell.batch)
        if side.streamed:
            blocks = source.family.ordered_blocks(source.family.denoiser, source.build(source.family.denoiser))
            given["resident"] = len(blocks) - round(len(blocks) * side.streamed / 100)
        sizes = lambda: head_sizes(source.build(source.family.denoiser))  # noqa: E731
        given["attention"] = choose(side.attention, device, torch.bfloat16, sizes)
        bench = Bench(source, side.storage, device, **given)
        if not side.streamed:
            bases.setdefault(side.storage, bench.base)
        if side.who == "peft":
            step = plain_step(source, bench, dora=given["dora"], dtype=torch.bfloat16, recomputed=cell.recomputed)
            self.take: Callable[[], object] = lambda: step(self.batch)
        else:
            for layer in bench.layers:
                layer.scaled_matmul = side.matmul == "fp8"
            self.take = lambda: bench.milliseconds(self.batch)
        # The first compiles kernels and makes the optimizer's state; a graph is recorded after those that warm up.
        for _ in range(WARM_UP + 1 if side.way == "graphs" else 1):
            self.take()
        synchronize(device)
        shared = known and not side.streamed  # with the sides before it
        base = sum(tensor.nbytes for tensor in bases[side.storage].values()) if shared else 0
        resident = allocated(device) - before + base
        self.row: dict[str, Any] = {"prepared_s": time.perf_counter() - began, "resident_bytes": resident}
        self.row["attention"] = str(given["attention"])  # the order of kinds: each call takes the first that can take it
        tokens = source.family.images.image_tokens(cell.pixels, cell.pixels)
        self.row["attention_taken"] = given["attention"].selected(device, torch.bfloat16, sizes(), tokens)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = allocated(device)
            self.take()
            synchronize(device)
            self.row["peak_bytes"] = torch.cuda.max_memory_allocated() - before + resident
            self.row |= self._profiled()
            if bench.streamer is not None:
                self.row |= {"copied_bytes": bench.streamer.copied, "resident_blocks": given["resident"]}

    def _profiled(self) -> dict[str, Any]:
        """Of one step: kernels and copies, and milliseconds in which the card has one of them, in which it copies from
        pinned memory, and in which it does that alone."""
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            self.take()
            synchronize(self.device)
        # The events as they are: to make torch's own of tens of thousands takes seconds.
        events = [e for e in seen.profiler.kineto_results.events() if e.device_type() == DeviceType.CUDA]
        spans = {pinned: [] for pinned in (True, False)}
        for event in events:
            spans["HtoD" in event.name() and "Pinned" in event.name()].append((event.start_ns(), event.end_ns()))
        total = busy([*spans[True], *spans[False]])
        return {
            "launches": len(events),
            "busy_ms": total / 1e6,
            "copies_ms": busy(spans[True]) / 1e6,
            "copies_alone_ms": (total - busy(spans[False])) / 1e6,
        }

    def turn(self) -> None:
        """One step, timed."""
        synchronize(self.device)
        start = time.perf_counter()
        self.take()
        synchronize(self.device)
        self.times.append(1000 * (time.perf_counter() - start))


def busy(spans: Any) -> int:
    """The length of the union of (start, end)."""
    total, until = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total


def measured(
    cell: Cell, source: ModelSource, bases: dict[str, Any], device: torch.device, rounds: int, end: float
) -> dict[str, Any]:
    """By side what was measured of it. Sides that are not prepared at `end` are left out, but for the first two."""
    result: dict[str, Any] = {side.name: {"side": asdict(side)} for side in cell.sides}
    ready: list[Prepared] = []

    def tried(side: Side, work: Callable[[], object]) -> bool:
        """A side that fails is named and left out: the others' figures are worth having."""
        try:
            work()
        except UserError as error:  # of a kind of attention
            result[side.name]["lacks"] = str(error)
            return False
        except Exception as error:
            result[side.name]["error"] = f"{type(error).__name__}: {error}"
            print(f"error: {cell.name}: {side.name}: {result[side.name]['error'].splitlines()[0]}", flush=True)
            return False
        return True

    for number, side in enumerate(cell.sides):
        if number > 1 and time.monotonic() > end:
            result[side.name]["error"] = NO_TIME
            continue
        tried(side, lambda side=side: ready.append(Prepared(cell, side, source, bases, device)))
    for _ in range(rounds):
        ready = [each for each in ready if tried(each.side, each.turn)]
    for each in ready:
        row = each.row | {"ms": statistics.median(each.times), "rounds": each.times}
        if each is not ready[0]:
            row["ratio"] = statistics.median(a / b for a, b in zip(each.times, ready[0].times, strict=True))
        if "busy_ms" in row:
            row["host_share"] = max(0.0, 1 - row["busy_ms"] / row["ms"])
        result[each.side.name] |= row
        print(f"{cell.name}: {side_line(each.side.name, row)}", flush=True)
    return result


def side_line(name: str, row: dict[str, Any]) -> str:
    """One side in words."""
    parts = [f"{name:<28} {row['ms']:9.1f} ms"]
    parts += [f"{row['ratio']:.3f} of the first"] if "ratio" in row else []
    parts += [f"{row['peak_bytes'] / 2**30:.1f} GiB"] if "peak_bytes" in row else []
    parts += [f"{row['launches']:,} launches, host {row['host_share']:.0%}"] if "host_share" in row else []
    parts += [f"{row['utilisation']:.0%} of the card's bf16 rate"] if "utilisation" in row else []
    parts += [copies(row)] if row.get("copied_bytes") and row.get("copies_ms") else []
    return ", ".join(parts)


def copies(row: dict[str, Any]) -> str:
    """What a side with streamed blocks copies in a step, in words."""
    rate, beside = row["copied_bytes"] / row["copies_ms"] / 1e6, 1 - row["copies_alone_ms"] / row["copies_ms"]
    return f"{row['copied_bytes'] / 2**30:.1f} GiB copied at {rate:.1f} GB/s, {beside:.0%} of it beside kernels"


def tflop(source: ModelSource, cell: Cell) -> float:
    """Of a step's products and attention in the base. A backward pass through frozen weights has the products of a forward
    pass again, and twice its attention."""
    family, meta = source.family, torch.device("meta")
    module = build(family.component(family.denoiser), source.config(family.denoiser)).to(torch.bfloat16)
    batch = each_tensor(batch_of(source, cell.pixels, TEXT_TOKENS[cell.family]), lambda tensor: tensor.to(meta))
    model = Model(
        {family.denoiser: module}, {family.denoiser: source.config(family.denoiser)}, {}, source.scheduler,
        {family.denoiser: torch.bfloat16}, meta, {"objective": None, "guidance": 1.0},
    )  # fmt: skip
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        family.images.predict(model, batch.latents.bfloat16(), torch.empty(1, device=meta), batch.conditioning, batch)
    counts = {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}
    attention = sum(flops for name, flops in counts.items() if "bmm" in name or "attention" in name)
    forward = cell.batch * (sum(counts.values()) - attention) / 1e12, cell.batch * attention / 1e12
    return forward[0] * (2 + cell.recomputed) + forward[1] * (3 + cell.recomputed)


def matmul_tflops(device: torch.device) -> float:
    """The card's rate on a large bf16 product, of random numbers."""
    m, n, k = 4608, 12288, 3072
    a, b = (torch.randn(rows, k, dtype=torch.bfloat16, device=device) for rows in (m, n))
    return 2 * m * n * k / graph_ms({"mm": lambda: a @ b.t()}, 20)["mm"] / 1e9


def bus_gbps(device: torch.device) -> float:
    """10^9 bytes a second of one large copy from pinned memory."""
    there = torch.full((2**30,), 1, dtype=torch.uint8, pin_memory=True)
    into = torch.empty_like(there, device=device)
    return (
        there.nbytes / min(graph_ms({"copy": lambda: into.copy_(there, non_blocking=True)}, 3)["copy"] for _ in "123") / 1e6
    )


def tiny(cell: Cell) -> Cell:
    """A cell of the tiny models."""
    return replace(cell, pixels={1024: 64, 768: 48, 512: 32}[cell.pixels])


def opened(path: Path | None, about: dict[str, Any]) -> dict[str, Any]:
    """What --json holds, to go on with. Exits where it was measured with something else."""
    if path is None or not path.exists():
        return {"about": about | {"date": datetime.now(UTC).isoformat(timespec="seconds")}, "cells": {}}
    found = json.loads(path.read_text())
    for key, value in about.items():
        if found["about"].get(key) != value:
            print(f"error: {path} is of {key} {found['about'].get(key)!r}, not {value!r}; move it away", file=sys.stderr)
            sys.exit(2)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", metavar="GLOB", default="*", help="cells whose name matches")
    parser.add_argument("--rounds", type=int, help="3 of Flux, 5 of SDXL; with --quick 2")
    parser.add_argument("--seconds", type=float, default=3e4, help="begin no further cell after this time")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    quick, device = asked.quick, torch.device("cpu" if asked.quick else "cuda")
    if not quick and not torch.cuda.is_available():
        print("error: no CUDA device is visible; --quick runs tiny models on a CPU", file=sys.stderr)
        return 2
    wanted = [cell for cell in cells() if fnmatchcase(cell.name, asked.only)]
    if not wanted:
        parser.error(f"--only {asked.only!r} matches none of {'; '.join(cell.name for cell in cells())}")
    prepare_device(device, {"bf16"})
    torch.manual_seed(0)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    name = platform.machine() if quick else torch.cuda.get_device_name()
    result = opened(asked.json, {"device": name, "torch": torch.__version__, "commit": commit or "unknown", "quick": quick})
    if not quick and "matmul_tflops" not in result:
        result["matmul_tflops"] = matmul_tflops(device)
        result["bus_gbps"] = bus_gbps(device)
        print(
            f"bf16 product: {result['matmul_tflops']:.0f} TFLOP/s; host to device: {result['bus_gbps']:.1f} GB/s", flush=True
        )
    end, family, bases = time.monotonic() + asked.seconds, "", {}
    with tempfile.TemporaryDirectory() as folder:
        models = sources(quick, Path(folder))
        for cell in wanted:
            there = result["cells"].get(cell.name)
            if there is not None and not any(row.get("error") == NO_TIME for row in there["sides"].values()):
                continue
            if time.monotonic() > end:
                print("out of time: the rest is for the next run", flush=True)
                return OUT_OF_TIME
            storages = {side.storage for side in cell.sides}
            bases = {storage: base for storage, base in bases.items() if storage in storages and cell.family == family}
            family, source = cell.family, models[cell.family]
            rounds = asked.rounds or (2 if quick else ROUNDS[family])
            of_step = 0.0 if quick else tflop(source, cell)  # first: a run that is cut off keeps what it measured
            sides = measured(tiny(cell) if quick else cell, source, bases, device, rounds, end)
            if not quick:
                for row in sides.values():
                    if "ms" in row:
                        row["utilisation"] = of_step / row["ms"] * 1000 / result["matmul_tflops"]
            about = {key: value for key, value in asdict(cell).items() if key != "sides"}
            result["cells"][cell.name] = {"cell": about, "sides": sides}
            if asked.json:
                asked.json.write_text(json.dumps(result, indent=1) + "\n")
            scratch._buffers.clear()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return int(any("error" in row for cell in result["cells"].values() for row in cell["sides"].values()))


if __name__ == "__main__":
    sys.exit(main())
