"""What a training step costs in Python: a step at full depth and tiny width, where the time on a CPU is the host's.

    OMP_NUM_THREADS=1 python benchmarks/host_time.py                         # Flux and SDXL: ours, and diffusers + PEFT
    OMP_NUM_THREADS=1 python benchmarks/host_time.py --against COMMIT        # and ours of an earlier commit
    OMP_NUM_THREADS=1 python benchmarks/host_time.py --family flux --lines 20   # and our most expensive functions
    OMP_NUM_THREADS=1 python benchmarks/host_time.py --wrappers              # what we add to a launch

Flux has its 19 + 38 blocks and SDXL's UNet its 70 transformer blocks, each a few channels wide, with 4 image tokens (Flux) or
16 pixels (SDXL), and 4 text tokens; batch 1, a rank-16 adapter on attention and MLP, bf16 compute, clipping, AdamW. What a
Triton kernel writes is filled with a constant in place of its launch: all that our Python does up to the launch is done, the
driver's part is not. On the other side is PEFT over diffusers' model under autocast (plain_peft.py).

Each side is a process, and the sides take turns, a step each. A figure is the median over the rounds, a ratio the median of
the ratios within a round, against an earlier commit with the interval of bench_cli.py. Milliseconds are the processor's, so
another program does not count. "operators" are those that torch dispatches, without views and empty tensors, and launches of
ours; "calls" are Python's function calls.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
# A side of an earlier commit runs this very file over the packages of its own tree.
ROOT = Path(os.environ.get("HOST_TIME_TREE", HERE.parents[1]))
sys.path.insert(0, str(ROOT))

FAMILIES = {"flux": "Flux", "sdxl": "SDXL"}
# What differs from the published config: widths alone.
NARROW: dict[str, dict[str, Any]] = {
    "flux": {
        "attention_head_dim": 16, "axes_dims_rope": [4, 6, 6], "num_attention_heads": 2, "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
    },
    "sdxl": {
        "block_out_channels": [32, 64, 64], "attention_head_dim": [2, 4, 4], "norm_num_groups": 8, "cross_attention_dim": 32,
        "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 80,
    },
}  # fmt: skip
PIXELS, TEXT_TOKENS = 32, 4
# Of each kernel of ours: the places of the arguments that it writes, as far as more than another kernel reads them, and what
# stands in for what it would write. A square of zero would be that of a row that its bias drowns (adapters/dora.py).
WRITES: dict[str, tuple[tuple[int, ...], float]] = {
    "upcast_kernel": ((5,), 0.0),
    "row_squares_kernel": ((4,), 1.0),
    "compose_kernel": ((5,), 0.0),
    "rotate_kernel": ((4, 5), 0.0),
    "row_sums_kernel": ((4,), 0.0),
    "adapter_gradients_kernel": ((5, 6, 7), 0.0),
    "weight_product_kernel": ((3,), 0.0),
    "adapted_norm_kernel": ((3,), 1.0),
}
# Operators that launch nothing.
FREE = ("empty", "empty_like", "empty_strided", "_unsafe_view", "detach")
VIEWS = (
    "view", "t", "transpose", "permute", "select", "slice", "split", "as_strided", "unsqueeze", "expand", "flatten",
    "reshape",
)  # fmt: skip


@dataclass(frozen=True)
class Side:
    """Who trains what, and how. who: "ours" or "peft". tree: "", or the commit whose program it is."""

    family: str
    who: str
    adapter: str
    storage: str
    recomputed: bool = True
    tree: str = ""
    compiled: bool = False

    @property
    def name(self) -> str:
        """As the table has it."""
        how = f"{', compiled' if self.compiled else ''}{'' if self.recomputed else ', nothing recomputed'}"
        return f"{FAMILIES[self.family]} {self.who}{self.tree and ' of ' + self.tree} {self.adapter} {self.storage}{how}"


@dataclass(frozen=True)
class Measured:
    """A side. ms: of each round."""

    side: Side
    ms: list[float]
    operators: int
    launches: int
    calls: int

    @property
    def median(self) -> float:
        return statistics.median(self.ms)


# --- a side, in its own process ---------------------------------------------------------------------------------------


class Launched:
    """Stands for a compiled kernel of ours."""

    count = 0

    def __init__(self, kernel: str) -> None:
        self.places, self.value = WRITES[kernel]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            Launched.count += 1
            for place in self.places:
                arguments[place].fill_(self.value)

        return run


@contextmanager
def no_launches() -> Iterator[None]:
    """Inside, a Triton kernel is not compiled, and not launched: what it writes is filled with a constant."""
    from triton.runtime.jit import JITFunction

    def run(kernel: Any, *arguments: Any, grid: Any, **options: Any) -> Launched:
        launched = Launched(kernel.__name__)
        launched[grid](*arguments)
        return launched

    before, JITFunction.run = JITFunction.run, run
    try:
        yield
    finally:
        JITFunction.run = before


def stepping(side: Side, folder: Path, **shorter: Any) -> Callable[[], object]:
    """One step of a side. folder: for its model's configs. shorter: what a denoiser of less depth has in its own."""
    import torch

    if (ROOT / "benchmarks").is_dir():
        from benchmarks import random_models, trace
        from trainer.models.config_files import PUBLISHED
    else:  # a commit before the benchmarks had a folder of their own
        from scripts.bench import bench_step as random_models  # type: ignore[no-redef]
        from scripts.bench import trace  # type: ignore[no-redef]

        from trainer.models.loading import PUBLISHED  # type: ignore[no-redef, attr-defined]
    from trainer import quantization
    from trainer.models import family_named
    from trainer.models.loading import ModelSource

    torch.manual_seed(0)
    family, published = family_named(side.family), PUBLISHED / trace.PUBLISHED_AS[side.family]
    for place in (f"{family.denoiser}/config.json", "scheduler/scheduler_config.json"):
        config = json.loads((published / place).read_text(encoding="utf-8"))
        (folder / place).parent.mkdir()
        own = NARROW[side.family] | shorter if place.startswith(family.denoiser) else {}
        (folder / place).write_text(json.dumps(config | own))
    source = ModelSource(family, folder, quantization.recognise)
    batch = random_models.batch_of(source, PIXELS, TEXT_TOKENS)
    if side.who == "ours":
        from trainer.kernels import dora_triton

        bench = random_models.Bench(
            source,
            side.storage,
            torch.device("cpu"),
            dora=side.adapter == "DoRA",
            chosen=dora_triton,
            recomputed=side.recomputed,
            **_compiler() if side.compiled else {},
        )
        numbers = iter(range(1, 10**9))
        return lambda: bench.step.run(next(numbers), [batch], batch.occurrences)
    step = trace.theirs(source, side.adapter.lower(), side.storage, side.recomputed)
    return lambda: step(batch)


