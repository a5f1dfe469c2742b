"""The types of the config's values, and the base of all its tables: frozen and strict."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from trainer.base.account import counted
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
QUANTISED = tuple(dtype for dtype in get_args(Dtype) if dtype not in get_args(Compute))
Colour = Annotated[str, Field(pattern=r"^#[0-9a-fA-F]{6}$"), AfterValidator(str.lower)]


def check_count_or_share(value: int | float, thing: str) -> int | float:
    """Raises ValueError unless the value is a count of things, or a share of them below 1."""
    if value < 0:
        raise ValueError(f"give a count of {thing}s, or a share of all below 1; 0 is none")
    if isinstance(value, float) and value >= 1:
        count = counted(int(value), thing)
        raise ValueError(f"a share must be below 1; write 0.05 for a twentieth, or a count without a point: {count}")
    return value


# The schema that docs/keys.md words: a count, or a share. `check_count_or_share` explains what is wrong with other values.
_SCHEMA = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "number", "minimum": 0, "exclusiveMaximum": 1}]}
_COUNT_OR_SHARE = WithJsonSchema(_SCHEMA)
PhotosOrShare = Annotated[int | float, AfterValidator(partial(check_count_or_share, thing="photo")), _COUNT_OR_SHARE]
StepsOrShare = Annotated[int | float, AfterValidator(partial(check_count_or_share, thing="step")), _COUNT_OR_SHARE]

# TOML's escapes in double quotes, which break a Windows path: "C:\new" is C:, a line feed, ew.
ESCAPES = {"\b": r"\b", "\t": r"\t", "\n": r"\n", "\f": r"\f", "\r": r"\r"}


def expand_home(path: str, option: str = "") -> str:
    """`path` with a leading `~` or `~user` expanded. option: the command line's, for messages; "": a key of the config, which
    `parse` names. Raises UserError if there is no such home folder, and for a Windows path on another system."""
    if not option and (escapes := [escape for character, escape in ESCAPES.items() if character in path]):
        raise UserError(f"in double quotes TOML reads {escapes[0]} as one character; write / or use single quotes")
    prefix = f"{option} {path}: " if option else ""
    if os.name != "nt" and re.match(r"[A-Za-z]:[\\/]", path):
        wsl = f"/mnt/{path[0].lower()}/{path[3:]}".replace("\\", "/")
        raise UserError(f"{prefix}this is a path of Windows; in WSL write {wsl}")
    if long := next((part for part in re.split(r"[/\\]", path) if len(os.fsencode(part)) > 255), ""):
        raise UserError(f"{prefix}a name in it has {len(os.fsencode(long))} bytes, and file systems take 255; shorten it")
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        home = path.partition("/")[0]
        raise UserError(f"{prefix}there is no home folder {home}; write ./{home} for a folder of that name here")
    return expanded


def check_size(text: str) -> str:
    """Raises ValueError if `parse_size` cannot read the text."""
    parse_size(text)
    return text


def check_fit(value: Any) -> Any:
    """Raises ValueError unless the value is a size or "auto"."""
    if not isinstance(value, str):
        raise ValueError(
            'give a size, for example "12GiB", or "auto" for the card at hand; memory.fit_by names what may be changed to '
            "fit, and a run says what each change costs"
        )
    return value if value == "auto" else check_size(value)


def check_mirror(url: str) -> str:
    """Raises ValueError unless this is the URL of a place in one store that outlives the process, without credentials."""
    example, parts = 'for example "s3://BUCKET/PREFIX"', urlsplit(url)
    # A secret key may contain any character, even "/", and fsspec chains URLs: no URL parser finds every one.
    if any(re.search(r":/+[^/@:]*:[^@]*@", link) for link in url.split("::")) or "?" in url:
        raise ValueError("keys do not belong in a URL; leave them to the environment, as in docs/mirror.md")
    if "::" in url:
        raise ValueError(f"what stands before a store would answer in its place; give the URL of the store alone, {example}")
    if parts.scheme == "memory":
        raise ValueError(f"memory:// ends with the process, and a mirror is there to outlive it; give another URL, {example}")
    if parts.scheme in ("http", "https"):
        raise ValueError(f"{parts.scheme}:// cannot be written to; give the bucket itself, {example} (docs/mirror.md)")
    if "://" not in url or not (parts.netloc + parts.path).strip("/"):
        raise ValueError(f"give a URL and a place in it, {example}")
    return url.rstrip("/")


def expand_source(path: str) -> str:
    """A source's path with `~` expanded, also behind the `hf:` of a dataset."""
    return "hf:" + expand_home(path[3:]) if path.startswith("hf:") else expand_home(path)


# Paths are expanded here, so that no other file handles `~`.
PathText = Annotated[str, AfterValidator(expand_home)]
MirrorUrl = Annotated[str, AfterValidator(check_mirror)]
SizeText = Annotated[str, AfterValidator(check_size)]
FitText = Annotated[str, BeforeValidator(check_fit)]
GivenPath = Annotated[str, Field(min_length=1), AfterValidator(expand_home)]


@dataclass(frozen=True)
class ReadWith:
    """A key's annotation: it has an effect only if another key has one of these values; else setting it is refused.

    keys: names separated by spaces, one of which is enough; a name without a dot is in the same table. values: those that
    count (None: left out; for a list: a member). above: the first key that is set counts above this number. With neither
    values nor above, any true value counts.
    """

    keys: str
    values: tuple[Any, ...] = ()
    above: float | None = None

    def without(self, value: Callable[[str], Any]) -> str | None:
        """Why the key has no effect, and the remedy; None if it has one. value: returns the value of a key."""
        key, values = self.keys, [value(key) for key in self.keys.split()]
        if self.above is not None:
            key, first = next(((k, v) for k, v in zip(key.split(), values, strict=True) if v is not None), (key, None))
            effective = first in self.values or first > self.above
            return None if effective else f"with {key} = {first!r}; leave it out, or raise {key} above {self.above:g}"
        if not self.values:
            remedy = "one of them" if " " in key else "it"
            return None if any(values) else f"without {' or '.join(key.split())}; leave it out, or set {remedy}"
        if isinstance(values[0], tuple):
            effective = not {*values[0]}.isdisjoint(self.values)
            return None if effective else f"without {self.values[0]!r} in {key}; leave it out, or add it there"
        reason = f"without {key}" if values[0] is None else f"with {key} = {values[0]!r}"
        return None if values[0] in self.values else f"{reason}; leave it out, or set {key} = {self.values[0]!r}"

    def __str__(self) -> str:
        """The condition, in Markdown."""
        text = " or ".join(f"`{key}`" for key in self.keys.split())
        *others, last = [f"`{value}`" for value in self.values if value is not None] or [""]
        text += f" above {self.above:g}" if self.above is not None else ""
        text += f" = {' or '.join(filter(None, (', '.join(others), last)))}" if last else ""
        return f"{text}, or where that is left out" if None in self.values else text


class Table(BaseModel):
    """A table of the config: frozen, strict; unknown keys are refused."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, validate_default=False, use_attribute_docstrings=True
    )


class IntervalTable(Table):
    """A table with an interval in steps or epochs."""

    every_steps: Cadence
    every_epochs: Cadence = 0
    """How often, in epochs, instead of `every_steps`. 0: by steps."""
