"""Adapters merged into a model's own weights, which any program reads: exact for a DoRA where a file of it is not.

One tensor after another. Of adapters FILE:STRENGTH, in the order given:

    LoRA    W <- W + strength s B A
    DoRA    W <- W + strength (g (W + s B A) - W),    g = m / ||W + s B A||, or m / ||W|| in a file for ComfyUI's releases

So ComfyUI applies patches (comfy/weight_adapter/base.py, `weight_decompose`, with an eps in the norm), and so samples are
drawn here at a strength. PEFT scales s instead. Sums are fp64; W is rounded once, when it is written.
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
from trainer.quantization import scaled_file
from trainer.runtime import precision
from workbench.adapter_files.opening import NamedModel, OpenedAdapter
from workbench.adapters.base_weights import BaseWeights
from workbench.adapters.convert import change_of
from workbench.adapters.ranks import Residual
from workbench.adapters.whole_files import Placed, WholeFile, folder_files, single_file

SCALED = "fp8"
BLOCK = 2**19  # numbers of W that are merged at once
# Hashes of what a file was before.
STALE = ("modelspec.hash_sha256", "sshs_model_hash", "sshs_legacy_hash")
CONFIGS = (".json", ".txt", ".model")  # of a diffusers folder: configs, vocabularies


@dataclass(frozen=True)
class Applied:
    """An adapter that is merged, and its strength."""

    opened: OpenedAdapter
    strength: float


@dataclass
class Merged:
    """A model file with adapters in it. layers: that changed. loss: what rounding took away of the change."""

    path: Path
    layers: set[str] = field(default_factory=set)
    loss: Residual = field(default_factory=Residual)


def merged_rows(weight: torch.Tensor, adapters: Sequence[Applied], layer: str) -> Iterator[tuple[slice, torch.Tensor]]:
    """(rows, these rows of the layer's W with the adapters in it, fp64 [rows, K]), until all rows were there: few at a time,
    whose copies stay in the processor's caches; all at once where a magnitude belongs to the columns."""
    held, changes = [], []
    for each in adapters:
        if (factors := each.opened.portable.layers.get(layer)) is not None:
            meaning = each.opened.portable.meaning
            if factors.form is not None:
                changes.append(each.strength * factors.scaling * factors.form.product(factors.held()))
                continue
            made = {kind: recipe(tensor.make().double()) for kind, tensor in factors.tensors().items()}
            held.append((each.strength, meaning, replace(factors, a=made["A"], b=made["B"], magnitude=made.get("magnitude"))))
    whole = any(factors.magnitude is not None and factors.axis == "input" for _, _, factors in held)
    step = len(weight) if whole else max(1, BLOCK // weight[0].numel())
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        w = sum((change[rows] for change in changes), weight[rows].double())
        for strength, meaning, factors in held:
            part = rows_of(factors, rows)
            if part.magnitude is None:
                a, b = part.a.make().flatten(1), part.b.make().flatten(1)
                w = torch.addmm(w.flatten(1), b, a, alpha=strength * part.scaling).view_as(w)
            else:
                w = w + strength * change_of(w, part, meaning).view_as(w)
        yield rows, w.flatten(1)


def rows_of(factors: Factors, rows: slice) -> Factors:
    """The adapter of these rows of W. A magnitude of the input axis stays, as it is of all of them."""
    b, m = factors.b.make()[rows], factors.magnitude
    if m is not None and factors.axis == "output":
        m = recipe(m.make()[rows])
    return replace(factors, b=recipe(b), magnitude=m)


def merge(
    model: NamedModel, adapters: Sequence[Applied], out: Path, *, dtype: str | None = None, phases: Phases = QUIET
) -> Merged:
    """Write `out`: a single file where it ends in .safetensors, else a diffusers folder.

    dtype: "fp32", "bf16", "fp16", or "fp8" (ComfyUI's scaled float8, a single file); None: as the model's files have it.
    The VAE keeps its own. Raises UserError for what cannot be written, NonFiniteError where a value would not be finite.
    """
    source, single = model.source, out.suffix == ".safetensors"
    assert source is not None
    refuse_taken(out)
    if not single and source.single_file is not None:
        single_too = f"{model.label} is one file, and so is what is made of it"
        raise UserError(f"OUT = {str(out)!r}: {single_too}; let OUT end in .safetensors")
    if dtype == SCALED and not single:
        raise UserError(
            f"--dtype {SCALED} is ComfyUI's, which reads single files; let OUT = {str(out)!r} end in .safetensors"
        )
    for each in adapters:
        each.opened.portable.check_finite()
    remove_leftovers(leftovers_of(out))  # each the size of a model
    work = _Work(model, adapters, dtype, Merged(out))
    of = [(each.opened.path, each.strength) for each in adapters]
    described = [{"file": path.name, "sha256": hash_file(path), "strength": strength} for path, strength in of]
    origin = {"merged_adapters": json.dumps(described, sort_keys=True)}
    files = {"": single_file(source)} if single else folder_files(source)
    work.check_all_there(files.values())
    made = {path: work.tensors(file) for path, file in files.items()}
    total = sum(math.prod(t.shape) * t.dtype.itemsize for tensors in made.values() for t in tensors.values())
    free = shutil.disk_usage(next(parent for parent in out.absolute().parents if parent.is_dir())).free
    if total > free:
        needed = f"needs {size_text(total)}, and its disk has {size_text(free)} free"
        raise UserError(f"{out} {needed}; make room, or give another OUT")
    with phases("writing the merged model", total, "B") as phase:
        if single:
            fields = {key: value for key, value in files[""].metadata.items() if key not in STALE}
            write_tensors(out, made[""], fields | origin, phase.advance)
        else:
            with appearing(out) as folder:
                _copy_configs(source.root, folder)
                for path, tensors in made.items():
                    write_tensors(folder / path, tensors, {**files[path].metadata, **origin}, phase.advance)
    return work.merged


class _Work:
    def __init__(self, model: NamedModel, adapters: Sequence[Applied], dtype: str | None, merged: Merged) -> None:
        assert model.source is not None
        self.family, self.weights = model.family, BaseWeights(model.source)
        self.adapters, self.dtype, self.merged = adapters, dtype, merged
        self.touched = {layer for each in adapters for layer in each.opened.portable.layers}

    def check_all_there(self, files: Iterable[WholeFile]) -> None:
        there = {f"{p.component}.{part}" for file in files for p in file.tensors.values() for part in p.link.parts}
        if absent := sorted(layer for layer in self.touched if f"{layer}.weight" not in there):
            lacks = f"would hold no {absent[0].partition('.')[0]}, as the model's file, and the adapters change it"
            remedy = "give the model as a diffusers folder"
            raise UserError(f"OUT = {str(self.merged.path)!r} {lacks}: {some(absent)}; {remedy}")

    def tensors(self, file: WholeFile) -> Tensors:
        made: dict[str, torch.Tensor | Recipe] = dict(file.others)
        for name, placed in file.tensors.items():
            is_linear = placed.component == self.family.denoiser and name.endswith(".weight") and len(placed.shape) == 2
            if is_linear and self.dtype == SCALED:
                layer = name.removesuffix(".weight")
                made[name] = Recipe(scaled_file.CODES, placed.shape, partial(self._codes, placed))
                made[f"{layer}.scale_weight"] = Recipe(torch.float32, (), partial(self._scale, placed))
            else:
                dtype = self._dtype(placed)
                made[name] = Recipe(dtype, placed.shape, partial(self._rounded, placed, dtype))
        if self.dtype == SCALED:
            prefix = self.family.component(self.family.denoiser).prefix_in(file.tensors) or ""
            made[f"{prefix}scaled_fp8"] = scaled_file.marker()
        return made

    def _dtype(self, placed: Placed) -> torch.dtype:
        if self.dtype is not None and placed.component != self.family.vae:
            return scaled_file.BESIDE if self.dtype == SCALED else precision.COMPUTE_DTYPES[self.dtype]
        if placed.dtype is None:
            raise UserError(f"the model holds {placed.component} quantised, and weights are merged as numbers: give --dtype")
        return placed.dtype

    def _parts(self, placed: Placed) -> Iterator[tuple[str, torch.Tensor]]:
        """(layer, tensor as the model has it, fp32) of the parts that the file holds in one."""
        for part in placed.link.parts:
            layer = f"{placed.component}.{part.removesuffix('.weight')}" if part.endswith(".weight") else ""
            yield layer, self.weights.tensor(placed.component, part)

    def _rounded(self, placed: Placed, dtype: torch.dtype) -> torch.Tensor:
        """As the file has it. What changes is made and rounded row by row."""
        made = []
        for layer, tensor in self._parts(placed):
            if layer not in self.touched:
                made.append(tensor.to(dtype))
                finite = is_finite(made[-1])
            else:
                made.append(torch.empty(tensor.shape, dtype=dtype))
                stored, before = made[-1].view(len(tensor), -1), tensor.flatten(1)
                for rows, exact in merged_rows(tensor, self.adapters, layer):
                    stored[rows] = exact
                    self._note(layer, exact, before[rows], stored[rows].double())
                finite = math.isfinite(self.merged.loss.lost)
            if not finite:
                raise self._not_finite(placed, dtype)
        return join_parts(placed.link, made)

    def _note(self, layer: str, exact: torch.Tensor, before: torch.Tensor, stored: torch.Tensor) -> None:
        self.merged.layers.add(layer)
        self.merged.loss.add(layer, float((stored - exact).norm()), float((exact - before).norm()))

    def _not_finite(self, placed: Placed, dtype: torch.dtype) -> NonFiniteError:
        tensor, remedy = f"{placed.component}.{placed.link.parts[0]}", "Give a wider --dtype, or a lower strength"
        return NonFiniteError(f"{tensor} would not be finite as {dtype}; nothing was written. {remedy}")

    def _exact(self, placed: Placed) -> torch.Tensor:
        """In the file's layout and not rounded: fp64 where it is merged, else fp32."""
        parts = []
        for layer, tensor in self._parts(placed):
            if layer in self.touched:
                rows = [exact for _, exact in merged_rows(tensor, self.adapters, layer)]
                tensor = torch.cat(rows).view(tensor.shape)
            parts.append(tensor)
        widest = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
        return join_parts(placed.link, [part.to(widest) for part in parts])

    def _codes(self, placed: Placed) -> torch.Tensor:
        exact = self._exact(placed)
        codes, scale = scaled_file.codes_of(exact), float(scaled_file.scale_of(exact))
        if not is_finite(codes):
            raise self._not_finite(placed, codes.dtype)
        if exact.dtype == torch.float64:
            layers, tensors = zip(*self._parts(placed), strict=True)
            before = join_parts(placed.link, [tensor.double() for tensor in tensors])
            self._note(layers[0], exact, before, codes.double() * scale)
            self.merged.layers |= self.touched.intersection(layers)
        return codes

    def _scale(self, placed: Placed) -> torch.Tensor:
        return scaled_file.scale_of(self._exact(placed))


def _copy_configs(root: Path, folder: Path) -> None:
    paths = [root / "model_index.json", *(path for path in sorted(root.glob("*/*")) if not path.name.startswith("."))]
    for path in paths:
        if path.suffix in CONFIGS and path.is_file() and ".index." not in path.name:  # an index is of shards
            write_atomic(folder / path.relative_to(root), [path.read_bytes()])
