"""Writers of adapter files: diffusers/PEFT keys and kohya keys, with the metadata their readers look for.

diffusers: COMPONENT.LAYER.lora_A.weight [R, K], .lora_B.weight [N, R], .lora_magnitude_vector [N] (Conv2d [1, N, 1, 1];
of a text encoder .lora_magnitude_vector.weight, see `_magnitude_key`); alpha / rank stand in the header's
`lora_adapter_metadata` (a `.alpha` key raises for SDXL, without either the scale is 1).

A LoKr's have lokr_w1, lokr_w2 or their pairs in place of A and B, as LyCORIS has them: in diffusers' keys with the scale in
the first of them and without alpha. Where the original layout fuses layers, kohya's keys are diffusers' names behind
`lycoris_`, which ComfyUI and LyCORIS read: of several products no one can be made. Layers that ComfyUI does not know by such
a name keep their original one.

kohya: PREFIX_NAME.{lora_down.weight, lora_up.weight, alpha, dora_scale}; scale = alpha / rank; dora_scale [N, 1]
(Conv2d [N, 1, 1, 1]; of the input axis [1, K]). Layers that the original layout fuses (Flux's qkv, linear1) become one pair:
block-diagonal, or where all have one and the same A, that A and their B's.

Nothing here reads a frozen weight: what a DoRA's files need of them is their row norms (norms.py).
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from trainer.adapters import peft_config, sd_scripts
from trainer.adapters.hashes import with_hash
from trainer.adapters.portable import AllNorms, DoraScale, Factors, Portable, by_component, derived, widest
from trainer.adapters.targets import Target, lora_config
from trainer.base.errors import NotTrained, UserError
from trainer.base.files import Advance, Write, no_progress, write_atomic
from trainer.base.tensorfile import Recipe, Tensors, write_tensors
from trainer.base.types import Link

DORA_SCALE_MEANING = {
    "comfyui_released": "g * ||W||, g = m / ||W + sBA|| as trained: where the reader divides by ||W|| (ComfyUI's releases)",
    "magnitude": "g * ||W + sBA||: where the reader divides by ||W + sBA|| (LyCORIS, PEFT's definition)",
}


FORMATS = ("diffusers", "comfyui")

# Header entries that are about a file's keys and bytes, and not about what was trained.
METADATA_OF_KEYS = (
    "lora_adapter_metadata", "format", "modelspec.implementation",
    "sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256", sd_scripts.ENTRY,
)  # fmt: skip
# Of ss_network_args, what is about a DoRA.
DORA_ARGS = ("dora_wd", "wd_on_output", "dora_scale", "dora_base")


@dataclass(frozen=True)
class About:
    """What an adapter file says of its origin.

    started: ISO time of the run's first start; never the present time. dora_base: which weights a DoRA's files are made for.
    average: of the weights over which updates; "" for no average. entries: further ones of the header, as they stand there.
    """

    name: str
    started: str
    step: int
    epoch: int
    learning_rate: float
    train_images: int
    resolution: str
    trigger_phrase: str
    seed: int
    dora_base: str
    entries: Mapping[str, str]
    average: str = ""


def file_names(
    stem: str, formats: Sequence[str] = FORMATS, adapted: Collection[str] = (), peft: Collection[str] = ()
) -> dict[str, str]:
    """What `write_files` writes, by format: of adapted components in `peft` "peft COMPONENT", each in a folder of PEFT's."""
    names = {"diffusers": f"{stem}.safetensors", "comfyui": f"{stem}_comfyui.safetensors"}
    if adapted and peft and not set(adapted) - set(peft):
        names.pop("diffusers")  # it would be empty
    own = [component for component in adapted if component in peft and "diffusers" in formats]
    apart = {f"peft {component}": f"{stem}_{component}/{peft_config.WEIGHTS}" for component in own}
    return {format: name for format, name in names.items() if format in formats} | apart


