"""Replaces the layers of a component by frozen ones, each in its format."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from trainer.base.protocols import Kernels
from trainer.base.types import HeldWeight
from trainer.quantization.convolutions import FrozenConv2d, Geometry
from trainer.quantization.formats import Format
from trainer.quantization.layers import FrozenLayer, FrozenLinear
from trainer.quantization.table import FORMATS, dense, formats_of

Choose = Callable[[str, nn.Module], tuple[Format, torch.dtype]]  # (name, layer) -> (storage, compute dtype)


def storage_of_layers(
    *,
    format: Format,
    compute: torch.dtype,
    unquantised: torch.dtype,
    keep: Sequence[str] = (),
    keep_fp32: Sequence[str] = (),
    held: Mapping[str, HeldWeight | torch.dtype] = {},
) -> Choose:
    """A function (name, layer) -> (storage, compute dtype) for the layers of a component.

    format, compute: for the layers in general. unquantised: storage of those that a quantised `format` leaves out: names that
      match `keep` (fnmatch patterns), and convolutions if the format has none.
    keep_fp32: name parts that a model class wants stored and computed in fp32 (`_keep_in_fp32_modules`), respected if
      the storage or the compute dtype is fp16, as in transformers.
    held: each layer in the model's files, if these hold quantised weights. Under a quantised `format`, which is then
      theirs, every layer keeps its storage there, whatever `keep` says: the lost precision cannot come back.
    """

    def choose(name: str, layer: nn.Module) -> tuple[Format, torch.dtype]:
        form, layer_compute = format, compute
        stays = any(fnmatchcase(name, pattern) for pattern in keep)
        if format.quantised and held:
            form = dense(kind) if isinstance(kind := held[name], torch.dtype) else formats_of(kind.dtype)[kind.backend]
        elif format.quantised and (stays or (isinstance(layer, nn.Conv2d) and not format.convolutions)):
            form = dense(unquantised)
        if torch.float16 in (format.dtype, compute) and any(part in name.split(".") for part in keep_fp32):
            form, layer_compute = form if form.quantised and held else FORMATS["fp32"], torch.float32
        return form, layer_compute

    return choose


def freeze_layers(module: nn.Module, choose: Choose, kernels: Kernels, *, scaled_matmul: bool = False) -> None:
    """Replace every Linear and Conv2d of `module` (on the meta device) by its frozen counterpart, in place.

    choose: from `storage_of_layers`. kernels: convert the weights, and compute the adapters on top of them.
    scaled_matmul: multiply float8 Linears as float8 (precision.matmul = "fp8").
    Other parameters are left alone; the loader places them as fp32.
    """
    for name, child in list(module.named_modules()):
        if not isinstance(child, (nn.Linear, nn.Conv2d)):
            continue
        frozen = frozen_like(child, *choose(name, child), kernels, child.weight.device)
        frozen.scaled_matmul = scaled_matmul and isinstance(frozen, FrozenLinear)
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, frozen)


def frozen_like(
    layer: nn.Linear | nn.Conv2d, form: Format, compute: torch.dtype, kernels: Kernels, device: torch.device | str
) -> FrozenLayer:
    """The frozen counterpart of a layer, without its weight."""
    common = dict(bias=layer.bias is not None, format=form, compute_dtype=compute, kernels=kernels, device=device)
    if isinstance(layer, nn.Linear):
        return FrozenLinear(layer.in_features, layer.out_features, **common)
    assert layer.padding_mode == "zeros", layer
    geometry = Geometry(layer.stride, layer.padding, layer.dilation, layer.groups)
    return FrozenConv2d(layer.weight.shape, geometry, **common)
