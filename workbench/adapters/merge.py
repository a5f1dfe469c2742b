"""Merges adapters into a model's weights, which any program reads: exact also for a DoRA whose file is not.

One tensor after another; the adapters FILE:STRENGTH in their order:

    LoRA    W <- W + strength s B A
    DoRA    W <- W + strength (g (W + s B A) - W),    g = m / ||W + s B A||, or m / ||W|| in a file for ComfyUI's releases

ComfyUI applies patches the same way (comfy/weight_adapter/base.py, `weight_decompose`, with an eps in the norm), and so do
samples at a strength here; PEFT scales s instead. Sums are fp64; W is rounded once, when it is written.
"""

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from trainer.adapters.portable import Factors, is_finite, recipe
from trainer.base.console import some
from trainer.base.errors import NonFiniteError, UserError
from trainer.base.files import appearing, hash_file, leftovers_of, refuse_taken, remove_leftovers, write_atomic
from trainer.base.progress import QUIET, Phases
from trainer.base.tensorfile import Recipe, Tensors, size_text, write_tensors
from trainer.models.names import join_parts
from trainer.quantization import quantised_files
from trainer.runtime import precision
from workbench.adapter_files.opening import NamedModel, OpenedAdapter
from workbench.adapters.base_weights import BaseWeights
from workbench.adapters.convert import change_of
from workbench.adapters.ranks import Residual
from workbench.adapters.whole_files import FileTensor, WholeFile, folder_files, single_file

SCALED = "fp8"
BLOCK = 2**19  # numbers of W that are merged at once
STALE = ("modelspec.hash_sha256", "sshs_model_hash", "sshs_legacy_hash")  # hashes of the file before the merge
CONFIGS = (".json", ".txt", ".model")  # of a diffusers folder: configs, vocabularies


Adapters = Sequence[tuple[OpenedAdapter, float]]  # (adapter, strength)


@dataclass
class MergedModel:
    """A merged model. layers: those changed. loss: the rounding error of the change."""

    path: Path
    layers: set[str] = field(default_factory=set)
    loss: Residual = field(default_factory=Residual)


