"""A component's weights in its folder: plain files, and variants of them (fp16, bf16, ...) under their own names.

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

# diffusers' and transformers' names for a component's weights in a folder.
WEIGHT_STEMS = ("diffusion_pytorch_model", "model")
PLAIN = "none"  # model.variant: the files without a variant in their names
# Variants that may be chosen automatically. Others (ema, ...) are other weights, not the same ones in fewer bits.
SIXTEEN_BIT = ("fp16", "bf16")
# A variant larger than this share of the plain files has as many bits: the plain files are 16-bit already.
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
    """One set of a component's weights. variant: None for plain files. index: file of the shards. bytes: of .safetensors."""

    variant: str | None
    names: tuple[str, ...]
    index: str | None
    bytes: int

    @property
    def whole(self) -> bool:
        """Whether all shards are present, by the count in their names."""
        return len(self.names) == (int(_TENSORS.fullmatch(self.names[0])["count"]) if self.index and self.names else 1)

    def __str__(self) -> str:
        return f"{self.variant or 'plain'} files, {size_text(self.bytes)}"


@dataclass(frozen=True)
class WeightChoice:
    """The set that is read, and the reason in words if there was a choice."""

    files: WeightSet
    reason: str = ""


def weight_sets(listing: Mapping[str, int]) -> list[WeightSet]:
    """The sets of a folder, from its files' names and bytes; the plain one first. An index counts before a single file."""
    shards: dict[tuple[str, str | None], dict[str, int]] = {}
    single: dict[tuple[str, str | None], dict[str, int]] = {}
    indices: dict[tuple[str, str | None], str] = {}
    for name in sorted(listing):
        match = _TENSORS.fullmatch(name) or _INDEX.fullmatch(name)
        if match is None or (match["new"] and match["old"]):
            continue
        key = match["stem"], match["new"] or match["old"]
        if match.re is _INDEX:
            indices[key] = name
        else:
            (shards if match["shard"] else single).setdefault(key, {})[name] = listing[name]
    sets: dict[str | None, WeightSet] = {}
    for stem in WEIGHT_STEMS:
        for key in sorted({*single, *indices}, key=lambda key: (key[1] is not None, key[1])):
            if key[0] == stem and key[1] not in sets:
                files = shards.get(key, {}) if key in indices else single[key]
                sets[key[1]] = WeightSet(key[1], tuple(files), indices.get(key), sum(files.values()))
    return sorted(sets.values(), key=lambda each: each.variant or "")


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
    """The set to read. Raises UserError if none fits.

    variant: model.variant; a folder without it gives its plain files. None: the plain files, or a smaller 16-bit variant if
    the component is neither stored nor computes in fp32. Names and sizes alone decide, so that a repository and its copy in a
    folder give the same.
    stored: the component's storage dtype; "fp32" also if it computes in fp32. where: the folder, for messages.
    """
    if variant is None:
        sets = [each for each in sets if each.whole] or sets  # a half-copied set may lack shards
    by_variant = {each.variant: each for each in sets}
    plain, names = by_variant.get(None), " and ".join(map(str, sets))
    if variant is not None:
        named = by_variant.get(None if variant == PLAIN else variant)
        if named is None and plain is None:
            raise UserError(f"model.variant = {variant!r}: {where} has no such files, only {names}; name one of these")
        if named is None:
            return WeightChoice(plain, f"no {variant} files there")
        return WeightChoice(named, f"model.variant = {variant!r}" if len(sets) > 1 else "")
    fitting = [by_variant[name] for name in SIXTEEN_BIT if name in by_variant]
    if plain is None and not fitting:
        raise UserError(f"{where} has only {names}; choose with model.variant")
    # At equal size the stored dtype first, else the finer one.
    fitting.sort(key=lambda each: each.variant != stored)
    if plain is None:
        return WeightChoice(fitting[0], "the only ones there" if len(sets) == 1 else f"there are {names}")
    if not fitting:
        return WeightChoice(plain)
    if stored == "fp32":
        return WeightChoice(plain, "fp32 is asked for")
    smallest = min(fitting, key=lambda each: each.bytes)
    if smallest.bytes >= SMALLER * plain.bytes:
        return WeightChoice(plain, f"the {fitting[0].variant} files are not smaller")
    smallest = next(each for each in fitting if each.bytes <= smallest.bytes / SMALLER)
    return WeightChoice(smallest, f"enough for {stored}; the plain ones have {size_text(plain.bytes)}")
