"""Adapter files: diffusers/PEFT keys (here) and kohya keys (sd_scripts.py), with the metadata that their readers look for.

diffusers: COMPONENT.LAYER.lora_A.weight [R, K], .lora_B.weight [N, R], .lora_magnitude_vector [N] (Conv2d [1, N, 1, 1];
for a text encoder .lora_magnitude_vector.weight, see `_magnitude_key`); alpha / rank stand in the header's
`lora_adapter_metadata` (a `.alpha` key raises for SDXL, without either the scale is 1).

A LoKr has lokr_w1, lokr_w2 or their pairs in place of A and B, as in LyCORIS' files: under diffusers' keys with the scale in
the first of them and without alpha.

No frozen weight is read here: of them a DoRA's files need the row norms alone (norms.py).
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainer.adapters import peft_config, sd_scripts
from trainer.adapters.portable import AllNorms, DoraScale, Portable, by_component, derived
from trainer.adapters.targets import Target, lora_config
from trainer.base.errors import NotTrained, UserError
from trainer.base.files import Advance, Write, no_progress, write_atomic
from trainer.base.tensorfile import Recipe, Tensors, serialize, write_tensors
from trainer.base.types import Link

DORA_SCALE_MEANING = {
    "comfyui_released": "g * ||W||, g = m / ||W + sBA|| as trained: where the reader divides by ||W|| (ComfyUI's releases)",
    "magnitude": "g * ||W + sBA||: where the reader divides by ||W + sBA|| (LyCORIS, PEFT's definition)",
}
FORMATS = ("diffusers", "comfyui")

# Header entries about a file's keys and bytes, not about the training.
METADATA_OF_KEYS = (
    "lora_adapter_metadata", "format", "modelspec.implementation",
    "sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256", sd_scripts.ENTRY,
)  # fmt: skip
DORA_ARGS = ("dora_wd", "wd_on_output", "dora_scale", "dora_base")  # keys of ss_network_args about a DoRA
LEGACY_HASHED = (0x100000, 0x110000)  # the span of a file's bytes that kohya's old hash covers


@dataclass(frozen=True)
class About:
    """The origin of an adapter file, for its header.

    started: ISO time of the run's first start; never the present time. dora_base: which weights a DoRA's files are made for.
    entries: further header entries, verbatim. average: which updates' weights were averaged; "" for none.
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
    """The files of `write_files` by format; "peft COMPONENT" for an adapted component in `peft`, in a PEFT folder."""
    names = {"diffusers": f"{stem}.safetensors", "comfyui": f"{stem}_comfyui.safetensors"}
    if adapted and peft and not set(adapted) - set(peft):
        names.pop("diffusers")  # it would be empty
    separate = [component for component in adapted if component in peft and "diffusers" in formats]
    peft_names = {f"peft {component}": f"{stem}_{component}/{peft_config.WEIGHTS}" for component in separate}
    return {format: name for format, name in names.items() if format in formats} | peft_names


@dataclass(frozen=True, kw_only=True)
class AdapterFiles:
    """Settings of a run's adapter files.

    formats: from FORMATS. dora_scale: the meaning of the kohya file's magnitudes. fused: `modules` of
    `sd_scripts.kohya_tensors`; prefixes, rows, not_behind_lycoris: its arguments. not_in_sd_scripts: fnmatch patterns of
    layers that sd-scripts drops. peft: component -> prefix of its layers' names in its PEFT file. dtype: of the matrices.
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

    portable: (meaning of the magnitudes) -> the adapter. norms: for `kohya_tensors`. thumbnail: picture as a data URI.
    advance: counts the layers of each file, and gets 0 for each piece written.
    Raises NonFiniteError if a tensor is not finite, NotTrained if no update has reached it, and then writes nothing.
    """
    meanings: dict[str, DoraScale] = {"diffusers": "magnitude", "comfyui": files.dora_scale}
    adapters = {format: portable(meanings[format]).rounded(files.dtype) for format in files.formats}
    components = {target.component: None for adapter in adapters.values() for target in adapter.targets}
    names = file_names(stem, files.formats, components, files.peft)
    paths = {format: files.folder / name for format, name in names.items()}
    if "diffusers" in adapters:
        adapters["diffusers"], separate = adapters["diffusers"].parted(files.peft)
        adapters |= {f"peft {component}": adapter for component, adapter in separate.items()}
    adapters = {format: adapters[format] for format in paths}
    for adapter in adapters.values():
        adapter.check_finite(advance)
    if not any(factors.changes() for adapter in adapters.values() for factors in adapter.layers.values()):
        raise NotTrained(
            f"every B of the adapter is zero after step {about.step}, so it changes nothing: no file was written. Either its "
            "updates were skipped (metrics.jsonl says so), or there was no gradient, or the rate was too small: "
            f"optimizer.lr is {about.learning_rate:g}, and a warm-up begins with zero"
        )
    for format, path in paths.items():
        adapter = adapters[format]
        if format == "diffusers":
            tensors = diffusers_tensors(adapter, advance)
            fields = metadata(adapter, about, convention="magnitude") | diffusers_metadata(adapter)
        elif format != "comfyui":
            prefix = files.peft[format.removeprefix("peft ")]
            tensors = peft_config.renamed(diffusers_tensors(adapter, advance), prefix)
            fields = metadata(adapter, about, convention="magnitude") | {"format": "pt"}
            config = lora_config(adapter.targets, adapter.kind, rslora=adapter.rslora)
            files.write(path.with_name(peft_config.CONFIG), [peft_config.config_bytes(config, prefix)])
        else:
            tensors = sd_scripts.kohya_tensors(
                adapter, modules=files.fused, prefixes=files.prefixes, rows=files.rows,
                not_behind_lycoris=files.not_behind_lycoris, norms=norms, advance=advance,
            )  # fmt: skip
            fields = metadata(adapter, about, convention=f"{files.dora_scale}: {DORA_SCALE_MEANING[files.dora_scale]}")
            if phrase := sd_scripts.left_out_phrase(adapter, files.not_in_sd_scripts):
                fields[sd_scripts.ENTRY] = phrase
        fields |= {"modelspec.thumbnail": thumbnail} if thumbnail else {}
        write_tensors(path, tensors, with_hash(tensors, fields, advance), lambda count: advance(0), files.write)
    return paths


