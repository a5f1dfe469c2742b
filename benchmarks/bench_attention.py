"""Attention, forward and backward (trainer/runtime/attention.py). Ratios.

On a CPU: 16-bit tensors computed in fp32 over torch's own.

    OMP_NUM_THREADS=1 python benchmarks/bench_attention.py             # 2 minutes
    OMP_NUM_THREADS=1 python benchmarks/bench_attention.py --json FILE

The two take turns; a figure is the median over the rounds of the ratio within a round, of the processor's seconds. Rows are
(queries, keys). Up to attention.FEW queries every ratio has to be below 1.

On a GPU: each kind of step.attention over "auto", at the shapes of Flux and SDXL at 1024 and 512 px, in bf16.

    python benchmarks/bench_attention.py --kinds [--json FILE]
    python benchmarks/bench_attention.py --kinds --quick               # tiny, on a CPU: it runs, its ratios mean nothing

The kinds take turns; a figure is the median over the rounds of the ratio within a round. A kind that fails its trial
(attention.fault) is not timed, and the row says why.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from trainer.runtime import attention, precision  # noqa: E402

Shapes = Mapping[str, Sequence[tuple[int, int, int, int]]]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_SIZES = (16, 32, 64, 128)
TOKENS = ((4, 4), (4, 77), (16, 16), (16, 77), (32, 32), (64, 64), (64, 77), (128, 77), (128, 128), (256, 77), (256, 256),
          (1024, 77), (1024, 1024))  # fmt: skip
WIDTH, ROWS = 128, 768  # of all heads together, and of all queries
# (heads, queries, keys, head size) of batch 1: Flux's text and image at 1024 and 512 px; SDXL's two resolutions with
# attention at 1024 px, to themselves and to the text. At 512 px its tokens are a quarter.
SHAPES = {
    "Flux": ((24, 4608, 4608, 128), (24, 1536, 1536, 128)),
    "SDXL": (
        (10, 4096, 4096, 64), (10, 4096, 77, 64), (20, 1024, 1024, 64), (20, 1024, 77, 64),
        (10, 1024, 1024, 64), (10, 1024, 77, 64), (20, 256, 256, 64), (20, 256, 77, 64),
    ),
}  # fmt: skip
QUICK = {"Flux": ((2, 96, 96, 16),), "SDXL": ((2, 64, 64, 8), (2, 64, 77, 8))}


def step(
    call: Callable[..., torch.Tensor], dtype: torch.dtype, queries: int, keys: int, size: int, *, heads: int = 0,
    device: str = "cpu",
) -> Callable[[], None]:  # fmt: skip
    """Heads lie beside one another in a token, as a product gives them. heads: of batch 1; 0: as many as the width holds."""
    batch, width = (1, heads * size) if heads else (max(1, ROWS // queries), WIDTH)
    generator = torch.Generator().manual_seed(0)

    def drawn(tokens: int) -> torch.Tensor:
        return torch.randn(batch, tokens, width, generator=generator).to(device, dtype).requires_grad_()

    query, key, value, upstream = drawn(queries), drawn(keys), drawn(keys), drawn(queries).detach()

    def taken() -> None:
        heads = (tensor.view(batch, -1, width // size, size).transpose(1, 2) for tensor in (query, key, value))
        out = call(*heads).transpose(1, 2).reshape(upstream.shape)
        torch.autograd.grad(out, (query, key, value), upstream)

    return taken


def ratio(one: Callable[[], None], other: Callable[[], None], rounds: int) -> float:
    def seconds(call: Callable[[], None]) -> float:
        started = time.process_time()
        call()
        return time.process_time() - started

    for call in (one, other):
        call()
    return statistics.median(seconds(one) / seconds(other) for _ in range(rounds))


def by_kind(device: torch.device, shapes: Shapes, rounds: int) -> Iterator[dict[str, Any]]:
    """One row for each shape: milliseconds of "auto", the ratios to it, and why a kind is not there."""

    def milliseconds(chosen: attention.Attention, call: Callable[[], None]) -> float:
        wait = torch.cuda.synchronize if device.type == "cuda" else int
        with chosen.used():
            wait()
            started = time.perf_counter()
            call()
            wait()
        return 1000 * (time.perf_counter() - started)

    for model, each in shapes.items():
        for heads, queries, keys, size in each:
            auto = attention.choose("auto", device, torch.bfloat16, lambda size=size: {size})
            lacks = {kind: attention.fault(kind, device, torch.bfloat16, {size}) for kind in attention.KERNELS}
            kinds = {"auto": auto} | {kind: attention.planned(kind) for kind, why in lacks.items() if not why}
            call = step(scaled_dot_product_attention, torch.bfloat16, queries, keys, size, heads=heads, device=device.type)
            for chosen in kinds.values():
                milliseconds(chosen, call)
            times = [{kind: milliseconds(chosen, call) for kind, chosen in kinds.items()} for _ in range(rounds)]
            yield {
                "model": model, "heads": heads, "queries": queries, "keys": keys, "size": size,
                "auto": str(auto), "note": auto.note, "ms": statistics.median(taken["auto"] for taken in times),
                "of auto": {k: statistics.median(t[k] / t["auto"] for t in times) for k in kinds if k != "auto"},
                "lacks": {kind: why for kind, why in lacks.items() if why},
            }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """Of one row: every kind's time over that of "auto"."""
    ratios = ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in row["of auto"].items())
    lacks = "".join(f"; no {kind}: {why}" for kind, why in row["lacks"].items())
    shape = f"{row['heads']} heads of {row['size']}, {row['queries']} x {row['keys']}"
    return f"{row['model']:<5} {shape}: {ratios} of auto ({row['auto']}, {row['ms']:.2f} ms){lacks}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kinds", action="store_true", help="each kind of step.attention, on a GPU")
    parser.add_argument("--quick", action="store_true", help="with --kinds: tiny shapes on the CPU")
    asked = parser.parse_args()
    if asked.kinds:
        return kinds_on("cpu" if asked.quick else "cuda", QUICK if asked.quick else SHAPES, asked.rounds, asked.json)
    attention.FEW = 2**30
    found = []
    for name, dtype in DTYPES.items():
        print(f"\n{name}, head size" + "".join(f"{size:>8}" for size in HEAD_SIZES))
        for queries, keys in TOKENS:
            ratios = []
            for size in HEAD_SIZES:
                given = dtype, queries, keys, size
                ours = step(attention.attention, *given)
                ratios.append(ratio(ours, step(scaled_dot_product_attention, *given), asked.rounds))
            by_size = dict(zip(HEAD_SIZES, ratios, strict=True))
            found.append({"dtype": name, "queries": queries, "keys": keys, "ratios": by_size})
            print(f"{f'({queries}, {keys})':>15}" + "".join(f"{each:8.2f}" for each in ratios), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def kinds_on(name: str, shapes: Shapes, rounds: int, path: Path | None) -> int:
    if name == "cuda" and not torch.cuda.is_available():
        print("error: --kinds times the kernels of a GPU, and no CUDA device is visible; try --quick", file=sys.stderr)
        return 2
    device = torch.device(name)
    precision.prepare_device(device, {"bf16"})
    rows = []
    for row in by_kind(device, shapes, rounds):
        rows.append(row)
        print(line(row), flush=True)
    if path:
        about = {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
        path.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
