"""What is done with all adapted layers at once, over a network of three."""

from __future__ import annotations

import pytest
import torch

from tests.numerics.test_adapted_layers import network, with_adapter
from trainer.adapters import ADAPTER_NAME, Method, Rates, Target, inject
from trainer.adapters.adapter import Adapter
from trainer.adapters.kinds import KINDS
from trainer.base.errors import UserError
from trainer.quantization import FORMATS, FrozenConv2d, FrozenLinear


def stopping(*stops: int | None) -> Adapter:
    """Of three layers, each with its stop_step."""
    targets = [Target("net", name, 3, 2.0, stop_step=stop) for name, stop in zip(("0", "2", "3"), stops, strict=True)]
    adapter = inject(
        {"net": network(FORMATS["fp32"])}, targets, bases=(FrozenLinear, FrozenConv2d), method=Method(KINDS["dora"]), seed=0,
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in adapter.named_parameters().items():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    adapter.mark_stale()
    return adapter


def change(adapter: Adapter) -> dict[str, torch.Tensor]:
    """||s B A|| of each layer, dense."""
    norms = {}
    for name, layer in adapter.layers.items():
        a, b = (layer.factors(ADAPTER_NAME)[place].detach().double().flatten(1) for place in (0, 1))
        norms[name] = layer.scaling[ADAPTER_NAME] * (b @ a).norm()
    return norms


def test_what_was_loaded_is_what_the_next_forward_computes_with() -> None:
    one, other = (with_adapter(model) for model in (network(FORMATS["int8"]), network(FORMATS["int8"])))
    with torch.no_grad():
        for parameter in other.named_parameters().values():
            parameter.mul_(1.5)
    other.mark_stale()
    x = torch.randn(2, 6, 5, 5)
    first, second = ((lambda value, each=each: each.layers["net.0"](value)) for each in (one, other))
    with torch.no_grad():
        before, wanted = first(x), second(x)
        one.load_state_dict(other.state_dict())
        assert torch.equal(first(x), wanted) and not torch.equal(before, wanted)


def test_another_shape_dtype_or_name_is_refused() -> None:
    adapter = with_adapter(network(FORMATS["fp32"]))
    state = adapter.state_dict()
    name = "net.2.lora_A.weight"
    for odd in (
        state | {name: state[name].to(torch.bfloat16)},
        state | {name: state[name][:1]},
        state | {"net.9.lora_A.weight": state[name]},
        {key: value for key, value in state.items() if key != name},
    ):
        with pytest.raises(UserError, match="the saved adapter does not fit this run: net"):
            adapter.load_state_dict(odd)


def test_a_strength_ends_with_its_sample() -> None:
    adapter = with_adapter(network(FORMATS["fp32"]))
    with pytest.raises(RuntimeError), adapter.at_strength(0.25):
        assert {layer.strength for layer in adapter.layers.values()} == {0.25}
        raise RuntimeError
    assert {layer.strength for layer in adapter.layers.values()} == {1.0}


@pytest.mark.parametrize("step", [4, 5])
def test_norms_are_limited_of_the_layers_that_the_step_trains_and_of_no_others(step: int) -> None:
    """By the step alone, whatever this process has trained of them."""
    adapter = stopping(None, 4, 4)
    before = change(adapter)
    limit = float(min(before.values())) / 2
    assert adapter.limit_norms(limit, step) == (3 if step == 4 else 1)
    for name, norm in change(adapter).items():
        limited = step == 4 or name == "net.0"
        assert float(norm) == pytest.approx(limit if limited else float(before[name]), rel=1e-5)


def test_groups_that_stop_first_come_last_and_magnitudes_are_never_decayed() -> None:
    adapter = stopping(3, None, 8)
    groups = adapter.parameter_groups(Rates(lr=1e-3, weight_decay=0.1, magnitude_lr=1e-4, lora_plus=4.0))
    assert [group.get("stop_step") for group in groups] == [None] * 3 + [8] * 3 + [3] * 3
    rates = {(group["lr"], group["weight_decay"], group["magnitudes"]) for group in groups}
    assert rates == {(1e-3, 0.1, False), (4e-3, 0.1, False), (1e-4, 0.0, True)}


def test_layers_that_are_off_or_merged_are_not_refreshed() -> None:
    model = network(FORMATS["fp32"])
    adapter = with_adapter(model)
    adapter.refresh_before({"net": model})
    first, second, third = adapter.layers.values()
    first.enable_adapters(False)
    second.merge()
    adapter.mark_stale()
    model(torch.randn(2, 6, 5, 5))
    assert [layer.stale for layer in (first, second, third)] == [True, True, False]


def test_rates_of_a_checkpoint_without_the_later_keys_are_the_defaults() -> None:
    assert Rates.read({"lr": 1e-3, "weight_decay": 0.1, "name": "adamw"}, ["te"]) == Rates(1e-3, 0.1, text_encoders=["te"])
