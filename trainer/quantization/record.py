"""What a component's layers are stored as: for people at the start of a run, and for `quantization.json`."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from statistics import median
from typing import Any

import torch
from torch import nn

from trainer import kernels
from trainer.base.console import shortlist
from trainer.base.progress import QUIET, Phases
from trainer.base.tensorfile import NAMES, size_text, tensor_sha256
from trainer.quantization.formats import Format
from trainer.quantization.layers import FrozenLayer, FrozenLinear

# What computes the codes.
DISTRIBUTIONS = {"native": "torch", "quanto": "optimum-quanto", "bitsandbytes": "bitsandbytes"}


@dataclass(frozen=True)
class Stored:
    """How a component's quantised layers lie in memory.

    layers: how many they are. kept: the names of the others. before: bytes of the quantised ones as read (None: the file
    held them so). errors: relative error of each converted weight, by layer (formats.relative_error).
    """

    format: Format
    layers: int
    kept: tuple[str, ...]
    before: int | None
    bytes: int
    errors: dict[str, float]

    def __str__(self) -> str:
        kind, layers, before, count, error = self.row()
        rest = f"; not quantised: {shortlist(self.kept, 3)}" if self.kept else ""
        return f"{layers} layers stored as {kind}, {before} -> {count}, relative error {error}{rest}"

    def row(self) -> list[object]:
        """format, layers, bytes before and after, relative error: as text, the report's columns after the name."""
        before = "as the file holds it" if self.before is None else size_text(self.before)
        error = "none: not converted"
        if self.errors:
            worst = max(self.errors, key=self.errors.__getitem__)
            error = f"{median(self.errors.values()):.2%}, at most {self.errors[worst]:.2%} ({worst})"
        layers = f"{self.layers} of {self.layers + len(self.kept)}"
        return [self.format.name, layers, before, size_text(self.bytes), error]


REPORT_COLUMNS = ["stored as", "layers", "size before", "size", "relative error (median, largest)"]


def stored_as(module: nn.Module) -> Stored | None:
    """The quantised layers of a loaded component that is not adapted yet; None where there are none."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, FrozenLayer)}
    quantised = {name: layer for name, layer in layers.items() if layer.format.quantised}
    if not quantised:
        return None
    before = [layer.bytes_before for layer in quantised.values()]
    return Stored(
        format=next(iter(quantised.values())).format,
        layers=len(quantised),
        kept=tuple(sorted(layers.keys() - quantised.keys())),
        before=None if None in before else sum(before),
        bytes=sum(t.nbytes for layer in quantised.values() for t in layer.payload().values()),
        errors={n: layer.relative_error for n, layer in quantised.items() if layer.relative_error is not None},
    )


def scaled_layers(module: nn.Module) -> str:
    """How many Linears of a component multiply in float8, for the start print."""
    linears = [layer for layer in module.modules() if isinstance(layer, FrozenLinear) and layer.format.quantised]
    rows = kernels.FP8_MIN_ROWS
    wide = sum(kernels.scaled_matmul_pays(rows, layer.out_features, layer.in_features) for layer in linears)
    return (
        f"{wide} of {len(linears)} float8 Linears are wide enough to multiply in float8 where they get {rows} rows or more; "
        "the others convert their weights"
    )


def record(components: Iterable[tuple[str, nn.Module]], phases: Phases = QUIET) -> dict[str, dict[str, Any]]:
    """What `quantization.json` says: every layer's format and every frozen tensor's SHA-256, quantised or not.

    Deterministic: the same checkpoint, config and device type give the same tensors, which a resume is checked against.
    library and relative_error are there to be read.
    """
    entries: dict[str, dict[str, Any]] = {}
    tensors: dict[tuple[str, str], torch.Tensor] = {}
    known: dict[tuple[str, str], str] = {}  # digests of tensors that are not here whole
    for component, module in components:
        for name, layer in module.named_modules():
            path = f"{component}.{name}" if name else component
            if isinstance(layer, FrozenLayer):
                entries[path] = {
                    "format": layer.format.dtype_name,
                    "backend": layer.format.backend,
                    "library": library(layer.format) if layer.bytes_before else "the model's file",
                    "shape": list(layer.weight_shape),
                    "relative_error": layer.relative_error,
                }
                tensors |= {(path, key): tensor for key, tensor in layer.payload().items()}
                known |= {(path, key): digest for key, digest in layer.digests.items()}
            parameters = dict(layer.named_parameters(recurse=False)) | {
                key: tensor for key, tensor in layer.named_buffers(recurse=False) if not key.startswith("payload_")
            }
            tensors |= {(path, key): tensor for key, tensor in parameters.items()}
    pool = ThreadPoolExecutor()  # hashing leaves Python's lock
    try:
        digests = {place: pool.submit(tensor_sha256, tensor) for place, tensor in tensors.items() if place not in known}
        with phases("hashing the frozen weights", sum(tensors[place].nbytes for place in digests), "B") as phase:
            for place, digest in digests.items():
                while not digest.done():
                    wait([digest], timeout=0.2)
                    phase.check()
                known[place] = digest.result()
                phase.advance(tensors[place].nbytes)
    finally:
        pool.shutdown(cancel_futures=True)
    for (path, key), tensor in tensors.items():
        held = entries.setdefault(path, {}).setdefault("tensors", {})
        held[key] = {"dtype": NAMES[tensor.dtype], "sha256": known[path, key]}
    return entries


@cache
def library(format: Format) -> str:
    """What computes a format's scales and codes, with its version."""
    return f"{DISTRIBUTIONS[format.backend]} {version(DISTRIBUTIONS[format.backend])}"
