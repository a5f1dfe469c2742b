"""Writes checkpoints that are quantised already, as the libraries and ComfyUI's converters leave them.

Layers, {name in the file: tensor}, by the libraries' own modules:  bitsandbytes_layer, quanto_layer; comfy_layer by formula
Folders in diffusers' layout:                                       bitsandbytes_folder, quanto_folder
Single files in the original layout:                                float8_file, comfy_file, bitsandbytes_file

Who writes a folder: quanto's denoiser diffusers, bitsandbytes' text encoders transformers, both by their save_pretrained.
Without a GPU diffusers refuses to make a bitsandbytes model, and transformers saves no quanto model: the former is put
together from the state dicts of bitsandbytes' layers, the latter is the state dict of the model that transformers made.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from tests.harness import DENOISER
from trainer.base.tensorfile import TensorEntry, TensorFile, write_tensors

BITSANDBYTES = ("nf4", "nf4-double", "fp4", "int8")
QUANTO = ("int8", "float8", "int4", "int2")
Tensors = dict[str, torch.Tensor]


def entries(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorEntry]:
    """What a file's header would say of them."""
    return {name: TensorEntry(t.dtype, tuple(t.shape), 0, t.nbytes) for name, t in tensors.items()}


# ------------------------------------------------------------------------------------------------------------ layers


def bitsandbytes_layer(layer: str, weight: torch.Tensor, kind: str) -> Tensors:
    """kind: one of BITSANDBYTES. weight [N, K]."""
    from bitsandbytes import nn as bnb

    rows, columns = weight.shape
    if kind == "int8":
        module = bnb.Linear8bitLt(columns, rows, bias=False, has_fp16_weights=False)
        module.weight = bnb.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    else:
        options = dict(quant_type=kind[:3], compress_statistics=kind.endswith("double"))
        module = bnb.Linear4bit(columns, rows, bias=False, **options)
        module.weight = bnb.Params4bit(weight, requires_grad=False, **options)
    return {f"{layer}.{name}": tensor for name, tensor in module.to("cpu").state_dict().items()}


def quanto_layer(layer: str, weight: torch.Tensor, dtype: str) -> Tensors:
    """dtype: one of quanto's qtypes without the q ("float8_e5m2"). weight [N, K] or a convolution's [N, K, h, w]."""
    from optimum import quanto

    rows, columns = weight.shape[:2]
    if weight.dim() == 2:
        plain, kind = nn.Linear(columns, rows, bias=False, dtype=weight.dtype), quanto.QLinear
    else:
        plain, kind = nn.Conv2d(columns, rows, weight.shape[2:], bias=False, dtype=weight.dtype), quanto.QConv2d
    plain.weight = nn.Parameter(weight, requires_grad=False)
    module = kind.from_module(plain, weights=quanto.qtypes[f"q{dtype}"])
    module.freeze()
    return {f"{layer}.{name}": tensor for name, tensor in module.state_dict().items()}


