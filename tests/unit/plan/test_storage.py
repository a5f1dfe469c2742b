"""What a component is stored as: what the config says, else what its files hold; nothing is quantised twice."""

from __future__ import annotations

import pytest

from trainer.base.errors import UserError
from trainer.config import ComponentTable
from trainer.models import FAMILIES
from trainer.plan.storage import _storage

COMPONENTS = {component.role: component for component in FAMILIES["sdxl"].components}
Held = tuple[str, str] | None


@pytest.mark.parametrize(
    ("role", "given", "held", "stored"),
    [
        ("denoiser", {}, None, ("bf16", "native")),
        ("denoiser", {"dtype": "int8"}, None, ("int8", "quanto")),
        ("denoiser", {"dtype": "int8", "backend": "bitsandbytes"}, None, ("int8", "bitsandbytes")),
        # Files that hold quantised weights are taken as they are, by whichever library, and may be read as 16 bits.
        ("denoiser", {}, ("int8", "bitsandbytes"), ("int8", "bitsandbytes")),
        ("denoiser", {"dtype": "int8"}, ("int8", "bitsandbytes"), ("int8", "bitsandbytes")),
        ("denoiser", {"dtype": "bf16"}, ("nf4", "bitsandbytes"), ("bf16", "native")),
        ("text_encoder", {}, ("fp8_e4m3", "native"), ("fp8_e4m3", "native")),
        # The VAE is never quantised, whatever the files hold.
        ("vae", {}, None, ("fp32", "native")),
        ("vae", {}, ("fp8_e4m3", "native"), ("fp32", "native")),
        ("vae", {"dtype": "bf16"}, ("fp8_e4m3", "native"), ("bf16", "native")),
    ],
)
def test_what_is_left_out_the_files_say(role: str, given: dict[str, str], held: Held, stored: tuple[str, str]) -> None:
    assert _storage(ComponentTable.model_validate(given), COMPONENTS[role], held) == stored


@pytest.mark.parametrize(
    ("given", "held", "said"),
    [
        ({"dtype": "int4"}, ("int8", "quanto"), r"dtype = 'int4'.* holds this component as int8 \(quanto\) already"),
        ({"dtype": "nf4"}, ("fp8_e4m3", "native"), r"dtype = 'nf4'.* would add a second error"),
        ({"dtype": "int8", "backend": "quanto"}, ("int8", "bitsandbytes"), r"backend = 'quanto' .* use 'bitsandbytes'"),
        ({"backend": "quanto"}, None, r"backend = 'quanto' has no dtype = 'bf16'; use 'native'"),
    ],
)
def test_what_is_quantised_already_is_not_quantised_again(given: dict[str, str], held: Held, said: str) -> None:
    with pytest.raises(UserError, match=f"model.components.unet.{said}"):
        _storage(ComponentTable.model_validate(given), COMPONENTS["denoiser"], held)