@dataclass(frozen=True, kw_only=True)
class AdapterFiles:
    """The files that a run makes of its adapter, and how it makes them.

    formats: of FORMATS. dtype: of the matrices. dora_scale: what the magnitudes of the kohya file mean. fused: as `modules`
    of `kohya_tensors`; prefixes, rows: as there. not_behind_lycoris, not_in_sd_scripts, peft: as a family has them.
    """

    folder: Path
    formats: Sequence[str]
    dora_scale: DoraScale
    fused: Mapping[str, Sequence[Link]]
    prefixes: Mapping[str, str]
    rows: Callable[[str], int]
    not_behind_lycoris: Sequence[str] = ()
    not_in_sd_scripts: Sequence[str] = ()
    peft: Mapping[str, str] = field(default_factory=dict)
    write: Write = write_atomic
    dtype: torch.dtype = torch.float32


def write_files(
    files: AdapterFiles,
    stem: str,
    about: About,
    portable: Callable[[DoraScale], Portable],
    norms: AllNorms,
    *,
    thumbnail: str = "",
    advance: Advance = no_progress,
) -> dict[str, Path]:
    """Write a run's adapter files; returns them by format (`file_names`).

    portable: the adapter, with magnitudes of the meaning asked for. norms: what `kohya_tensors` takes. thumbnail: a small
    picture as a data URI.
    advance: counts layers made ready, of each file, and gets 0 for a piece of one that was written.
    Raises NonFiniteError where a tensor is not finite, NotTrained where no update has reached it, and writes nothing then.
    """
    meanings: dict[str, DoraScale] = {"diffusers": "magnitude", "comfyui": files.dora_scale}
    whole = {format: portable(meanings[format]).rounded(files.dtype) for format in files.formats}
    adapted = {target.component: None for adapter in whole.values() for target in adapter.targets}
    names = file_names(stem, files.formats, adapted, files.peft)
    written = {format: files.folder / name for format, name in names.items()}
    if "diffusers" in whole:
        whole["diffusers"], apart = whole["diffusers"].parted(files.peft)
        whole |= {f"peft {component}": adapter for component, adapter in apart.items()}
    made = {format: whole[format] for format in written}
    for adapter in made.values():
        adapter.check_finite(advance)
    if not any(factors.changes() for adapter in made.values() for factors in adapter.layers.values()):
        raise NotTrained(
            f"every B of the adapter is zero after step {about.step}, so it changes nothing: no file was written. Either its "
            "updates were skipped (metrics.jsonl says so), or there was no gradient, or the rate was too small: "
            f"optimizer.lr is {about.learning_rate:g}, and a warm-up begins with zero"
        )
    for format, path in written.items():
        adapter = made[format]
        if format == "diffusers":
            tensors = diffusers_tensors(adapter, advance)
            fields = metadata(adapter, about, convention="magnitude") | diffusers_metadata(adapter)
        elif format != "comfyui":
            before = files.peft[format.removeprefix("peft ")]
            tensors = peft_config.renamed(diffusers_tensors(adapter, advance), before)
            fields = metadata(adapter, about, convention="magnitude") | {"format": "pt"}
            said = lora_config(adapter.targets, adapter.kind, rslora=adapter.rslora)
            files.write(path.with_name(peft_config.CONFIG), [peft_config.written(said, before)])
        else:
            tensors = kohya_tensors(
                adapter, modules=files.fused, prefixes=files.prefixes, rows=files.rows,
                not_behind_lycoris=files.not_behind_lycoris, norms=norms, advance=advance,
            )  # fmt: skip
            fields = metadata(adapter, about, convention=f"{files.dora_scale}: {DORA_SCALE_MEANING[files.dora_scale]}")
            if phrase := sd_scripts.left_out_phrase(adapter, files.not_in_sd_scripts):
                fields[sd_scripts.ENTRY] = phrase
        fields |= {"modelspec.thumbnail": thumbnail} if thumbnail else {}
        write_tensors(path, tensors, with_hash(tensors, fields, advance), lambda count: advance(0), files.write)
    return written