def comfy_layer(layer: str, weight: torch.Tensor, *, new: bool, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensors:
    """One scale a tensor: max |W| / largest code."""
    scale = weight.float().abs().max() / torch.finfo(dtype).max
    codes, one = (weight.float() / scale).to(dtype), torch.tensor(1.0)
    if not new:
        return {f"{layer}.weight": codes, f"{layer}.scale_weight": scale, f"{layer}.scale_input": one}
    said = json.dumps({"format": str(dtype).removeprefix("torch."), "full_precision_matrix_mult": True})
    return {
        f"{layer}.weight": codes,
        f"{layer}.weight_scale": scale,
        f"{layer}.input_scale": one,
        f"{layer}.comfy_quant": torch.tensor(list(said.encode()), dtype=torch.uint8),
    }


# ------------------------------------------------------------------------------------------------------------- files


def float8_file(source: Path, target: Path, dtype: torch.dtype = torch.float8_e4m3fn, prefix: str = "") -> Path:
    """A raw cast of every tensor, norms and biases too, whose name begins with `prefix`."""
    tensors = TensorFile(source).read_all()
    cast = {n: t.to(dtype) for n, t in tensors.items() if n.startswith(prefix) and t.is_floating_point()}
    return _write_file(source, target, tensors | cast)


def comfy_file(source: Path, target: Path, *, new: bool, prefix: str = "") -> Path:
    """Linear layers whose names begin with `prefix` as ComfyUI's scaled float8; prefix: a component's, whole."""
    tensors = _replace(TensorFile(source).read_all(), prefix, lambda layer, w: comfy_layer(layer, w, new=new))
    if not new:
        tensors[f"{prefix}scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    return _write_file(source, target, tensors)


def bitsandbytes_file(source: Path, target: Path, kind: str, prefix: str = "") -> Path:
    """Linear layers whose names begin with `prefix` as bitsandbytes', fused ones in one."""
    tensors = TensorFile(source).read_all()
    return _write_file(source, target, _replace(tensors, prefix, lambda layer, w: bitsandbytes_layer(layer, w, kind)))


def _replace(tensors: Tensors, prefix: str, layer) -> Tensors:
    """Every two-dimensional weight under the prefix replaced by `layer(its layer's name, it)`."""
    replaced: Tensors = {}
    for name, tensor in tensors.items():
        linear = name.startswith(prefix) and name.endswith(".weight") and tensor.dim() == 2
        replaced |= layer(name.removesuffix(".weight"), tensor) if linear else {name: tensor}
    return replaced


def _write_file(source: Path, target: Path, tensors: Tensors) -> Path:
    """With the source's folder of configs beside it."""
    write_tensors(target, tensors)
    if source.with_suffix("").is_dir():
        target.with_suffix("").symlink_to(source.with_suffix("").resolve())
    return target


# ----------------------------------------------------------------------------------------------------------- folders


def bitsandbytes_folder(source: Path, target: Path, kind: str, components: Sequence[str]) -> Path:
    """A copy of a diffusers folder with those components (denoiser, text encoders) quantised."""
    import diffusers
    import transformers

    options = dict(load_in_8bit=True) if kind == "int8" else dict(
        load_in_4bit=True, bnb_4bit_quant_type=kind[:3], bnb_4bit_use_double_quant=kind.endswith("double")
    )  # fmt: skip
    for component, class_name in _copied(source, target, components).items():
        if component in DENOISER.values():
            said = diffusers.BitsAndBytesConfig(**options).to_dict()
            plain = TensorFile(source / component / "diffusion_pytorch_model.safetensors").read_all()
            tensors = _replace(plain, "", lambda layer, w: bitsandbytes_layer(layer, w, kind))
            _write_component(source, target, component, tensors, said)
        else:
            model = getattr(transformers, class_name).from_pretrained(
                source / component, quantization_config=transformers.BitsAndBytesConfig(**options), dtype=torch.bfloat16
            )
            model.save_pretrained(target / component)
    return target


def quanto_folder(source: Path, target: Path, dtype: str, components: Sequence[str]) -> Path:
    """A copy of a diffusers folder with those components (denoiser, text encoders) quantised; dtype: one of QUANTO."""
    import diffusers
    import transformers

    for component, class_name in _copied(source, target, components).items():
        if component in DENOISER.values():
            model = getattr(diffusers, class_name).from_pretrained(
                source / component,
                quantization_config=diffusers.QuantoConfig(weights_dtype=dtype),
                torch_dtype=torch.bfloat16,
            )
            model.save_pretrained(target / component)
        else:
            config = transformers.QuantoConfig(weights=dtype)
            model = getattr(transformers, class_name).from_pretrained(
                source / component, quantization_config=config, dtype=torch.bfloat16
            )
            _write_component(source, target, component, model.state_dict(), config.to_dict())
    return target


def _copied(source: Path, target: Path, components: Sequence[str]) -> dict[str, str]:
    """Copies all but the weights of `components`; their class names."""
    shutil.copytree(source, target)
    for component in components:
        for file in (target / component).glob("*.safetensors"):
            file.unlink()
    index = json.loads((source / "model_index.json").read_text())
    return {component: index[component][1] for component in components}


def _write_component(source: Path, target: Path, component: str, tensors: Tensors, said: dict) -> None:
    name = "diffusion_pytorch_model" if component in DENOISER.values() else "model"
    write_tensors(target / component / f"{name}.safetensors", tensors, {"format": "pt"})
    config = json.loads((source / component / "config.json").read_text())
    text = json.dumps(config | {"quantization_config": said}, indent=2, default=str)
    (target / component / "config.json").write_text(text + "\n")
