"""Storage and compute dtypes of each component, from the config and the model's files."""

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
    """Storage format and compute dtype of one component. exclude, sensitive: the config's and the family's patterns of layers
    that are not quantised. scaled_matmul: multiply float8 Linears as float8. tf32: encode photos in TF32."""

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
        """The same component in another dtype of the config, with its first backend."""
        return replace(self, format=next(iter(formats_of(dtype).values())))

    def swap(self, module: nn.Module, *, kernels: Kernels, held: Mapping[str, HeldWeight | torch.dtype] = {}) -> None:
        """Freeze the layers of a module on the meta device. held: layer -> its weight in the files (ModelSource.held)."""
        choose = quantization.storage_of_layers(
            format=self.format,
            compute=self.compute,
            unquantised=self.format.dtype or torch.bfloat16,  # dtype of unquantised layers in a quantised component
            keep=self.keep,
            keep_fp32=tuple(getattr(module, "_keep_in_fp32_modules", None) or ()),
            held=held,
        )
        quantization.freeze_layers(module, choose, kernels, scaled_matmul=self.scaled_matmul)
        precision.keep_activations(module, self.compute)


def asked_precision(config: Config, component: Component) -> str:
    """A component's storage dtype before its files are read; "fp32" also if it computes in fp32."""
    table = config.model.components.get(component.name, ComponentTable())
    stored = table.dtype or DEFAULT_STORAGE[component.role]
    return "fp32" if (table.compute or config.precision.compute) == "fp32" else stored


def resolve(config: Config, source: ModelSource) -> dict[str, ComponentTable]:
    """Every component's table with its defaults: dtype, backend and compute dtype. Raises UserError."""
    resolved = {}
    for component in source.family.components:
        table = config.model.components.get(component.name, ComponentTable())
        dtype, backend = _storage(table, component, held_as(source, component.name))
        # fp32 is affordable for encoders; the denoiser, all of a run's time, computes in the configured dtype.
        exact = dtype == "fp32" and component.role != "denoiser"
        compute = table.compute or ("fp32" if exact else config.precision.compute)
        update = {"dtype": dtype, "backend": backend, "compute": compute}
        if component.name in source.found:
            update["path"] = str(source.found[component.name])
        resolved[component.name] = table.model_copy(update=update)
    return resolved


def held_as(source: ModelSource, name: str) -> tuple[str, str] | None:
    """(dtype, backend) of the quantised weights in a component's files, or before they are fetched in its config.json; else
    None. Raises UserError for more than one."""
    if not source.is_here(name):
        return quantization.declared(source.config(name))
    kinds = {(h.dtype, h.backend) for h in source.held(name).values() if not isinstance(h, torch.dtype)}
    if len(kinds) > 1:
        text = " and ".join(f"{dtype} ({backend})" for dtype, backend in sorted(kinds))
        raise UserError(f"component {name!r} holds weights quantised in more than one way: {text}; use a file of one way")
    return next(iter(kinds), None)


def _storage(table: ComponentTable, component: Component, in_files: tuple[str, str] | None) -> tuple[str, str]:
    """(dtype, backend) of a component, from its table and `held_as`. Raises UserError."""
    key = f"model.components.{component.name}"
    quantises = component.role != "vae"
    dtype = table.dtype or (in_files[0] if in_files and quantises else DEFAULT_STORAGE[component.role])
    if in_files and dtype == in_files[0]:
        backends = [in_files[1]]
    else:
        backends = list(formats_of(dtype))
        if in_files and formats_of(dtype)[backends[0]].quantised and quantises:
            raise UserError(
                f"{key}.dtype = {dtype!r}: the model's file holds this component as {in_files[0]} ({in_files[1]}) already, "
                "and to quantise it again would add a second error; leave dtype out to take it as it is, or use the 16-bit "
                "file"
            )
    if table.backend not in (None, *backends):
        raise UserError(
            f"{key}.backend = {table.backend!r} has no dtype = {dtype!r}; "
            f"use {' or '.join(map(repr, backends))} (left out: {backends[0]!r})"
        )
    return dtype, table.backend or backends[0]


def storages(config: Config, family: Family) -> dict[str, Storage]:
    """Component name -> storage. Raises UserError for a dtype that a component cannot be stored or computed in."""
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
        if (reason := family.memory.no_fp16.get(component.name)) and table.compute == "fp16":
            raise UserError(
                f"the {component.name} of {family.name} does not compute in fp16: {reason}; set "
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
    """Streamed component -> number of blocks that stay on the device. memory.offload streams the denoiser, and all blocks of
    text encoders without an adapter. "auto" is 0 until a forecast is made. Raises UserError for more blocks than exist."""
    if config.memory.offload == "none":
        return {}
    family, resident = source.family, config.memory.resident_blocks
    count = len(find_blocks(source.build(family.denoiser), family.memory.blocks))
    if resident != "auto" and resident > count:
        raise UserError(
            f"memory.resident_blocks = {resident} is more than the {count} blocks of the {family.denoiser}; use at most "
            f"{count}, with which nothing is streamed, or 'auto'"
        )
    encoders = [name for name in family.text_encoders if name not in adapted and family.blocks_of(name)]
    return {family.denoiser: 0 if resident == "auto" else resident, **dict.fromkeys(encoders, 0)}


def parts(config: Config, processes: int) -> int:
    """The number of shards of each denoiser block, one in each process; 1: not sharded. Raises UserError."""
    if config.memory.shard and processes == 1:
        raise UserError(
            "memory.shard = true shares the base out among several processes, and there is 1: start as many as there are "
            "cards (torchrun --nproc_per_node N train.py ...), or leave it out; a plan is for N with WORLD_SIZE=N in the "
            "environment. On one card memory.offload = 'blocks' keeps the base in host memory"
        )
    return processes if config.memory.shard else 1


def weight_bytes(source: ModelSource, component: Storage, *, held: Mapping[str, HeldWeight | torch.dtype]) -> int:
    """The bytes of a component's weights in memory. held: layer -> its weight in the files (ModelSource.held)."""
    module = source.build(component.name)
    component.swap(module, kernels=dora_torch, held=held)  # nothing is computed
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in module.state_dict().values())


def check(source: ModelSource, component: Storage) -> None:
    """Raises UserError if files lack a tensor, or `exclude` matches no layer, or a quantised one. Reads headers only."""
    name, key = component.name, f"model.components.{component.name}.exclude"
    weights = {}
    if source.is_here(name):
        source.verify(name)
        weights = source.held(name) if component.format.quantised else {}
    for layer, weight in weights.items():
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
    """Raises UserError if fetched weights are quantised in a way that their config.json does not say."""
    in_files, planned = held_as(source, component.name), component.format
    if in_files and planned.quantised and in_files != (planned.dtype_name, planned.backend):
        dtype, backend = in_files
        raise UserError(
            f"model.components.{component.name}: the fetched files hold it as {dtype} ({backend}), which their config.json "
            f"does not say, and it was to be stored as {planned.name}; set its dtype = {dtype!r} and backend = {backend!r}, "
            "or use the 16-bit model"
        )
