"""What each component of the model is stored as, and what it computes in, from the config and the model's files."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import nn

from trainer import quantization
from trainer.base import patterns
from trainer.base.errors import UserError
from trainer.base.memory import find_blocks
from trainer.base.protocols import Kernels
from trainer.base.types import HeldWeight
from trainer.config import ComponentTable, Config
from trainer.kernels import dora_torch
from trainer.models.base import Component, Family
from trainer.models.loading import ModelSource
from trainer.quantization import Format, formats_of
from trainer.runtime import precision

DEFAULT_STORAGE = {"denoiser": "bf16", "text_encoder": "bf16", "vae": "fp32"}


@dataclass(frozen=True)
class Storage:
    """How one component is stored, and in which dtype it computes. exclude, sensitive: the config's and the family's patterns
    of layers that are not quantised. scaled_matmul: multiply float8 Linears as float8. tf32: encode photos in TF32."""

    name: str
    format: Format
    compute: torch.dtype
    exclude: tuple[str, ...] = ()
    sensitive: tuple[str, ...] = ()
    scaled_matmul: bool = False
    tf32: bool = False

    @property
    def keep(self) -> tuple[str, ...]:
        """The patterns of layers that are not quantised."""
        return (*self.sensitive, *self.exclude)

    def stored_as(self, dtype: str) -> "Storage":
        """The same component in another dtype of the config, by its first backend."""
        return replace(self, format=next(iter(formats_of(dtype).values())))

    def swap(self, module: nn.Module, *, kernels: Kernels, held: Mapping[str, HeldWeight | torch.dtype] = {}) -> None:
        """Freeze the layers of a module on the meta device. held: what the model's files hold (ModelSource.held)."""
        choose = quantization.storage_of_layers(
            format=self.format,
            compute=self.compute,
            unquantised=self.format.dtype or torch.bfloat16,  # layers that are not: 16 bit where the component is
            keep=self.keep,
            keep_fp32=tuple(getattr(module, "_keep_in_fp32_modules", None) or ()),
            held=held,
        )
        quantization.freeze_layers(module, choose, kernels, scaled_matmul=self.scaled_matmul)
        precision.keep_activations(module, self.compute)


def asked_precision(config: Config, component: Component) -> str:
    """What a component is stored as, before its files are looked at; "fp32" also where it computes in fp32."""
    given = config.model.components.get(component.name, ComponentTable())
    stored = given.dtype or DEFAULT_STORAGE[component.role]
    return "fp32" if (given.compute or config.precision.compute) == "fp32" else stored


def resolve(config: Config, source: ModelSource) -> dict[str, ComponentTable]:
    """Every component's table with what was left out: dtype, backend and compute dtype. Raises UserError."""
    resolved = {}
    for component in source.family.components:
        given = config.model.components.get(component.name, ComponentTable())
        dtype, backend = _storage(given, component, held_as(source, component.name))
        # What only encodes is worth its fp32; the denoiser, all of a run's time, is not slowed down by how it is stored.
        exact = dtype == "fp32" and component.role != "denoiser"
        compute = given.compute or ("fp32" if exact else config.precision.compute)
        update = {"dtype": dtype, "backend": backend, "compute": compute}
        if component.name in source.found:
            update["path"] = str(source.found[component.name])
        resolved[component.name] = given.model_copy(update=update)
    return resolved


def held_as(source: ModelSource, name: str) -> tuple[str, str] | None:
    """(dtype, backend) of a component whose files hold quantised weights; before they are fetched, what its config says."""
    if not source.is_here(name):
        return quantization.declared(source.config(name))
    kinds = {(h.dtype, h.backend) for h in source.held(name).values() if not isinstance(h, torch.dtype)}
    if len(kinds) > 1:
        text = " and ".join(f"{dtype} ({backend})" for dtype, backend in sorted(kinds))
        raise UserError(f"component {name!r} holds weights quantised in more than one way: {text}; use a file of one way")
    return next(iter(kinds), None)


def _storage(given: ComponentTable, component: Component, held: tuple[str, str] | None) -> tuple[str, str]:
    """(dtype, backend) of a component, from what the config gives and what its files hold. Raises UserError."""
    key = f"model.components.{component.name}"
    quantises = component.role != "vae"
    dtype = given.dtype or (held[0] if held and quantises else DEFAULT_STORAGE[component.role])
    if held and dtype == held[0]:
        backends = [held[1]]
    else:
        backends = list(formats_of(dtype))
        if held and formats_of(dtype)[backends[0]].quantised and quantises:
            raise UserError(
                f"{key}.dtype = {dtype!r}: the model's file holds this component as {held[0]} ({held[1]}) already, and to "
                f"quantise it again would add a second error; leave dtype out to take it as it is, or use the 16-bit file"
            )
    if given.backend not in (None, *backends):
        raise UserError(
            f"{key}.backend = {given.backend!r} has no dtype = {dtype!r}; "
            f"use {' or '.join(map(repr, backends))} (left out: {backends[0]!r})"
        )
    return dtype, given.backend or backends[0]