def _compiler() -> dict[str, Any]:
    from trainer.runtime.compilation import Compiler

    folder = Path(tempfile.gettempdir()) / "host_time_compiled"  # stays: the next run of this finds it
    return {"compiler": Compiler(folder, "", lambda line: print(line, file=sys.stderr))}


def serve(side: Side) -> None:
    """Answer each line of the standard input with one of JSON: "step" with its milliseconds, "count" and "lines"."""
    from torch.backends import mkldnn

    answers, sys.stdout = sys.stdout, sys.stderr
    # Its products of small bf16 matrices take four times as long as the plain ones, and neither is the host's time.
    with tempfile.TemporaryDirectory() as folder, no_launches(), mkldnn.flags(enabled=False):
        step = stepping(side, Path(folder))
        for _ in range(2):  # the first makes the optimizer's state
            step()
        count = partial(counted, compiled=side.compiled)
        for line in sys.stdin:
            print(json.dumps({"step": timed, "count": count, "lines": dearest}[line.strip()](step)), file=answers, flush=True)


def timed(step: Callable[[], object]) -> float:
    start = time.process_time()
    step()
    return 1000 * (time.process_time() - start)


def counted(step: Callable[[], object], compiled: bool = False) -> dict[str, int]:
    """What one step asks of torch, of Triton and of Python. compiled: no mode sees into a program; torch's profiler sees its
    operators, but for the loops that were made for it."""
    from torch.profiler import ProfilerActivity, profile
    from torch.utils._python_dispatch import TorchDispatchMode

    operators, calls, before = Counter(), [0], Launched.count

    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
            if not func.is_view and func.overloadpacket.__name__ not in FREE:
                operators[str(func)] += 1
            return func(*args, **(kwargs or {}))

    if compiled:
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            step()
        for event in seen.events():
            outer = event.cpu_parent
            while outer is not None and not outer.name.startswith("aten::"):
                outer = outer.cpu_parent
            kind, name = event.name.partition("::")[::2]
            if kind == "aten" and outer is None and name not in (*FREE, *VIEWS):
                operators[{"fill_": "aten.fill_.Scalar"}.get(name, name)] += 1
    else:
        with Counts():
            step()
    launches = Launched.count - before

    def count(frame: Any, event: str, argument: Any) -> None:
        calls[0] += event == "call"

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    # Each launch was filled in for.
    filled = operators["aten.fill_.Scalar"] if launches else 0
    return {"operators": operators.total() - filled, "launches": launches, "calls": calls[0]}