def with_hash(tensors: Tensors, fields: dict[str, str], advance: Advance = no_progress) -> dict[str, str]:
    """`fields` with the hashes by which programs know an adapter file, whatever else its header says.

    `sshs_model_hash`, and `modelspec.hash_sha256` with 0x before it: SHA-256 of everything behind the header.
    `sshs_legacy_hash`: the first 8 digits of the SHA-256 of LEGACY_HASHED, in a file whose header has the `ss_*` entries
    alone (sd-scripts, library/train_util.py, precalculate_safetensors_hashes).
    """
    data, window, at = hashlib.sha256(), hashlib.sha256(), 0
    first, last = LEGACY_HASHED
    for piece in serialize(tensors, {key: value for key, value in fields.items() if key.startswith("ss_")}):
        if at:  # the header comes first
            data.update(piece)
        window.update(piece[max(0, first - at) : max(0, last - at)])
        at += len(piece)
        advance(0)
    digest = data.hexdigest()
    hashes = {"sshs_model_hash": digest, "sshs_legacy_hash": window.hexdigest()[:8], "modelspec.hash_sha256": f"0x{digest}"}
    return fields | hashes


def diffusers_tensors(portable: Portable, advance: Advance = no_progress) -> Tensors:
    """The adapter's tensors under diffusers / PEFT keys, in their own dtypes. advance: counts layers.

    Raises UserError for a DoRA of the input axis, which PEFT does not have, and for one that leaves out some layers.
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


# The name of text encoders in diffusers' pipelines, with or without a number behind it, by which they load adapters.
ENCODER = "text_encoder"
# diffusers' loader recognises a text encoder's keys by one of these layers (loaders/lora_base.py).
ENCODER_LAYERS = (".q_proj", ".k_proj", ".v_proj", ".out_proj")


def _magnitude_key(name: str) -> str:
    """The key of a layer's magnitude that diffusers loads.

    Denoisers go through PEFT, which takes the key with and without `.weight` and writes it without. Text encoders go through
    transformers (`load_adapter`, 5.23), which finds no magnitude without `.weight`: it would stay ||W||, with no more than a
    table in the log.
    """
    return f"{name}.lora_magnitude_vector{'.weight' if name.startswith(ENCODER) else ''}"


def not_loaded_by_diffusers(names: Iterable[str]) -> list[str]:
    """Messages about layers that diffusers' pipelines do not load from a file in its own keys. names: full names."""
    encoders: dict[str, list[str]] = {}
    for name in names:
        if name.startswith(ENCODER):
            encoders.setdefault(name.partition(".")[0], []).append(name)
    marks = ", ".join(end.removeprefix(".") for end in ENCODER_LAYERS)
    return [
        f"diffusers does not load the adapter of {component}: none of its layers is a {marks}, by which its loader knows an "
        "encoder's keys; merge it into the model for diffusers (scripts/adapter.py merge), or use the kohya file elsewhere"
        for component, layers in encoders.items()
        if not any(layer.endswith(ENCODER_LAYERS) for layer in layers)
    ]


def diffusers_metadata(portable: Portable) -> dict[str, str]:
    """`lora_adapter_metadata` as diffusers writes it, each component's LoraConfig fields under its prefix; and the library
    whose names the keys are."""
    if portable.kind.form:  # the loader finds rank and factor in the tensors
        return {"format": "pt", "modelspec.implementation": "diffusers"}
    fields: dict[str, Any] = {}
    for component, layers in by_component(portable):
        targets = [Target(component, name, *factors.ranked) for name, factors in layers.items()]
        config = {"lora_bias": False, "bias": "none"} | lora_config(targets, portable.kind, rslora=portable.rslora)
        fields |= {f"{component}.{key}": value for key, value in config.items()}
    text = json.dumps(fields, indent=2, sort_keys=True)
    return {"lora_adapter_metadata": text, "format": "pt", "modelspec.implementation": "diffusers"}


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
