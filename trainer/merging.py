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
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from trainer import precision
from trainer.adapter_files import NamedModel, OpenedAdapter
from trainer.adapters.keys import some
from trainer.conversion import adapted, dora_change
from trainer.errors import NonFiniteError, UserError
from trainer.files import hash_file, write_atomic
from trainer.models.base_weights import BaseWeights
from trainer.models.names import join_parts
from trainer.models.whole_files import Placed, WholeFile, folder_files, single_file
from trainer.phases import QUIET, Phases
from trainer.quantization import scaled_file
from trainer.tensorfile import Recipe, Tensors, size_text, write_tensors

SCALED = "fp8"
# Hashes of what a file was before.
STALE = ("modelspec.hash_sha256", "sshs_model_hash", "sshs_legacy_hash")
CONFIGS = (".json", ".txt", ".model")  # of a diffusers folder: configs, vocabularies


@dataclass(frozen=True)
class Applied:
    opened: OpenedAdapter
    strength: float

    def described(self) -> dict[str, object]:
        path = self.opened.path
        return {"file": path.name, "sha256": hash_file(path), "strength": self.strength}


@dataclass
class Merged:
    """layers: that changed. change, lost: the norms of the change of all weights, and of what its rounding took away."""

    path: Path
    layers: set[str] = field(default_factory=set)
    change_sq: float = 0.0
    lost_sq: float = 0.0

    @property
    def lost(self) -> float:
        """Relative to the change."""
        return math.sqrt(self.lost_sq / max(self.change_sq, 1e-300))


def merged_weight(weight: torch.Tensor, adapters: Sequence[Applied], layer: str) -> torch.Tensor:
    """The layer's W with these adapters in it, fp64, of its shape."""
    w = weight.double()
    for each in adapters:
        factors = each.opened.portable.layers.get(layer)
        if factors is None:
            continue
        if factors.magnitude is None:
            change = adapted(w, factors) - w.flatten(1)
        else:
            change = dora_change(w, factors, each.opened.portable.meaning)
        w = w + each.strength * change.view_as(w)
    return w


def merge(
    model: NamedModel, adapters: Sequence[Applied], out: Path, *, dtype: str | None = None, phases: Phases = QUIET
) -> Merged:
    """Write `out`: a single file where it ends in .safetensors, else a diffusers folder.

    dtype: "fp32", "bf16", "fp16", or "fp8" (ComfyUI's scaled float8, a single file); None: as the model's files have it.
    The VAE keeps its own. Raises UserError for what cannot be written, NonFiniteError where a value would not be finite.
    """
    source, single = model.source, out.suffix == ".safetensors"
    assert source is not None
    if out.exists():
        raise UserError(f"{out} exists; remove it, or give another OUT")
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
    work = _Work(model, adapters, dtype, Merged(out))
    said = {"merged_adapters": json.dumps([each.described() for each in adapters], sort_keys=True)}
    files = {"": single_file(source)} if single else folder_files(source)
    work.check_all_there(files.values())
    made = {path: work.tensors(file) for path, file in files.items()}
    total = sum(math.prod(t.shape) * t.dtype.itemsize for tensors in made.values() for t in tensors.values())
    _check_space(out, total)
    with phases("writing the merged model", total, "B") as phase:
        if single:
            fields = {key: value for key, value in files[""].metadata.items() if key not in STALE}
            write_tensors(out, made[""], fields | said, phase.advance)
        else:
            with _appearing(out) as folder:
                _copy_configs(source.root, folder)
                for path, tensors in made.items():
                    write_tensors(folder / path, tensors, {**files[path].metadata, **said}, phase.advance)
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
        own = self.dtype is None or placed.component == self.family.vae
        if own and placed.dtype is None:
            raise UserError(f"the model holds {placed.component} quantised, and weights are merged as numbers: give --dtype")
        if own:
            assert placed.dtype is not None
            return placed.dtype
        return scaled_file.BESIDE if self.dtype == SCALED else precision.compute_dtype(str(self.dtype))

    def _exact(self, placed: Placed) -> tuple[torch.Tensor, float]:
        """(the tensor in the file's layout, fp64 where it is merged, else fp32; the square of its change)."""
        parts, squared = [], 0.0
        for part in placed.link.parts:
            tensor, layer = self.weights.tensor(placed.component, part), f"{placed.component}.{part.removesuffix('.weight')}"
            if part.endswith(".weight") and layer in self.touched:
                new = merged_weight(tensor, self.adapters, layer)
                squared += float((new - tensor).square().sum())
                self.merged.layers.add(layer)
                tensor = new
            parts.append(tensor)
        widest = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
        return join_parts(placed.link, [part.to(widest) for part in parts]), squared

    def _rounded(self, placed: Placed, dtype: torch.dtype) -> torch.Tensor:
        exact, squared = self._exact(placed)
        return self._noted(placed, exact, squared, exact.to(dtype), 1.0)

    def _codes(self, placed: Placed) -> torch.Tensor:
        exact, squared = self._exact(placed)
        return self._noted(placed, exact, squared, scaled_file.codes_of(exact), float(scaled_file.scale_of(exact)))

    def _scale(self, placed: Placed) -> torch.Tensor:
        return scaled_file.scale_of(self._exact(placed)[0])

    def _noted(self, placed: Placed, exact: torch.Tensor, squared: float, stored: torch.Tensor, scale: float) -> torch.Tensor:
        value = stored.double() if exact.dtype == torch.float64 else stored.float()
        if not bool(torch.isfinite(value).all()):
            raise NonFiniteError(
                f"{placed.component}.{placed.link.parts[0]} would not be finite as {stored.dtype}; nothing was written. "
                "Give a wider --dtype, or a lower strength"
            )
        if exact.dtype == torch.float64:
            self.merged.change_sq += squared
            self.merged.lost_sq += float((value * scale - exact).square().sum())
        return stored


def _check_space(out: Path, needed: int) -> None:
    there = next(parent for parent in out.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise UserError(
            f"{out} needs {size_text(needed)}, and its disk has {size_text(free)} free; make room, or give another OUT"
        )


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name when all is in it."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _copy_configs(root: Path, folder: Path) -> None:
    """What a diffusers folder has besides weights: its index, and the configs and vocabularies in its folders."""
    found = [root / "model_index.json", *(path for path in sorted(root.glob("*/*")) if not path.name.startswith("."))]
    for path in found:
        if path.suffix in CONFIGS and path.is_file() and ".index." not in path.name:  # an index is of shards
            write_atomic(folder / path.relative_to(root), [path.read_bytes()])
