"""The model families, by name."""

from __future__ import annotations

import difflib

from trainer.errors import UserError
from trainer.models import flux, sdxl
from trainer.models.base import Family

FAMILIES: dict[str, Family] = {family.name: family for family in (sdxl.FAMILY, flux.FAMILY)}


def family_named(name: str) -> Family:
    """Raises UserError, with the name that was probably meant."""
    if name not in FAMILIES:
        close = difflib.get_close_matches(name, FAMILIES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; use one of {', '.join(map(repr, FAMILIES))}"
        raise UserError(f"model.family = {name!r} is not known{hint}")
    return FAMILIES[name]
