"""Converts adapter files from one format to another. Every change is noted; what the format cannot hold is refused."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from trainer.adapters import export, sd_scripts
from trainer.adapters.export import DORA_SCALE_MEANING, METADATA_OF_KEYS, with_hash
from trainer.adapters.norms import RowNorms
from trainer.adapters.portable import DoraScale, Factors, Portable, recipe, shrunk, with_factors
from trainer.adapters.targets import fused_with, lora_config
from trainer.base.console import some
from trainer.base.errors import UserError
from trainer.base.files import FileGroup
from trainer.base.tensorfile import Tensors, write_tensors
from workbench.adapter_files.opening import NamedModel, OpenedAdapter
from workbench.adapter_files.reading import network_args
from workbench.adapters.ranks import Residual, matrices, nearest, relative_error

# The norm that each format's readers divide a magnitude by; for ComfyUI it can be chosen.
MEANINGS: Mapping[str, DoraScale] = {
    "diffusers": "magnitude", "kohya": "magnitude", "onetrainer": "magnitude", "comfyui": "comfyui_released",
}  # fmt: skip
FORMATS = (*MEANINGS, "lora")
KOHYA = ("kohya", "comfyui", "lora")  # formats that sd-scripts reads, for LoRAs
WeightOf = Callable[[str], torch.Tensor]  # a layer's full name -> W, fp32, in its own shape


@dataclass
class WrittenAdapter:
    """An adapter that was written. portable: the file's content. notes: the changes, in sentences. loss: the error of an
    approximation."""

    portable: Portable
    notes: list[str] = field(default_factory=list)
    loss: Residual = field(default_factory=Residual)


@dataclass(frozen=True)
class Conversion:
    """The file to make. to: one of FORMATS. rank: of the approximation, for "lora". dora_scale: for "comfyui".
    for_sd_scripts: drops the layers that sd-scripts has no modules for. dtype: of the matrices; None: each keeps its own."""

    to: str
    rank: int | None = None
    dora_scale: DoraScale | None = None
    for_sd_scripts: bool = False
    dtype: torch.dtype | None = None


def convert(opened: OpenedAdapter, out: Path, conversion: Conversion, weight: WeightOf | None = None) -> WrittenAdapter:
    """Write `out`. weight: of the base model, or None. Raises UserError for what the format cannot hold, and if the base is
    needed but missing; NonFiniteError if a number is not finite."""
    to, rank, dtype = conversion.to, conversion.rank, conversion.dtype
    portable, notes = opened.portable, []
    if to == "lora" and portable.kind.magnitudes:
        portable = approximated(portable, _required(weight, "an approximation of a DoRA"), rank, notes)
    elif to == "lora" and portable.kind.form:
        portable = of_rank(portable, opened, rank, notes)
    elif rank is not None:
        words = "a DoRA or a LoKr, whose change has no rank of its own"
        raise UserError(f"--rank belongs to --to lora of {words}; {opened.path} to {to}")
    if conversion.for_sd_scripts:
        portable = _without_left_out(portable, opened, to, notes)
    if portable.kind.magnitudes:
        meaning = conversion.dora_scale or MEANINGS[to]
        if meaning != portable.meaning:
            portable = rescaled(portable, meaning, weight, notes)
    if dtype is not None:
        whole, portable = portable, portable.rounded(dtype)
        loss, name = whole.distance(portable)
        notes.append(f"in {str(dtype).removeprefix('torch.')} at most {loss:.3%} of a layer's change is lost ({name})")
    return write_as(opened, portable, out, to, weight, notes)


def write_as(
    opened: OpenedAdapter, portable: Portable, out: Path, to: str, weight: WeightOf | None, notes: list[str]
) -> WrittenAdapter:
    """Write `portable`, made from `opened`, with the format's keys. weight: of the base model, or None. Raises UserError for
    what the format cannot hold, and if `out` exists with other bytes."""
    portable.check_finite()
    family, kind = opened.model.family, portable.kind
    if to == "diffusers" and not family.file_formats(kind.in_files, [to]):
        remedy = "--to comfyui keeps it, and --to lora --rank N makes a LoRA of it"
        raise UserError(f"{opened.path} is a {kind.word}, which diffusers' loader of {family.name} does not take; {remedy}")
    notes += opened.read.account.lines()
    for form, count in opened.read.fused.items():
        share = "its parts of A and B" if form == "block-diagonal" else "its rows of B, and all of A"
        notes.append(f"{count} modules of several layers were {form}: each layer gets {share}, which is exact")
    if to == "diffusers":
        portable, others = portable.parted(family.adapters.peft)
        if others and not portable.layers:
            alone = f"adapts {', '.join(others)} alone, which diffusers does not load for this model"
            raise UserError(f"{opened.path} {alone}; --to comfyui keeps it")
        reason = "as diffusers does not load them for this model; --to comfyui keeps them"
        notes += [f"{len(part.layers)} layers of {component} were left out, {reason}" for component, part in others.items()]
        notes += export.not_loaded_by_diffusers(portable.layers)
    tensors = tensors_of(portable, opened.model, to, weight, notes)
    fields = _metadata(opened, portable, to)
    if to in KOHYA and (phrase := sd_scripts.left_out_phrase(portable, family.adapters.not_in_sd_scripts)):
        fields[sd_scripts.ENTRY] = phrase
        notes.append(sd_scripts.sentence(phrase))
    with FileGroup(keep=True) as group:
        write_tensors(out, tensors, with_hash(tensors, fields), write=group.write)
    return WrittenAdapter(portable, notes)


def _without_left_out(portable: Portable, opened: OpenedAdapter, to: str, notes: list[str]) -> Portable:
    if to not in KOHYA:
        raise UserError(f"--for_sd_scripts belongs to --to {', '.join(KOHYA)}; --to {to} has other keys")
    if (kind := portable.kind).module:
        raise UserError(f"{opened.path} is a {kind.word}, which sd-scripts has not: take --to lora, which makes a LoRA of it")
    patterns = opened.model.family.adapters.not_in_sd_scripts
    names = sd_scripts.left_out(portable.layers, patterns)
    if len(names) == len(portable.layers):
        raise UserError(f"{opened.path} has no layer that sd-scripts builds a module for: {some(names)}")
    if names:
        notes.append(f"left out, as sd-scripts builds no module for them: {sd_scripts.left_out_phrase(portable, patterns)}")
    return portable.with_layers({name: factors for name, factors in portable.layers.items() if name not in names})


def _required(weight: WeightOf | None, purpose: str) -> WeightOf:
    if weight is None:
        raise UserError(f"{purpose} takes the weights of the model that the adapter was trained over: give it with --base")
    return weight


def tensors_of(portable: Portable, model: NamedModel, to: str, weight: WeightOf | None, notes: list[str]) -> Tensors:
    """The adapter's tensors by the keys of the format `to`."""
    components = list(dict.fromkeys(name.partition(".")[0] for name in portable.layers))
    if to == "diffusers":
        return export.diffusers_tensors(portable)
    family = model.family
    if to == "onetrainer":
        prefixes = {name: family.flat_prefix(name, "OneTrainer") for name in components}
        return sd_scripts.kohya_tensors(portable, modules={}, prefixes=prefixes, rows=len)
    modules = {name: model.modules(name) for name in components}
    shapes = model.full_layers(components)
    norms: dict[str, RowNorms] = {}
    if portable.kind.magnitudes and weight is not None:
        joined = fused_with(portable.layers, modules)
        norms = {name: RowNorms(weight(name).flatten(1).norm(dim=1), None, None) for name in joined}
    for links in modules.values() if not portable.kind.form else ():
        _note_joined(portable, components, links, notes)
    prefixes = family.kohya_prefixes(model.config)
    return sd_scripts.kohya_tensors(
        portable, modules=modules, prefixes=prefixes, rows=lambda name: shapes[name][0],
        not_behind_lycoris=family.adapters.not_behind_lycoris, norms=norms,
    )  # fmt: skip


