"""Reads adapter files of all kinds into one internal form (portable.py); the keys tell the kind.

A DoRA's `.lora_magnitude_vector` is of the output axis, `.dora_scale` of the output axis ([N, 1]) or the input axis ([1, K]).
The scale is alpha / rank. Alpha is in the module's keys, in diffusers' `lora_adapter_metadata`, or in the config that PEFT
saves beside the file (peft.py); without it the scale is 1. LyCORIS' `.scalar` is a further factor, `.lora_mid` a Tucker core
between A and B.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from trainer.adapters import lokr
from trainer.adapters.peft_config import CONFIG
from trainer.adapters.portable import Axis, DoraScale, Factors, Portable, derived, made_of
from trainer.base.account import Account, Heading
from trainer.base.console import some
from trainer.base.errors import UserError, reading, shown
from trainer.base.tensorfile import Recipe, TensorFile
from workbench.adapter_files.keys import KeyTable, Module, embeddings_in, parsed
from workbench.adapter_files.peft import AS_SAVED, PeftConfig, config_beside
from workbench.adapter_files.splitting import split

Shapes = Mapping[str, tuple[int, ...]]
Stems = Mapping[str, Mapping[str, str]]  # stem -> role -> key
METADATA = "lora_adapter_metadata"
MOST_RANK = 2**14  # about the rows of the largest layers: beyond it a file of zeros would ask for all memory
NO_ALPHA = "not given: the scale is 1"
Scales = PeftConfig | dict[str, dict[str, Any]]  # PEFT's config, or `_metadata_alphas`


@dataclass
class ReadAdapter:
    """An adapter file's content. conventions: counts of modules by naming convention. fused: counts of modules of several
    layers, by form. alphas: counts by the source of the scale. absent: layers of fused modules without an adapter, whose
    magnitudes (the model's norms) were left out. account: the assumptions, and the parts left out."""

    portable: Portable
    conventions: Counter[str] = field(default_factory=Counter)
    fused: Counter[str] = field(default_factory=Counter)
    alphas: Counter[str] = field(default_factory=Counter)
    absent: list[str] = field(default_factory=list)
    account: Account = field(default_factory=Account)


def stems_of(file: TensorFile) -> dict[str, dict[str, str]]:
    """Each module's keys by role. Raises UserError for keys that are not of a LoRA or DoRA."""
    if not file.entries:
        raise UserError(f"{file.path} holds no tensors: it is no adapter")
    return parsed(file.entries, file.path)


def read_adapter(file: TensorFile, stems: Stems, table: KeyTable, shapes: Shapes, advice: str = "") -> ReadAdapter:
    """Read the file by a model's table of keys. Loads alphas, the B of fused modules, and the config beside a PEFT file.

    shapes: of every adaptable layer's weight, by full name. advice: the end of messages about other shapes. Raises UserError
    if a module is not the model's, occurs twice, lacks a tensor or does not fit.
    """
    if unknown := [key for stem in sorted(stems.keys() - table.keys()) for key in stems[stem].values()]:
        raise UserError(f"{file.path} has keys of no layer that the model has: {some(unknown)}")
    dora_scale = str(network_args(file.metadata).get("dora_scale"))
    meanings: tuple[DoraScale, ...] = ("comfyui_released", "magnitude")
    meaning: DoraScale | None = next((meaning for meaning in meanings if dora_scale.startswith(meaning)), None)
    result = ReadAdapter(Portable({}, meaning or "magnitude", dict(file.metadata)))
    reader = _Reader(file, config_beside(file.path, stems) or _metadata_alphas(file), result.alphas, advice)
    layers, by_layer = {}, {}
    for stem, keys in stems.items():
        module = table[stem]
        for part in module.link.parts:
            if part in by_layer:
                raise UserError(f"{file.path} has {part} twice, as {by_layer[part]!r} and as {stem!r}")
            by_layer[part] = stem
        rows = [shapes[part][0] for part in module.link.parts]
        shape = (sum(rows), *shapes[module.link.parts[0]][1:])
        whole = reader.module(stem, keys, module, shape)
        parts, form = split(whole, rows, swap=module.link.swap)
        result.conventions[module.convention] += 1
        if form:
            result.fused[form] += 1
        for name, part in zip(module.link.parts, parts, strict=True):
            if part is not None:
                layers[name] = part
            elif whole.magnitude is not None:
                result.absent.append(name)
    ordered = {name: layers[name] for name in shapes if name in layers}
    result.portable = replace(result.portable, layers=ordered)
    result.account = _account(file, stems, meaning, reader.unscaled)
    return result


def _account(file: TensorFile, stems: Stems, meaning: DoraScale | None, unscaled: list[str]) -> Account:
    """The assumptions beyond a file's keys, and the keys that are not read. unscaled: stems without an alpha."""
    scaled, scalars = ([keys[role] for keys in stems.values() if role in keys] for role in ("dora_scale", "scalar"))
    account, path = Account(), file.path
    if unscaled:
        reason = f"no alpha in {path}, so the scale is taken for 1"
        remedy = f"if PEFT saved the file, put its {CONFIG} beside it, which has the scale"
        account.add(Heading.ASSUMED, reason, unscaled, remedy=remedy, noun="module")
    if scaled and not meaning:
        norm = "the norm by rows where it is a column [rows, 1], by columns where it is a row [1, columns]"
        reason = f"dora_scale in {path} is taken for m of m (W + sBA) / ||W + sBA||, {norm}"
        entry = "dora_scale = comfyui_released in its header's ss_network_args"
        remedy = f"a file made for readers that divide by ||W|| has {entry}"
        account.add(Heading.ASSUMED, reason, scaled, remedy=remedy, noun="magnitude")
    if scalars:
        reason = f"LyCORIS' scalar in {path} is multiplied into the scale; ComfyUI and A1111 leave it out"
        account.add(Heading.NOTE, reason, scalars, noun="module")
    if words := embeddings_in(file.entries):
        reason = f"{path} bundles embeddings of words, which are no part of a LoRA"
        remedy = "OneTrainer writes them to a file of their own, too"
        account.add(Heading.LEFT_OUT, reason, words, remedy=remedy, noun="tensor")
    return account


def network_args(metadata: Mapping[str, str]) -> dict[str, Any]:
    """A header's ss_network_args; empty if unreadable, as other programs write anything there."""
    try:
        args = json.loads(metadata.get("ss_network_args", "{}"))
    except (ValueError, RecursionError):
        return {}
    return args if isinstance(args, dict) else {}


@dataclass(frozen=True)
class _Reader:
    """Reads the modules of one file. alphas: counts by the source of the scale. unscaled: stems without an alpha."""

    file: TensorFile
    scales: Scales
    alphas: Counter[str]
    advice: str
    unscaled: list[str] = field(default_factory=list)

    def error(self, stem: str, text: str) -> UserError:
        return UserError(f"{self.file.path}: {stem!r} {text}")

    @property
    def misfit(self) -> str:
        return f"the file is for a model of another size, or damaged{self.advice}"

    def module(self, stem: str, keys: Mapping[str, str], module: Module, shape: tuple[int, ...]) -> Factors:
        """The factors of a module. shape: of its weight."""
        if ends := {end: keys[end] for end in lokr.ENDS if end in keys}:
            return self.product(stem, keys, ends, module, shape)
        for role, named in (("a", "A (lora_A, lora_down)"), ("b", "B (lora_B, lora_up)")):
            if role not in keys:
                raise self.error(stem, f"has no {named}, only {some(sorted(keys.values()))}; it is not whole")
        if "magnitude" in keys and "dora_scale" in keys:
            raise self.error(stem, "has lora_magnitude_vector and dora_scale; which of them counts is not known")
        for role, key in keys.items():
            if role not in ("alpha", "scalar") and not self.file.entries[key].dtype.is_floating_point:
                raise self.error(stem, f"holds {self.file.entries[key].dtype} in {key!r} where numbers are floating point")
        a, b = _stored(self.file, keys["a"]), _stored(self.file, keys["b"])
        if "mid" in keys:
            a = self.with_core(stem, a, _stored(self.file, keys["mid"]), shape[2:])
        rank, rows = (a.shape or (0,))[0], (b.shape or (0,))[0]
        if (largest := max(rank, *b.shape[1:2])) > MOST_RANK:
            raise self.error(stem, f"has rank {largest}, and {MOST_RANK} is the most that is read; the file is damaged")
        kernel = [1] * (len(shape) - 2)
        shape_a, shape_b = (rank, *shape[1:]), (shape[0], rank, *kernel)
        # Some programs store 1x1 convolutions as Linears, or the other way round.
        if rank < 1 or not _equal_but_ones(a.shape, shape_a) or not _equal_but_ones(b.shape, shape_b):
            sizes, weight = f"has A {list(a.shape)} and B {list(b.shape)}", f"the layer's weight {list(shape)} ({rows} rows)"
            raise self.error(stem, f"{sizes}, which do not fit each other and {weight}; {self.misfit}")
        a, b = _shaped(a, shape_a), _shaped(b, shape_b)
        factors = Factors(a, b, *self.alpha(stem, keys, module, rank))
        if "scalar" in keys:
            scalar = self.number(keys["scalar"])
            changed = {"alpha": factors.alpha * scalar} if scalar else {"b": derived(b, b.shape, torch.zeros_like)}
            factors = replace(factors, **changed)
        if m := keys.get("magnitude") or keys.get("dora_scale"):
            factors = replace(factors, **self.magnitude(stem, m, "magnitude" in keys, shape))
        return factors

    def product(
        self, stem: str, keys: Mapping[str, str], ends: Mapping[str, str], module: Module, shape: tuple[int, ...]
    ) -> Factors:
        """The factors of a LoKr's module. ends: the keys of its matrices, by their ends."""
        if beside := sorted(keys[role] for role in keys.keys() - ends.keys() - {"alpha", "scalar"}):
            raise self.error(stem, f"is a LoKr with {some(beside)} over it, which is not read")
        tensors = {end: _stored(self.file, key) for end, key in ends.items()}
        sizes = {end: tensor.shape for end, tensor in tensors.items()}
        expected = lokr.sizes_for(shape, sizes)
        if expected is None or any(len(sizes[end]) < 2 or math.prod(sizes[end]) != math.prod(expected[end]) for end in sizes):
            actual = f"has {', '.join(f'{end} {list(size)}' for end, size in sizes.items())}"
            raise self.error(stem, f"{actual}, which do not make the layer's weight {list(shape)}; {self.misfit}")
        if lokr.is_whole(sizes):
            scaling = 1.0
            self.alphas["none: both matrices are whole, and the scale is 1"] += 1
        else:
            alpha, rslora = self.alpha(stem, keys, module, rank := lokr.rank_of(sizes))
            scaling = alpha / (math.sqrt(rank) if rslora else rank)
        scaling *= self.number(keys["scalar"]) if "scalar" in keys else 1
        return made_of({end: _shaped(tensor, expected[end]) for end, tensor in tensors.items()}, scaling)

    def number(self, key: str) -> float:
        """A tensor's one number, of any dtype."""
        entry = self.file.entries[key]
        if math.prod(entry.shape) != 1:
            raise UserError(f"{self.file.path}: {key!r} has shape {list(entry.shape)}, and is to be one number")
        number = float(self.file.read(key).double().reshape(()))
        if not math.isfinite(number):
            raise UserError(f"{self.file.path}: {key!r} is {number}, not a number to scale by")
        return number

    def with_core(self, stem: str, a: Recipe, core: Recipe, kernel: tuple[int, ...]) -> Recipe:
        """A [R, K, kh, kw], fp32, from A [R, K, 1, 1] and LyCORIS' Tucker core [R, R, kh, kw]."""
        if core.shape != (*a.shape[:1] * 2, *kernel) or math.prod(a.shape[2:]) != 1:
            raise self.error(stem, f"has A {list(a.shape)} and a core (lora_mid) {list(core.shape)}, which do not fit")
        return Recipe(
            torch.float32, (*a.shape[:2], *kernel),
            lambda: torch.einsum("rs...,sk->rk...", core.make().float(), a.make().float().flatten(1)),
        )  # fmt: skip

    def alpha(self, stem: str, keys: Mapping[str, str], module: Module, rank: int) -> tuple[float, bool]:
        """(alpha, whether the scale is rsLoRA's)."""
        if isinstance(self.scales, PeftConfig):
            if key := keys.get("alpha"):
                conflict = f"gives the alphas, and the file has {key!r}: which of them counts is not known"
                raise self.scales.error(conflict + AS_SAVED)
            self.alphas["in PEFT's adapter_config.json"] += 1
            return self.scales.alpha(stem, rank, dora="magnitude" in keys or "dora_scale" in keys), self.scales.rslora
        if "alpha" in keys:
            if (alpha := self.number(keys["alpha"])) == 0:
                raise UserError(f"{self.file.path}: {keys['alpha']!r} is 0, not a number to scale by")
            self.alphas["beside the module"] += 1
            return alpha, False
        component, _, name = module.link.parts[0].partition(".")
        if component in self.scales:
            config = self.scales[component]
            pattern = next((p for p in config["patterns"] if p[0] == name or (not p[2] and name.endswith(f".{p[0]}"))), None)
            self.alphas["in the metadata"] += 1
            return config["alpha"] if pattern is None else pattern[1], config["rslora"]
        self.alphas[NO_ALPHA] += 1
        self.unscaled.append(stem)
        return float(rank), False

    def magnitude(self, stem: str, key: str, peft: bool, shape: tuple[int, ...]) -> dict[str, Any]:
        """The fields of Factors for the magnitude and its axis. peft: whether the key is PEFT's."""
        stored, rows, columns = _stored(self.file, key), shape[0], shape[1]
        ones = (1,) * (len(shape) - 2)
        outputs = [(rows,), (1, rows, *ones)] if peft else [(rows, 1, *ones), (rows, 1)]
        axis: Axis
        if stored.shape in outputs:
            axis, length = "output", rows
        elif not peft and stored.shape in [(1, columns, *ones), (1, columns)]:
            axis, length = "input", columns
        else:
            kohyas = f"in kohya's keys it is [{rows}, 1] of the output axis or [1, {columns}] of the input axis"
            raise self.error(stem, f"has a magnitude of shape {list(stored.shape)}; {kohyas}, in PEFT's [{rows}]")
        return {"magnitude": derived(stored, (length,), lambda t: t.reshape(-1)), "axis": axis}


def _stored(file: TensorFile, key: str) -> Recipe:
    entry = file.entries[key]
    return Recipe(entry.dtype, entry.shape, lambda: file.read(key))


def _shaped(tensor: Recipe, shape: tuple[int, ...]) -> Recipe:
    return tensor if tensor.shape == shape else derived(tensor, shape, lambda t: t.reshape(shape))


def _equal_but_ones(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether both shapes are equal up to trailing dimensions of 1."""
    longer, shorter = (shape, expected) if len(shape) >= len(expected) else (expected, shape)
    return len(shorter) >= 2 and longer[: len(shorter)] == shorter and all(size == 1 for size in longer[len(shorter) :])


def _metadata_alphas(file: TensorFile) -> dict[str, dict[str, Any]]:
    """diffusers' `lora_adapter_metadata`: component -> {"alpha", "rslora", "patterns": [(name, alpha, whole)]}.

    PEFT's patterns are regular expressions, which could take forever to match. Here they are names, or ends of names.
    """
    text = file.metadata.get(METADATA)
    if text is None:
        return {}
    remedy = "without it the scale of the adapter is not known: save the file again"
    with reading(file.path, f"the header's {METADATA}", remedy=remedy):
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError("it is not a JSON object")
    alphas: dict[str, dict[str, Any]] = {}
    for key, alpha in fields.items():
        component, _, field_name = key.rpartition(".")
        if field_name != "lora_alpha":
            continue
        with reading(file.path, f"the header's {METADATA}, {key!r:.200}", remedy=remedy):
            if not _is_number(alpha):
                raise ValueError(f"{shown(alpha)} is no number to scale by")
        patterns_key = f"{component}.alpha_pattern"
        with reading(file.path, f"the header's {METADATA}, {patterns_key!r:.200}", remedy=remedy):
            patterns = fields.get(patterns_key) or {}
            if not isinstance(patterns, dict) or not all(map(_is_number, patterns.values())):
                raise ValueError(f"{shown(patterns)} gives no layer a number to scale by")
            alphas[component] = {
                "alpha": float(alpha), "rslora": fields.get(f"{component}.use_rslora") is True,
                "patterns": [_pattern(*pattern) for pattern in patterns.items()],
            }  # fmt: skip
    return alphas


def _pattern(pattern: str, number: float) -> tuple[str, float, bool]:
    """(name, alpha, whether the name is a whole layer name)."""
    name = pattern.removeprefix("^").removesuffix("$").replace("\\.", ".")
    if not all(letter.isalnum() or letter in "._" for letter in name):
        raise ValueError(f"it has the pattern {pattern[:200]!r}, which is no layer's name")
    return name, float(number), pattern.startswith("^")


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and 0 < abs(value) < 2**53
