"""Time and peak memory of scripts/adapter.py at full size: convert, merge, extract, compare, resize.

    python benchmarks/adapter_files.py --out docs/benchmarks/adapter-files-CPU-DATE.json [--folder DIR] [--threads 2]

Each command is a process of its own: its seconds, its processor seconds and its peak resident memory, the start and the
libraries included. Flux has no model: a rank-64 adapter of its attention in bf16 is converted. SDXL's model is a sparse
file of the published sizes, whose weights read as zeros. The adapters have random values in every layer of the UNet and
both text encoders, so what is merged, and what is extracted from it, is zero nowhere. Takes 7.5 GiB of disk. Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from trainer.base.files import json_bytes, write_atomic  # noqa: E402
from trainer.base.tensorfile import Recipe, write_tensors  # noqa: E402
from workbench.adapter_files.opening import NamedModel, published  # noqa: E402

GIB = 2**30
RANK, EXTRACTED, RESIZED, CONVERSIONS = 16, 16, 8, 5
DRAWN = 2**24  # numbers that all tensors are cut from, each at a place of its own


def drawn(shape: Sequence[int], place: int, numbers: torch.Tensor) -> torch.Tensor:
    count = torch.Size(shape).numel()
    start = place * 7_919 % (len(numbers) - count)
    return numbers[start : start + count].view(*shape)


def write_adapter(path: Path, model: NamedModel, layers: Sequence[str], rank: int, *, dora: bool = False) -> None:
    """Random, in bf16, under diffusers' keys; of a DoRA with magnitudes around one, in fp32."""
    numbers = (0.05 * torch.randn(DRAWN, generator=torch.Generator().manual_seed(0))).bfloat16()
    ones = 1 + 0.1 * torch.randn(DRAWN // 16, generator=torch.Generator().manual_seed(1))
    shapes, tensors = model.full_layers(list(dict.fromkeys(name.partition(".")[0] for name in layers))), {}
    for place, name in enumerate(layers):
        rows, *columns = shapes[name]
        kernel = (1,) * (len(columns) - 1)
        for key, shape in (("lora_A.weight", (rank, *columns)), ("lora_B.weight", (rows, rank, *kernel))):
            make = partial(drawn, shape, 2 * place + key.startswith("lora_B"), numbers)
            tensors[f"{name}.{key}"] = Recipe(torch.bfloat16, shape, make)
        if dora:
            shape = (1, rows, 1, 1) if kernel else (rows,)
            tensors[f"{name}.lora_magnitude_vector"] = Recipe(torch.float32, shape, partial(drawn, shape, place, ones))
    write_tensors(path, tensors, dict(model.hints))


def measured(arguments: Sequence[object], threads: int) -> dict[str, Any]:
    """Run `scripts/adapter.py ARGUMENTS`; ends the program where that fails."""
    command = [sys.executable, str(ROOT / "scripts" / "adapter.py"), *map(str, arguments)]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, env=os.environ | {"OMP_NUM_THREADS": str(threads)})
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        text = said.read()
    if process.returncode:
        sys.exit(f"adapter.py {arguments[0]} ended with {process.returncode}")
    found = {
        "seconds": round(seconds, 1), "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_gib": round(used.ru_maxrss * 1024 / GIB, 2), "load": [round(each, 1) for each in os.getloadavg()],
        "said": [line for line in text.splitlines() if "/" not in line or "||" in line][-6:],
    }  # fmt: skip
    print(f"{arguments[0]}: {found['seconds']} s, {found['cpu_seconds']} s of CPU, {found['peak_gib']} GiB", flush=True)
    return found


def converted(folder: Path, threads: int) -> dict[str, Any]:
    """Several times: it is short, and its start alone takes seconds."""
    model = published("flux")[0]
    layers = [f"transformer.{name}" for name in model.layers("transformer") if ".attn." in name]
    file = folder / "flux.safetensors"
    write_adapter(file, model, layers, 64)
    tries = [measured(["convert", file, folder / "kohya.safetensors", "--to", "kohya"], threads) for _ in range(CONVERSIONS)]
    middle = sorted(tries, key=lambda each: each["cpu_seconds"])[len(tries) // 2]
    more = {
        "all_seconds": [each["seconds"] for each in tries], "all_cpu_seconds": [each["cpu_seconds"] for each in tries],
        "adapter_gib": round(file.stat().st_size / GIB, 2),
    }  # fmt: skip
    return {"convert, Flux attention, rank 64, bf16": middle | more}


def sdxl(folder: Path, threads: int, *, extract: bool) -> dict[str, Any]:
    model, whole = published("sdxl")[0], folder / "sdxl.safetensors"
    command = [sys.executable, str(ROOT / "scripts" / "make_model.py"), "--size", "full", "--family", "sdxl", "--sparse"]
    subprocess.run([*command, "--layout", "single_file", str(whole)], check=True)
    layers = list(model.full_layers(model.adaptable))
    lora, dora, merged, taken = (folder / f"{name}.safetensors" for name in ("lora", "dora", "merged", "taken"))
    write_adapter(lora, model, layers, RANK)
    write_adapter(dora, model, layers, RANK, dora=True)
    found = {f"merge, SDXL, LoRA of rank {RANK} on {len(layers)} layers": measured(["merge", whole, lora, merged], threads)}
    if extract:
        took = measured(["extract", merged, whole, taken, "--rank", EXTRACTED], threads)
        found[f"extract, SDXL, rank {EXTRACTED}"] = took
        found["compare, SDXL"] = measured(["compare", lora, taken], threads)
        smaller = folder / "smaller.safetensors"
        found[f"resize, SDXL, to rank {RESIZED}"] = measured(["resize", taken, smaller, "--rank", RESIZED], threads)
    merged.unlink()
    found[f"merge, SDXL, DoRA of rank {RANK} on {len(layers)} layers"] = measured(["merge", whole, dora, merged], threads)
    merged.unlink()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="JSON", help="figures in it that are not measured stay")
    parser.add_argument("--folder", type=Path, help="where the files go for the time being")
    parser.add_argument("--threads", type=int, default=2)
    parts = ("convert", "merge", "extract")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="extract: with merge, compare and resize")
    chosen = parser.parse_args()
    found: dict[str, Any] = json.loads(chosen.out.read_text()) if chosen.out.exists() else {}
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    of = {"commit": commit.stdout.strip(), "threads": chosen.threads, "cores": os.cpu_count(), "machine": platform.machine()}
    with tempfile.TemporaryDirectory(dir=chosen.folder) as temporary:
        made: dict[str, Any] = {}
        if "convert" in chosen.parts:
            made |= converted(Path(temporary), chosen.threads)
        if {"merge", "extract"} & set(chosen.parts):
            made |= sdxl(Path(temporary), chosen.threads, extract="extract" in chosen.parts)
    found |= {name: each | {"of": of} for name, each in made.items()}
    write_atomic(chosen.out, [json_bytes(found)])


if __name__ == "__main__":
    main()
