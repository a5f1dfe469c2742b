"""Adapter files: diffusers/PEFT keys and kohya keys, with the metadata their readers look for.

diffusers: COMPONENT.LAYER.lora_A.weight [R, K], .lora_B.weight [N, R], .lora_magnitude_vector [N] (Conv2d [1, N, 1, 1]);
alpha / rank stand in the header's `lora_adapter_metadata` (a `.alpha` key raises for SDXL, without either the scale is 1).

kohya: PREFIX_ORIGINAL_NAME.{lora_down.weight, lora_up.weight, alpha, dora_scale}; scale = alpha / rank; dora_scale [N, 1]
(Conv2d [N, 1, 1, 1]). Layers that the original layout fuses (Flux's qkv, linear1) become one block-diagonal pair.

Nothing here reads a frozen weight: what a DoRA's files need of them is their row norms (norms.py).
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from trainer.adapters.adapter import Adapter
from trainer.adapters.norms import RowNorms, magnitude, released_scale
from trainer.adapters.targets import Target, lora_config
from trainer.errors import NonFiniteError
from trainer.files import Advance, unheard
from trainer.tensorfile import serialize, write_tensors
from trainer.types import Link

Tensors = dict[str, torch.Tensor]
AllNorms = Mapping[str, RowNorms]  # by full name of the layer

# ComfyUI's released versions divide dora_scale by ||W|| instead of ||W + sBA||; the label says what a file was made for.
DoraScale = Literal["comfyui_released", "magnitude"]
DORA_SCALE_MEANING = {
    "comfyui_released": "g * ||W||, g = m / ||W + sBA|| as trained: where the reader divides by ||W|| (ComfyUI's releases)",
    "magnitude": "g * ||W + sBA||: where the reader divides by ||W + sBA|| (LyCORIS, PEFT's definition)",
}


@dataclass(frozen=True)
class About:
    """What an adapter file says of its origin.

    started: ISO time of the run's first start; never the present time. dora_base: which weights a DoRA's files are made for.
    changes: what was changed in mid-run, as Progress has it. average: of the weights over which updates; "" for no average.
    """

    name: str
    started: str
    step: int
    epoch: int
    learning_rate: float
    train_images: int
    resolution: str
    tag_frequency: Mapping[str, int]
    trigger_phrase: str
    seed: int
    dora_base: str
    family: Mapping[str, str]
    changes: Sequence[Mapping[str, Any]] = ()
    average: str = ""


def file_names(stem: str, formats: Sequence[str]) -> dict[str, str]:
    """What `write_files` writes, by format."""
    names = {"diffusers": f"{stem}.safetensors", "comfyui": f"{stem}_comfyui.safetensors"}
    return {format: name for format, name in names.items() if format in formats}


def write_files(
    adapter: Adapter,
    folder: Path,
    stem: str,
    about: About,
    *,
    formats: Sequence[str],
    fused: Mapping[str, Sequence[Link]],
    prefixes: Mapping[str, str],
    rows: Callable[[str], int],
    norms: AllNorms,
    dora_scale: DoraScale,
    advance: Advance = unheard,
) -> dict[str, Path]:
    """Write the adapter's files to `folder`; returns them by format ("diffusers", "comfyui"). The rest as in `kohya_tensors`.

    advance: counts layers made ready, of each file, and gets 0 for a piece of one that was written.
    Raises NonFiniteError, and writes nothing, where a tensor is not finite.
    """
    for name, tensor in adapter.state_dict().items():
        if not torch.isfinite(tensor).all():
            raise NonFiniteError(f"the adapter's {name} is not finite; it was not exported. Resume an earlier checkpoint")
    written = {format: folder / name for format, name in file_names(stem, formats).items()}
    for format, path in written.items():
        if format == "diffusers":
            tensors = diffusers_tensors(adapter, norms, advance)
            fields = metadata(adapter, about, convention="magnitude") | diffusers_metadata(adapter)
        else:
            tensors = kohya_tensors(
                adapter, fused=fused, prefixes=prefixes, rows=rows, norms=norms, dora_scale=dora_scale, advance=advance
            )
            fields = metadata(adapter, about, convention=f"{dora_scale}: {DORA_SCALE_MEANING[dora_scale]}")
        write_tensors(path, tensors, with_hash(tensors, fields, advance), lambda count: advance(0))
    return written


def diffusers_tensors(adapter: Adapter, norms: AllNorms, advance: Advance = unheard) -> Tensors:
    """fp32 tensors under diffusers / PEFT keys. norms: of every DoRA layer, by full name. advance: as in `write_files`."""
    tensors = adapter.state_dict()
    for layer in adapter.layers:
        advance(1)
        name = f"{layer}.lora_magnitude_vector"
        if name not in tensors:
            continue
        vector_N = _dora_scale(adapter, tensors, layer, norms, "magnitude")
        convolution = tensors[f"{layer}.lora_A.weight"].dim() == 4
        tensors[name] = vector_N.view(1, -1, 1, 1) if convolution else vector_N
    return tensors


def diffusers_metadata(adapter: Adapter) -> dict[str, str]:
    """`lora_adapter_metadata` as diffusers writes it: each component's LoraConfig fields under its prefix."""
    fields: dict[str, Any] = {}
    by_component: dict[str, list[Target]] = {}
    for target in adapter.targets.values():
        by_component.setdefault(target.component, []).append(target)
    for component, targets in by_component.items():
        config = {"lora_bias": False, "bias": "none"} | lora_config(targets, dora=adapter.dora, rslora=adapter.rslora)
        fields |= {f"{component}.{key}": value for key, value in config.items()}
    return {"lora_adapter_metadata": json.dumps(fields, indent=2, sort_keys=True), "format": "pt"}


