"""Put adapters on a component's layers, through PEFT, and give them their first values.

The only file that knows PEFT's experimental hook for custom layers (`LoraConfig._register_custom_module`).
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from trainer.adapters.adapter import ADAPTER_NAME, Adapter
from trainer.adapters.kinds import AdapterKind
from trainer.adapters.targets import Target, lora_config
from trainer.base import draws
from trainer.base.errors import UserError
from trainer.base.files import Advance, no_progress


@dataclass(frozen=True)
class Method:
    """How an adapter computes. dropout: probability for its inputs, in training."""

    kind: AdapterKind
    rslora: bool = False
    dropout: float = 0.0


def inject(
    components: Mapping[str, nn.Module],
    targets: Sequence[Target],
    *,
    method: Method,
    bases: tuple[type[nn.Module], ...],
    seed: int,
    advance: Advance = no_progress,
) -> Adapter:
    """Put one adapter on every target, in place; everything else is frozen.

    bases: classes of the frozen base layers (protocols.BaseLayer). seed: for the first values. advance: counts layers.
    Raises UserError for a grouped convolution, whose rows see different inputs.
    """
    from peft import LoraConfig, inject_adapter_in_model

    from trainer.adapters.layers import AdaptedLayer

    for module in components.values():
        module.requires_grad_(False)
    by_layer: dict[int, Target] = {}
    for target in targets:
        base = components[target.component].get_submodule(target.name)
        if base.groups != 1:
            raise UserError(
                f"{target.component}.{target.name} is a grouped convolution (groups = {base.groups}), which cannot carry an "
                "adapter; leave it out of adapter.targets and adapter.rules"
            )
        by_layer[id(base)] = target

    def build(base_layer, adapter_name, *, config, **rank_and_alpha) -> AdaptedLayer:
        # Rank and alpha come from our own table: PEFT would try every pattern as a regular expression on every layer.
        target = by_layer[id(base_layer)]
        layer = AdaptedLayer(base_layer, adapter_name, config, target.rank, target.alpha, method.kind)
        advance(1)
        return layer

    layers: dict[str, AdaptedLayer] = {}
    for component in dict.fromkeys(target.component for target in targets):
        module = components[component]
        members = [target for target in targets if target.component == component]
        # An exact match of whole names: a list would match suffixes.
        pattern = "|".join(re.escape(target.name) for target in members)
        config = LoraConfig(r=1, target_modules=pattern, use_rslora=method.rslora, lora_dropout=method.dropout)
        config._register_custom_module(dict.fromkeys(bases, build))
        inject_adapter_in_model(config, module, ADAPTER_NAME)
        for name, value in lora_config(members, method.kind, rslora=method.rslora).items():
            setattr(config, name, value)
        layers |= {f"{component}.{target.name}": module.get_submodule(target.name) for target in members}
    assert all(isinstance(layer, AdaptedLayer) for layer in layers.values())
    _draw(layers, method.kind, seed)
    return Adapter(layers, {f"{t.component}.{t.name}": t for t in targets}, kind=method.kind, rslora=method.rslora)


@torch.no_grad()
def _draw(layers: Mapping[str, nn.Module], kind: AdapterKind, seed: int) -> None:
    """Draw A, or a kind's other random parameters, from U(-1/sqrt(K), 1/sqrt(K)) with K columns (kaiming_uniform with
    a = sqrt(5), as in PEFT and LyCORIS). The rest has its first values (`AdaptedLayer.update_layer`).

    Seeded by the layer's name, so that the values do not depend on which other layers are adapted.
    """
    for name, layer in layers.items():
        generator = draws.generator(seed, "init", name)
        for end, values in layer.trained(ADAPTER_NAME).items():
            if end in kind.drawn:
                a = values.weight
                bound = 1 / math.sqrt(a.flatten(1).shape[1])
                a.copy_(torch.empty(a.shape).uniform_(-bound, bound, generator=generator))
        layer.mark_stale()