def _note_joined(portable: Portable, components: list[str], links, notes: list[str]) -> None:
    joined = ratios = 0
    for link in links:
        parts = [f for c in components for part in link.parts if (f := portable.layers.get(f"{c}.{part}"))]
        joined += len(link.parts) > 1 and len(parts) > 0
        scales = {part.scaling for part in parts}
        ratios += len(scales) > 1
    if joined:
        notes.append(f"{joined} modules hold several layers in this format: one A where all share it, else block-diagonal")
    if ratios:
        notes.append(f"{ratios} of them have layers of different scales: B carries the ratio, rounded to its dtype")


def adapted(weight: torch.Tensor, factors: Factors) -> torch.Tensor:
    """W + s B A as a matrix [N, K], fp64."""
    a, b = matrices(factors)
    return torch.addmm(weight.double().flatten(1), b, a, alpha=factors.scaling)


def rescaled(portable: Portable, meaning: DoraScale, weight: WeightOf | None, notes: list[str]) -> Portable:
    """The same DoRA with magnitudes of the other meaning: times or over ||W|| / ||W + s B A||, row by row. Magnitudes of the
    input axis stay: ComfyUI divides these by ||W + s B A||, as all others do."""
    layers, count = dict(portable.layers), 0
    for name, factors in portable.layers.items():
        if factors.magnitude is None or factors.axis == "input":
            continue
        w = _required(weight, f"to write magnitudes {DORA_SCALE_MEANING[meaning].partition(':')[0]}")(name)
        ratio = w.double().flatten(1).norm(dim=1) / adapted(w, factors).norm(dim=1).clamp_min(1e-300)
        m = factors.magnitude.make().double()
        changed = (m * ratio if meaning == "comfyui_released" else m / ratio.clamp_min(1e-300)).to(factors.magnitude.dtype)
        layers[name] = replace(factors, magnitude=recipe(changed))
        count += 1
    if count:
        meanings = f"were {portable.meaning!r} and are {meaning!r} now, rounded to their dtype"
        notes.append(f"magnitudes of {count} layers {meanings}")
    return replace(portable, layers=layers, meaning=meaning)