def storages(config: Config, family: Family) -> dict[str, Storage]:
    """Every component's storage, by name. Raises UserError for what cannot be stored or computed so."""
    plans = {}
    for component in family.components:
        table = config.model.components[component.name]
        format = formats_of(table.dtype)[table.backend]
        if component.role == "vae" and format.quantised:
            raise UserError(
                f"model.components.{component.name}.dtype = {table.dtype!r}: the VAE is not quantised (its convolutions "
                "are a few hundred MB, and errors show in every image); use fp32, bf16 or fp16"
            )
        compute = precision.COMPUTE_DTYPES[table.compute]
        if (why := family.memory.no_fp16.get(component.name)) and table.compute == "fp16":
            raise UserError(
                f"the {component.name} of {family.name} does not compute in fp16: {why}; set "
                f"precision.compute or model.components.{component.name}.compute to 'bf16' or 'fp32'"
            )
        scaled = config.precision.matmul == "fp8" and component.role == "denoiser"
        if scaled and (table.dtype, table.compute) != ("fp8_e4m3", "bf16"):
            raise UserError(
                f"precision.matmul = 'fp8' multiplies a denoiser that is stored as fp8_e4m3 and computes in bf16; "
                f"model.components.{component.name} has dtype = {table.dtype!r} and compute = {table.compute!r}. Change "
                "these, or set precision.matmul = 'compute'"
            )
        fast = config.vae.encode == "fast" and component.role == "vae"
        if fast and table.compute != "fp32":
            raise UserError(
                f"vae.encode = 'fast' takes TF32 in the place of fp32, and model.components.{component.name} has compute = "
                f"{table.compute!r}; leave it out, or set compute = 'fp32' there"
            )
        plans[component.name] = Storage(component.name, format, compute, table.exclude, component.sensitive, scaled, fast)
    return plans


def resident_blocks(config: Config, source: ModelSource, adapted: Collection[str]) -> dict[str, int]:
    """How many blocks stay on the device, by streamed component: with memory.offload the denoiser, and text encoders without
    an adapter, of which none stay. "auto" is 0 until a forecast was made. Raises UserError for more blocks than there are."""
    if config.memory.offload == "none":
        return {}
    family, asked = source.family, config.memory.resident_blocks
    count = len(find_blocks(source.build(family.denoiser), family.memory.blocks))
    if asked != "auto" and asked > count:
        raise UserError(
            f"memory.resident_blocks = {asked} is more than the {count} blocks of the {family.denoiser}; use at most "
            f"{count}, with which nothing is streamed, or 'auto'"
        )
    encoders = [name for name in family.text_encoders if name not in adapted and family.blocks_of(name)]
    return {family.denoiser: 0 if asked == "auto" else asked, **dict.fromkeys(encoders, 0)}


def parts(config: Config, processes: int) -> int:
    """The number of parts of each of the denoiser's blocks, one in each process; 1: whole in all. Raises UserError."""
    if config.memory.shard and processes == 1:
        raise UserError(
            "memory.shard = true shares the base out among several processes, and there is 1: start as many as there are "
            "cards (torchrun --nproc_per_node N train.py ...), or leave it out; a plan is for N with WORLD_SIZE=N in the "
            "environment. On one card memory.offload = 'blocks' keeps the base in host memory"
        )
    return processes if config.memory.shard else 1


def weight_bytes(source: ModelSource, component: Storage, *, held: Mapping[str, HeldWeight | torch.dtype]) -> int:
    """The bytes of a component's weights in memory. held: what is taken as its files hold it (ModelSource.held)."""
    module = source.build(component.name)
    component.swap(module, kernels=dora_torch, held=held)  # nothing is computed
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in module.state_dict().values())


def check(source: ModelSource, component: Storage) -> None:
    """Refuse files that lack a tensor, and an `exclude` of no layer, or of what they hold quantised. Reads headers only."""
    name, key = component.name, f"model.components.{component.name}.exclude"
    here = source.is_here(name)
    if here:
        source.verify(name)
    held = source.held(name) if here and component.format.quantised else {}
    for layer, weight in held.items():
        for pattern in component.exclude:
            if not isinstance(weight, torch.dtype) and fnmatchcase(layer, pattern):
                raise UserError(
                    f"{key}: {pattern!r} matches {layer}, which the model's file holds as {weight.dtype} already; "
                    "take the pattern out, or use the 16-bit file"
                )
    modules = source.build(name).named_modules() if component.exclude else ()
    names = [layer for layer, module in modules if isinstance(module, (nn.Linear, nn.Conv2d))]
    for pattern in component.exclude:
        if not any(fnmatchcase(layer, pattern) for layer in names):
            raise UserError(
                f"{key}: the pattern {pattern!r} matches no layer (patterns are fnmatch on the whole dotted name); "
                f"{patterns.advice(pattern, names)}"
            )


def check_fetched(source: ModelSource, component: Storage) -> None:
    """Refuse weights held in a way that a hub id's config.json had not said, once they were fetched."""
    held = held_as(source, component.name)
    if held and component.format.quantised and held != (component.format.dtype_name, component.format.backend):
        raise UserError(
            f"model.components.{component.name}: the fetched files hold it as {held[0]} ({held[1]}), which their config.json "
            f"does not say, and it was to be stored as {component.format.name}; set its dtype = {held[0]!r} and "
            f"backend = {held[1]!r}, or use the 16-bit model"
        )
