"""One training step of the full-size models in each storage, as a ratio to bf16; and where a float8 product pays.

    python benchmarks/bench_step.py --device cuda [--seconds 150] [--storage bf16,fp8_e4m3] [--json FILE]
    python benchmarks/bench_step.py --quick     # tiny models, on a CPU too: it runs, its ratios mean nothing

A step: forward and backward of a rank-16 DoRA on attention and MLP, every block recomputed, bf16 compute, clipping, AdamW;
batch 1 at 1024 and 512 px. The weights are random: the published configs, built as a run builds them, without files. All
storages of a model are in memory at once (Flux: 60 GB) and take turns, a step each; a ratio is the median over the rounds of
a step's time over bf16's in the same round. "fp8_e4m3 + fp8 matmul" is the float8 model with precision.matmul = "fp8".
"fp8_e4m3 LoRA" is a LoRA over that storage: what DoRA costs in a whole step, launches included.
Memory is what a run of that storage alone would take: weights, adapter, optimizer and the peak of a step.

Layers: for each shape, the float8 product and input gradient over upcast and bf16 product, in replayed CUDA graphs, with the
verdict that kernels.scaled_matmul_pays is to give; "fast sums" is fp8_triton.FAST_SUMS. Utilisation: the base's products of a
step (forward, recomputation, input gradients) over what this card multiplies in that time in one large bf16 product.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import unset_fake_temporarily  # noqa: E402

from benchmarks.bench_dora import graph_ms  # noqa: E402
from scripts.make_model import tiny_flux, tiny_sdxl  # noqa: E402
from trainer import kernels, optim, quantization  # noqa: E402
from trainer.adapters import Method, Rates, inject, match_targets  # noqa: E402
from trainer.base.memory import checkpoint_blocks, find_blocks  # noqa: E402
from trainer.base.protocols import Kernels  # noqa: E402
from trainer.base.types import Batch, Conditioning, Occurrence  # noqa: E402
from trainer.engine.step import Losses, Step  # noqa: E402
from trainer.kernels import scratch  # noqa: E402
from trainer.models import family_named  # noqa: E402
from trainer.models.base import Markers, Model  # noqa: E402
from trainer.models.config_files import PUBLISHED  # noqa: E402
from trainer.models.loading import ModelSource  # noqa: E402
from trainer.plan.storage import Storage  # noqa: E402
from trainer.quantization import FORMATS, FrozenConv2d, FrozenLayer, FrozenLinear  # noqa: E402
from trainer.runtime.compilation import Compiler  # noqa: E402
from trainer.runtime.precision import prepare_device  # noqa: E402

STORAGES = ("bf16", "fp8_e4m3", "int8", "nf4")
SCALED = "fp8_e4m3 + fp8 matmul"
LORA = "fp8_e4m3 LoRA"
RANK = 16
# TFLOP of a step at batch 1, every block recomputed: products and attention of the base, counted on the published configs.
TFLOP = {("Flux", 1024): 238.0, ("Flux", 512): 66.0, ("SDXL", 1024): 21.0}
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


class Bench:
    """A denoiser in one storage, with its adapter and optimizer: what a run of it holds."""

    def __init__(
        self, source: ModelSource, storage: str, device: torch.device, *, dora: bool = True, chosen: Kernels | None = None,
        recomputed: bool = True, optimizer: str = "adamw", compiler: Compiler | None = None,
    ) -> None:  # fmt: skip
        """chosen: kernels; None for those that a run would choose. recomputed: every block. compiler: of some."""
        before = allocated(device)
        family = source.family
        name = family.denoiser
        component = Storage(
            name, FORMATS[storage], torch.bfloat16, sensitive=family.component(name).sensitive, scaled_matmul=False
        )
        module = source.build(name)
        adaptable = [n for n, m in module.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
        targets = match_targets(
            {name: adaptable}, denoiser=name, targets="attention+mlp", presets=family.presets, rules=(), rank=RANK, alpha=None
        )  # fmt: skip
        component.swap(module, kernels=chosen or kernels.choose("auto", device))
        module.to_empty(device=device)
        fill(module)
        family.adjust(name, module)
        self.adapter = inject(
            {name: module}, targets, bases=(FrozenLinear, FrozenConv2d), method=Method(dora=dora), seed=0,
        )  # fmt: skip
        module.eval()
        self.adapter.share_inputs(name, family.shared_inputs.get(name, ()))
        blocks = find_blocks(module, family.blocks)
        self.adapter.refresh_before({name: module})
        compiled = {n: b for n, b in blocks.items() if compiler and any(fnmatchcase(n, p) for p in family.compiled)}
        checkpoint_blocks(blocks, recomputed, family.unread, family.skipped, compiled)
        if compiler is not None:
            compiler.compile(compiled)
        built = optim.build_optimizer(
            optimizer, self.adapter.parameter_groups(Rates(lr=1e-4, weight_decay=0.01)), min_8bit_size=1
        )  # fmt: skip
        with unset_fake_temporarily():  # it reads its noise levels
            self.objective = objective = family.objective(
                source.scheduler, Markers(), prediction="auto", zero_terminal_snr="auto", min_snr_gamma=None,
                timesteps="auto", shift="auto", logit_mean=0.0, logit_std=1.0,
            )  # fmt: skip
        self.model = model = Model(
            {name: module}, {name: source.config(name)}, {}, source.scheduler, {name: torch.bfloat16}, device,
            {"objective": objective, "guidance": 1.0},
        )  # fmt: skip
        self.step = Step(
            losses=Losses(
                objective=objective, image_tokens=family.image_tokens, seed=0, device=device,
                predict=lambda *inputs: family.predict(model, *inputs),
                tokens=lambda texts: {}, encode=lambda tokens: None,
            ),
            optimizer=built,
            schedule=optim.build_schedule("constant", built, warmup=0, total_steps=10**6),
            scaler=torch.amp.GradScaler(device.type, enabled=False),
            max_grad_norm=1.0,
            after_update=lambda step: self.adapter.mark_stale() or {},
            sum=lambda tensor: None,
            training=self.adapter.training(0),
        )  # fmt: skip
        self.layers = [m for m in module.modules() if isinstance(m, FrozenLinear)]
        self.device, self.done = device, 0
        self.resident_bytes = allocated(device) - before

    def milliseconds(self, batch: Batch, scaled: bool) -> float:
        """Of one step, which ends in a read of its gradient norm."""
        for layer in self.layers:
            layer.scaled_matmul = scaled
        self.done += 1
        synchronize(self.device)
        start = time.perf_counter()
        self.step.run(self.done, [batch], batch.occurrences)
        synchronize(self.device)
        return 1000 * (time.perf_counter() - start)


def fill(module: nn.Module) -> None:
    """Random weights that keep activations of order 1, made and quantised layer by layer on the module's device."""
    assert all(name.rpartition(".")[2].startswith("payload_") for name, _ in module.named_buffers())
    with torch.no_grad():
        for layer in module.modules():
            for name, parameter in layer.named_parameters(recurse=False):
                parameter.fill_(1.0 if name == "weight" else 0.0)
            if isinstance(layer, FrozenLayer):
                columns = layer.weight_shape[1:].numel()
                dense = torch.randn(layer.weight_shape, dtype=torch.bfloat16, device=layer.payload_weight.device)
                layer.format.quantize_into(dense.mul_(columns**-0.5), layer.payload())


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def batch_of(source: ModelSource, pixels: int, text_tokens: int) -> Batch:
    config, generator = source.config(source.family.denoiser), torch.Generator().manual_seed(0)
    if source.family.name == "flux":
        channels, width, pooled = (config["in_channels"] // 4, config["joint_attention_dim"], config["pooled_projection_dim"])
    else:
        channels, width = config["in_channels"], config["cross_attention_dim"]
        pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
    size = torch.tensor([[pixels, pixels]])
    return Batch(
        (Occurrence(0, "0/a.png", 0),),
        torch.randn(1, channels, pixels // 8, pixels // 8, generator=generator),
        ("",),
        Conditioning(
            torch.randn(1, text_tokens, width, generator=generator).bfloat16(),
            pooled=torch.randn(1, pooled, generator=generator).bfloat16(),
        ),
        original_size=size, crop_top_left=torch.zeros_like(size), target_size=size,
    )  # fmt: skip


def steps(
    label: str, source: ModelSource, storages: list[str], sizes: tuple[int, ...], text_tokens: int, rounds: int,
    device: torch.device, end: float, errors: dict[str, str],
) -> list[dict[str, Any]]:  # fmt: skip
    """One row for each size and storage. Rounds end early at `end`; what fails is named in `errors`, the others go on."""
    benches: dict[str, Bench] = {}
    for storage in storages:
        with noted(errors, f"{label} {storage}"):
            benches[storage] = Bench(source, storage, device)
    if "fp8_e4m3" in storages:
        with noted(errors, f"{label} {LORA}"):
            benches[LORA] = Bench(source, "fp8_e4m3", device, dora=False)
    variants = [(name, bench, False) for name, bench in benches.items()]
    if "fp8_e4m3" in benches:
        variants.insert(1 + list(benches).index("fp8_e4m3"), (SCALED, benches["fp8_e4m3"], True))
    rows = []
    for pixels in sizes:
        batch, peak, times = batch_of(source, pixels, text_tokens), {}, {}
        for name, bench, scaled in variants:
            with noted(errors, f"{label} {pixels} px {name}"):
                before = allocated(device)
                bench.milliseconds(batch, scaled)  # compiles kernels, makes the optimizer's state
                bench.resident_bytes += allocated(device) - before
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                before = allocated(device)
                bench.milliseconds(batch, scaled)
                if device.type == "cuda":
                    peak[name] = torch.cuda.max_memory_allocated() - before + bench.resident_bytes
                times[name] = []
        done = 0
        while times and done < rounds and (done == 0 or time.monotonic() < end):
            done += 1
            for name, bench, scaled in variants:
                if name in times and len(times[name]) == done - 1:
                    with noted(errors, f"{label} {pixels} px {name}"):
                        times[name].append(bench.milliseconds(batch, scaled))
        times = {name: values for name, values in times.items() if len(values) == done}
        for name, bench, _ in variants:
            if name in times:
                row = {
                    "model": label, "pixels": pixels, "storage": name, "ms": statistics.median(times[name]),
                    "rounds": done, "resident_bytes": bench.resident_bytes, "peak_bytes": peak.get(name),
                }  # fmt: skip
                if "bf16" in times:
                    row["ratio"] = statistics.median(a / b for a, b in zip(times[name], times["bf16"], strict=True))
                rows.append(row)
                print(step_line(row), flush=True)
    return rows


@contextmanager
def noted(errors: dict[str, str], what: str):
    """A storage that fails is named and left out: the others' figures are worth having."""
    try:
        yield
    except Exception as error:
        errors[what] = f"{type(error).__name__}: {error}"
        print(f"error: {what}: {errors[what].splitlines()[0]}", flush=True)


def step_line(row: dict[str, Any]) -> str:
    ratio = f"{row['ratio']:.3f} of bf16" if "ratio" in row else ""
    memory = f"{row['peak_bytes'] / 2**30:6.1f} GiB" if row["peak_bytes"] else ""
    return f"{row['model']:<5} {row['pixels']:>4} px {row['storage']:<22} {row['ms']:9.1f} ms  {ratio:<14} {memory}"


def layer_steps(shape: tuple[int, int, int], device: torch.device) -> dict[str, Callable[[], object]]:
    """Forward and input gradient of one layer stored as fp8_e4m3: ordinary, in float8, in float8 with fast sums."""
    m, n, k = shape
    chosen = kernels.choose("auto", device)
    layer = FrozenLinear(
        k, n, bias=False, format=FORMATS["fp8_e4m3"], compute_dtype=torch.bfloat16, kernels=chosen, device=device
    )  # fmt: skip
    fill(layer)
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

    functions = {"forward": lambda: layer.converted_product(x), "input_grad": lambda: layer.input_grad(dy, x.shape, g)}
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


def matmul_tflops(device: torch.device) -> float:
    """The card's rate on a large bf16 product, of random numbers."""
    m, n, k = 4608, 12288, 3072
    a, b = (torch.randn(rows, k, dtype=torch.bfloat16, device=device) for rows in (m, n))
    return 2 * m * n * k / graph_ms({"mm": lambda: a @ b.t()}, 20)["mm"] / 1e9


def sources(quick: bool, folder: Path) -> dict[str, ModelSource]:
    """The published models' configs; tiny ones with `quick`."""
    roots = {"Flux": ("flux", PUBLISHED / "flux-dev"), "SDXL": ("sdxl", PUBLISHED / "sdxl")}
    found = {}
    for label, (name, root) in roots.items():
        family = family_named(name)
        if quick:
            tiny = tiny_flux("flux-dev", 1000, 1000) if name == "flux" else tiny_sdxl(1000)
            config, scheduler = folder / name / family.denoiser, folder / name / "scheduler"
            config.mkdir(parents=True), scheduler.mkdir()
            (config / "config.json").write_text(json.dumps(tiny[family.denoiser]))
            published = root / "scheduler" / "scheduler_config.json"
            (scheduler / "scheduler_config.json").write_text(published.read_text())
            root = folder / name
        found[label] = ModelSource(family, root, quantization.recognise)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--storage", default=",".join(STORAGES), help="comma-separated; ratios need bf16")
    parser.add_argument("--rounds", type=int, help="7; with --quick 3")
    parser.add_argument("--seconds", type=float, default=600, help="start no further round or model after this time")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    storages = arguments.storage.split(",")
    if unknown := set(storages) - set(FORMATS):
        parser.error(f"--storage does not know {', '.join(sorted(unknown))}; it knows {', '.join(FORMATS)}")
    device, quick = torch.device(arguments.device), arguments.quick
    if device.type == "cuda" and not torch.cuda.is_available():
        print("error: --device cuda, but no CUDA device is visible", file=sys.stderr)
        return 2
    if device.type == "cpu" and not quick:
        print("error: the full-size models need --device cuda; --quick runs tiny ones on a CPU", file=sys.stderr)
        return 2
    prepare_device(device, {"bf16"})
    torch.manual_seed(0)
    start, errors = time.monotonic(), {}
    result: dict[str, Any] = {
        "about": {
            "date": datetime.now(UTC).isoformat(timespec="seconds"), "torch": torch.__version__, "quick": quick,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
            "kernels": kernels.choose("auto", device).name,
            "multiplies float8": kernels.multiplies_float8(kernels.choose("auto", device), device),
            "gate": {"min weights": kernels.FP8_MIN_WEIGHTS, "min rows": kernels.FP8_MIN_ROWS},
        },
        "layers": [], "steps": [], "errors": errors,
    }  # fmt: skip

    def write() -> None:
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")

    layers = {"Flux": ((32, 64, 64),), "SDXL": ((32, 48, 96),)} if quick else LAYERS
    if quick:
        # Nothing in a tiny model would pass it.
        kernels.FP8_MIN_WEIGHTS, kernels.FP8_MIN_ROWS = 1, 1
    result["layers"] = layer_rows(layers, 3 if quick else 20, device, errors)
    if device.type == "cuda":
        result["matmul_tflops"] = matmul_tflops(device)
        print(f"bf16 product: {result['matmul_tflops']:.0f} TFLOP/s", flush=True)
    write()
    sizes, tokens = ((64, 32), 8) if quick else ((1024, 512), None)
    with tempfile.TemporaryDirectory() as folder:
        # Flux may take six tenths of the time: its models are large.
        shares = zip(sources(quick, Path(folder)).items(), (0.6, 1.0), strict=True)
        for (label, source), share in shares:
            end = start + share * arguments.seconds
            if time.monotonic() > end:
                print(f"{label}: left out, out of time", flush=True)
                continue
            text = tokens or {"Flux": 512, "SDXL": 77}[label]
            rounds = arguments.rounds or (3 if quick else 7)
            result["steps"] += steps(label, source, storages, sizes, text, rounds, device, end, errors)
            for row in result["steps"]:
                if "matmul_tflops" in result and (row["model"], row["pixels"]) in TFLOP:
                    rate = TFLOP[row["model"], row["pixels"]] / row["ms"] * 1000
                    row["utilisation"] = rate / result["matmul_tflops"]
            write()
            scratch._buffers.clear()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
