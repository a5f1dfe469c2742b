"""Peak memory while a bf16 component of 2 GiB is loaded as float8.

    python scripts/bench_loading.py [--dtype fp8_e4m3] [--folder DIR]

Writes the transformer of a Flux with the published widths and fewer blocks, loads it in a fresh process and prints the
process's peak resident memory (VmHWM: mapped pages count) beside the limit: final size + largest tensor + 1 GiB. The
peak holds everything, the interpreter and the libraries too. Exit status 1 when the peak is above the limit. Linux.
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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # `python scripts/x.py` puts scripts/ on the path, not the root

GIB = 2**30

# FLUX.1-dev has 19 and 38 blocks; 1 and 5 give 2.07 GiB in bf16.
CONFIG = {
    "_class_name": "FluxTransformer2DModel",
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 1,
    "num_single_layers": 5,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
    "axes_dims_rope": [16, 56, 56],
}


def load_component(path: Path, dtype: str):
    """The component in `path`, stored as `dtype`, through the trainer's own loader. The only place that knows it."""
    import torch

    from trainer.models import FAMILIES
    from trainer.models.loading import open_model
    from trainer.quantization import FORMATS, freeze_layers

    family = FAMILIES["flux"]
    keep = family.component(family.denoiser).sensitive

    def swap(module: torch.nn.Module) -> None:
        freeze_layers(
            module, format=FORMATS[dtype], compute=torch.bfloat16, unquantised=torch.bfloat16, keep=keep
        )  # fmt: skip

    return open_model(family, str(path)).load(family.denoiser, swap=swap, device=torch.device("cpu"))


def write_component(folder: Path) -> int:
    """A diffusers folder with the one component, written piece by piece; returns the bytes of its file."""
    import torch
    from diffusers import FluxTransformer2DModel

    from trainer.tensorfile import write_atomic

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


def measure(folder: Path, dtype: str) -> dict[str, float]:
    """Load the component in this process. Sizes in bytes, time in seconds."""
    import diffusers  # noqa: F401 - imported first so that `before` holds the libraries
    import torch

    before = resident("VmRSS")
    start = time.perf_counter()
    module = load_component(folder, dtype)
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
    parser.add_argument("--folder", type=Path, help="where 2.1 GiB are written for the time being (default: TMPDIR)")
    # What the two child processes are told. Writing has its own, because a child's peak begins with its parent's.
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write_component(args.write)
        return 0
    if args.measure:
        print(json.dumps(measure(args.measure, args.dtype)))
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-loading-", dir=args.folder) as temporary:
        folder = str(Path(temporary) / "model")
        this = [sys.executable, str(Path(__file__).resolve())]
        subprocess.run([*this, "--write", folder], check=True)
        command = [*this, "--dtype", args.dtype, "--measure", folder]
        result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    labels = {
        "file": "the bf16 file",
        "final": f"final size as {args.dtype}",
        "largest": "largest tensor of the file",
        "before": "resident before loading (interpreter, libraries)",
        "peak": "peak resident memory (VmHWM)",
        "limit": "limit: final + largest + 1 GiB",
    }
    print("| what | GiB |\n|---|---|")
    for key, label in labels.items():
        print(f"| {label} | {result[key] / GIB:.2f} |")
    print(f"\nLoaded in {result['seconds']:.1f} s; peak / limit = {result['peak'] / result['limit']:.2f}")
    return 0 if result["peak"] <= result["limit"] else 1


if __name__ == "__main__":
    sys.exit(main())
