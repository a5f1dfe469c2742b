"""Peak memory and rate while a bf16 component of 2 GiB is loaded quantised.

    python benchmarks/bench_loading.py [--dtype fp8_e4m3] [--rounds 3] [--cached] [--folder DIR]

Writes the transformer of a Flux with the published widths and fewer blocks, loads it in a fresh process and prints the
process's peak resident memory (VmHWM: mapped pages count) beside the limit: final size + largest tensor + 1 GiB. The
peak holds everything, the interpreter and the libraries too. In turn with it, another process reads the same file and
casts every tensor to a type of the same width, nothing else: the rates are compared. --cached: also a start that finds its
converted weights in model.cache_dir, and its model's file as it was when it was hashed. Exit status 1 when the peak is above
the limit. Linux.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import pages  # noqa: E402

GIB = 2**30

# FLUX.1-dev has 19 and 38 blocks; 1 and 5 give 2.07 GiB in bf16.
CONFIG = json.loads((ROOT / "benchmarks" / "flux_2gib.json").read_text(encoding="utf-8"))


def load_component(path: Path, dtype: str, cache_dir: Path | None):
    """The component in `path`, stored as `dtype`, through the trainer's own loader. The only place that knows it."""
    import torch

    from trainer.base.digests import FileDigests
    from trainer.kernels import dora_torch
    from trainer.models import FAMILIES
    from trainer.models.opening import open_model
    from trainer.quantization import FORMATS, ConvertedWeights, freeze_layers, library, storage_of_layers

    family = FAMILIES["flux"]
    keep = family.component(family.denoiser).sensitive

    def swap(module: torch.nn.Module) -> None:
        freeze_layers(
            module,
            storage_of_layers(format=FORMATS[dtype], compute=torch.bfloat16, unquantised=torch.bfloat16, keep=keep),
            dora_torch,
        )

    source = open_model(family, str(path))
    if cache_dir is None:
        return source.load(family.denoiser, swap=swap, device=torch.device("cpu"))
    digests = FileDigests(cache_dir / "digests.json")
    converted = ConvertedWeights(
        cache_dir, fingerprint=source.fingerprint(family.denoiser, digests.of), library=library(FORMATS[dtype])
    )
    module = source.load(family.denoiser, swap=swap, fill=converted.fill, device=torch.device("cpu"))
    converted.store(module)
    return module


def read_and_cast(file: Path, dtype: str) -> float:
    """Seconds to read every tensor of the file and cast it to a type as wide as `dtype`'s codes, or narrower types' byte."""
    import torch

    from trainer.base.tensorfile import TensorFile

    kind = torch.float8_e4m3fn if dtype.startswith("fp8") else torch.int8
    start = time.perf_counter()
    source = TensorFile(file)
    kept = [source.read(name).to(kind) for name in source.entries]
    seconds = time.perf_counter() - start
    assert len(kept) == len(source.entries)
    return seconds