def diffusers_tensors(portable: Portable, advance: Advance = no_progress) -> Tensors:
    """The adapter's tensors under diffusers / PEFT keys, in the dtypes that they have. advance: counts layers.

    Raises UserError for a DoRA of the input axis, which PEFT has not, and for one that leaves out some layers.
    """
    tensors: dict[str, Recipe] = {}
    for name, factors in portable.layers.items():
        if factors.matrices:
            tensors |= factors.named_matrices(f"{name}.", scaled=True)
            advance(1)
            continue
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = factors.a, factors.b
        if portable.kind.magnitudes:
            m = factors.magnitude
            if m is None:
                raise UserError(
                    f"{name} has no magnitude, other layers have one, and PEFT takes a DoRA for all layers or for none; "
                    "use --to comfyui"
                )
            if factors.axis == "input":
                raise UserError(
                    f"the magnitude of {name} is of the input axis (one a column of W), which PEFT's DoRA has not; "
                    "use --to comfyui, or --to lora for an approximation"
                )
            shape = (1, factors.rows, 1, 1) if len(factors.a.shape) == 4 else (factors.rows,)
            tensors[_magnitude_key(name)] = derived(m, shape, lambda t, shape=shape: t.reshape(shape))
        advance(1)
    return tensors


# diffusers' pipelines have their encoders under this name, with or without a number, and load adapters by it.
ENCODER = "text_encoder"
# Without one of these in a text encoder its loader does not recognise the keys (loaders/lora_base.py).
ENCODER_LAYERS = (".q_proj", ".k_proj", ".v_proj", ".out_proj")


def _magnitude_key(name: str) -> str:
    """Of a layer's magnitude, as diffusers loads it.

    Denoisers go through PEFT, which takes the key with and without `.weight` and writes it without. Text encoders go through
    transformers (`load_adapter`, 5.23), which finds no magnitude without `.weight`: it would stay ||W||, with no more than a
    table in the log.
    """
    return f"{name}.lora_magnitude_vector{'.weight' if name.startswith(ENCODER) else ''}"


def not_loaded_by_diffusers(names: Iterable[str]) -> list[str]:
    """Sentences about the layers, by full name, that its pipelines do not take from a file in its own keys."""
    encoders: dict[str, list[str]] = {}
    for name in names:
        if name.startswith(ENCODER):
            encoders.setdefault(name.partition(".")[0], []).append(name)
    known = ", ".join(end.removeprefix(".") for end in ENCODER_LAYERS)
    return [
        f"diffusers does not load the adapter of {component}: none of its layers is a {known}, by which its loader knows an "
        "encoder's keys; merge it into the model for diffusers (scripts/adapter.py merge), or use the kohya file elsewhere"
        for component, layers in encoders.items()
        if not any(layer.endswith(ENCODER_LAYERS) for layer in layers)
    ]


def diffusers_metadata(portable: Portable) -> dict[str, str]:
    """`lora_adapter_metadata` as diffusers writes it: each component's LoraConfig fields under its prefix.

    And whose names the keys are.
    """
    if portable.kind.form:  # its loader finds rank and factor in the tensors
        return {"format": "pt", "modelspec.implementation": "diffusers"}
    fields: dict[str, Any] = {}
    for component, layers in by_component(portable):
        targets = [Target(component, name, *factors.ranked) for name, factors in layers.items()]
        config = {"lora_bias": False, "bias": "none"} | lora_config(targets, portable.kind, rslora=portable.rslora)
        fields |= {f"{component}.{key}": value for key, value in config.items()}
    said = json.dumps(fields, indent=2, sort_keys=True)
    return {"lora_adapter_metadata": said, "format": "pt", "modelspec.implementation": "diffusers"}


