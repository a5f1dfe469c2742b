"""How frozen weights are stored: one entry point that swaps a component's layers, and the record of what was stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from trainer.quantization.formats import FORMATS, Format
from trainer.quantization.layers import FrozenConv2d, FrozenLayer, FrozenLinear
from trainer.tensorfile import NAMES, tensor_sha256

__all__ = ["FORMATS", "Format", "FrozenConv2d", "FrozenLayer", "FrozenLinear", "freeze_layers", "record"]


def freeze_layers(
    module: nn.Module,
    *,
    format: Format,
    compute: torch.dtype,
    unquantised: torch.dtype,
    keep: Sequence[str] = (),
    keep_fp32: Sequence[str] = (),
) -> None:
    """Replace every Linear and Conv2d of `module` (on the meta device) by its frozen counterpart, in place.

    format: storage of the layers; compute: their compute dtype.
    keep: fnmatch patterns of layers that are not quantised and stay at `unquantised` when `format` is quantised.
    keep_fp32: name parts a model class wants stored and computed in fp32 (`_keep_in_fp32_modules`), honoured when the
      storage or the compute dtype is fp16, as in transformers.
    Other parameters stay what they are; the loader places them as fp32.
    """
    for name, child in list(module.named_modules()):
        if not isinstance(child, (nn.Linear, nn.Conv2d)):
            continue
        chosen, chosen_compute = format, compute
        if format.quantised and any(fnmatchcase(name, pattern) for pattern in keep):
            chosen = next(f for f in FORMATS.values() if f.dtype == unquantised)
        if torch.float16 in (format.dtype, compute) and any(part in name.split(".") for part in keep_fp32):
            chosen, chosen_compute = FORMATS["fp32"], torch.float32
        common = dict(
            bias=child.bias is not None, format=chosen, compute_dtype=chosen_compute, device=child.weight.device
        )  # fmt: skip
        if isinstance(child, nn.Linear):
            frozen: FrozenLayer = FrozenLinear(child.in_features, child.out_features, **common)
        else:
            assert child.padding_mode == "zeros", name
            frozen = FrozenConv2d(
                child.in_channels, child.out_channels, child.kernel_size, stride=child.stride, padding=child.padding,
                dilation=child.dilation, groups=child.groups, **common,
            )  # fmt: skip
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, frozen)


def record(components: Iterable[tuple[str, nn.Module]]) -> dict[str, dict[str, object]]:
    """What `quantization.json` says: for every quantised layer its format and the SHA-256 of each payload tensor.

    Deterministic: the same checkpoint and config give the same record, which a resume is checked against.
    """
    layers: dict[str, dict[str, object]] = {}
    for component, module in components:
        for name, layer in module.named_modules():
            if isinstance(layer, FrozenLayer) and layer.format.quantised:
                layers[f"{component}.{name}"] = {
                    "format": layer.format.name,
                    "shape": list(layer.weight_shape),
                    "payload": {
                        key: {"dtype": NAMES[t.dtype], "sha256": tensor_sha256(t)} for key, t in layer.payload().items()
                    },
                }
    return layers
