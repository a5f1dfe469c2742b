"""Converted weights in a file of their own: a second start reads them instead of converting again.

One safetensors file for each component, named by a digest of all inputs of the conversion. It holds the payloads, and the row
norms of the weights they came from; its metadata a SHA-256 for every tensor. A layer with a digest that does not match counts
as missing and is converted again.
"""

import hashlib
import json
from functools import partial
from pathlib import Path

import torch
from torch import nn

from trainer.base.errors import UserError
from trainer.base.files import remove_leftovers
from trainer.base.progress import QUIET, Phases
from trainer.base.tensorfile import Recipe, TensorFile, tensor_sha256, write_tensors
from trainer.quantization.layers import FrozenLayer

VERSION = 2  # raise it if a format converts to other bytes or lies in memory in another way, or if the file holds more
NORMS = "original_norms"  # a key beside the payload's names


class ConvertedWeights:
    """The cache of one component. fingerprint: of the model's files. library: the converting one, with its version.

    total, hits: how many weights `fill` looked for, and filled.
    """

    def __init__(self, folder: Path, *, fingerprint: str, library: str) -> None:
        self.folder, self.fingerprint, self.library = folder, fingerprint, library
        self.hits, self.total = 0, 0

    def path(self, module: nn.Module) -> Path:
        """The file for a module with frozen layers. Its name depends on the device, which rounds in its own way."""
        layers = {
            name: [layer.format.name, list(layer.weight_shape), layer.qweight.device.type]
            for name, layer in _converted(module).items()
        }
        inputs = {"version": VERSION, "model": self.fingerprint, "layers": layers, "library": self.library}
        return self.folder / f"{hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()}.safetensors"

    def fill(self, module: nn.Module, phases: Phases = QUIET) -> set[str]:
        """Fill the weights that are there and intact; returns their names."""
        layers = _converted(module)
        self.total = len(layers)
        try:
            file = TensorFile(self.path(module))
            about = json.loads(file.metadata["layers"])
        except (UserError, KeyError, ValueError):  # missing or damaged: convert everything again
            return set()
        if not isinstance(about, dict):
            return set()
        total = sum(tensor.nbytes for layer in layers.values() for tensor in layer.payload().values())
        filled = set()
        with phases("reading converted weights", total, "B") as phase:
            for name, layer in layers.items():
                record, expected = about.get(name, {}), layer.payload() | {NORMS: torch.empty(layer.weight_shape[0])}
                kinds = {f"{name}.{key}": (tensor.dtype, tensor.shape) for key, tensor in expected.items()}
                entries = {key: file.entries[key] for key in kinds if key in file.entries}
                if {key: (entry.dtype, entry.shape) for key, entry in entries.items()} != kinds:
                    continue
                tensors = {key: file.read(f"{name}.{key}", phase.advance) for key in expected}
                if record.get("sha256") == {key: tensor_sha256(tensor) for key, tensor in tensors.items()}:
                    layer.original_norms = tensors.pop(NORMS)
                    layer.load_payload(tensors)
                    layer.bytes_before, layer.relative_error = record["bytes_before"], record["relative_error"]
                    filled.add(f"{name}.weight")
        self.hits = len(filled)
        return filled

    def store(self, module: nn.Module, phases: Phases = QUIET) -> None:
        """Write the file, atomically, unless all of it was there."""
        if self.hits == self.total:
            return
        remove_leftovers(self.folder.glob(".*.tmp"), idle=600)
        layers = _converted(module)
        payloads = {name: layer.payload() | {NORMS: layer.original_norms} for name, layer in layers.items()}
        size = sum(tensor.nbytes for some in payloads.values() for tensor in some.values())
        tensors, about = dict[str, torch.Tensor | Recipe](), {}
        # Twice through the bytes: the header holds the digests of the data behind it.
        with phases("storing converted weights", 2 * size, "B") as phase:
            for name, layer in layers.items():
                digests = {}
                for key, tensor in payloads[name].items():
                    place = f"{name}.{key}"
                    if key in layer.digests:  # the tensor is not here whole
                        make = partial(lambda layer, key: layer.whole_payload()[key], layer, key)
                        digests[key], tensors[place] = layer.digests[key], Recipe(tensor.dtype, tuple(tensor.shape), make)
                    else:
                        digests[key], tensors[place] = tensor_sha256(tensor, phase.advance), tensor
                about[name] = {"sha256": digests, "bytes_before": layer.bytes_before, "relative_error": layer.relative_error}
            write_tensors(self.path(module), tensors, {"layers": json.dumps(about, sort_keys=True)}, phase.advance)


def _converted(module: nn.Module) -> dict[str, FrozenLayer]:
    return {n: layer for n, layer in module.named_modules() if isinstance(layer, FrozenLayer) and layer.format.quantised}
