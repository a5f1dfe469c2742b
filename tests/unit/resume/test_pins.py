"""What must not have changed since a run stopped: the base's bytes, not the library that made them."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.base.errors import UserError
from trainer.resume.pins import pin_quantization

LAYER: dict[str, Any] = {
    "format": "int4", "library": "quanto 0.2", "relative_error": 0.01, "tensors": {"weight": "a" * 64, "bias": "b" * 64},
}  # fmt: skip
BASE = {"unet.a": LAYER, "unet.b": LAYER}


@pytest.mark.parametrize("other", [{"library": "quanto 9.9"}, {"relative_error": 0.011}, {}])
def test_a_base_of_the_same_bytes_is_the_same(other: dict[str, Any]) -> None:
    pin_quantization(BASE | {"unet.b": LAYER | other}).load_state_dict(dict(BASE))


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (
            {"unet.b": LAYER | {"tensors": {"weight": "c" * 64, "bias": "b" * 64}}},
            "unet.b has other bytes now: the model's file",
        ),
        ({"unet.b": LAYER | {"tensors": {"weight": "a" * 64}}}, "unet.b has other bytes now: the model's file changed"),
        ({"unet.b": LAYER | {"tensors": {}, "library": "quanto 9.9"}}, r"changed \(quanto 0.2 then, quanto 9.9 now\)"),
        ({"unet.b": LAYER | {"format": "int8", "tensors": {}}}, "unet.b is stored as int4 in the checkpoint, as int8 now"),
        ({"unet.c": LAYER}, "unet.c was not there then"),
        ({"unet.a": LAYER | {"format": "int8"}, "unet.b": LAYER | {"format": "int8"}}, "unet.a is stored as int4"),
    ],
)
def test_another_base_is_refused_with_the_first_layer_that_differs(now: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        pin_quantization(BASE | now).load_state_dict(dict(BASE))
    with pytest.raises(UserError, match="unet.b is not there now"):
        pin_quantization({"unet.a": LAYER}).load_state_dict(dict(BASE))
