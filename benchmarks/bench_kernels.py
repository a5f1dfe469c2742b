"""Time the fused kernels against their plain twins, eager and compiled, on the layers that carry the time.

    python benchmarks/bench_kernels.py [--seconds 240] [--rank 16] [--storage fp8_e4m3,nf4,bf16] [--json FILE]
    python benchmarks/bench_kernels.py --casts     # on a CPU: how float8 weights are decoded there, beside torch's cast

Medians of triton.testing.do_bench, which clears the L2 cache between calls; the arguments rotate besides. `GB/s` counts each
input once and each output once, and `of copy` is its share of what a large device-to-device copy reaches in the same process.
First the kernels and the eager twins are timed, then, while time is left, the compiled twins. Exit status 2 without CUDA.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks import pages  # noqa: E402
from trainer.base.types import StoredWeight  # noqa: E402

# (M, N, K). Flux at 1024 px: image, text and joint rows; SDXL at 1024 px, batch 4 of the first two.
LAYERS = [
    (4608, 3072, 3072), (4608, 12288, 3072), (4608, 3072, 15360), (4096, 3072, 12288), (512, 3072, 3072),
    (512, 12288, 3072), (16384, 640, 640), (4096, 1280, 1280), (4096, 5120, 640), (4096, 640, 2560), (4096, 10240, 1280),
    (1024, 1280, 5120),
]  # fmt: skip
STORAGES = ("bf16", "fp8_e4m3", "int8", "int4", "nf4")
# An H200's L2 holds 50 MB: arguments rotate through more than that.
ROTATION_BYTES = 128 << 20


def random_weight(storage: str, n: int, k: int) -> StoredWeight:
    def number(size: int) -> torch.Tensor:
        return torch.rand(size, device="cuda") + 0.5

    if storage == "bf16":
        return StoredWeight(torch.randn(n, k, device="cuda", dtype=torch.bfloat16), (n, k))
    if storage == "fp8_e4m3":
        codes = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
        return StoredWeight(codes, (n, k), None, k, number(n))
    if storage == "int8":
        codes = torch.randint(-127, 128, (n, k), device="cuda", dtype=torch.int8)
        return StoredWeight(codes, (n, k), None, k, number(n))
    packed = torch.randint(0, 256, (n * k // 2,), device="cuda", dtype=torch.uint8)
    if storage == "int4":
        return StoredWeight(packed, (n, k), 4, 128, number(n * k // 128), -8 * number(n * k // 128))
    return StoredWeight(packed, (n, k), 4, 64, number(n * k // 64), None, torch.randn(16, device="cuda"))


def stored_bytes(weight: StoredWeight) -> int:
    return sum(t.nbytes for t in (weight.codes, weight.scale, weight.offset, weight.levels) if t is not None)


class Case:
    """One operation on one layer: its name, how to make arguments, and the bytes that it has to move."""

    def __init__(self, operation: str, storage: str, layer: tuple[int, int, int], rank: int) -> None:
        self.operation, self.storage, self.layer, self.rank = operation, storage, layer, rank

    def arguments(self) -> tuple[Any, ...]:
        m, n, k = self.layer

        def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=dtype)

        if self.operation == "compose":
            g, bias = random(n, dtype=torch.float32), random(n, dtype=torch.float32)
            return random(m, n), random(m, self.rank), random(n, self.rank), g, bias, random(m, n)
        if self.operation == "adapter_gradients":
            b, g, over, bias = random(n, self.rank, dtype=torch.float32), *(random(n, dtype=torch.float32) for _ in range(3))
            return random(m, n), random(m, n), random(m, self.rank), b, g, over, bias, 1.0, False
        weight = random_weight(self.storage, n, k)
        if self.operation == "upcast":
            return weight, torch.bfloat16, random(n, dtype=torch.float32), random(n, k)
        if self.operation == "row_squares":
            return (weight,)
        a, b = random(self.rank, k, dtype=torch.float32), random(n, self.rank, dtype=torch.float32)
        return [weight], [random(n, dtype=torch.float32).abs() * k], [a], [b], [1.0]

    def moved_bytes(self, arguments: tuple[Any, ...]) -> int:
        """Each input once and each output once; those that are not arguments too."""
        m, n, _ = self.layer
        new = {"adapter_gradients": n * (6 * self.rank + 4), "row_squares": 4 * n, "adapted_norms": 4 * n}
        each = [a for given in arguments for a in (given if isinstance(given, list) else [given])]
        tensors = sum(a.nbytes for a in each if isinstance(a, torch.Tensor))
        weights = sum(stored_bytes(a) for a in each if isinstance(a, StoredWeight))
        return tensors + weights + new.get(self.operation, 0)


def cases(storages: list[str], rank: int) -> Iterator[Case]:
    for operation in ("compose", "adapter_gradients"):
        for layer in sorted({(m, n, 0) for m, n, _ in LAYERS}, reverse=True):
            yield Case(operation, "-", layer, rank)
    for operation in ("upcast", "adapted_norms", "row_squares"):
        for storage in storages:
            for layer in sorted({(0, n, k) for _, n, k in LAYERS}, reverse=True):
                yield Case(operation, storage, layer, rank)


def microseconds(function: Callable[..., Any], sets: list[tuple[Any, ...]]) -> float:
    from triton.testing import do_bench

    turn = itertools.cycle(sets)
    median: Any = do_bench(lambda: function(*next(turn)), warmup=10, rep=40, return_mode="median")
    return 1000 * median


def copy_rate() -> float:
    """Bytes read and written a second by a device-to-device copy of 1 GiB."""
    source = torch.randint(0, 255, (1 << 30,), device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.nbytes / microseconds(target.copy_, [(source,)]) * 1e6


def casts(rounds: int = 12) -> int:
    """Best of alternating rounds: another load on the machine slows both."""
    from trainer.kernels import dora_torch

    n, k = 3072, 3072
    codes = torch.randn(n, k).to(torch.float8_e4m3fn)
    weight, out = StoredWeight(codes, (n, k), None, k, torch.ones(n), plain=True), torch.empty(n, k, dtype=torch.bfloat16)

    def milliseconds(function: Callable[[], Any]) -> float:
        start = time.perf_counter()
        function()
        return 1000 * (time.perf_counter() - start)

    def ours() -> None:
        dora_torch.upcast(weight, torch.bfloat16, None, out)

    taken = [(milliseconds(ours), milliseconds(lambda: codes.to(torch.bfloat16))) for _ in range(rounds)]
    decoded, cast = map(min, zip(*taken, strict=True))
    print(f"{n} x {k} from float8 to bf16: {decoded:.1f} ms, torch's cast {cast:.1f} ms, {cast / decoded:.1f} times as long")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=240, help="stop measuring after this time")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--storage", default="fp8_e4m3,nf4,bf16", help=f"comma-separated: {', '.join(STORAGES)}")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--casts", action="store_true", help="on a CPU: decoding float8 beside torch's cast of it")
    args = parser.parse_args()
    if args.casts:
        return casts()
    storages = args.storage.split(",")
    if unknown := set(storages) - set(STORAGES):
        parser.error(f"--storage does not know {', '.join(sorted(unknown))}; it knows {', '.join(STORAGES)}")
    if not torch.cuda.is_available():
        print("error: bench_kernels.py times Triton kernels and needs a CUDA device; there is none", file=sys.stderr)
        return 2
    import triton

    from trainer.kernels import decode, dora_torch, dora_triton

    decode.DEVICE_PIECE = 1 << 62  # one piece: its best case, memory aside
    deadline = time.monotonic() + args.seconds
    ceiling = copy_rate()
    rows: list[dict[str, Any]] = []
    left = list(cases(storages, args.rank))
    for compiled in (False, True):
        for index, case in enumerate(left):
            if time.monotonic() > deadline:
                break
            first = case.arguments()
            size = case.moved_bytes(first)
            sets = [first, *(case.arguments() for _ in range(min(64, ROTATION_BYTES // size)))]
            twin = getattr(dora_torch, case.operation)
            if compiled:
                torch.compiler.reset()  # every case starts with room for its compilations
                rows[index]["compiled_us"] = microseconds(torch.compile(twin, dynamic=False), sets)
                continue
            fused_us = microseconds(getattr(dora_triton, case.operation), sets)
            rows.append({
                "operation": case.operation, "storage": case.storage, "layer": case.layer, "rank": case.rank,
                "bytes": size, "triton_us": fused_us, "eager_us": microseconds(twin, sets), "compiled_us": None,
                "of_copy": size / fused_us * 1e6 / ceiling,
            })  # fmt: skip
        left = left[: len(rows)]

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, rank {args.rank}")
    print(f"copy: {ceiling / 1e9:.0f} GB/s\n")
    lines = []
    for row in rows:
        layer = ", ".join(str(size or "-") for size in row["layer"])
        slow = "" if row["compiled_us"] is None else f"{row['compiled_us']:.1f}"
        times = [f"{row['triton_us']:.1f}", f"{row['eager_us']:.1f}", slow]
        rate = [f"{row['bytes'] / row['triton_us'] / 1e3:.0f}", f"{row['of_copy']:.0%}"]
        lines.append([row["operation"], row["storage"], layer, *times, *rate])
    titles = ["operation", "storage", "M, N, K", "triton us", "eager us", "compiled us", "GB/s", "of copy"]
    print(pages.table(titles, lines))
    total = len(list(cases(storages, args.rank)))
    missing = sum(row["compiled_us"] is None for row in rows)
    print(f"\n{len(rows)} of {total} cases; without a compiled figure: {missing}")
    if args.json:
        header = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        args.json.write_text(json.dumps(header | {"copy_bytes_per_second": ceiling, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
