"""From which layer shape on a float8 product pays: forward and input gradient of one layer, over upcast and bf16 product.

    python benchmarks/bench_float8.py [--json FILE]
    python benchmarks/bench_float8.py --quick     # tiny layers, on a CPU too: it runs, its ratios mean nothing

In replayed CUDA graphs, with the verdict that kernels.scaled_matmul_pays is to give; "fast sums" is fp8_triton.FAST_SUMS.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.bench_dora import graph_ms  # noqa: E402
from benchmarks.random_models import fill  # noqa: E402
from trainer import kernels  # noqa: E402
from trainer.quantization import FORMATS, FrozenLinear  # noqa: E402
from trainer.runtime.precision import prepare_device  # noqa: E402

# (M, N, K) of the layers that carry the time, at 1024 and 512 px. SDXL's 16384 and 4096 rows: batch 4.
LAYERS = {
    "Flux": tuple(
        (m, n, k)
        for m, sizes in (
            (512, ((3072, 3072), (12288, 3072), (3072, 12288))),
            (1024, ((3072, 3072), (12288, 3072), (3072, 12288))),
            (1536, ((3072, 3072), (12288, 3072), (3072, 15360))),
            (4096, ((3072, 3072), (12288, 3072), (3072, 12288))),
            (4608, ((3072, 3072), (12288, 3072), (3072, 15360))),
        )
        for n, k in sizes
    ),
    "SDXL": (
        (256, 1280, 1280), (256, 10240, 1280), (256, 1280, 5120), (1024, 1280, 1280), (1024, 10240, 1280),
        (1024, 1280, 5120), (4096, 1280, 1280), (4096, 10240, 1280), (4096, 640, 640), (4096, 5120, 640), (4096, 640, 2560),
        (16384, 640, 640), (16384, 5120, 640), (16384, 640, 2560),
    ),
}  # fmt: skip
# Below this the float8 layer counts as faster: what timings of one shape vary by.
PAYS = 0.97


@contextmanager
def noted(errors: dict[str, str], what: str):
    """A storage that fails is named and left out: the others' figures are worth having."""
    try:
        yield
    except Exception as error:
        errors[what] = f"{type(error).__name__}: {error}"
        print(f"error: {what}: {errors[what].splitlines()[0]}", flush=True)


def layer_steps(shape: tuple[int, int, int], device: torch.device) -> dict[str, Callable[[], object]]:
    """Forward and input gradient of one layer stored as fp8_e4m3: ordinary, in float8, in float8 with fast sums."""
    m, n, k = shape
    chosen = kernels.choose("auto", device)
    layer = FrozenLinear(
        k, n, bias=False, format=FORMATS["fp8_e4m3"], compute_dtype=torch.bfloat16, kernels=chosen, device=device
    )  # fmt: skip
    fill(layer, device)
    x, dy = (torch.randn(m, width, dtype=torch.bfloat16, device=device) for width in (k, n))
    g = torch.rand(n, device=device)

    def chosen_way(function: Callable[[], object], scaled: bool, fast: bool) -> Callable[[], object]:
        def run() -> object:
            layer.scaled_matmul = scaled
            if not fast:
                return function()
            from trainer.kernels import fp8_triton

            fp8_triton.FAST_SUMS = True
            try:
                return function()
            finally:
                fp8_triton.FAST_SUMS = False

        return run

    functions = {"forward": lambda: layer.matmul(x), "input_grad": lambda: layer.input_grad(dy, x.shape, g)}
    ways = {"upcast": (False, False), "fp8": (True, False)} | ({"fast": (True, True)} if chosen.name == "triton" else {})
    return {f"{pass_} {way}": chosen_way(function, *ways[way]) for pass_, function in functions.items() for way in ways}


@contextmanager
def open_gate():
    """Every aligned shape multiplies in float8: the gate is what is to be judged."""
    bounds = kernels.FP8_MIN_WEIGHTS, kernels.FP8_MIN_ROWS
    kernels.FP8_MIN_WEIGHTS, kernels.FP8_MIN_ROWS = 1, 1
    try:
        yield
    finally:
        kernels.FP8_MIN_WEIGHTS, kernels.FP8_MIN_ROWS = bounds


@torch.no_grad()
def layer_rows(
    layers: dict[str, tuple[tuple[int, int, int], ...]], rounds: int, device: torch.device, errors: dict[str, str]
) -> list[dict[str, Any]]:
    rows = []
    for label, shapes in layers.items():
        for shape in shapes:
            with noted(errors, f"{label} layer {shape}"):
                with open_gate():
                    timed = layer_steps(shape, device)
                    ms = graph_ms(timed, rounds) if device.type == "cuda" else plain_ms(timed, rounds)
                total = {way: ms[f"forward {way}"] + ms[f"input_grad {way}"] for way in ("upcast", "fp8")}
                row = {
                    "model": label, "shape": list(shape), "ms": ms, "ratio": total["fp8"] / total["upcast"],
                    "pays": total["fp8"] <= PAYS * total["upcast"], "gate": kernels.scaled_matmul_pays(*shape),
                }  # fmt: skip
                if "forward fast" in ms:
                    row["ratio, fast sums"] = (ms["forward fast"] + ms["input_grad fast"]) / total["upcast"]
                rows.append(row)
                print(layer_line(row), flush=True)
    return rows


def layer_line(row: dict[str, Any]) -> str:
    verdict = "pays" if row["pays"] else "does not pay"
    gate = "" if row["pays"] == row["gate"] else f"; the gate says {'yes' if row['gate'] else 'no'}"
    ms, fast = row["ms"], f" (fast sums {row['ratio, fast sums']:.2f})" if "ratio, fast sums" in row else ""
    each = ", ".join(f"{p} {ms[f'{p} fp8'] / ms[f'{p} upcast']:.2f}" for p in ("forward", "input_grad"))
    return f"{row['model']:<5} {str(tuple(row['shape'])):<20} fp8 / upcast {row['ratio']:.2f}: {each}{fast}; {verdict}{gate}"


def plain_ms(timed: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds + 1):
        for name, function in timed.items():
            start = time.perf_counter()
            function()
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if not asked.quick and not torch.cuda.is_available():
        print("error: no CUDA device is visible; --quick runs tiny layers on a CPU", file=sys.stderr)
        return 2
    device = torch.device("cpu" if asked.quick else "cuda")
    prepare_device(device, {"bf16"})
    torch.manual_seed(0)
    if asked.quick:
        # Nothing in a tiny model would pass it.
        kernels.FP8_MIN_WEIGHTS, kernels.FP8_MIN_ROWS = 1, 1
    shapes = {"Flux": ((32, 64, 64),), "SDXL": ((32, 48, 96),)} if asked.quick else LAYERS
    errors: dict[str, str] = {}
    rows = layer_rows(shapes, 3 if asked.quick else 20, device, errors)
    if asked.json:
        gate = {"min weights": kernels.FP8_MIN_WEIGHTS, "min rows": kernels.FP8_MIN_ROWS}
        asked.json.write_text(json.dumps({"gate": gate, "rows": rows, "errors": errors}, indent=1) + "\n")
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
