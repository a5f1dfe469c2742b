"""Adapters merged into a model's own weights, which any program reads: exact for a DoRA where a file of it is not.

One tensor after another, from the model's files into new ones. Of adapters FILE:STRENGTH, in the order given:

    LoRA    W <- W + strength s B A
    DoRA    W <- W + strength (g (W + s B A) - W),    g = m / ||W + s B A||, or m / ||W|| in a file for ComfyUI's releases

So ComfyUI applies patches (comfy/weight_adapter/base.py, `weight_decompose`), and so samples are drawn here at a strength.
Its norm has an eps of the weight's dtype besides, which an exact formula has not. PEFT scales s instead, which for a DoRA
is something else at any strength but 1. Sums are fp64; W is rounded once, when it is written.
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

    def described(self) -> dict[str, object]:
        """What the merged file says of it."""
        path = self.opened.path
        return {"file": path.name, "sha256": hash_file(path), "strength": self.strength}


@dataclass
class Merged:
    """A model file with adapters in it. layers: that changed. change, lost: the norms of the change of all weights, and of
    what its rounding took away."""

    path: Path
    layers: set[str] = field(default_factory=set)
    change_sq: float = 0.0
    lost_sq: float = 0.0

    @property
    def lost(self) -> float:
        """Relative to the change."""
        return math.sqrt(self.lost_sq / max(self.change_sq, 1e-300))


def merged_rows(weight: torch.Tensor, adapters: Sequence[Applied], layer: str) -> Iterator[tuple[slice, torch.Tensor]]:
    """(rows, these rows of the layer's W with the adapters in it, fp64 [rows, K]), until all rows were there.

    Few rows at a time, whose copies stay in the processor's caches; all at once where a magnitude belongs to the columns.
    """
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
        raise UserError(
            f"OUT = {str(out)!r}: {model.label} is one file, and so is what is made of it; let OUT end in .safetensors"
        )
    if dtype == SCALED and not single:
        raise UserError(
            f"--dtype {SCALED} is ComfyUI's, which reads single files; let OUT = {str(out)!r} end in .safetensors"
        )
    for each in adapters:
        each.opened.portable.check_finite()
    remove_leftovers(leftovers_of(out))  # each the size of a model
    work = _Work(model, adapters, dtype, Merged(out))
    origin = {"merged_adapters": json.dumps([each.described() for each in adapters], sort_keys=True)}
    files = {"": single_file(source)} if single else folder_files(source)
    work.check_all_there(files.values())
    made = {path: work.tensors(file) for path, file in files.items()}
    total = sum(math.prod(t.shape) * t.dtype.itemsize for tensors in made.values() for t in tensors.values())
    _check_space(out, total)
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
    """What the tensors of the new files are made with."""

    def __init__(self, model: NamedModel, adapters: Sequence[Applied], dtype: str | None, merged: Merged) -> None:
        assert model.source is not None
        self.family, self.weights = model.family, BaseWeights(model.source)
        self.adapters, self.dtype, self.merged = adapters, dtype, merged
        self.touched = {layer for each in adapters for layer in each.opened.portable.layers}

    def check_all_there(self, files: Iterable[WholeFile]) -> None:
        there = {f"{p.component}.{part}" for file in files for p in file.tensors.values() for part in p.link.parts}
        absent = sorted(layer for layer in self.touched if f"{layer}.weight" not in there)
        if absent:
            raise UserError(
                f"OUT = {str(self.merged.path)!r} would hold no {absent[0].partition('.')[0]}, as the model's file, and the "
                f"adapters change it: {some(absent)}; give the model as a diffusers folder"
            )

    def tensors(self, file: WholeFile) -> Tensors:
        made: dict[str, torch.Tensor | Recipe] = dict(file.others)
        for name, placed in file.tensors.items():
            if self._is_scaled(name, placed):
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

    def _is_scaled(self, name: str, placed: Placed) -> bool:
        linear = placed.component == self.family.denoiser and name.endswith(".weight") and len(placed.shape) == 2
        return linear and self.dtype == SCALED

    def _dtype(self, placed: Placed) -> torch.dtype:
        stays = self.dtype is None or placed.component == self.family.vae
        if stays and placed.dtype is None:
            raise UserError(f"the model holds {placed.component} quantised, and weights are merged as numbers: give --dtype")
        if stays:
            assert placed.dtype is not None
            return placed.dtype
        return scaled_file.BESIDE if self.dtype == SCALED else precision.COMPUTE_DTYPES[str(self.dtype)]

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
                finite = math.isfinite(self.merged.lost_sq)
            if not finite:
                raise self._not_finite(placed, dtype)
        return join_parts(placed.link, made)

    def _note(self, layer: str, exact: torch.Tensor, before: torch.Tensor, stored: torch.Tensor) -> None:
        self.merged.layers.add(layer)
        self.merged.change_sq += float((exact - before).square().sum())
        self.merged.lost_sq += float((stored - exact).square().sum())

    def _not_finite(self, placed: Placed, dtype: torch.dtype) -> NonFiniteError:
        return NonFiniteError(
            f"{placed.component}.{placed.link.parts[0]} would not be finite as {dtype}; nothing was written. "
            "Give a wider --dtype, or a lower strength"
        )

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


def _check_space(out: Path, needed: int) -> None:
    there = next(parent for parent in out.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise UserError(
            f"{out} needs {size_text(needed)}, and its disk has {size_text(free)} free; make room, or give another OUT"
        )


def _copy_configs(root: Path, folder: Path) -> None:
    """What a diffusers folder has besides weights: its index, and the configs and vocabularies in its folders."""
    paths = [root / "model_index.json", *(path for path in sorted(root.glob("*/*")) if not path.name.startswith("."))]
    for path in paths:
        if path.suffix in CONFIGS and path.is_file() and ".index." not in path.name:  # an index is of shards
            write_atomic(folder / path.relative_to(root), [path.read_bytes()])
