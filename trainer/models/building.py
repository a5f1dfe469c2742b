"""A component's module before its weights are read: built without memory, then with memory for its final form."""

import importlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.models.base import Component
from trainer.models.config_files import blamed_on, culprit, strict_values
from trainer.models.names import ComponentConfig, Shape

# Replaces layers of a module on the meta device; may return tensors that it allocated elsewhere, where they stay.
Swap = Callable[[nn.Module], Collection[torch.Tensor] | None]


def build(component: Component, config: ComponentConfig, file: Path | str = "") -> nn.Module:
    """The component's module in eval mode, its parameters on the meta device. The buffers that it computes itself (position
    ids, rotary tables) are real.

    file: the config's. Raises UserError for a config that the class does not take, or that makes a denoiser with other
    tensors than our table of names has.
    """
    from accelerate import init_empty_weights

    library, class_name = component.library, component.class_name
    config = {key: value for key, value in component.shorten(config).items() if not key.startswith("_")}
    cls: Any = getattr(importlib.import_module(library), class_name)

    def instance(config: dict[str, Any]) -> nn.Module:
        config = strict_values(config, library, class_name)
        with init_empty_weights(include_buffers=False):
            module = cls.from_config(config) if library == "diffusers" else cls(cls.config_class.from_dict(config))
        names = component.names if component.role == "denoiser" else None
        if names is not None and _shapes(module) != names({**component.defaults, **config}).shapes:
            raise ValueError("its layers are not those of the models that are trained here")
        return module

    file = file or f"{component.name}/config.json"
    with blamed_on(file, component, lambda: culprit(config, library, class_name, instance)):
        module = instance(config)
    return module.eval().requires_grad_(False)


def allocate(module: nn.Module, device: torch.device, stay: Collection[torch.Tensor] = ()) -> None:
    """Allocate all that is on the meta device, and move the rest, except the tensors that `stay`."""
    stays = {id(tensor) for tensor in stay}

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in stays:
            return tensor
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    module._apply(placed)


def shapes_of(component: Component, config: ComponentConfig, file: Path | str = "") -> dict[str, Shape]:
    """The shapes of the component's tensors, by the module's names. file: the config's. Raises UserError for a config that
    the class does not take."""
    if component.names is None:
        return _shapes(build(component, config, file))
    try:
        return component.names(config).shapes
    except Exception:
        build(component, config, file)  # raises UserError if the class does not take the config, either
        raise  # it does: the mistake is in our table of names


def _shapes(module: nn.Module) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