def dearest(step: Callable[[], object]) -> list[str]:
    """Our functions by the time that they take themselves."""
    profile = cProfile.Profile()
    profile.enable()
    step()
    profile.disable()
    entries = pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
    ours = [
        (own, calls, f"{Path(file).relative_to(ROOT)}:{line} {name}")
        for (file, line, name), (_, calls, own, *_) in entries
        if file.startswith(f"{ROOT}{os.sep}")
    ]
    return [f"{1000 * own:8.1f} ms {calls:>8,} x  {function}" for own, calls, function in sorted(ours, reverse=True)]


def wrappers() -> dict[str, tuple[float, float]]:
    """By kernel: microseconds of what stands for its launch, and of our wrapper with it."""
    import torch

    from trainer.base.types import StoredWeight
    from trainer.kernels import dora_triton, upcast_triton

    m, n, k, rank = 8, 64, 32, 16
    weight = StoredWeight(torch.zeros(n, k).to(torch.float8_e4m3fn), (n, k), None, k, torch.ones(n))
    out, (z, t, sb) = torch.empty(n, k).bfloat16(), (torch.zeros(*size).bfloat16() for size in ((m, n), (m, rank), (n, rank)))
    g, b, d, du = torch.ones(n), torch.ones(n, rank), torch.empty(1, n, rank), torch.empty(1, n)
    codes = upcast_triton.flat(weight).pointers()
    gradients = d, du, b, g, g, torch.empty_like(b), torch.empty_like(g), torch.empty_like(sb)
    wrapped: dict[str, tuple[Sequence[tuple[str, tuple[Any, ...]]], Callable[[], object]]] = {
        "upcast": ([("upcast", (*codes, g, out))], lambda: dora_triton.upcast(weight, torch.bfloat16, g, out)),
        "compose": ([("compose", (z, t, sb, g, g, z))], lambda: dora_triton.compose(z, t, sb, g, g, z)),
        "adapter_gradients (two kernels)": (
            [("row_sums", (z, z, t, g, d, du)), ("adapter_gradients", gradients)],
            lambda: dora_triton._adapter_gradients(z, z, t, b, g, g, g, 1.0, False, 64, d, du, *gradients[5:]),
        ),
    }
    told = {}
    with no_launches():
        for name, (launched, wrapper) in wrapped.items():
            runs = [(Launched(f"{kernel}_kernel")[1, 1, 1], (*tensors, *range(15))) for kernel, tensors in launched]
            told[name] = microseconds(lambda runs=runs: [run(*given) for run, given in runs]), microseconds(wrapper)
    return told


def microseconds(function: Callable[[], object], times: int = 2000, rounds: int = 9) -> float:
    """Of the fastest round."""
    return 1000 / times * min(timed(lambda: [function() for _ in range(times)]) for _ in range(rounds))


# --- all sides --------------------------------------------------------------------------------------------------------


