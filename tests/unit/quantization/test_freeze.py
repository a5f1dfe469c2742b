"""Which layer is stored how, and what is recorded of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.numerics.test_adapted_layers import network
from trainer.kernels import dora_torch
from trainer.quantization import FORMATS, freeze_layers, storage_of_layers
from trainer.quantization.record import record


def frozen(format: str, *, compute: torch.dtype = torch.float32, **more) -> nn.ModuleDict:
    model = nn.ModuleDict({"wo": nn.Linear(8, 8), "two": nn.Linear(8, 8), "conv": nn.Conv2d(8, 8, 3)}).to("meta")
    freeze_layers(
        model, storage_of_layers(format=FORMATS[format], compute=compute, unquantised=torch.bfloat16, **more), dora_torch
    )
    return model


def kinds(model: nn.ModuleDict) -> dict[str, str]:
    return {name: layer.format.name for name, layer in model.items()}


def test_convolutions_have_a_format_only_where_there_is_one() -> None:
    assert kinds(frozen("int4")) == {"wo": "int4 (quanto)", "two": "int4 (quanto)", "conv": "bf16"}
    assert kinds(frozen("int8")) == dict.fromkeys(("wo", "two", "conv"), "int8 (quanto)")
    assert kinds(frozen("int8", keep=("t*",)))["two"] == "bf16"


@pytest.mark.parametrize("format", ["fp16", "bf16"])
def test_in_fp16_what_a_class_wants_in_fp32_is_that_by_its_whole_name(format: str) -> None:
    model = frozen(format, compute=FORMATS[format].dtype, keep_fp32=("wo",))
    half = format == "fp16"
    assert kinds(model) == {"wo": "fp32" if half else "bf16", "two": format, "conv": format}
    assert model["wo"].compute_dtype == (torch.float32 if half else torch.bfloat16)


@pytest.mark.parametrize("change", ["0.payload_weight", "2.payload_scale", "2.bias"])
def test_every_frozen_tensor_is_recorded(change: str) -> None:
    one, other = network(FORMATS["int8"]), network(FORMATS["int8"])
    assert record([("net", one)]) == record([("net", other)])
    with torch.no_grad():
        layer, _, tensor = change.partition(".")
        getattr(other.get_submodule(layer), tensor).view(-1)[0] += 1
    then, now = ({layer: entry["tensors"] for layer, entry in record([("net", each)]).items()} for each in (one, other))
    layer, _, key = change.replace("payload_", "").partition(".")
    assert [(name, each) for name in now for each in now[name] if now[name][each] != then[name][each]] == [
        (f"net.{layer}", key)
    ]