def gain(weight: torch.Tensor, factors: Factors, meaning: DoraScale) -> torch.Tensor:
    """The factor g of W + s B A, fp64: [N] of the output axis, [K] of the input axis (a convolution's channels)."""
    assert factors.magnitude is not None
    m, v = factors.magnitude.make().double(), adapted(weight, factors)
    if factors.axis == "output":
        norm = (weight.double().flatten(1) if meaning == "comfyui_released" else v).norm(dim=1)
    else:
        norm = v.view(len(v), weight.shape[1], -1).transpose(0, 1).flatten(1).norm(dim=1)
    return m / norm.clamp_min(1e-300)


def change_of(weight: torch.Tensor, factors: Factors, meaning: DoraScale) -> torch.Tensor:
    """An adapter's change of W: g (W + s B A) - W, fp64 [N, K], by the formula of its meaning and axis."""
    v, w = adapted(weight, factors), weight.double().flatten(1)
    if factors.magnitude is None:
        return v - w
    g = gain(weight, factors, meaning)
    if factors.axis == "output":
        return g[:, None] * v - w
    return (v.view(len(v), weight.shape[1], -1) * g[:, None]).flatten(1) - w


def approximated(portable: Portable, weight: WeightOf, rank: int | None, notes: list[str]) -> Portable:
    """A LoRA of rank `rank` (None: of each layer's own) for a DoRA: the nearest of that rank to g (W + s B A) - W."""
    layers, loss = dict(portable.layers), Residual()
    for name, factors in portable.layers.items():
        if factors.magnitude is None:
            continue
        change = change_of(weight(name), factors, portable.meaning)
        a, b = nearest(change, rank or factors.rank)
        layers[name] = lora = with_factors(replace(factors, magnitude=None), a, b, 1.0)
        loss.add(name, *relative_error(change, lora.a.make(), lora.b.make(), lora.scaling))
    notes.append(_approximation_note("each layer's rank" if rank is None else f"rank {rank}", "DoRA", loss))
    return replace(portable, layers=layers, meaning="magnitude")