def fused_modules(links: Sequence[Link]) -> list[Link]:
    """The modules behind a family's links of parameters, by their weights."""
    weights = [link for link in links if link.original.endswith(".weight")]
    return [
        Link(link.original.removesuffix(".weight"), tuple(part.removesuffix(".weight") for part in link.parts), link.op)
        for link in weights
    ]


def fused_with(adapter: Adapter, fused: Mapping[str, Sequence[Link]]) -> list[str]:
    """The layers without an adapter, by full name, that one module holds together with adapted ones."""
    names = []
    for component, modules in fused.items():
        for module in modules:
            parts = [f"{component}.{part}" for part in module.parts]
            absent = [name for name in parts if name not in adapter.targets]
            names += absent if len(absent) < len(parts) else []
    return names


def kohya_tensors(
    adapter: Adapter,
    *,
    fused: Mapping[str, Sequence[Link]],
    prefixes: Mapping[str, str],
    rows: Callable[[str], int],
    norms: AllNorms,
    dora_scale: DoraScale,
    advance: Advance = unheard,
) -> Tensors:
    """fp32 tensors under kohya keys.

    fused: component -> its modules in the original layout (empty: names stay).
    prefixes: component -> key prefix. rows: full name of a layer of `fused_with` -> how many it has.
    norms: for DoRA, of every adapted layer and of those of `fused_with`, by full name.
    advance: as in `write_files`.
    """
    tensors: Tensors = {}
    state = {name: tensor.cpu() for name, tensor in adapter.state_dict().items()}
    for component in dict.fromkeys(target.component for target in adapter.targets.values()):
        names = [t.name for t in adapter.targets.values() if t.component == component]
        modules = [f for f in fused.get(component, ()) if any(part in names for part in f.parts)]
        known = {part for module in modules for part in module.parts}
        modules += [Link(name, (name,)) for name in names if name not in known]
        for module in modules:
            key = f"{prefixes[component]}_{module.original.replace('.', '_')}"
            full = Link(key, tuple(f"{component}.{part}" for part in module.parts), module.op)
            tensors |= _kohya_module(adapter, state, full, rows, norms, dora_scale)
            advance(sum(part in adapter.targets for part in full.parts))
    return tensors


