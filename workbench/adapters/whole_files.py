"""The tensors of a whole model's files, to write the model again with other values in its layout; a diffusers folder also as
one file, under the names of the original layout, for ComfyUI's checkpoint loader."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from trainer.base.tensorfile import Recipe, Tensors
from trainer.base.types import Link
from trainer.models.loading import ModelSource
from trainer.models.names import Shape, original_shape
from trainer.models.weights import Read

MARKERS = {"v_pred": ("prediction_type", "v_prediction"), "ztsnr": ("rescale_betas_zero_snr", True)}


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file, made of parameters of `component` by the link. shape: in the file. dtype: in the model's files;
    None if quantised there."""

    component: str
    link: Link
    shape: Shape
    dtype: torch.dtype | None


@dataclass(frozen=True)
class WholeFile:
    """A model file to write. tensors: by name in the file. others: the model file's other tensors, unchanged."""

    tensors: Mapping[str, FileTensor]
    others: Tensors
    metadata: Mapping[str, str]


def folder_files(source: ModelSource) -> dict[str, WholeFile]:
    """The files of a diffusers folder, by path in it: one file for each component, whatever shards it is read from."""
    files = {}
    for component in source.family.components:
        stem = "model" if component.library == "transformers" else "diffusion_pytorch_model"
        tensors = {read.link.original: _file_tensor(component.name, read) for read in source.reads(component.name)}
        files[f"{component.name}/{stem}.safetensors"] = WholeFile(tensors, {}, {"format": "pt"})
    return files


def single_file(source: ModelSource) -> WholeFile:
    """A single-file model's file; for a diffusers folder one file of all components."""
    if source.single_file is None:
        return _all_in_one(source)
    tensors: dict[str, FileTensor] = {}
    claimed: set[str] = set()
    for component in source.family.components:
        weights = source.weights(component.name)
        if [file.path for file in weights.files] != [source.single_file.path]:
            continue
        for read in source.reads(component.name):
            tensors[weights.prefix + read.link.original] = _file_tensor(component.name, read)
            parts = read.held.parts.values() if read.held else (read.link.original,)
            claimed |= {weights.prefix + part for part in parts}
        claimed |= {weights.prefix + other for other in weights.recognised.other}
    file = source.single_file
    # Read when they are written: a training script's own averages may be as large as the model.
    others = {
        name: Recipe(entry.dtype, entry.shape, partial(file.read, name))
        for name, entry in file.entries.items()
        if name not in claimed
    }
    return WholeFile(tensors, others, file.metadata)


def _file_tensor(component: str, read: Read) -> FileTensor:
    dtype = None if read.held else read.weights.entry(read.link.original).dtype
    return FileTensor(component, read.link, read.shape, dtype)


def _all_in_one(source: ModelSource) -> WholeFile:
    tensors: dict[str, FileTensor] = {}
    for component in source.family.components:
        reads = {part: read for read in source.reads(component.name) for part in read.link.parts}
        shapes = {part: shape for read in reads.values() for part, shape in zip(read.link.parts, read.parts, strict=True)}
        if component.names is not None:
            links = component.names(source.config(component.name)).links
        else:
            # CLIP's files in the original layout use the inner model's name, whatever the class. T5's embedding table has two
            # names in the module.
            inner = "text_model." if component.class_name == "CLIPTextModel" else ""
            twice = "encoder.embed_tokens.weight" if "shared.weight" in shapes else ""
            links = [Link(inner + name.removeprefix(inner), (name,)) for name in shapes if name != twice]
        for link in links:
            dtypes = {_file_tensor(component.name, reads[part]).dtype for part in link.parts}
            dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
            shape = original_shape([shapes[part] for part in link.parts], link.op)
            tensors[component.prefixes[0] + link.original] = FileTensor(component.name, link, shape, dtype)
    # A folder has this in the scheduler's config, a file as empty tensors.
    markers = {name: torch.zeros(0) for name, (key, value) in MARKERS.items() if source.scheduler.get(key) == value}
    return WholeFile(tensors, markers, {})