def of_rank(portable: Portable, opened: OpenedAdapter, rank: int | None, notes: list[str]) -> Portable:
    """A LoRA of rank `rank` for a LoKr: the nearest of that rank to each layer's s w1 (x) w2."""
    if rank is None:
        whole = max(factors.rank for factors in portable.layers.values())
        remedy = f"give the LoRA's rank with --rank ({whole} keeps all of it)"
        raise UserError(f"{opened.path} is a {portable.kind.word}; {remedy}")
    layers, loss = dict(portable.layers), Residual()
    for name, factors in portable.layers.items():
        if factors.form is not None:
            layers[name], share = shrunk(factors, rank)
            norm = abs(factors.scaling) * factors.form.norm(factors.matrix_tensors())
            loss.add(name, share * norm, norm)
    notes.append(_approximation_note(f"rank {rank}", portable.kind.word, loss))
    return replace(portable, layers=layers)


def _approximation_note(rank: str, kind: str, loss: Residual) -> str:
    name, most = loss.worst
    error = f"{loss.share:.2%} of the change of the weights is lost in all, {most:.2%} at most ({name})"
    return f"a plain LoRA of {rank} in place of a {kind}: {error}"


def _metadata(opened: OpenedAdapter, portable: Portable, to: str) -> dict[str, str]:
    """The file's own entries, updated for the new keys; for a file without its family, the family's."""
    entries = {key: value for key, value in portable.metadata.items() if key not in METADATA_OF_KEYS}
    if len(opened.labels) == 1 or all(m == opened.labels[0] for m in opened.labels):
        entries = {key: value for key, value in opened.model.hints.items() if value} | entries
    fields = lora_config(portable.targets, portable.kind, rslora=portable.rslora)
    ranks, alphas = ({f"{getattr(target, key):g}" for target in portable.targets} for key in ("rank", "alpha"))
    numbers = {"ss_network_dim": f"{fields['r']:g}", "ss_network_alpha": f"{fields['lora_alpha']:g}"}
    for key, present in (("ss_network_dim", ranks), ("ss_network_alpha", alphas)):
        # The file's own number stays if a layer has it; else the most common one.
        entries[key] = entries[key] if entries.get(key) in present else numbers[key]
    before = network_args(portable.metadata)
    args = {k: v for k, v in before.items() if k not in export.DORA_ARGS}
    args |= {"algo": portable.kind.name if portable.kind.form else "lora", "rs_lora": str(portable.rslora)}
    if portable.kind.magnitudes:
        axes = {factors.axis for factors in portable.layers.values() if factors.magnitude is not None}
        meaning = f"{portable.meaning}: {DORA_SCALE_MEANING[portable.meaning]}"
        args |= {"dora_wd": "True", "wd_on_output": str(axes == {"output"}), "dora_scale": meaning}
        if to == "diffusers":
            args["dora_scale"] = "magnitude"
        if isinstance(base := before.get("dora_base"), str) and base:
            args["dora_base"] = base
    if "ss_network_module" not in portable.metadata or portable.kind is not opened.portable.kind:
        of_lora = opened.model.hints.get("ss_network_module", "networks.lora")
        entries["ss_network_module"] = portable.kind.module or of_lora
    entries["ss_network_args"] = json.dumps(args, sort_keys=True)
    return entries | (export.diffusers_metadata(portable) if to == "diffusers" else {})
