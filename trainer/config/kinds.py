"""What the values of keys may be, and the table that all tables are: frozen and strict."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from trainer.base.errors import UserError
from trainer.base.files import parse_size

Dtype = Literal["fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "int2", "nf4", "fp4"]
Compute = Literal["fp32", "bf16", "fp16"]
Count = Annotated[int, Field(ge=1)]
Cadence = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Strings = Annotated[tuple[str, ...], Field(strict=False)]
# For the page of all keys: a count, or a share. A check says what is wrong with others.
CountOrShare = WithJsonSchema(
    {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "number", "minimum": 0, "exclusiveMaximum": 1}]}
)
Colour = Annotated[str, Field(pattern=r"^#[0-9a-fA-F]{6}$"), AfterValidator(str.lower)]


# What becomes of a path that Windows wrote, in double quotes of TOML: "C:\new" is C:, the end of a line, ew.
ESCAPES = {"\b": r"\b", "\t": r"\t", "\n": r"\n", "\f": r"\f", "\r": r"\r"}


def expand_home(path: str, given_as: str = "") -> str:
    """`path` with a leading `~` or `~user` as that home folder. Raises UserError where there is no such home.

    given_as: an argument of the command line, for the message; a key of the config is named by `parse`.
    """
    if not given_as and (found := [escape for character, escape in ESCAPES.items() if character in path]):
        raise UserError(f"in double quotes TOML reads {found[0]} as one character; write / or use single quotes")
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        prefix, home = f"{given_as} {path}: " if given_as else "", path.partition("/")[0]
        raise UserError(f"{prefix}there is no home folder {home}; write ./{home} for a folder of that name here")
    return expanded


def check_size(text: str) -> str:
    """Raises ValueError for what `parse_size` cannot read."""
    parse_size(text)
    return text


def expand_source(path: str) -> str:
    """As `expand_home`, also behind the `hf:` of a dataset."""
    return "hf:" + expand_home(path[3:]) if path.startswith("hf:") else expand_home(path)


# Every path that a config gives, so that nothing below this file knows of `~`.
PathText = Annotated[str, AfterValidator(expand_home)]
SizeText = Annotated[str, AfterValidator(check_size)]
GivenPath = Annotated[str, Field(min_length=1), AfterValidator(expand_home)]


class Table(BaseModel):
    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, validate_default=False, use_attribute_docstrings=True
    )
