"""The storage of a component's layers: as text at the start of a run, and for `quantization.json`."""

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

DISTRIBUTIONS = {"native": "torch", "quanto": "optimum-quanto", "bitsandbytes": "bitsandbytes"}  # compute the codes
REPORT_COLUMNS = ["stored as", "layers", "size before", "size", "relative error (median, largest)"]  # of Stored.row


@dataclass(frozen=True)
class Stored:
    """A component's quantised layers in memory.

    layers: their number. unquantised: names of the others. before: bytes of the quantised ones as read (None: the file
    held them so); bytes: now. errors: relative error of each converted weight, by layer (formats.relative_error).
    """

    format: Format
    layers: int
    unquantised: tuple[str, ...]
    before: int | None
    bytes: int
    errors: dict[str, float]

    def __str__(self) -> str:
        kind, layers, before, count, error = self.row()
        rest = f"; not quantised: {shortlist(self.unquantised, 3)}" if self.unquantised else ""
        return f"{layers} layers stored as {kind}, {before} -> {count}, relative error {error}{rest}"

    def row(self) -> list[object]:
        """Format, layers, bytes before and after, relative error as text: the report's REPORT_COLUMNS."""
        before = "as the file holds it" if self.before is None else size_text(self.before)
        error = "none: not converted"
        if self.errors:
            worst = max(self.errors, key=self.errors.__getitem__)
            error = f"{median(self.errors.values()):.2%}, at most {self.errors[worst]:.2%} ({worst})"
        layers = f"{self.layers} of {self.layers + len(self.unquantised)}"
        return [self.format.name, layers, before, size_text(self.bytes), error]


def stored_as(module: nn.Module) -> Stored | None:
    """The quantised layers of a loaded component that is not adapted yet; None if it has none."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, FrozenLayer)}
    quantised = {name: layer for name, layer in layers.items() if layer.format.quantised}
    if not quantised:
        return None
    before = [layer.bytes_before for layer in quantised.values()]
    return Stored(
        format=next(iter(quantised.values())).format,
        layers=len(quantised),
        unquantised=tuple(sorted(layers.keys() - quantised.keys())),
        before=None if None in before else sum(before),
        bytes=sum(t.nbytes for layer in quantised.values() for t in layer.payload().values()),
        errors={n: layer.relative_error for n, layer in quantised.items() if layer.relative_error is not None},
    )


def scaled_layers(module: nn.Module) -> str:
    """A sentence for the start of a run: how many Linears of a component multiply in float8."""
    linears = [layer for layer in module.modules() if isinstance(layer, FrozenLinear) and layer.format.quantised]
    rows = kernels.FP8_MIN_ROWS
    wide = sum(kernels.scaled_matmul_pays(rows, layer.out_features, layer.in_features) for layer in linears)
    return (
        f"{wide} of {len(linears)} float8 Linears are wide enough to multiply in float8 where they get {rows} rows or more; "
        "the others convert their weights"
    )


def record(components: Iterable[tuple[str, nn.Module]], phases: Phases = QUIET) -> dict[str, dict[str, Any]]:
    """The content of `quantization.json`: every layer's format and every frozen tensor's SHA-256, quantised or not.

    Deterministic: the same checkpoint, config and device type give the same tensors, which a resume is checked against.
    library and relative_error are information only.
    """
    entries: dict[str, dict[str, Any]] = {}
    tensors: dict[tuple[str, str], torch.Tensor] = {}
    digests: dict[tuple[str, str], str] = {}  # at first of tensors that are not here whole
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
                digests |= {(path, key): digest for key, digest in layer.digests.items()}
            parameters = dict(layer.named_parameters(recurse=False)) | {
                key: tensor for key, tensor in layer.named_buffers(recurse=False) if not key.startswith("payload_")
            }
            tensors |= {(path, key): tensor for key, tensor in parameters.items()}
    pool = ThreadPoolExecutor()  # hashing releases Python's lock
    try:
        futures = {place: pool.submit(tensor_sha256, tensor) for place, tensor in tensors.items() if place not in digests}
        with phases("hashing the frozen weights", sum(tensors[place].nbytes for place in futures), "B") as phase:
            for place, future in futures.items():
                while not future.done():
                    wait([future], timeout=0.2)
                    phase.check()
                digests[place] = future.result()
                phase.advance(tensors[place].nbytes)
    finally:
        pool.shutdown(cancel_futures=True)
    for (path, key), tensor in tensors.items():
        described = entries.setdefault(path, {}).setdefault("tensors", {})
        described[key] = {"dtype": NAMES[tensor.dtype], "sha256": digests[path, key]}
    return entries


@cache
def library(format: Format) -> str:
    """The library that computes a format's scales and codes, with its version."""
    return f"{DISTRIBUTIONS[format.backend]} {version(DISTRIBUTIONS[format.backend])}"
