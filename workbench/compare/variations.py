"""The file of --compare: a base config, variants of it, and the seeds that each is trained with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import variance
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from trainer.base.errors import UserError, reading
from trainer.config import mistakes
from trainer.config.keys import flatten
from trainer.config.kinds import GivenPath, Seed, Table
from trainer.config.reading import literal, load, read_toml
from trainer.config.tables import Config

# Keys that the comparison sets itself, for all variants.
OWN_KEYS = ("run.seed", "run.name", "run.output_dir", "run.stop_after")
# Key or table -> why variants cannot differ in it.
SHARED = {
    "data": "variants share photos and draws, so that they can be compared in pairs",
    "run.seed": "variants share their seeds, so that they can be compared in pairs; write seeds = [...]",
    "validation": "variants are measured alike",
}


class VariantTable(Table):
    """A variant: one setting of the comparison."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """The variant's name on the page."""
    set: dict[str, Any] = {}
    """Keys of the base config and their values. Left out: the base config as it is."""


class ComparisonTable(Table):
    """The comparison."""

    config: GivenPath
    """The base config: a path, or the bare name of a file in configs/."""
    output_dir: GivenPath
    """The folder for the page and the runs, each in a folder of its own."""
    seeds: Annotated[tuple[Seed, ...], Field(strict=False)]
    """The seeds, at least two. Each variant is trained with each seed."""
    earlier: GivenPath | None = None
    """The comparison.json of an earlier comparison: gives the detectable difference in units of the loss, too."""
    set: dict[str, Any] = {}
    """Keys of the base config and their values, for all variants."""
    variant: Annotated[tuple[VariantTable, ...], Field(strict=False)] = ()
    """The variants, at least two."""


class _Step(BaseModel):
    differences: Annotated[list[float], Field(min_length=2)]


class _Pair(BaseModel):
    by_step: Annotated[list[_Step], Field(min_length=1)]


class _Earlier(BaseModel):
    """The fields that are read from a comparison.json."""

    pairs: list[_Pair]


@dataclass(frozen=True)
class Variation:
    """One run of a comparison. overrides: of the base config, in the syntax of --set."""

    variant: str
    seed: int
    overrides: tuple[str, ...]
    config: Config

    @property
    def folder(self) -> Path:
        """The run's output folder."""
        return Path(self.config.run.output_dir)


@dataclass(frozen=True)
class Variations:
    """The runs of a comparison. base: the base config as written in the file. runs: by seed, then by variant. deviation:
    standard deviation of an earlier comparison's paired differences at the ends, in units of the loss, or None."""

    base: str
    output_dir: str
    runs: tuple[Variation, ...]
    deviation: float | None = None


def read_comparison(path: str) -> Variations:
    """Read a comparison's file. Raises UserError if it is invalid."""
    tree = read_toml(path, "--compare")
    if "model" in tree:
        name = f"name it as config = {path!r} in a file that compares its variants (docs/compare.md)"
        raise UserError(f"--compare {path}: this is the config of one run; {name}")
    try:
        table = ComparisonTable.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"--compare {path}: {mistakes.explain(error.errors(include_url=False))}") from error
    _check(path, table)
    runs = []
    for seed, variant in product(table.seeds, table.variant):
        overrides = (*_overrides(table.set), *_overrides(variant.set), f"run.seed={seed}", "run.stop_after=")
        try:
            runs.append(Variation(variant.name, seed, overrides, load(table.config, list(overrides))))
        except UserError as error:
            raise UserError(f"--compare {path}: variant {variant.name!r}: {error}") from error
    config = runs[0].config
    held_out = config.data.held_out or any(source.held_out for source in config.data.sources)
    missing = [] if held_out else ["data.held_out = 0.2"]
    missing += [] if config.validation.loss_every_steps else ["validation.loss_every_steps = 25"]
    if missing:
        raise UserError(
            f"--compare {path}: {table.config} measures no held-out loss, by which the variants are compared; write "
            f"set = {{ {', '.join(missing)} }}"
        )
    deviation = None if table.earlier is None else _deviation(table.earlier)
    return Variations(table.config, table.output_dir, tuple(runs), deviation)


def _deviation(earlier: str) -> float:
    """The standard deviation of the paired differences at the ends of an earlier comparison's pairs, pooled over these."""
    try:
        text = Path(earlier).read_bytes()
    except OSError as error:
        raise UserError(f"earlier = {earlier!r}: {error.strerror}; give a page's comparison.json") from error
    with reading(earlier, remedy="give the comparison.json of variants that were compared"):
        ends = [pair.by_step[-1].differences for pair in _Earlier.model_validate_json(text).pairs]
        freedom, squares = sum(len(end) - 1 for end in ends), sum(variance(end) * (len(end) - 1) for end in ends)
        if not squares > 0:
            raise ValueError("its pairs have no differences")
    return math.sqrt(squares / freedom)


def _check(path: str, table: ComparisonTable) -> None:
    names = [variant.name for variant in table.variant]
    if len(names) < 2:
        count = f"there is only {names[0]!r}" if names else "there is none"
        raise UserError(
            f"--compare {path}: {count} of the variants; write two [[variant]] tables at least, each with a name (one "
            "without a set is the base config as it is)"
        )
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"--compare {path}: two variants are named {twice[0]!r}; give each a name of its own")
    if len(set(table.seeds)) < 2 or len(set(table.seeds)) < len(table.seeds):
        raise UserError(
            f"--compare {path}: seeds = {list(table.seeds)}: give two at least, each once: one run cannot tell what its "
            "seed did from what the variant did"
        )
    for key in flatten(table.set):
        if key in OWN_KEYS:
            seeds = " and write seeds = [...]" if key == "run.seed" else ""
            raise UserError(f"--compare {path}: set.{key}: the comparison decides it; leave it out{seeds}")
    for variant in table.variant:
        for key in flatten(variant.set):
            decided = "the comparison decides it" if key in OWN_KEYS else ""
            if reason := next((text for shared, text in SHARED.items() if f"{key}.".startswith(f"{shared}.")), decided):
                remedy = "leave it out" if decided else "write it into the set of all, above the variants"
                raise UserError(f"--compare {path}: variant {variant.name!r}: {key}: {reason}; {remedy}")


def _overrides(values: Mapping[str, Any], prefix: str = "") -> tuple[str, ...]:
    """The keys of `set` in the syntax of --set."""
    overrides: list[str] = []
    for key, value in values.items():
        nested = isinstance(value, dict) and value
        overrides += _overrides(value, f"{prefix}{key}.") if nested else [f"{prefix}{key}={literal(value)}"]
    return tuple(overrides)
