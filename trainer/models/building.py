"""A component's module before its weights are read: built without memory, then with memory for its final form."""

import importlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.models.base import Component
from trainer.models.config_files import as_taken, blamed_on, culprit, parameters_of
from trainer.models.names import ComponentConfig, Shape

# Replaces layers of a module without memory; may return tensors that it gave memory elsewhere, where they stay.
Swap = Callable[[nn.Module], Collection[torch.Tensor] | None]


def build(component: Component, config: ComponentConfig, where: Path | str = "") -> nn.Module:
    """The component's module in eval mode, its parameters on the meta device. What the module makes itself (position ids,
    rotary tables) is real.

    where: the config's file. Raises UserError for a config that the class does not take, or of which it makes a denoiser
    with other tensors than are known by name.
    """
    from accelerate import init_empty_weights

    config = {key: value for key, value in component.shorten(config).items() if not key.startswith("_")}
    cls: Any = getattr(importlib.import_module(component.library), component.class_name)

    def made(config: dict[str, Any]) -> nn.Module:
        config = as_taken(config, parameters_of(component.library, component.class_name))
        with init_empty_weights(include_buffers=False):
            made = cls.from_config(config) if component.library == "diffusers" else cls(cls.config_class.from_dict(config))
        known = component.names if component.role == "denoiser" else None
        if known is not None and _shapes(made) != known({**component.defaults, **config}).shapes:
            raise ValueError("its layers are not those of the models that are trained here")
        return made

    with blamed_on(
        where or f"{component.name}/config.json", component, lambda: culprit(config, component.library, cls.__name__, made)
    ):
        module = made(config)
    return module.eval().requires_grad_(False)


def allocate(module: nn.Module, device: torch.device, stay: Collection[torch.Tensor] = ()) -> None:
    """Memory for all that is on the meta device; what has a value moves, but for the tensors that `stay`."""
    stays = {id(tensor) for tensor in stay}

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in stays:
            return tensor
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    module._apply(placed)


def shapes_of(component: Component, config: ComponentConfig, where: Path | str = "") -> dict[str, Shape]:
    """The shape of every tensor that the component's files have for its module, by the module's names. where: the config's
    file. Raises UserError for a config that the class does not take."""
    if component.names is None:
        return _shapes(build(component, config, where))
    try:
        return component.names(config).shapes
    except Exception:
        build(component, config, where)  # raises UserError where the class does not take the config, either
        raise  # it does: the mistake is in our table of names


def _shapes(module: nn.Module) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
