"""The seams are what protocols.py says: stand-ins that have a protocol's names alone do all that the real ones do."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import nn

from tests.numerics.test_adapted_layers import jitter
from trainer.adapters import ADAPTER_NAME, Method, Target, inject
from trainer.adapters.change import change
from trainer.adapters.export import diffusers_tensors
from trainer.adapters.kinds import file_kind
from trainer.adapters.norms import Norms, read_norms
from trainer.adapters.portable import of_adapter
from trainer.adapters.sd_scripts import kohya_tensors
from trainer.base.protocols import BaseLayer, Kernels
from trainer.base.tensorfile import Recipe
from trainer.kernels import dora_torch
from trainer.models.weights import WeightOwner
from trainer.quantization import FORMATS, FrozenConv2d, FrozenLayer, FrozenLinear, Geometry

RANK = 2


def names_of(protocol: type) -> frozenset[str]:
    own = {name for name in vars(protocol) if not name.startswith("_")} | set(inspect.get_annotations(protocol))
    return frozenset(own | ({"__call__"} if "__call__" in vars(protocol) else set()))


class StandIn:
    """The attributes `names` of `real`, and nothing else of it."""

    def __init__(self, real: object, names: Collection[str]) -> None:
        object.__setattr__(self, "_seen", (real, names))

    def __getattr__(self, name: str) -> Any:
        real, names = object.__getattribute__(self, "_seen")
        if name not in names:
            raise AttributeError(f"the protocol has no {name!r}")
        return getattr(real, name)


def layer_class(names: Collection[str], *, kernels: Collection[str] = names_of(Kernels)) -> type[nn.Module]:
    """A torch module with those names of a frozen layer, which lies beside it: not as a child, whose names would show."""

    class Layer(nn.Module):
        def __init__(self, real: FrozenLayer) -> None:
            vars(self)["training"] = True
            super().__init__()
            vars(self)["_real"] = real
            real.kernels = StandIn(real.kernels, kernels)

        def forward(self, x):
            if "__call__" not in names:
                raise AttributeError("the protocol has no '__call__'")
            return self._real(x)

        def __setattr__(self, name: str, value: Any) -> None:
            if not (name in names or name in vars(self)):
                raise AttributeError(f"the protocol has no {name!r}")
            super().__setattr__(name, value)

    def passed_on(name: str) -> property:
        return property(lambda self: getattr(self._real, name), lambda self, value: setattr(self._real, name, value))

    for name in names - {"__call__"}:
        setattr(Layer, name, passed_on(name))
    return Layer


def frozen() -> list[FrozenLayer]:
    common = dict(format=FORMATS["int8"], compute_dtype=torch.float32, kernels=dora_torch)
    layers = [
        FrozenConv2d((6, 3, 3, 3), Geometry((2, 2), (1, 1), (1, 1), 1), bias=True, **common),
        FrozenLinear(16, 8, bias=False, **common),
        FrozenLinear(16, 5, bias=True, **common),
        FrozenLinear(16, 5, bias=True, **common),
    ]
    generator = torch.Generator().manual_seed(0)
    for layer in layers:
        layer.load_weight(torch.randn(layer.weight_shape, generator=generator))
        if layer.bias is not None:
            layer.bias.data.normal_(generator=generator)
    return layers


def everything(layers: list[nn.Module], *, dora: bool) -> dict[str, torch.Tensor]:
    """All that is done with adapted layers, and what comes out: forward, backward, norms, merge, change, files."""
    conv, wide, one, other = layers
    model = nn.ModuleDict({"conv": conv, "block": nn.ModuleDict({"q": wide, "k": one}), "beside": other})
    model["norm"] = nn.LayerNorm(5)  # PEFT wants a model to have a parameter
    targets = [Target("unet", name, RANK, 3.0) for name in ("conv", "block.q", "block.k")]
    adapter = inject(
        {"unet": model}, targets, bases=(type(one), type(conv)), method=Method(file_kind(magnitudes=dora)), seed=0
    )  # fmt: skip
    norms = Norms(adapter, {"unet.beside": other}, {"unet": "int8"})
    adapter.share_inputs("unet", [("q", "k")])
    adapter.refresh_before({"unet": model})
    jitter(adapter)
    adapter.refresh()
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def run() -> torch.Tensor:
        h = model["conv"](x).flatten(2)
        return torch.cat([model["block"]["q"](h), model["block"]["k"](h), model["beside"](h)], 2)

    out = {"adapted": run()}
    out["adapted"].square().sum().backward()
    out |= {name: parameter.grad for name, parameter in adapter.named_parameters().items()} | {"x": x.grad}
    with torch.no_grad():
        with adapter.at_strength(0.0):
            out["base"] = run()
        for name, layer in adapter.layers.items():
            out[f"{name}.change"] = torch.tensor(dataclasses.astuple(change(layer)))
            out[f"{name}.delta"] = layer.get_delta_weight(ADAPTER_NAME)
            layer.merge(safe_merge=True)
        out["merged"] = run()
        for layer in adapter.layers.values():
            layer.unmerge()
        out["unmerged"] = run()
    read = read_norms(norms.state_dict())
    norms.load_state_dict(norms.state_dict())
    own = of_adapter(adapter, read, "magnitude")
    out |= {f"diffusers {name}": tensor.make() for name, tensor in diffusers_tensors(own).items()}
    kohya = kohya_tensors(own, modules={}, prefixes={"unet": "lora_unet"}, rows=lambda name: 5, norms=read)
    kohya = {name: tensor.make() if isinstance(tensor, Recipe) else tensor for name, tensor in kohya.items()}
    return out | {f"kohya {name}": tensor for name, tensor in kohya.items()}


def standing_in(names: Collection[str], **more: Collection[str]) -> list[nn.Module]:
    conv_class, linear_class = layer_class(names, **more), layer_class(names, **more)
    return [(linear_class if isinstance(layer, FrozenLinear) else conv_class)(layer) for layer in frozen()]


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_ask_no_more_of_a_frozen_layer_than_the_protocol_names(dora: bool) -> None:
    expected = everything(frozen(), dora=dora)
    found = everything(standing_in(names_of(BaseLayer)), dora=dora)
    assert found.keys() == expected.keys() and len(expected) > 20
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", sorted(names_of(BaseLayer) - {"__call__"}))
def test_adapters_need_every_name_of_the_protocol(name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        everything(standing_in(names_of(BaseLayer) - {name}), dora=True)


OF_OTHERS = {"name", "quantize_rows", "scaled_product", "scaled_input_grad", "rotate"}


@pytest.mark.parametrize("name", sorted(names_of(Kernels) - OF_OTHERS))
def test_layers_need_every_name_of_the_kernels(name: str) -> None:
    """But for those of float8 products, of which tests/numerics/test_fp8_matmul.py is, and attention's."""
    with pytest.raises(AttributeError, match=name):
        layers = standing_in(names_of(BaseLayer), kernels=names_of(Kernels) - {name})
        for layer in layers:
            layer._real.load_weight(torch.randn(layer.weight_shape))
        everything(layers, dora=True)


def test_kernels_have_the_protocols_names_and_no_others() -> None:
    assert set(dora_torch.__all__) == names_of(Kernels)
    for name in names_of(Kernels) - {"name"}:
        ours, wanted = (list(inspect.signature(getattr(k, name)).parameters) for k in (dora_torch, Kernels))
        assert ["self", *ours] == wanted, name


def test_frozen_layers_own_their_weight_and_no_module_of_torch_does() -> None:
    assert all(isinstance(layer, WeightOwner) for layer in frozen())
    assert not isinstance(nn.Linear(2, 2), WeightOwner)
