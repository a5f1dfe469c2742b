"""The model families, by name."""

from trainer.base import patterns
from trainer.base.errors import UserError
from trainer.models import flux, flux2, flux3, sdxl, zimage
from trainer.models.base import Family

FAMILIES: dict[str, Family] = {
    family.name: family for family in (sdxl.FAMILY, flux.FAMILY, flux2.FAMILY, flux3.FAMILY, zimage.FAMILY)
}


def family_named(name: str) -> Family:
    """Raises UserError, with the name that was probably meant."""
    if name not in FAMILIES:
        raise UserError(f"model.family = {name!r} is not known; {patterns.suggestion(name, FAMILIES)}")
    return FAMILIES[name]
