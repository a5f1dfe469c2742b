"""What the values of keys may be, and the table that all tables are: frozen and strict."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
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
# The schema that docs/keys.md words: a count, or a share. `count_or_share` explains what is wrong with other values.
COUNT_OR_SHARE = WithJsonSchema(
    {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "number", "minimum": 0, "exclusiveMaximum": 1}]}
)
Colour = Annotated[str, Field(pattern=r"^#[0-9a-fA-F]{6}$"), AfterValidator(str.lower)]


def count_or_share(given: int | float, thing: str) -> int | float:
    """Raises ValueError for what is neither a count of things nor a share of them below 1."""
    if given < 0:
        raise ValueError(f"give a count of {thing}s, or a share of all below 1; 0 is none")
    if isinstance(given, float) and given >= 1:
        count = counted(int(given), thing)
        raise ValueError(f"a share must be below 1; write 0.05 for a twentieth, or a count without a point: {count}")
    return given


# What becomes of a path that Windows wrote, in double quotes of TOML: "C:\new" is C:, the end of a line, ew.
ESCAPES = {"\b": r"\b", "\t": r"\t", "\n": r"\n", "\f": r"\f", "\r": r"\r"}


def expand_home(path: str, given_as: str = "") -> str:
    """`path` with a leading `~` or `~user` as that home folder. Raises UserError where there is no such home, and for a path
    of Windows elsewhere. given_as: an argument of the command line; a key of the config is named by `parse`."""
    if not given_as and (escapes := [escape for character, escape in ESCAPES.items() if character in path]):
        raise UserError(f"in double quotes TOML reads {escapes[0]} as one character; write / or use single quotes")
    prefix = f"{given_as} {path}: " if given_as else ""
    if os.name != "nt" and re.match(r"[A-Za-z]:[\\/]", path):
        here = f"/mnt/{path[0].lower()}/{path[3:]}".replace("\\", "/")
        raise UserError(f"{prefix}this is a path of Windows; in WSL write {here}")
    if long := next((part for part in re.split(r"[/\\]", path) if len(os.fsencode(part)) > 255), ""):
        raise UserError(f"{prefix}a name in it has {len(os.fsencode(long))} bytes, and file systems take 255; shorten it")
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        home = path.partition("/")[0]
        raise UserError(f"{prefix}there is no home folder {home}; write ./{home} for a folder of that name here")
    return expanded


def check_size(text: str) -> str:
    """Raises ValueError for what `parse_size` cannot read."""
    parse_size(text)
    return text


def check_fit(given: Any) -> Any:
    """Raises ValueError for what is neither a size nor "auto"."""
    if not isinstance(given, str):
        raise ValueError(
            'give a size, for example "12GiB", or "auto" for the card at hand; memory.fit_by names what may be changed to '
            "fit, and a run says what each change costs"
        )
    return given if given == "auto" else check_size(given)


def once_each(names: tuple[str, ...]) -> tuple[str, ...]:
    """Raises ValueError for a name that is there twice."""
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(f"{twice[0]!r} stands there twice; name each once, in the order in which they may be changed")
    return names


def check_mirror(url: str) -> str:
    """Raises ValueError for what is no URL of one store with a place in it that outlives the process, and for keys in it."""
    example, parts = 'for example "s3://BUCKET/PREFIX"', urlsplit(url)
    # A key may have any letter, as "/", and fsspec chains URLs: no parser of URLs finds every one.
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
    """A source's path with the home folder in place of "~", also behind the `hf:` of a dataset."""
    return "hf:" + expand_home(path[3:]) if path.startswith("hf:") else expand_home(path)


# Every path that a config gives, so that nothing below this file knows of `~`.
PathText = Annotated[str, AfterValidator(expand_home)]
MirrorUrl = Annotated[str, AfterValidator(check_mirror)]
SizeText = Annotated[str, AfterValidator(check_size)]
FitText = Annotated[str, BeforeValidator(check_fit)]
GivenPath = Annotated[str, Field(min_length=1), AfterValidator(expand_home)]


@dataclass(frozen=True)
class ReadWith:
    """The annotation of a key that is read only beside a choice: set without it, the key is refused.

    keys: of the choice, parted by blanks, of which one is enough; one without a dot is of the same table. values: one of them
    is the choice (None: the key left out; of a list: a member of it). above: or a number above it, of the first key that is
    set. With neither the choice is whatever is neither empty nor 0 nor false.
    """

    keys: str
    values: tuple[Any, ...] = ()
    above: float | None = None

    def without(self, value: Callable[[str], Any]) -> str | None:
        """The choice beside which the key has no effect, and the remedy; None where it is read. value: gives a key's."""
        key, values = self.keys, [value(key) for key in self.keys.split()]
        beside = f"without {key}" if values[0] is None else f"with {key} = {values[0]!r}"
        if self.above is not None:
            key, first = next(((k, v) for k, v in zip(key.split(), values, strict=True) if v is not None), (key, None))
            read = first in self.values or first > self.above
            return None if read else f"with {key} = {first!r}; leave it out, or raise {key} above {self.above:g}"
        if not self.values:
            one = " one of them" if " " in key else " it"
            return None if any(values) else f"without {' or '.join(key.split())}; leave it out, or set{one}"
        if isinstance(values[0], tuple):
            have = not {*values[0]}.isdisjoint(self.values)
            return None if have else f"without {self.values[0]!r} in {key}; leave it out, or add it there"
        return None if values[0] in self.values else f"{beside}; leave it out, or set {key} = {self.values[0]!r}"

    def __str__(self) -> str:
        """The choice, in Markdown."""
        text = " or ".join(f"`{key}`" for key in self.keys.split())
        *most, last = [f"`{value}`" for value in self.values if value is not None] or [""]
        text += f" above {self.above:g}" if self.above is not None else ""
        text += f" = {' or '.join(filter(None, (', '.join(most), last)))}" if last else ""
        return f"{text}, or where that is left out" if None in self.values else text


class Table(BaseModel):
    """A table of the config: frozen, strict, and refusing keys that it does not have."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, validate_default=False, use_attribute_docstrings=True
    )


class IntervalTable(Table):
    """A table of what is done every so many steps or epochs."""

    every_steps: Cadence
    every_epochs: Cadence = 0
    """How often, in epochs. 0 leaves it to `every_steps`; else that is not written, or 0."""
