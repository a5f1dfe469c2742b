"""A component's weights in its folder: plain files, and variants of them (fp16, bf16, ...) under names of their own.

    plain                  STEM.safetensors            STEM-00001-of-00002.safetensors, STEM.safetensors.index.json
    a variant              STEM.fp16.safetensors       STEM.fp16-00001-of-00002.safetensors, STEM.safetensors.index.fp16.json
    its shards, formerly                               STEM-00001-of-00002.fp16.safetensors, STEM.safetensors.fp16.index.json

Sources: `variant_compatible_siblings` of diffusers' pipelines/pipeline_loading_utils.py, `_add_variant` of transformers'
modeling_utils.py.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainer.base.errors import UserError
from trainer.base.tensorfile import size_text

# Both libraries' names for a component's weights in a folder.
WEIGHT_STEMS = ("diffusion_pytorch_model", "model")
PLAIN = "none"  # model.variant: the files without a variant in their names
# What may be taken without being asked for. Others (ema, ...) are other weights, not the same ones in fewer bits.
SIXTEEN_BIT = ("fp16", "bf16")
# A variant that is not smaller than this share of the plain files holds as many bits: those are 16-bit already.
SMALLER = 0.75

SHARD = re.compile(r"-(\d{5})-of-(\d{5})(\.[^./]+)?$")  # the end of a name
_SUFFIX = r"\.(?i:safetensors|sft)"  # as `tensorfile.SUFFIXES`
_STEM = f"(?P<stem>{'|'.join(WEIGHT_STEMS)})"
_TENSORS = re.compile(
    rf"{_STEM}(\.(?P<new>[^./]+?))?(?P<shard>-\d{{5}}-of-(?P<count>\d{{5}}))?(\.(?P<old>[^./]+?))?{_SUFFIX}"
)
_INDEX = re.compile(rf"{_STEM}\.safetensors(\.(?P<old>[^./]+))?\.index(\.(?P<new>[^./]+))?\.json")


@dataclass(frozen=True)
class WeightSet:
    """One set of a component's weights. variant: None for plain files. index: of shards. bytes: of the .safetensors."""

    variant: str | None
    names: tuple[str, ...]
    index: str | None
    bytes: int

    @property
    def whole(self) -> bool:
        """Whether all shards are there, as far as their names tell."""
        return len(self.names) == (int(_TENSORS.fullmatch(self.names[0])["count"]) if self.index and self.names else 1)

    def __str__(self) -> str:
        return f"{self.variant or 'plain'} files, {size_text(self.bytes)}"


@dataclass(frozen=True)
class WeightChoice:
    """The set that is read, and for people why, where there was a choice."""

    files: WeightSet
    why: str = ""


def weight_sets(listing: Mapping[str, int]) -> list[WeightSet]:
    """The sets of a folder, from its files' names and bytes; the plain one first. An index counts before a single file."""
    shards: dict[tuple[str, str | None], dict[str, int]] = {}
    single: dict[tuple[str, str | None], dict[str, int]] = {}
    indices: dict[tuple[str, str | None], str] = {}
    for name in sorted(listing):
        if (found := _TENSORS.fullmatch(name)) and not (found["new"] and found["old"]):
            kind = shards if found["shard"] else single
            kind.setdefault((found["stem"], found["new"] or found["old"]), {})[name] = listing[name]
        elif (found := _INDEX.fullmatch(name)) and not (found["new"] and found["old"]):
            indices[found["stem"], found["new"] or found["old"]] = name
    sets: dict[str | None, WeightSet] = {}
    for stem in WEIGHT_STEMS:
        for key in sorted({*single, *indices}, key=lambda key: (key[1] is not None, key[1])):
            if key[0] == stem and key[1] not in sets:
                files = shards.get(key, {}) if key in indices else single[key]
                sets[key[1]] = WeightSet(key[1], tuple(files), indices.get(key), sum(files.values()))
    return sorted(sets.values(), key=lambda held: held.variant or "")


@dataclass(frozen=True)
class Wanted:
    """A user's choice among several files of a component (`choose`).

    variant: model.variant. stored: storage dtype by component, "fp32" also if it computes in fp32. distillation: one of
    `VariantPart.names`, if model.variant names that. revision: model.revision, a branch, tag or commit of a hub id.
    """

    variant: str | None = None
    stored: Mapping[str, str] = field(default_factory=dict)
    distillation: str | None = None
    revision: str | None = None


ANY = Wanted()


def choose(sets: Sequence[WeightSet], *, variant: str | None, stored: str, where: str) -> WeightChoice:
    """The set to read. Raises UserError where none fits; `where` names the folder.

    variant: as `model.variant` asks; a folder without it gives its plain files. None: the plain files, or a 16-bit variant
    that is smaller, where the component is neither stored nor computes in fp32. Names and sizes alone decide, so that a
    repository and its copy in a folder give the same.
    stored: what the component is stored as; "fp32" also where it computes in fp32.
    """
    if variant is None:
        sets = [held for held in sets if held.whole] or sets  # shards may be missing of one that was half copied
    by_name = {held.variant: held for held in sets}
    plain, there = by_name.get(None), " and ".join(map(str, sets))
    if variant is not None:
        wanted = by_name.get(None if variant == PLAIN else variant)
        if wanted is None and plain is None:
            raise UserError(f"model.variant = {variant!r}: {where} has no such files, only {there}; name one of these")
        if wanted is None:
            return WeightChoice(plain, f"no {variant} files there")
        return WeightChoice(wanted, f"model.variant = {variant!r}" if len(sets) > 1 else "")
    fitting = [by_name[name] for name in SIXTEEN_BIT if name in by_name]
    if plain is None and not fitting:
        raise UserError(f"{where} has only {there}; choose with model.variant")
    # Of the same size, the one that is stored, or else the finer one.
    fitting.sort(key=lambda held: held.variant != stored)
    if plain is None:
        return WeightChoice(fitting[0], "the only ones there" if len(sets) == 1 else f"there are {there}")
    if not fitting:
        return WeightChoice(plain)
    if stored == "fp32":
        return WeightChoice(plain, "fp32 is asked for")
    smallest = min(fitting, key=lambda held: held.bytes)
    if smallest.bytes >= SMALLER * plain.bytes:
        return WeightChoice(plain, f"the {fitting[0].variant} files are not smaller")
    smallest = next(held for held in fitting if held.bytes <= smallest.bytes / SMALLER)
    return WeightChoice(smallest, f"enough for {stored}; the plain ones have {size_text(plain.bytes)}")
