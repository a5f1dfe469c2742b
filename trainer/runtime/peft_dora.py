"""Our DoRA kernels in the layers of a PEFT model: parameters, switches and files stay PEFT's; the math is
adapters/dora.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import Conv2d, Linear, LoraLayer
from torch import Tensor, nn

from trainer import kernels
from trainer.adapters.dora import Part, adapted, is_drowned
from trainer.base.errors import UserError
from trainer.base.protocols import BaseLayer
from trainer.quantization import FORMATS, frozen_like
from trainer.quantization.formats import Dense

DENSE = {torch.float64, *(format.dtype for format in FORMATS.values() if not format.quantised)}


class Frozen(NamedTuple):
    """A base layer for our kernels, with PEFT's own weight. key: names its tensors. w_sq: ||W||^2. z_rows: for `Part`."""

    key: tuple
    base: BaseLayer
    w_sq_N: Tensor
    z_rows: Tensor | None

    def __reduce__(self) -> tuple:
        return type(None), ()  # a copied or unpickled model makes a new one


@torch.inference_mode(False)  # the tensors are saved for backward passes later
@torch.no_grad()
def frozen(layer: nn.Linear | nn.Conv2d, compute: torch.dtype, key: tuple) -> Frozen:
    """The layer for our kernels, without a copy of its weight."""
    weight, bias = layer.weight.detach(), layer.bias
    fused = kernels.choose("torch" if weight.dtype == torch.float64 else "auto", weight.device)
    base: Any = frozen_like(layer, Dense(str(weight.dtype), weight.dtype), compute, fused, "meta")
    base.payload_weight, base.bias = weight, None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
    w_sq_N = fused.row_squares(base.stored())
    z_rows = is_drowned(w_sq_N, base.bias_N).nonzero().flatten()
    return Frozen(key, base, w_sq_N, z_rows if len(z_rows) else None)


def forgetting(name: str) -> Callable[..., Any]:
    """PEFT's method `name`, which first drops the frozen base: no old weight is held beside a new one."""

    def method(self, *args: Any, **kwargs: Any) -> Any:
        self.frozen = None
        return getattr(super(OurDora, self), name)(*args, **kwargs)

    return method


class OurDora:
    """PEFT's layer with our forward while one DoRA is active and not merged."""

    frozen: Frozen | None = None
    merge, unmerge, set_adapter, _apply = map(forgetting, ("merge", "unmerge", "set_adapter", "_apply"))

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's output in the base's dtype; under autocast in autocast's."""
        names, base, device = active(self), self.get_base_layer(), x.device.type
        by_peft = args or kwargs or self.disable_adapters or self.merged or (x.dim() == 3 and isinstance(base, nn.Conv2d))
        if by_peft or not any(name in self.lora_magnitude_vector for name in names):
            return super().forward(x, *args, **kwargs)
        autocast = torch.is_autocast_enabled(device) and base.weight.dtype != torch.float64
        compute = torch.get_autocast_dtype(device) if autocast else base.weight.dtype
        tensors = (base.weight,) if base.bias is None else (base.weight, base.bias)
        key = compute, *((each.data_ptr(), each._version, each.dtype, each.requires_grad) for each in tensors)
        if self.frozen is None or self.frozen.key != key:
            if fault := unsuited(self):
                raise UserError(f"our kernels do not compute this DoRA layer: {fault}")
            self.frozen = frozen(base, compute, key)
        (name,), (_, fixed, w_sq_N, z_rows) = names, self.frozen
        scaling, wide = self.scaling[name], torch.promote_types(compute, torch.float32)
        a, b, m = (each[name].weight.to(wide) for each in (self.lora_A, self.lora_B, self.lora_magnitude_vector))
        with torch.autocast(device, enabled=False):
            a_RK, b_NR = a.detach().flatten(1), b.detach().flatten(1)
            (c_N,) = fixed.kernels.adapted_norms([fixed.stored()], [w_sq_N], [a_RK], [b_NR], [scaling])
            (y,) = adapted(x, [Part(fixed, a, b, scaling, m.flatten(), c_N, z_rows)])
        return y


class OurLinear(OurDora, Linear):
    """PEFT's Linear with our DoRA."""


class OurConv2d(OurDora, Conv2d):
    """PEFT's Conv2d with our DoRA."""


OURS = {Linear: OurLinear, Conv2d: OurConv2d}
THEIRS = {ours: theirs for theirs, ours in OURS.items()}


@dataclass(frozen=True)
class Accelerated:
    """A PEFT model's layers. layers: those that compute with our kernels, by name. left: the other LoRA layers, and why."""

    layers: Mapping[str, LoraLayer]
    left: Mapping[str, str]

    def undo(self) -> None:
        """Let PEFT compute again."""
        _change(self.layers, THEIRS)


def accelerate_peft_dora(model: nn.Module) -> Accelerated:
    """Have the DoRA layers of a PEFT model compute with our kernels, in place. A second call adds layers that are new since.
    Raises UserError for a model without DoRA, and, before any change, for DoRA layers that our kernels do not compute."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    doras = {name: layer for name, layer in layers.items() if layer.lora_magnitude_vector}
    if not doras:
        raise UserError("the model has no DoRA layer of PEFT; give it an adapter of LoraConfig(use_dora=True)")
    if faults := {name: fault for name, layer in doras.items() if (fault := unsuited(layer))}:
        named = "; ".join(f"{name}: {fault}" for name, fault in faults.items())
        raise UserError(f"nothing was changed, as {len(faults)} DoRA layer(s) do not suit our kernels: {named}")
    _change(doras, OURS)
    return Accelerated(doras, {name: "it has no DoRA" for name in layers if name not in doras})


def _change(layers: Mapping[str, Any], into: Mapping[type, type]) -> None:
    for layer in layers.values():
        layer.frozen, layer.__class__ = None, into.get(type(layer), type(layer))


def active(layer: LoraLayer) -> list[str]:
    """The active adapters that the layer has."""
    return [name for name in layer.active_adapters if name in layer.lora_A]


def unsuited(layer: LoraLayer) -> str | None:
    """Why our kernels do not compute a DoRA layer as PEFT does, with the remedy; None if they do."""
    base: Any = layer.get_base_layer()
    weight: Any = getattr(base, "weight", None)
    bias, dtype = getattr(base, "bias", None), getattr(weight, "dtype", None)
    if type(layer) not in OURS | THEIRS or type(base) not in (nn.Linear, nn.Conv2d) or dtype not in DENSE:
        layers = f"PEFT's {type(layer).__name__} over {type(base).__name__} in {dtype}"
        return f"{layers}; only Linear and Conv2d in fp32, fp16 or bf16 are computed, so leave it out of target_modules"
    if len(active(layer)) > 1:
        return f"several adapters are active ({', '.join(active(layer))}); activate one with set_adapter"
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        return "its base is trained; freeze its weight and bias"
    if any(isinstance(layer.lora_dropout[name], nn.Dropout) for name in layer.lora_magnitude_vector):
        return "lora_dropout, with which a DoRA multiplies W twice; set it to 0"
    if base._forward_hooks or base._forward_pre_hooks or "forward" in vars(base):
        return "hooks at its base, as of offloading, would not be called; remove them"
    plain = isinstance(base, nn.Linear) or (base.groups, base.padding_mode, base.dilation) == (1, "zeros", (1, 1))
    if not plain or isinstance(getattr(base, "padding", 0), str):
        return f"{base}; only groups 1, dilation 1 and zeros around it, counted in pixels, are computed"
    return None
