"""Forward and backward of one adapted layer: our LoRA and DoRA beside PEFT's. One table; every figure is a ratio in one run.

    python benchmarks/bench_dora.py                    # on the CPU; about 10 minutes
    python benchmarks/bench_dora.py --device cuda      # the layers of Flux and SDXL, replayed as CUDA graphs
    python benchmarks/bench_dora.py --shared-input     # q, k and v reading x together, over apart
    python benchmarks/bench_dora.py --accelerated      # PEFT's own DoRA under trainer.accelerate_peft_dora, over PEFT's
    python benchmarks/bench_dora.py --quick            # fewer shapes and rounds; --json PATH writes the numbers

CPU: a round times PEFT's LoRA, a candidate, PEFT's LoRA again; it counts if the two LoRA times are within 2 % of one another.
A figure is the median of at least 7 such rounds; with fewer in the time it may take it is marked "~". Our DoRA recomputes its
norm in every forward here; a run does so once an update. "frozen" is the layer without an adapter: nothing can be less.

PEFT's adapters over a bf16 base are fp32 here, as `get_peft_model` makes them and as ours are; PEFT then multiplies in fp32.
`--peft-adapters compute` casts them to the base's dtype (what `inject_adapter_in_model` alone gives): faster, less exact.

CUDA: a graph of one forward and backward is replayed, so that Python's launches do not count; each ratio is of medians that
alternate. Extra memory: the peak of a step over that of our LoRA, as a share of x, y and their gradients, for a layer with a
bias (whose z0 is saved) and without; the one buffer that all layers share is not counted. `--seconds` ends it in time.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from peft import LoraConfig, inject_adapter_in_model  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks.plain_peft import adapt  # noqa: E402
from trainer import accelerate_peft_dora  # noqa: E402
from trainer.adapters import Method, Target, inject  # noqa: E402
from trainer.adapters.kinds import KINDS, file_kind  # noqa: E402
from trainer.kernels import choose  # noqa: E402
from trainer.quantization import FORMATS, FrozenConv2d, FrozenLinear, freeze_layers, storage_of_layers  # noqa: E402
from trainer.runtime.precision import prepare_device  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CPU_SHAPES = ((4096, 640, 640), (1024, 1280, 1280), (1024, 5120, 1280), (1536, 3072, 3072))
# (M, N, K) at 1024 px, batch 1: Flux's double block (image and text rows) and single block, SDXL's attention and GEGLU.
FLUX_SHAPES = (
    (4096, 3072, 3072), (4096, 12288, 3072), (4096, 3072, 12288), (512, 3072, 3072), (512, 12288, 3072),
    (4608, 3072, 3072), (4608, 12288, 3072), (4608, 3072, 15360),
)  # fmt: skip
SDXL_SHAPES = (
    (4096, 640, 640), (4096, 5120, 640), (4096, 640, 2560), (1024, 1280, 1280), (1024, 10240, 1280), (1024, 1280, 5120),
    (16384, 640, 640), (4096, 1280, 1280), (4096, 10240, 1280),
)  # fmt: skip
ROUNDS, AGREE, SLICE = 7, 0.02, 0.06  # SLICE: seconds of one timing; short, so that a quiet moment spans a round


def peft_layer(shape, dtype, rank: int, dora: bool, device, adapters: str) -> nn.Module:
    _, n, k = shape
    model = nn.Sequential(nn.Linear(k, n, device=device, dtype=dtype))
    model = inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=["0"], use_dora=dora), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype if adapters == "compute" else torch.float32)
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.01)
    return model.train()


def our_layer(
    shape, storage: str, dtype, rank: int, dora: bool, device, kernels, bias: bool = True
) -> tuple[nn.Module, Callable]:
    """The layer, and what an update does to it: the norm is recomputed at the next forward."""
    _, n, k = shape
    # PEFT wants a parameter to tell the device by.
    model = nn.Sequential(nn.Linear(k, n, bias=bias, device=device), nn.LayerNorm(1, device=device))[: 1 if bias else 2]
    weight, given = model[0].weight.data, model[0].bias
    freeze_layers(model, storage_of_layers(format=FORMATS[storage], compute=dtype, unquantised=dtype), kernels)
    model[0].load_weight(weight)
    if bias:
        model[0].bias.data.copy_(given.data)
    adapter = inject(
        {"net": model},
        [Target("net", "0", rank, float(rank))],
        bases=(FrozenLinear, FrozenConv2d),
        method=Method(file_kind(magnitudes=dora)),
        seed=0,
    )
    for name, parameter in adapter.named_parameters().items():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.01)
    return model[:1], adapter.mark_stale


def stepper(model: nn.Module, x: torch.Tensor, dy: torch.Tensor, update: Callable = lambda: None) -> Callable:
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        update()
        model(x).backward(dy)

    return step


def seconds(step: Callable, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - start) / repeats


def cpu_ratio(reference: Callable, candidate: Callable, rounds: int, limit_s: float) -> tuple[float, int]:
    """(median of candidate / reference over the rounds that count, how many those are)."""
    for step in (reference, candidate):
        step()
    repeats = max(1, round(SLICE / seconds(reference, 1)))
    kept, end = [], time.monotonic() + limit_s
    while len(kept) < rounds and time.monotonic() < end:
        before, measured, after = (seconds(step, repeats) for step in (reference, candidate, reference))
        if abs(before / after - 1) <= AGREE:
            kept.append(2 * measured / (before + after))
    return (statistics.median(kept) if kept else float("nan")), len(kept)


def cpu_rows(shapes, ranks, rounds: int, limit_s: float, adapters: str) -> list[dict]:
    device, rows = torch.device("cpu"), []
    kernels = choose("auto", device)
    for dtype_name, dtype in DTYPES.items():
        for shape in shapes:
            for rank in ranks:
                m, n, k = shape
                x, dy = torch.randn(m, k).to(dtype).requires_grad_(), torch.randn(m, n).to(dtype)
                lora = stepper(peft_layer(shape, dtype, rank, False, device, adapters), x, dy)
                frozen = nn.Sequential(
                    FrozenLinear(k, n, bias=True, format=FORMATS[dtype_name], compute_dtype=dtype, kernels=kernels)
                )
                frozen[0].load_weight(torch.randn(n, k))
                frozen[0].bias.data.zero_()
                candidates = {
                    "frozen": stepper(frozen, x, dy),
                    "our LoRA": stepper(*_with(our_layer(shape, dtype_name, dtype, rank, False, device, kernels), x, dy)),
                    "our DoRA": stepper(*_with(our_layer(shape, dtype_name, dtype, rank, True, device, kernels), x, dy)),
                    "PEFT DoRA": stepper(peft_layer(shape, dtype, rank, True, device, adapters), x, dy),
                }
                row: dict = {"dtype": dtype_name, "shape": list(shape), "rank": rank, "rounds": {}}
                for name, step in candidates.items():
                    row[name], row["rounds"][name] = cpu_ratio(lora, step, rounds, limit_s)
                row["our DoRA / PEFT DoRA"] = row["our DoRA"] / row["PEFT DoRA"]
                rows.append(row)
                print(cpu_line(row), flush=True)
    return rows


def _with(layer, x, dy):
    model, update = layer
    return model, x, dy, update


CPU_HEAD = (
    f"{'dtype':<5} {'(M, N, K)':<20} {'r':>3} | {'frozen':>7} {'LoRA':>7} {'DoRA':>7} {'PEFT DoRA':>9} | "
    f"{'DoRA / PEFT DoRA':>16}"
)


def cpu_line(row: dict) -> str:
    def shown(name: str) -> str:
        return f"{row[name]:.3f}" + ("" if row["rounds"][name] >= ROUNDS else "~")

    return (
        f"{row['dtype']:<5} {str(tuple(row['shape'])):<20} {row['rank']:>3} | {shown('frozen'):>7} {shown('our LoRA'):>7} "
        f"{shown('our DoRA'):>7} "
        f"{shown('PEFT DoRA'):>9} | {row['our DoRA / PEFT DoRA']:>16.3f}"
    )


def shared_steps(shape, storage: str, dtype, rank: int, device, kernels) -> dict[str, Callable]:
    """A step of three adapted layers on one x (q, k, v), which read it apart or together."""
    m, n, k = shape
    x = torch.randn(m, k, device=device).to(dtype).requires_grad_()
    dys = [torch.randn(m, n, device=device).to(dtype) for _ in range(3)]

    def steps(together: bool) -> Callable:
        model = nn.ModuleDict({name: nn.Linear(k, n, device=device) for name in "qkv"})
        weights = [(layer.weight.data, layer.bias.data) for layer in model.values()]
        freeze_layers(model, storage_of_layers(format=FORMATS[storage], compute=dtype, unquantised=dtype), kernels)
        for layer, (weight, bias) in zip(model.values(), weights, strict=True):
            layer.load_weight(weight)
            layer.bias.data.copy_(bias)
        adapter = inject(
            {"net": model},
            [Target("net", name, rank, float(rank)) for name in "qkv"],
            bases=(FrozenLinear, FrozenConv2d),
            method=Method(KINDS["dora"]),
            seed=0,
        )
        if together:
            adapter.share_inputs("net", [tuple("qkv")])
        leaves = [x, *adapter.named_parameters().values()]

        def step() -> None:
            for leaf in leaves:
                leaf.grad = None
            adapter.mark_stale()
            torch.autograd.backward([layer(x) for layer in model.values()], dys)

        return step

    return {"apart": steps(False), "together": steps(True)}


def accelerated_steps(shape, storage: str, dtype, rank: int, device, kernels) -> dict[str, Callable]:
    """A step of one DoRA layer of PEFT, by PEFT and under `trainer.accelerate_peft_dora`."""
    theirs = peft_layer(shape, dtype, rank, True, device, "fp32")
    ours = copy.deepcopy(theirs)
    accelerate_peft_dora(ours)
    x = torch.randn(shape[0], shape[2], device=device).to(dtype).requires_grad_()
    dy = torch.randn(shape[0], shape[1], device=device).to(dtype)
    return {"PEFT": stepper(theirs, x, dy), "accelerated": stepper(ours, x, dy)}


def pair_rows(steps_of: Callable, shapes, ranks, device, rounds: int, limit_s: float) -> list[dict]:
    """The second step of a pair over the first."""
    rows, kernels = [], choose("auto", device)
    for dtype_name, dtype in DTYPES.items() if device.type == "cpu" else [("bf16", torch.bfloat16)]:
        for shape in shapes:
            for rank in ranks:
                steps = steps_of(shape, dtype_name, dtype, rank, device, kernels)
                (one, of_one), (other, of_other) = steps.items()
                if device.type == "cuda":
                    ms = graph_ms(steps, rounds)
                    ratio, counted = ms[other] / ms[one], rounds
                else:
                    ratio, counted = cpu_ratio(of_one, of_other, rounds, limit_s)
                rows.append({"dtype": dtype_name, "shape": list(shape), "rank": rank, "ratio": ratio, "rounds": counted})
                print(
                    f"{dtype_name:<5} {str(shape):<20} {rank:>3} | {other} / {one} {ratio:.3f} ({counted} rounds)", flush=True
                )
    return rows


def pocket(family: str, dtype: torch.dtype) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """(the denoiser of a pocket model of `examples/` under PEFT's DoRA, its loss on noise)."""
    from diffusers import FluxTransformer2DModel, UNet2DConditionModel

    torch.manual_seed(0)
    kind, folder = (UNet2DConditionModel, "unet") if family == "sdxl" else (FluxTransformer2DModel, "transformer")
    model = kind.from_pretrained(ROOT / "examples" / f"pocket_{family}" / folder, torch_dtype=dtype).train()
    adapt(model, ["to_q", "to_k", "to_v", "to_out.0", "ff.net.2", "conv1"], rank=16, dora=True)
    width = model.config.cross_attention_dim if family == "sdxl" else model.config.joint_attention_dim
    text = torch.randn(1, 77, width, dtype=dtype)
    if family == "sdxl":
        pooled = model.config.projection_class_embeddings_input_dim - 6 * model.config.addition_time_embed_dim
        of_text = {"text_embeds": torch.randn(1, pooled, dtype=dtype), "time_ids": torch.full((1, 6), 64.0)}
        given = dict(
            sample=torch.randn(1, model.config.in_channels, 32, 32, dtype=dtype),
            timestep=torch.tensor([500]),
            added_cond_kwargs=of_text,
        )
    else:
        places = torch.tensor([[0.0, i, j] for i in range(16) for j in range(16)])
        given = dict(hidden_states=torch.randn(1, 256, model.config.in_channels, dtype=dtype), timestep=torch.tensor([0.5]),
            pooled_projections=torch.randn(1, model.config.pooled_projection_dim, dtype=dtype),
            guidance=torch.tensor([3.5]), img_ids=places, txt_ids=torch.zeros(77, 3),
        )  # fmt: skip
    target = torch.randn_like(given["sample" if family == "sdxl" else "hidden_states"], dtype=torch.float32)

    def loss(denoiser: nn.Module) -> torch.Tensor:
        return (denoiser(**given, encoder_hidden_states=text, return_dict=False)[0].float() - target).square().mean()

    return model, loss


def training(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> Callable[[], None]:
    """A step of AdamW on what the model trains."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    return step


def pocket_rows(rounds: int, limit_s: float) -> list[dict]:
    """Whole steps of the pocket denoisers under PEFT's DoRA, accelerated over PEFT's own."""
    rows = []
    for family in ("sdxl", "flux"):
        for dtype_name, dtype in DTYPES.items():
            theirs, loss = pocket(family, dtype)
            ours = copy.deepcopy(theirs)
            layers = len(accelerate_peft_dora(ours).layers)
            ratio, counted = cpu_ratio(training(theirs, loss), training(ours, loss), rounds, limit_s)
            rows.append({"family": family, "dtype": dtype_name, "layers": layers, "ratio": ratio, "rounds": counted})
            print(
                f"pocket {family}, {dtype_name}, {layers} layers | accelerated / PEFT {ratio:.3f} ({counted} rounds)",
                flush=True,
            )
    return rows


def graph_ms(steps: dict[str, Callable], rounds: int) -> dict[str, float]:
    """Median milliseconds of a replayed graph of each step, the steps taking turns."""
    graphs = {}
    for name, step in steps.items():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            step()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()
            start.record()
            for _ in range(5):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) / 5)
    return {name: statistics.median(values) for name, values in times.items()}


def peak_bytes(step: Callable) -> int:
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def cuda_rows(shapes: dict, storages, ranks, rounds: int, kernels_name: str, adapters: str, end: float) -> list[dict]:
    device, dtype, rows = torch.device("cuda"), torch.bfloat16, []
    kernels = choose(kernels_name, device)
    for family, family_shapes in shapes.items():
        for shape in family_shapes:
            m, n, k = shape
            x = torch.randn(m, k, device=device).to(dtype).requires_grad_()
            dy = torch.randn(m, n, device=device).to(dtype)
            for storage in storages:
                for rank in ranks:
                    if time.monotonic() > end:
                        return rows
                    steps = {
                        "our LoRA": stepper(*_with(our_layer(shape, storage, dtype, rank, False, device, kernels), x, dy)),
                        "our DoRA": stepper(*_with(our_layer(shape, storage, dtype, rank, True, device, kernels), x, dy)),
                    }
                    if storage == "bf16":
                        steps["PEFT LoRA"] = stepper(peft_layer(shape, dtype, rank, False, device, adapters), x, dy)
                        steps["PEFT DoRA"] = stepper(peft_layer(shape, dtype, rank, True, device, adapters), x, dy)
                    peaks = {name: peak_bytes(step) for name, step in steps.items()}
                    for name, dora in (("LoRA, no bias", False), ("DoRA, no bias", True)):
                        layer = our_layer(shape, storage, dtype, rank, dora, device, kernels, bias=False)
                        peaks[name] = peak_bytes(stepper(*_with(layer, x, dy)))
                    ms = graph_ms(steps, rounds)
                    activations = 2 * (m * n + m * k) * dtype.itemsize
                    row = {
                        "family": family, "shape": list(shape), "storage": storage, "rank": rank, "kernels": kernels.name,
                        "ms": ms, "DoRA / LoRA": ms["our DoRA"] / ms["our LoRA"],
                        "extra memory": (peaks["our DoRA"] - peaks["our LoRA"]) / activations,
                        "extra memory, no bias": (peaks["DoRA, no bias"] - peaks["LoRA, no bias"]) / activations,
                        "peak bytes": peaks,
                    }  # fmt: skip
                    if storage == "bf16":
                        row |= {
                            "LoRA / PEFT LoRA": ms["our LoRA"] / ms["PEFT LoRA"],
                            "DoRA / PEFT LoRA": ms["our DoRA"] / ms["PEFT LoRA"],
                            "PEFT DoRA / DoRA": ms["PEFT DoRA"] / ms["our DoRA"],
                        }
                    rows.append(row)
                    print(cuda_line(row), flush=True)
                    del steps
                    torch.cuda.empty_cache()
    return rows


CUDA_HEAD = (
    f"{'layer':<5} {'(M, N, K)':<20} {'base':<9} {'r':>3} | {'DoRA ms':>8} {'DoRA/LoRA':>9} {'LoRA/PEFT':>9} "
    f"{'PEFT DoRA/DoRA':>14} | {'extra memory':>12} {'no bias':>7}"
)


def cuda_line(row: dict) -> str:
    def optional(name: str) -> str:
        return f"{row[name]:.3f}" if name in row else "-"

    return (
        f"{row['family']:<5} {str(tuple(row['shape'])):<20} {row['storage']:<9} {row['rank']:>3} | "
        f"{row['ms']['our DoRA']:>8.3f} {row['DoRA / LoRA']:>9.3f} {optional('LoRA / PEFT LoRA'):>9} "
        f"{optional('PEFT DoRA / DoRA'):>14} | {row['extra memory']:>12.1%} {row['extra memory, no bias']:>7.1%}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--kernels", choices=["auto", "triton", "torch"], default="auto", help="on CUDA")
    parser.add_argument("--peft-adapters", choices=["fp32", "compute"], default="fp32")
    parser.add_argument("--shared-input", action="store_true")
    parser.add_argument("--accelerated", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--limit", type=float, default=40, help="CPU: seconds that one figure may take")
    parser.add_argument("--seconds", type=float, default=600, help="CUDA: start no further layer after this time")
    parser.add_argument("--dtype", choices=list(DTYPES), help="CPU: only this one")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("error: --device cuda, but no CUDA device is visible; leave it out to measure on the CPU", file=sys.stderr)
        return 2
    prepare_device(device, set(DTYPES))
    if arguments.dtype:
        for name in set(DTYPES) - {arguments.dtype}:
            del DTYPES[name]
    end = time.monotonic() + arguments.seconds
    torch.manual_seed(0)
    if arguments.shared_input or arguments.accelerated:
        cuda = device.type == "cuda"
        shapes, rounds = ((*FLUX_SHAPES, *SDXL_SHAPES), 20) if cuda else (CPU_SHAPES, ROUNDS)
        if arguments.shared_input:
            shapes = [shape for shape in shapes if shape[1] == shape[2]]
        steps_of = shared_steps if arguments.shared_input else accelerated_steps
        rows = pair_rows(steps_of, shapes, (16,), device, rounds, arguments.limit)
        if arguments.accelerated and not cuda:
            rows += pocket_rows(rounds, arguments.limit)
    elif device.type == "cpu":
        print("times over PEFT's LoRA (last column: over PEFT's DoRA); '~': fewer than 7 rounds counted")
        print(CPU_HEAD)
        shapes, ranks, rounds = (CPU_SHAPES[:2], (16,), 3) if arguments.quick else (CPU_SHAPES, (16, 64), ROUNDS)
        rows = cpu_rows(shapes, ranks, rounds, arguments.limit, arguments.peft_adapters)
    else:
        print(CUDA_HEAD)
        shapes = {"Flux": FLUX_SHAPES, "SDXL": SDXL_SHAPES}
        storages, ranks = ("bf16", "fp8_e4m3"), (16,)
        if arguments.quick:
            shapes = {name: list(of)[:2] for name, of in shapes.items()}
        rows = cuda_rows(shapes, storages, ranks, 20, arguments.kernels, arguments.peft_adapters, end)
        if not arguments.quick:
            some = {"Flux": FLUX_SHAPES[:2], "SDXL": SDXL_SHAPES[:1]}
            rows += cuda_rows(some, ("int8", "int4", "nf4"), (16,), 20, arguments.kernels, arguments.peft_adapters, end)
            rows += cuda_rows(some, ("bf16",), (64,), 20, arguments.kernels, arguments.peft_adapters, end)
    if arguments.json:
        about = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"), "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
            "threads": torch.get_num_threads(), "peft_adapters": arguments.peft_adapters,
        }  # fmt: skip
        arguments.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