class Process:
    """A side's."""

    def __init__(self, side: Side, tree: Path) -> None:
        environment = os.environ | {"HOST_TIME_TREE": str(tree), "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HERE), "--serve", json.dumps(asdict(side))]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.side, self.process = side, subprocess.Popen(command, env=environment, cwd=tree, **pipes)

    def ask(self, what: str) -> Any:
        """The answer. Ends this program where the other one ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(f"{what}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"{self.side.name}: ended with status {self.process.wait()}")
        return json.loads(answer)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def sides_of(family: str, against: str) -> list[Side]:
    """Those of a family, in the order of the table."""
    ours = [
        Side(family, "ours", adapter, storage, recomputed)
        for recomputed in (True, False)
        for storage in ("fp8_e4m3", "bf16")
        for adapter in ("LoRA", "DoRA")
    ]
    compiled = [Side(family, "ours", adapter, "fp8_e4m3", compiled=True) for adapter in ("LoRA", "DoRA")]
    then = [Side(family, "ours", adapter, "fp8_e4m3", True, against) for adapter in ("LoRA", "DoRA") if against]
    return [*ours, *compiled, *then, *(Side(family, "peft", adapter, "bf16", True) for adapter in ("LoRA", "DoRA"))]


def measure(sides: Sequence[Side], trees: dict[str, Path], rounds: int, lines: int) -> list[Measured]:
    """The sides, a step each in turn; the one that begins is another in each round."""
    with ExitStack() as stack:
        processes = [stack.enter_context(Process(side, trees[side.tree])) for side in sides]
        counts = [process.ask("count") for process in processes]
        times: list[list[float]] = [[] for _ in processes]
        for number in range(rounds):
            for at in range(len(processes)):
                place = (at + number) % len(processes)
                times[place].append(processes[place].ask("step"))
        measured = [Measured(side, ms, **count) for side, ms, count in zip(sides, times, counts, strict=True)]
        for process in processes:
            if lines and process.side.who == "ours":
                print(f"\n{process.side.name}, under a profiler:", *process.ask("lines")[:lines], sep="\n")
    return measured


def ratio(one: Measured, other: Measured) -> float:
    """Within the rounds."""
    return statistics.median(a / b for a, b in zip(one.ms, other.ms, strict=True))


def table(rows: Sequence[Measured]) -> str:
    """Of one family."""
    by = {row.side: row for row in rows}
    lines = ["| | ms | operators + launches | us each | calls | of PEFT's |", "|---|---|---|---|---|---|"]
    for side, row in by.items():
        peft = by[Side(side.family, "peft", side.adapter, "bf16")]
        asked = row.operators + row.launches
        lines.append(
            f"| {side.name} | {row.median:.0f} | {row.operators:,} + {row.launches:,} | {1000 * row.median / asked:.0f} "
            f"| {row.calls:,} | {'' if row is peft else f'{ratio(row, peft):.2f}'} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=sorted(FAMILIES), action="append", help="both")
    parser.add_argument("--against", metavar="COMMIT", default="", help="our steps of this commit as well")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--wrappers", action="store_true", help="only what our wrappers add to a launch")
    parser.add_argument("--lines", type=int, default=0, help="how many of our most expensive functions to list, a side")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)  # a side: this is its process
    asked = parser.parse_args()
    if asked.serve:
        serve(Side(**json.loads(asked.serve)))
        return 0
    if asked.wrappers:
        for name, (launcher, wrapper) in wrappers().items():
            print(f"{name:<32} the launch {launcher:5.1f} us, with our wrapper {wrapper:5.1f}: + {wrapper - launcher:.1f}")
        return 0
    from benchmarks.bench_cli import interval
    from tests.proofs.shared import worktree

    rows = []
    with ExitStack() as stack:
        trees = {"": ROOT}
        if asked.against:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "tree"
            trees[asked.against] = stack.enter_context(worktree(asked.against, folder))
        for family in asked.family or FAMILIES:
            measured = measure(sides_of(family, asked.against), trees, asked.rounds, asked.lines)
            rows += measured
            print(f"\n{table(measured)}", flush=True)
            by = {row.side: row for row in measured}
            lora, dora = (by[Side(family, "ours", adapter, "fp8_e4m3")] for adapter in ("LoRA", "DoRA"))
            made = [by[Side(family, "ours", adapter, "fp8_e4m3", compiled=True)] for adapter in ("LoRA", "DoRA")]
            print(f"\nDoRA over LoRA: {ratio(dora, lora):.2f}, compiled {ratio(*reversed(made)):.2f}")
            for eager, row in zip((lora, dora), made, strict=True):
                print(f"{row.side.adapter}, compiled over eager: {ratio(row, eager):.2f}")
            for row in (lora, dora, *made) if asked.against else ():
                then = by[Side(family, "ours", row.side.adapter, "fp8_e4m3", True, asked.against)]
                mean, low, high = interval([now / before for now, before in zip(row.ms, then.ms, strict=True)])
                print(f"{row.side.name} over {asked.against}: {mean:.3f}, 95 % interval {low:.3f} to {high:.3f}")
    if asked.json:
        asked.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
