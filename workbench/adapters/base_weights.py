"""Reads a model's weights one at a time, without building the model: for tools that compare, merge or measure."""

import torch

from trainer.base.errors import UserError
from trainer.models.loading import ModelSource
from trainer.models.weights import Read
from workbench.adapter_files.opening import NamedModel, models_at


class BaseWeights:
    """Reads layers' weights from a model's files. The last tensor is cached, for fused layers."""

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self._reads: dict[str, dict[str, Read]] = {}
        self._last: tuple[Read, list[torch.Tensor]] | None = None

    def weight(self, layer: str) -> torch.Tensor:
        """W of a layer by its full name ("unet.mid_block...to_q"), fp32, in its own shape, dequantised. Raises UserError if
        the model's files lack it."""
        component, _, name = layer.partition(".")
        if f"{name}.weight" not in self.reads(component):
            raise UserError(f"the model has no layer {layer}")
        return self.tensor(component, f"{name}.weight")

    def tensor(self, component: str, parameter: str) -> torch.Tensor:
        """Any parameter of a component, by its name in the module, as `weight`."""
        read = self.reads(component)[parameter]
        if self._last is None or self._last[0] is not read:
            self._last = None  # before the next is made
            self._last = read, read.tensors()
        return self._last[1][read.link.parts.index(parameter)]

    def reads(self, component: str) -> dict[str, Read]:
        """The component's reads, by parameter."""
        if component not in self._reads:
            if not self.source.is_here(component):
                raise UserError(f"the weights of {component} are not on this machine; give the model as a folder or a file")
            self._reads[component] = {part: read for read in self.source.reads(component) for part in read.link.parts}
        return self._reads[component]


def whole_model_at(path: str) -> NamedModel:
    """The model at `path`. Raises UserError if its denoiser's weights are not there. Reads headers only."""
    refusals = []
    for model in models_at(path):
        assert model.source is not None
        try:
            if not model.source.is_here(model.family.denoiser):
                raise UserError(f"the weights of {path} are not on this machine; give a folder or a .safetensors file")
            model.source.verify(model.family.denoiser)
            return model
        except UserError as error:
            refusals.append(error)
    raise refusals[0]