def _kohya_module(
    adapter: Adapter, state: Tensors, module: Link, rows: Callable[[str], int], norms: AllNorms, dora_scale: DoraScale
) -> Tensors:
    """module: its key, and its parts by their full names."""
    key, swap = module.original, module.swap
    present = [name for name in module.parts if name in adapter.targets]
    scalings = {name: adapter.targets[name].scaling(adapter.rslora) for name in present}
    downs = {name: state[f"{name}.lora_A.weight"] for name in present}
    ups = {name: state[f"{name}.lora_B.weight"] for name in present}
    counts = {name: len(ups[name]) if name in ups else rows(name) for name in module.parts}
    rank, scaling = sum(map(len, downs.values())), scalings[present[0]]
    up = torch.zeros(sum(counts.values()), rank, *ups[present[0]].shape[2:])
    row = column = 0
    for name, count in counts.items():
        if name in ups:
            b = ups[name]
            # One alpha serves all parts: a part whose scaling differs from the first's carries the ratio in its rows.
            ratio = scalings[name] / scaling
            up[row : row + count, column : column + b.shape[1]] = b if ratio == 1 else b * ratio
            column += b.shape[1]
        row += count
    if swap:
        up = torch.cat(up.chunk(2)[::-1])
    tensors = {
        f"{key}.lora_down.weight": torch.cat(list(downs.values())),
        f"{key}.lora_up.weight": up,
        f"{key}.alpha": torch.tensor(scaling * rank, dtype=torch.float32),
    }
    if adapter.dora:
        scales = [_dora_scale(adapter, state, n, norms, dora_scale) if n in ups else norms[n].reader for n in module.parts]
        scale = torch.cat(scales)
        if swap:
            scale = torch.cat(scale.chunk(2)[::-1])
        tensors[f"{key}.dora_scale"] = scale.view(-1, *([1] * (up.dim() - 1)))
    return tensors


def _dora_scale(adapter: Adapter, state: Tensors, name: str, norms: AllNorms, dora_scale: DoraScale) -> torch.Tensor:
    """fp32 [N], on the CPU, for one layer's rows."""
    m = state[f"{name}.lora_magnitude_vector"].cpu()
    if dora_scale == "comfyui_released":
        return released_scale(m, norms[name])
    a, b = (state[f"{name}.lora_{factor}.weight"].cpu().flatten(1) for factor in "AB")
    return magnitude(m, a, b, adapter.targets[name].scaling(adapter.rslora), norms[name])


def metadata(adapter: Adapter, about: About, *, convention: str) -> dict[str, str]:
    """Header entries that Civitai, A1111 and ComfyUI's nodes read (`ss_*` as kohya's, `modelspec.*` as SAI's)."""
    targets = list(adapter.targets.values())
    fields = lora_config(targets, dora=adapter.dora, rslora=adapter.rslora)
    args: dict[str, str] = {"algo": "lora", "rs_lora": str(adapter.rslora)}
    if adapter.dora:
        args |= {"dora_wd": "True", "wd_on_output": "True", "dora_scale": convention, "dora_base": about.dora_base}
    if len({t.rank for t in targets}) > 1 or len({t.alpha for t in targets}) > 1:
        args |= {"per_layer_rank": "True"}
    return {
        "ss_network_module": "lycoris.kohya" if adapter.dora else "networks.lora",
        "ss_network_dim": str(fields["r"]),
        "ss_network_alpha": f"{fields['lora_alpha']:g}",
        "ss_network_args": json.dumps(args, sort_keys=True),
        "ss_output_name": about.name,
        "ss_steps": str(about.step),
        "ss_epoch": str(about.epoch),
        "ss_learning_rate": f"{about.learning_rate:g}",
        "ss_num_train_images": str(about.train_images),
        "ss_resolution": about.resolution,
        "ss_seed": str(about.seed),
        "ss_tag_frequency": json.dumps({"captions": dict(sorted(about.tag_frequency.items()))}, ensure_ascii=False),
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.title": about.name,
        "modelspec.date": about.started.partition("T")[0],  # the day: equal runs of one day are equal bytes
        "modelspec.resolution": about.resolution,
        "modelspec.trigger_phrase": about.trigger_phrase,
        **about.family,
        **({"average": about.average} if about.average else {}),
        **({"changed_in_mid_run": json.dumps(list(about.changes), sort_keys=True)} if about.changes else {}),
    }


def with_hash(tensors: Tensors, fields: dict[str, str], advance: Advance = unheard) -> dict[str, str]:
    """`fields` with `sshs_model_hash`: SHA-256 of everything behind the header, as kohya's tools compute it."""
    digest, pieces = hashlib.sha256(), serialize(tensors)
    next(pieces)
    for piece in pieces:
        digest.update(piece)
        advance(0)
    return fields | {"sshs_model_hash": digest.hexdigest()}