def kohya_tensors(
    portable: Portable,
    *,
    modules: Mapping[str, Sequence[Link]],
    prefixes: Mapping[str, str],
    rows: Callable[[str], int],
    not_behind_lycoris: Sequence[str] = (),
    norms: AllNorms = {},
    advance: Advance = no_progress,
) -> Tensors:
    """The adapter's tensors under kohya keys, A and B in the dtypes that they have, alpha in fp32.

    modules: component -> its modules under the names to write (empty: the layers under their own names).
    prefixes: component -> key prefix; behind one that ends in a dot, names keep their dots.
    rows: full name of a layer of `fused_with` -> how many it has.
    not_behind_lycoris: fnmatch patterns of full names of layers that ComfyUI does not know behind `lycoris_`.
    norms: for DoRA, of the layers of `fused_with`, by full name.
    advance: counts layers. Raises UserError where the magnitudes of one module cannot be put together.
    """
    tensors: dict[str, torch.Tensor | Recipe] = {}
    for component, layers in by_component(portable):
        wanted = [module for module in modules.get(component, ()) if any(part in layers for part in module.parts)]
        known = {part for module in wanted for part in module.parts}
        wanted += [Link(name, (name,)) for name in layers if name not in known]
        fuses = portable.kind.form is not None and any(len(module.parts) > 1 for module in modules.get(component, ()))
        for module in wanted:
            links = [(prefixes[component], module)]
            if fuses and not any(fnmatchcase(f"{component}.{module.parts[0]}", each) for each in not_behind_lycoris):
                links = [("lycoris", Link(part, (part,))) for part in module.parts if part in layers]
            for prefix, link in links:
                key = prefix + link.original if prefix.endswith(".") else f"{prefix}_{link.original.replace('.', '_')}"
                full = Link(key, tuple(f"{component}.{part}" for part in link.parts), link.op)
                tensors |= _kohya_module(portable, full, rows, norms)
                advance(sum(part in layers for part in link.parts))
    return tensors


def _kohya_module(portable: Portable, module: Link, rows: Callable[[str], int], norms: AllNorms) -> dict[str, Any]:
    key = module.original
    parts = {name: portable.layers.get(name) for name in module.parts}
    if module.swap:
        parts = {name: factors.swapped() for name, factors in parts.items()}
    present = {name: factors for name, factors in parts.items() if factors is not None}
    if formed := next((factors for factors in present.values() if factors.matrices), None):
        return formed.named_matrices(f"{key}.") | {f"{key}.alpha": torch.tensor(formed.ranked[1], dtype=torch.float32)}
    counts = {name: factors.rows if factors else rows(name) for name, factors in parts.items()}
    first = next(iter(present.values()))
    shared = len(present) == len(parts) > 1 and _one_a(list(present.values()))
    rank = first.rank if shared else sum(factors.rank for factors in present.values())
    total, kernel = sum(counts.values()), first.b.shape[2:]

    def up() -> torch.Tensor:
        made = torch.zeros(total, rank, *kernel, dtype=dtype_b)
        row = column = 0
        for name, count in counts.items():
            if (factors := parts[name]) is not None:
                b = factors.b.make()
                # One alpha serves all parts: a part whose scaling differs from the first's carries the ratio in its rows.
                ratio = factors.scaling / first.scaling
                made[row : row + count, column : column + b.shape[1]] = b if ratio == 1 else b * ratio
                column += 0 if shared else b.shape[1]
            row += count
        return made

    def down() -> torch.Tensor:
        made = [factors.a.make() for factors in ([first] if shared else present.values())]
        return made[0] if len(made) == 1 else torch.cat([a.to(dtype_a) for a in made])

    dtype_a, dtype_b = (widest([getattr(factors, which) for factors in present.values()]) for which in "ab")
    tensors: dict[str, Any] = {
        f"{key}.lora_down.weight": Recipe(dtype_a, (rank, *first.a.shape[1:]), down),
        f"{key}.lora_up.weight": Recipe(dtype_b, (total, rank, *kernel), up),
        f"{key}.alpha": torch.tensor(first.scaling * rank, dtype=torch.float32),
    }
    if (scale := _module_scale(parts, norms)) is not None:
        tensors[f"{key}.dora_scale"] = scale
    return tensors