def merged_rows(weight: torch.Tensor, adapters: Adapters, layer: str) -> Iterator[tuple[slice, torch.Tensor]]:
    """(rows, these rows of the merged W, fp64 [rows, K]) for all rows of a layer: few at a time, which stay in the
    processor's caches; all at once if a magnitude belongs to the columns."""
    parts, changes = [], []
    for opened, strength in adapters:
        if (factors := opened.portable.layers.get(layer)) is not None:
            if factors.form is not None:
                changes.append(strength * factors.scaling * factors.form.product(factors.matrix_tensors()))
                continue
            wide = {kind: recipe(tensor.make().double()) for kind, tensor in factors.tensors().items()}
            factors = replace(factors, a=wide["A"], b=wide["B"], magnitude=wide.get("magnitude"))
            parts.append((strength, opened.portable.meaning, factors))
    whole = any(factors.magnitude is not None and factors.axis == "input" for _, _, factors in parts)
    step = len(weight) if whole else max(1, BLOCK // weight[0].numel())
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        w = sum((change[rows] for change in changes), weight[rows].double())
        for strength, meaning, factors in parts:
            part = rows_of(factors, rows)
            if part.magnitude is None:
                a, b = part.a.make().flatten(1), part.b.make().flatten(1)
                w = torch.addmm(w.flatten(1), b, a, alpha=strength * part.scaling).view_as(w)
            else:
                w = w + strength * change_of(w, part, meaning).view_as(w)
        yield rows, w.flatten(1)


def rows_of(factors: Factors, rows: slice) -> Factors:
    """The factors of these rows of W. A magnitude of the input axis stays: it belongs to all rows."""
    b, m = factors.b.make()[rows], factors.magnitude
    if m is not None and factors.axis == "output":
        m = recipe(m.make()[rows])
    return replace(factors, b=recipe(b), magnitude=m)


def merge(
    model: NamedModel, adapters: Adapters, out: Path, *, dtype: str | None = None, phases: Phases = QUIET
) -> MergedModel:
    """Write `out`: a single file if it ends in .safetensors, else a diffusers folder.

    dtype: "fp32", "bf16", "fp16", or "fp8" (ComfyUI's scaled float8, a single file); None: the model files' dtype. The
    VAE keeps its own. Raises UserError for what cannot be written, NonFiniteError if a value would not be finite.
    """
    source, single = model.source, out.suffix == ".safetensors"
    assert source is not None
    refuse_taken(out)
    if not single and source.single_file is not None:
        reason = f"{model.label} is one file, and so is what is made of it"
        raise UserError(f"OUT = {str(out)!r}: {reason}; let OUT end in .safetensors")
    if dtype == SCALED and not single:
        reason = f"--dtype {SCALED} is ComfyUI's, which reads single files"
        raise UserError(f"{reason}; let OUT = {str(out)!r} end in .safetensors")
    for opened, _ in adapters:
        opened.portable.check_finite()
    remove_leftovers(leftovers_of(out))  # of interrupted merges, each the size of a model
    merger = _Merger(model, adapters, dtype, MergedModel(out))
    entries = [
        {"file": opened.path.name, "sha256": hash_file(opened.path), "strength": strength} for opened, strength in adapters
    ]
    origin = {"merged_adapters": json.dumps(entries, sort_keys=True)}
    files = {"": single_file(source)} if single else folder_files(source)
    merger.check_complete(files.values())
    content = {path: merger.tensors(file) for path, file in files.items()}
    total = sum(math.prod(t.shape) * t.dtype.itemsize for tensors in content.values() for t in tensors.values())
    free = shutil.disk_usage(next(parent for parent in out.absolute().parents if parent.is_dir())).free
    if total > free:
        sizes = f"needs {size_text(total)}, and its disk has {size_text(free)} free"
        raise UserError(f"{out} {sizes}; make room, or give another OUT")
    with phases("writing the merged model", total, "B") as phase:
        if single:
            fields = {key: value for key, value in files[""].metadata.items() if key not in STALE}
            write_tensors(out, content[""], fields | origin, phase.advance)
        else:
            with appearing(out) as folder:
                _copy_configs(source.root, folder)
                for path, tensors in content.items():
                    write_tensors(folder / path, tensors, {**files[path].metadata, **origin}, phase.advance)
    return merger.merged


class _Merger:
    """Tensors of the merged files, made when they are written."""

    def __init__(self, model: NamedModel, adapters: Adapters, dtype: str | None, merged: MergedModel) -> None:
        assert model.source is not None
        self.family, self.weights = model.family, BaseWeights(model.source)
        self.adapters, self.dtype, self.merged = adapters, dtype, merged
        self.touched = {layer for opened, _ in adapters for layer in opened.portable.layers}

    def check_complete(self, files: Iterable[WholeFile]) -> None:
        present = {f"{p.component}.{part}" for file in files for p in file.tensors.values() for part in p.link.parts}
        if absent := sorted(layer for layer in self.touched if f"{layer}.weight" not in present):
            lacks = f"would hold no {absent[0].partition('.')[0]}, as the model's file, and the adapters change it"
            remedy = "give the model as a diffusers folder"
            raise UserError(f"OUT = {str(self.merged.path)!r} {lacks}: {some(absent)}; {remedy}")

    def tensors(self, file: WholeFile) -> Tensors:
        tensors: dict[str, torch.Tensor | Recipe] = dict(file.others)
        for name, entry in file.tensors.items():
            is_linear = entry.component == self.family.denoiser and name.endswith(".weight") and len(entry.shape) == 2
            if is_linear and self.dtype == SCALED:
                layer = name.removesuffix(".weight")
                tensors[name] = Recipe(quantised_files.SCALED_CODES, entry.shape, partial(self._codes, entry))
                tensors[f"{layer}.scale_weight"] = Recipe(torch.float32, (), partial(self._scale, entry))
            else:
                dtype = self._dtype(entry)
                tensors[name] = Recipe(dtype, entry.shape, partial(self._rounded, entry, dtype))
        if self.dtype == SCALED:
            prefix = self.family.component(self.family.denoiser).prefix_in(file.tensors) or ""
            tensors[f"{prefix}scaled_fp8"] = quantised_files.scaled_marker()
        return tensors

    def _dtype(self, entry: FileTensor) -> torch.dtype:
        if self.dtype is not None and entry.component != self.family.vae:
            return quantised_files.SCALED_OTHER if self.dtype == SCALED else precision.COMPUTE_DTYPES[self.dtype]
        if entry.dtype is None:
            raise UserError(f"the model holds {entry.component} quantised, and weights are merged as numbers: give --dtype")
        return entry.dtype

    def _parts(self, entry: FileTensor) -> Iterator[tuple[str, torch.Tensor]]:
        """(layer, or "" if not a weight; the model's tensor, fp32) of the parts of a file's tensor."""
        for part in entry.link.parts:
            layer = f"{entry.component}.{part.removesuffix('.weight')}" if part.endswith(".weight") else ""
            yield layer, self.weights.tensor(entry.component, part)

    def _rounded(self, entry: FileTensor, dtype: torch.dtype) -> torch.Tensor:
        """The file's tensor, rounded to `dtype`. Changed layers are computed and rounded row by row."""
        parts = []
        for layer, tensor in self._parts(entry):
            if layer not in self.touched:
                parts.append(tensor.to(dtype))
                finite = is_finite(parts[-1])
            else:
                parts.append(torch.empty(tensor.shape, dtype=dtype))
                stored, before = parts[-1].view(len(tensor), -1), tensor.flatten(1)
                for rows, exact in merged_rows(tensor, self.adapters, layer):
                    stored[rows] = exact
                    self._record(layer, exact, before[rows], stored[rows].double())
                finite = math.isfinite(self.merged.loss.error)
            if not finite:
                raise self._not_finite(entry, dtype)
        return join_parts(entry.link, parts)

    def _record(self, layer: str, exact: torch.Tensor, before: torch.Tensor, stored: torch.Tensor) -> None:
        self.merged.layers.add(layer)
        self.merged.loss.add(layer, float((stored - exact).norm()), float((exact - before).norm()))

    def _not_finite(self, entry: FileTensor, dtype: torch.dtype) -> NonFiniteError:
        tensor, remedy = f"{entry.component}.{entry.link.parts[0]}", "Give a wider --dtype, or a lower strength"
        return NonFiniteError(f"{tensor} would not be finite as {dtype}; nothing was written. {remedy}")

    def _exact(self, entry: FileTensor) -> torch.Tensor:
        """The file's tensor, not rounded: fp64 if merged, else fp32."""
        parts = []
        for layer, tensor in self._parts(entry):
            if layer in self.touched:
                rows = [exact for _, exact in merged_rows(tensor, self.adapters, layer)]
                tensor = torch.cat(rows).view(tensor.shape)
            parts.append(tensor)
        widest = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
        return join_parts(entry.link, [part.to(widest) for part in parts])

    def _codes(self, entry: FileTensor) -> torch.Tensor:
        exact = self._exact(entry)
        codes, scale = quantised_files.codes_of(exact), float(quantised_files.scale_of(exact))
        if not is_finite(codes):
            raise self._not_finite(entry, codes.dtype)
        if exact.dtype == torch.float64:
            layers, tensors = zip(*self._parts(entry), strict=True)
            before = join_parts(entry.link, [tensor.double() for tensor in tensors])
            self._record(layers[0], exact, before, codes.double() * scale)
            self.merged.layers |= self.touched.intersection(layers)
        return codes

    def _scale(self, entry: FileTensor) -> torch.Tensor:
        return quantised_files.scale_of(self._exact(entry))


def _copy_configs(root: Path, folder: Path) -> None:
    paths = [root / "model_index.json", *(path for path in sorted(root.glob("*/*")) if not path.name.startswith("."))]
    for path in paths:
        if path.suffix in CONFIGS and path.is_file() and ".index." not in path.name:  # an index is of shards
            write_atomic(folder / path.relative_to(root), [path.read_bytes()])