def write_component(folder: Path) -> int:
    """A diffusers folder with the one component, written piece by piece; returns the bytes of its file."""
    import torch
    from diffusers import FluxTransformer2DModel

    from trainer.base.files import write_atomic

    with torch.device("meta"):
        module = FluxTransformer2DModel.from_config(CONFIG)
    shapes = {name: tuple(tensor.shape) for name, tensor in sorted(module.state_dict().items())}
    (folder / "transformer").mkdir(parents=True)
    (folder / "transformer" / "config.json").write_text(json.dumps(CONFIG))
    index = {"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    _, size = write_atomic(folder / "transformer" / "diffusion_pytorch_model.safetensors", pieces(shapes))
    return size


def pieces(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[memoryview]:
    """A bf16 safetensors file of random values: the header, then every tensor cut from one block of 32 MiB.

    The project's writer takes tensors, which would all have to be in memory at once here.
    """
    import torch

    sizes = {name: 2 * torch.Size(shape).numel() for name, shape in shapes.items()}
    header, position = {}, 0
    for name, size in sizes.items():
        offsets = [position, position + size]
        header[name] = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": offsets}
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    values = torch.randn(2**24, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    block = memoryview(values.view(torch.uint8).numpy())
    for size in sizes.values():
        for start in range(0, size, len(block)):
            yield block[: min(len(block), size - start)]


def resident(field: str) -> int:
    """VmHWM (the peak) or VmRSS (now) of this process, in bytes."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(match[1]) * 1024


def measure(folder: Path, dtype: str, cache_dir: Path | None) -> dict[str, float]:
    """Load the component in this process. Sizes in bytes, time in seconds."""
    import bitsandbytes  # noqa: F401
    import torch
    from diffusers import FluxTransformer2DModel  # noqa: F401
    from optimum import quanto  # noqa: F401

    import trainer.models.loading
    import trainer.quantization  # noqa: F401

    # All imported first: `before` holds the libraries, and their seconds are no part of the rate.
    before = resident("VmRSS")
    start = time.perf_counter()
    module = load_component(folder, dtype, cache_dir)
    seconds = time.perf_counter() - start
    storages: dict[int, int] = {}  # by address: a tensor that is registered twice counts once
    for tensor in (*module.parameters(), *module.buffers()):
        assert not tensor.is_meta
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    with open(file, "rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    largest = max(end - start for start, end in (item["data_offsets"] for item in header.values()))
    final = sum(storages.values())
    dtypes: dict[torch.dtype, int] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + tensor.nbytes
    for kind, size in sorted(dtypes.items(), key=lambda item: -item[1]):
        print(f"    {kind}: {size / GIB:.3f} GiB", file=sys.stderr)
    return {
        "file": file.stat().st_size,
        "final": final,
        "largest": largest,
        "before": before,
        "peak": resident("VmHWM"),
        "limit": final + largest + GIB,
        "seconds": seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="fp8_e4m3")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cached", action="store_true", help="also time starts that find converted weights")
    parser.add_argument("--folder", type=Path, help="where 2.1 GiB are written for the time being (default: TMPDIR)")
    # What the child processes are told. Writing has its own, because a child's peak begins with its parent's.
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--plain", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cache-dir", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write_component(args.write)
        return 0
    if args.measure:
        print(json.dumps(measure(args.measure, args.dtype, args.cache_dir)))
        return 0
    if args.plain:
        print(json.dumps(read_and_cast(args.plain / "transformer" / "diffusion_pytorch_model.safetensors", args.dtype)))
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-loading-", dir=args.folder) as temporary:
        folder, cache = str(Path(temporary) / "model"), str(Path(temporary) / "cache")
        this = [sys.executable, str(Path(__file__).resolve()), "--dtype", args.dtype]

        def child(*more: str):
            return json.loads(subprocess.run([*this, *more], check=True, stdout=subprocess.PIPE, text=True).stdout)

        subprocess.run([*this, "--write", folder], check=True)
        loads, plain, cached = [], [], []
        if args.cached:
            child("--measure", folder, "--cache-dir", cache)
        for _ in range(args.rounds):
            plain.append(child("--plain", folder))
            loads.append(child("--measure", folder))
            if args.cached:
                cached.append(child("--measure", folder, "--cache-dir", cache)["seconds"])
    result = max(loads, key=lambda load: load["peak"])
    labels = {
        "file": "the bf16 file",
        "final": f"final size as {args.dtype}",
        "largest": "largest tensor of the file",
        "before": "resident before loading (interpreter, libraries)",
        "peak": "peak resident memory (VmHWM)",
        "limit": "limit: final + largest + 1 GiB",
    }
    print(pages.table(["what", "GiB"], [[label, f"{result[key] / GIB:.2f}"] for key, label in labels.items()]))
    seconds, cast = median(load["seconds"] for load in loads), median(plain)
    print(f"\npeak / limit {result['peak'] / result['limit']:.2f}")
    print(f"loaded in {seconds:.1f} s, read and cast in {cast:.1f} s: rate {cast / seconds:.2f} of it")
    if cached:
        print(f"with converted weights found: {median(cached):.1f} s, {seconds / median(cached):.1f} times faster")
    return 0 if result["peak"] <= result["limit"] else 1


if __name__ == "__main__":
    sys.exit(main())