def _module_scale(parts: Mapping[str, Factors | None], norms: AllNorms) -> Recipe | None:
    """The scale of one module, by the full names of its layers; None where none of them has a magnitude."""
    present = {name: factors for name, factors in parts.items() if factors is not None}
    with_m = {name: factors for name, factors in present.items() if factors.magnitude is not None}
    if not with_m:
        return None
    first = next(iter(with_m.values()))
    ones, axes = [1] * (len(first.b.shape) - 2), {factors.axis for factors in with_m.values()}
    if axes == {"input"}:
        made = [factors.magnitude.make() for factors in with_m.values()]
        if len(with_m) < len(parts) or not all(torch.equal(made[0], m) for m in made):
            raise UserError(
                f"{', '.join(parts)} are one module in this format, with one magnitude of the input axis; theirs differ. "
                "Use --to lora for an approximation"
            )
        return derived(first.magnitude, (1, len(made[0]), *ones), lambda m: m.view(1, -1, *ones))
    absent = [name for name in parts if name not in with_m]
    if axes != {"output"} or any(name in present or name not in norms for name in absent):
        raise UserError(
            f"{', '.join(absent or parts)}: a module of several layers takes the magnitudes of all of them, "
            "of one axis, and of a layer without an adapter its norms in the model: give the model with --base"
        )
    rows = [f.magnitude.make().flatten() if (f := with_m.get(name)) else norms[name].reader for name in parts]
    scale = torch.cat(rows).view(-1, 1, *ones)
    return Recipe(scale.dtype, tuple(scale.shape), lambda: scale)


def _one_a(parts: Sequence[Factors]) -> bool:
    """Whether all parts have one and the same A, as where a fused adapter was trained, and one scaling."""
    first = parts[0]
    if any((part.a.shape, part.a.dtype, part.scaling) != (first.a.shape, first.a.dtype, first.scaling) for part in parts):
        return False
    return all(part.a is first.a or torch.equal(part.a.make(), first.a.make()) for part in parts[1:])


def metadata(adapter: Portable, about: About, *, convention: str) -> dict[str, str]:
    """Header entries that Civitai, A1111 and ComfyUI's nodes read: `ss_*` as sd-scripts writes them (train_network.py),
    `modelspec.*` by Stability AI's specification (https://github.com/Stability-AI/ModelSpec), 1.0.0."""
    targets = adapter.targets
    resolution = about.resolution.rpartition(", ")[2]  # the largest: both have one
    fields = lora_config(targets, adapter.kind, rslora=adapter.rslora)
    args: dict[str, str] = {"algo": adapter.kind.name if adapter.kind.form else "lora", "rs_lora": str(adapter.rslora)}
    if adapter.kind.magnitudes:
        args |= {"dora_wd": "True", "wd_on_output": "True", "dora_scale": convention, "dora_base": about.dora_base}
    trigger = about.trigger_phrase
    if len({t.rank for t in targets}) > 1 or len({t.alpha for t in targets}) > 1:
        args |= {"per_layer_rank": "True"}
    return {
        "ss_num_train_images": str(about.train_images),
        "ss_network_dim": str(fields["r"]),
        "ss_network_alpha": f"{fields['lora_alpha']:g}",
        "ss_network_args": json.dumps(args, sort_keys=True),
        "ss_output_name": about.name,
        "ss_steps": str(about.step),
        "ss_epoch": str(about.epoch),
        "ss_learning_rate": f"{about.learning_rate:g}",
        "ss_resolution": f"({resolution.replace('x', ', ')})",
        "ss_seed": str(about.seed),
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.title": about.name,
        "modelspec.date": about.started.partition("T")[0],  # the day: equal runs of one day are equal bytes
        "modelspec.resolution": resolution,
        **about.entries,
        "ss_network_module": adapter.kind.module or about.entries.get("ss_network_module", "networks.lora"),
        **({"modelspec.trigger_phrase": trigger, "modelspec.usage_hint": f"Trigger: {trigger}"} if trigger else {}),
        **({"average": about.average} if about.average else {}),
    }
